"""Check the device names of a mesh, and the ids of this process's devices."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

from layoutmap.core import tf_format
from layoutmap.core.arguments import as_int, check_name_is_encodable, convert_to_builtin_str, describe_type
from layoutmap.core.errors import MeshError
from layoutmap.core.mesh_dims import MeshDimension

_DEVICE_TYPE = re.compile(r"(?:^|device:)([A-Za-z]+):\d+$", re.IGNORECASE)
_FORBIDDEN = re.compile(r"[,|\s]")


def parse_device_type(device: str) -> str:
    """Return the type that a device name contains: `"CPU"` for `"CPU:0"` or `"/job:w/task:0/device:CPU:0"`."""
    found = _DEVICE_TYPE.search(device)
    if not found:
        raise MeshError(
            f"device {device!r} does not name a type",
            why="a device name ends in TYPE:NUMBER",
            fix='write "CPU:0", "GPU:3" or "/job:worker/replica:0/task:1/device:TPU:0"',
        )
    return found.group(1).upper()


def validate_device_names(devices: Iterable[str], dims: tuple[MeshDimension, ...]) -> tuple[str, ...]:
    """Check the device names of a mesh, and return them as a tuple of `str`.

    TensorFlow's full name of a device in a program of one process is shortened, as to `CPU:0`.

    Raises:
        MeshError: The names are a single string, cannot be iterated, or include a value that is not a string.
    """
    fix = 'pass names, as in ["CPU:0", "CPU:1"], or None for an abstract mesh'
    why = ""
    names: tuple[Any, ...] = ()
    if isinstance(devices, str):
        why, fix = "a mesh has one name for each device", f"write a list: [{devices!r}]"
    elif not isinstance(devices, Iterable):  # pyright: ignore[reportUnnecessaryIsInstance]
        why = f"they are {describe_type(devices)}"
    else:
        names = tuple(devices)
    if why:
        raise MeshError(f"mesh devices {devices!r} cannot be read", why=why, fix=fix)
    for name in names:
        if not isinstance(name, str):
            raise MeshError(
                f"device {name!r} is not a name",
                facts={"mesh": ", ".join(map(str, dims))},
                why=f"it is {describe_type(name)}; a mesh holds the names of devices, such as CPU:0",
                fix=fix,
            )
    return tuple(convert_to_builtin_str(name).removeprefix(tf_format.LOCAL_DEVICE) for name in names)


def check_mesh_devices(devices: tuple[str, ...] | None, dims: tuple[MeshDimension, ...], size: int) -> None:
    """Raise if a mesh of this size cannot have these devices.

    Raises:
        MeshError: They are too many or too few, one cannot be written or appears twice, or they are of several types.
    """
    if devices is None:
        return
    facts = {"mesh": ", ".join(map(str, dims)), "devices": _shorten_device_names(devices)}
    if len(devices) != size:
        raise MeshError(
            f"a mesh of {_format_device_count(size)} cannot have {len(devices)}",
            facts=facts,
            why=f"{' x '.join(str(dim.size) for dim in dims)} is {size}, not {len(devices)}"
            if len(dims) > 1
            else "",
            fix=f"pass {_format_device_count(size)}"
            + (f", or sizes whose product is {len(devices)}" if devices else ", or None"),
        )
    known = [name for name in devices if name]
    for name in known:
        check_name_is_encodable(name, "device")
    split = next((name for name in known if _FORBIDDEN.search(name)), None)
    if split is not None:
        raise MeshError(
            f"device {split!r} has a comma, a bar or a blank",
            facts=facts,
            why="they separate the fields of a mesh's text form",
            fix=f"name it {_FORBIDDEN.sub('_', split)!r}",
        )
    repeated = next((name for name, count in Counter(known).items() if count > 1), None)
    if repeated is not None:
        raise MeshError(
            f"device {repeated!r} appears twice in a mesh",
            facts=facts,
            why="each position of a mesh has a different device",
            fix="list each device once",
        )
    types = {parse_device_type(name) for name in known}
    if len(types) > 1:
        raise MeshError(
            f"a mesh cannot mix the device types {', '.join(sorted(types))}",
            facts=facts,
            why="one program runs on all devices of a mesh, so they are of one type",
            fix="make one mesh for each type",
        )


def _format_device_count(size: int) -> str:
    return f"{size} device{'s' if size > 1 else ''}"


def _shorten_device_names(devices: tuple[str, ...]) -> str:
    shown = devices if len(devices) <= 8 else (*devices[:4], f"... {len(devices) - 6} more", *devices[-2:])
    return ", ".join(shown) or "none"


def list_named_device_positions(devices: tuple[str, ...] | None, size: int) -> tuple[int, ...]:
    """Return the positions of devices with a name, or all positions on an abstract mesh."""
    return tuple(range(size)) if devices is None else tuple(i for i, name in enumerate(devices) if name)


def validate_local_device_ids(
    local_device_ids: Iterable[int] | None,
    devices: tuple[str, ...] | None,
    dims: tuple[MeshDimension, ...],
    size: int,
) -> tuple[int, ...]:
    """Check the mesh positions of this process's devices, and return them. `None` stands for all devices with a name.

    Raises:
        MeshError: The positions are outside the mesh or not ascending, or a device has no name.
    """
    if local_device_ids is None:
        return list_named_device_positions(devices, size)
    ids = tuple(local_device_ids)
    local = tuple(-1 if (i := as_int(id_)) is None else i for id_ in ids)
    if any(not 0 <= i < size for i in local) or list(local) != sorted(set(local)):
        raise MeshError(
            f"local device ids {_shorten_device_names(tuple(map(str, ids)))} do not fit the mesh",
            facts={"mesh": ", ".join(map(str, dims))},
            why=f"they are positions in the mesh, 0 to {size - 1}, each once and in ascending order",
            fix="list the positions of this process's devices in ascending order, or leave the argument out",
        )
    if devices is not None and not all(devices[i] for i in local):
        raise MeshError(
            f"the local device at position {next(i for i in local if not devices[i])} of the mesh has no name",
            facts={"mesh": ", ".join(map(str, dims))},
            why="only the devices of other processes may be unknown",
            fix="name the device, or remove its position from local_device_ids",
        )
    return local
