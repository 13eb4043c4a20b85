"""Read and write meshes and layouts as text and protobuf, byte-compatible with TensorFlow's.

This module converts fields to text or a message and back. `Mesh` and `Layout` check the values of the fields.

    mesh    NAME|x=4,y=2|0,1,2,..|0,1,2,..|local devices[|all devices]
    layout  sharding_specs:x,unsharded, mesh:<mesh>

TensorFlow cannot express three properties, and rejects their form here: an axis sharded over several mesh dims
(`x:y`, major to minor), host memory (`memory::pinned_host` after the specs of all axes), and a mesh without devices
(`NAME|x=4,y=2`; in a message, no device ids).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from layoutmap.core.arguments import describe_type
from layoutmap.core.errors import LayoutError, LayoutMapError, MeshError, shorten_repr

MATCH = "match"
"""TensorFlow's word for "any sharding" inside its own rules; never a sharding of a stored tensor."""

LOCAL_DEVICE = "/job:localhost/replica:0/task:0/device:"
"""The prefix of a device's full name in a single process, which TensorFlow requires in text."""

_SHORT_DEVICE = re.compile("[A-Za-z]+:[0-9]+")
_LAYOUT_PREFIX = "sharding_specs:"
_MESH_PREFIX = " mesh:"
_WHOLE_NUMBER = re.compile("-?[0-9]{1,18}")
_MAX_DEVICES = 10**18
_FIX_MESH = "write NAME|x=4,y=2|ids|local ids|devices, as Mesh.to_string() does"
_FIX_LAYOUT = "write sharding_specs:x,unsharded, mesh:<mesh>, as Layout.to_string() does"


@dataclass(frozen=True, slots=True)
class MeshFields:
    """Unchecked values in the text or protobuf form of a mesh. `Mesh.from_fields` checks them.

    An unknown device of another process has the name `""`. If `devices` is None, `local_device_ids` is ignored.
    """

    name: str
    dims: tuple[tuple[str, int], ...]
    devices: tuple[str, ...] | None
    local_device_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LayoutFields:
    """Unchecked values in a layout's text or protobuf form: mesh dims or `("unsharded",)` per axis, and the mesh."""

    specs: tuple[tuple[str, ...], ...]
    mesh: MeshFields


def _list_full_device_names(fields: MeshFields) -> tuple[list[str], list[str]]:
    """Return the full names of local devices and of all devices. The second list is empty if it is not needed."""
    names = fields.devices or ()
    devices = [LOCAL_DEVICE + name if _SHORT_DEVICE.fullmatch(name) else name for name in names]
    local = [devices[i] for i in fields.local_device_ids]
    all_devices = devices if len(local) < len(devices) and all(devices) else []
    return local, all_devices


def _order_device_names(
    size: int, local_ids: tuple[int, ...], local: tuple[str, ...], all_devices: tuple[str, ...]
) -> tuple[str, ...]:
    """Return the device names in mesh order. If `all_devices` is empty, devices that are not local are named `""`."""
    if len(local_ids) != len(local):
        raise MeshError(
            f"local device ids and local devices differ in number: {len(local_ids)} and {len(local)}",
            why="each local id has one device",
            fix=_FIX_MESH,
        )
    by_id = dict(zip(local_ids, local, strict=True))
    if any(not 0 <= i < size for i in by_id):
        raise MeshError(
            f"local device ids {list(local_ids)} are outside the mesh",
            why=f"they are positions in the mesh, and it has {size} devices",
            fix=f"use ids from 0 to {size - 1}",
        )
    if all_devices:
        for i, name in by_id.items():
            if all_devices[i : i + 1] != (name,):
                listed = repr(all_devices[i]) if i < len(all_devices) else "nothing"
                raise MeshError(
                    f"local device {i} is {name!r}, but the list of all devices has {listed} there",
                    why="the list of all devices contains the devices of this process at their ids",
                    fix=_FIX_MESH,
                )
        return all_devices
    return tuple(by_id.get(i, "") for i in range(size))


def _check_global_ids(ids: tuple[int, ...], size: int) -> None:
    if len(ids) != size or any(id_ != i for i, id_ in enumerate(ids)):
        shown = ", ".join(map(str, ids[:9])) + (", ..." if len(ids) > 9 else "")
        raise MeshError(
            f"global device ids [{shown}] are not 0 to {size - 1} in order",
            why="device i of a mesh has the id i",
            fix="number the devices from 0 in mesh order",
        )


def format_mesh(fields: MeshFields) -> str:
    """Return a mesh as text in the format of TensorFlow's `Mesh.to_string`."""
    parts = [fields.name, ",".join(f"{name}={size}" for name, size in fields.dims)]
    if fields.devices is not None:
        local, everything = _list_full_device_names(fields)
        parts.append(",".join(map(str, range(len(fields.devices)))))
        parts.append(",".join(map(str, fields.local_device_ids)))
        parts.append(",".join(local))
        if everything:
            parts.append(",".join(everything))
    return "|".join(parts)


def parse_mesh(text: str) -> MeshFields:
    """Return the fields of a mesh from text in the format of TensorFlow's `Mesh.to_string`.

    Raises:
        MeshError: The text is not in this format.
    """
    try:
        if not isinstance(text, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(f"it is {describe_type(text)}")
        parts = text.split("|")
        if len(parts) not in (2, 5, 6):
            raise ValueError(f"bars split it into {len(parts)} fields, and a mesh has 2, 5 or 6")
        dims = tuple(_parse_dim(part) for part in _split_at_commas(parts[1]))
        size = _count_devices(dims)
        if len(parts) == 2:
            return MeshFields(parts[0], dims, None, ())
        ids, local_ids = (tuple(_parse_int(i) for i in _split_at_commas(part)) for part in parts[2:4])
    except ValueError as error:
        raise MeshError(
            f"mesh text {shorten_repr(text)} cannot be read", why=str(error), fix=_FIX_MESH
        ) from None
    _check_global_ids(ids, size)
    everything = _split_at_commas(parts[5]) if len(parts) == 6 else ()
    return MeshFields(
        parts[0],
        dims,
        _order_device_names(size, local_ids, _split_at_commas(parts[4]), everything),
        local_ids,
    )


def make_mesh_proto(fields: MeshFields) -> Any:
    """Return a mesh as TensorFlow's protobuf message `MeshProto`."""
    pb = _import_proto_module()

    proto = pb.MeshProto(
        name=fields.name, mesh_dimensions=[pb.MeshDimensionProto(name=n, size=s) for n, s in fields.dims]
    )
    if fields.devices is not None:
        local, everything = _list_full_device_names(fields)
        proto.global_device_ids.extend(range(len(fields.devices)))
        proto.local_device_ids.extend(fields.local_device_ids)
        proto.local_devices.extend(local)
        proto.global_devices.extend(everything)
    return proto


def read_mesh_proto(message: Any) -> MeshFields:
    """Return the fields of a mesh from a `MeshProto` of layoutmap or of TensorFlow, or from its bytes.

    Raises:
        MeshError: The message is no mesh, or has `use_xla_spmd` or `single_device` set.
    """
    pb = _import_proto_module()

    proto = _parse_proto(message, pb.MeshProto, MeshError)
    for unsupported in ("use_xla_spmd", "single_device"):
        if getattr(proto, unsupported):
            raise MeshError(
                f"the MeshProto has {unsupported} set",
                why="only meshes of named dims are supported",
                fix="make the mesh from dims and devices",
            )
    dims = tuple((dim.name, dim.size) for dim in proto.mesh_dimensions)
    size = _count_devices(dims)
    ids = tuple(proto.global_device_ids)
    if not ids:
        return MeshFields(proto.name, dims, None, ())
    _check_global_ids(ids, size)
    local_ids = tuple(proto.local_device_ids)
    devices = _order_device_names(size, local_ids, tuple(proto.local_devices), tuple(proto.global_devices))
    return MeshFields(proto.name, dims, devices, local_ids)


# TensorFlow rejects a colon in a dim name, so it cannot misread `x:y`, an axis over several dims (decisions/0004).
def format_layout(fields: LayoutFields) -> str:
    """Return a layout as text in the format of TensorFlow's `Layout.to_string`."""
    specs = "".join(":".join(spec) + "," for spec in fields.specs)
    return f"{_LAYOUT_PREFIX}{specs}{_MESH_PREFIX}{format_mesh(fields.mesh)}"


def parse_layout(text: str) -> LayoutFields:
    """Return the fields of a layout from text in the format of TensorFlow's `Layout.to_string`.

    Raises:
        LayoutError: The text is not in this format. A spec list without its closing comma is refused too, because
            TensorFlow silently drops the last spec.
    """
    specs = found = mesh = why = ""
    if isinstance(text, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        specs, found, mesh = text.removeprefix(_LAYOUT_PREFIX).partition(_MESH_PREFIX)
    if not isinstance(text, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        why = f"it is {describe_type(text)}"
    elif not text.startswith(_LAYOUT_PREFIX):
        why = f"it does not start with {_LAYOUT_PREFIX!r}"
    elif not found:
        why = f"it has no {_MESH_PREFIX!r}"
    elif specs and not specs.endswith(","):
        why = "each spec is followed by a comma, the last one too"
    if why:
        raise LayoutError(f"layout text {shorten_repr(text)} cannot be read", why=why, fix=_FIX_LAYOUT)
    return LayoutFields(tuple(tuple(s.split(":")) for s in specs.split(",")[:-1]), parse_mesh(mesh))


def make_layout_proto(fields: LayoutFields) -> Any:
    """Return a layout as TensorFlow's protobuf message `LayoutProto`."""
    pb = _import_proto_module()

    return pb.LayoutProto(
        sharding_specs=[pb.ShardingSpec(sharding_spec=":".join(spec)) for spec in fields.specs],
        mesh_config=make_mesh_proto(fields.mesh),
        type=pb.LayoutProto.STATIC,
    )


def read_layout_proto(message: Any) -> LayoutFields:
    """Return the fields of a layout from a `LayoutProto` of layoutmap or of TensorFlow, or from its bytes.

    Raises:
        LayoutError: The message is no layout, is not of the type `STATIC`, or has no mesh.
    """
    pb = _import_proto_module()

    proto = _parse_proto(message, pb.LayoutProto, LayoutError)
    if proto.type not in (pb.LayoutProto.UNKNOWN, pb.LayoutProto.STATIC):
        known = {value.number: value.name for value in pb.LayoutProto.LayoutType.DESCRIPTOR.values}
        raise LayoutError(
            f"the LayoutProto is of type {known.get(proto.type, proto.type)}",
            why="only static layouts are supported: each axis sharded over named mesh dims or replicated",
            fix="use Layout(sharding_specs, mesh)",
        )
    if not proto.HasField("mesh_config"):
        raise LayoutError(
            "the LayoutProto has no mesh",
            why="its mesh_config is not set" if proto.sharding_specs else "it is empty",
            fix="pass the message of as_proto(), or its bytes",
        )
    specs = tuple(tuple(spec.sharding_spec.split(":")) for spec in proto.sharding_specs)
    return LayoutFields(specs, read_mesh_proto(proto.mesh_config))


def serialize_message(message: Any) -> bytes:
    """Return the bytes of a protobuf message, which are the same in every run."""
    return message.SerializeToString(deterministic=True)


# protobuf is installed only with the extra `proto`, so this import can fail (decisions/0179).
def _import_proto_module() -> Any:
    """Return the module with the protobuf messages, imported on first use, because few programs need it.

    Raises:
        LayoutMapError: protobuf is not installed.
    """
    try:
        from layoutmap.core.proto import layout_pb2
    except ModuleNotFoundError as error:
        raise LayoutMapError(
            "the protobuf form needs protobuf, which is not installed",
            why=f"there is no module {error.name!r}",
            fix='pip install "layoutmap[proto]"; the text form, of to_string and from_string, needs nothing',
        ) from error
    return layout_pb2


def _parse_proto(message: Any, message_class: Any, error_class: type[LayoutError] | type[MeshError]) -> Any:
    """Convert a protobuf message, or the bytes of a message, to an instance of layoutmap's message class."""
    wanted = message_class.DESCRIPTOR.name
    try:
        if isinstance(message, bytes):
            return message_class.FromString(message)
        if not hasattr(message, "SerializeToString"):
            raise TypeError(f"it is {describe_type(message)}")
        # The bytes of another message type could parse without an error, so compare the type names first.
        if message.DESCRIPTOR.name != wanted:
            raise TypeError(f"it is a {message.DESCRIPTOR.name} message")
        return message_class.FromString(message.SerializeToString())
    except Exception as cause:  # protobuf runtimes have different classes for decode errors, so catch all
        raise error_class(
            f"{' '.join(repr(message).split()):.80} is not a {wanted}",
            why=str(cause),
            fix="pass the message of as_proto(), or its bytes",
        ) from cause


def _split_at_commas(text: str) -> tuple[str, ...]:
    return tuple(text.split(",")) if text else ()


def _parse_dim(text: str) -> tuple[str, int]:
    name, equals, size = text.partition("=")
    if not equals:
        raise ValueError(f"{shorten_repr(text)} is not name=size")
    return name, _parse_int(size)


def _parse_int(text: str) -> int:
    """Return the integer that a text of decimal digits stands for."""
    # int() also accepts blanks, underscores, and digits of other scripts, so check the text first.
    if not _WHOLE_NUMBER.fullmatch(text):
        limit = " of at most 18 digits" if len(text) > 18 else ""
        raise ValueError(f"{shorten_repr(text)} is not an integer{limit}")
    return int(text)


def _count_devices(dims: tuple[tuple[str, int], ...]) -> int:
    """Return the product of the dims' sizes, or a partial product once that exceeds `_MAX_DEVICES`."""
    num_devices = 1
    for _, size in dims:
        num_devices *= size
        if abs(num_devices) > _MAX_DEVICES:
            break
    return num_devices
