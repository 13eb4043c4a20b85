"""Define the mesh: devices in a grid with named dims.

A mesh has *mesh dimensions* (dims), each with a name and a size, and one device at each position of the grid,
row-major: the last dim runs fastest. It is a value. It holds device *names*, never device objects, so that a
mesh of 4,096 accelerators can be written down, planned on and compared on a laptop. A mesh without device
names is *abstract*; it is bound to real devices when something is materialized on it.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from layoutmap.core import tf_format
from layoutmap.core.arguments import as_int, check_name_is_encodable, convert_to_builtin_str, describe_type
from layoutmap.core.errors import LayoutMapError, MeshError, ScopeError, shorten_repr
from layoutmap.core.mesh_devices import (
    check_mesh_devices,
    list_named_device_positions,
    parse_device_type,
    validate_device_names,
    validate_local_device_ids,
)
from layoutmap.core.mesh_dims import UNSHARDED, MeshDimension, check_dims, parse_mesh_dims, replace_axis_types

__all__ = ["UNSHARDED", "Mesh", "MeshDimension", "check_dims_in_mesh", "convert_mesh", "is_dtensor_instance"]

_FORBIDDEN = re.compile(r"[|\s]")


@dataclass(frozen=True, slots=True, init=False, repr=False)
class Mesh:
    """Grid of devices with a name for each dimension, in row-major order: the last dimension varies fastest.

    Args:
        devices: The device names in row-major order, as in `["CPU:0", "CPU:1"]`; `None` makes an abstract mesh,
            which is bound to real devices when something is materialized on it. An empty name stands for a device
            of another process whose name is not known here. Dims in its place, as in `Mesh("batch=2,model=4")`, make an
            abstract mesh, too.
        mesh_dims: Pairs of name and size, a dict, or text such as `"batch=2,model=4"`.
        mesh_name: A name of your choice, kept in the text and protobuf forms.
        local_device_ids: The positions of this process's devices in the mesh; `None` means all whose names are known.
            Not compared: the processes of one program hold equal meshes.
        axis_types: JAX's types of the dims: `"explicit"` or `"auto"` for all, a list with one for each, or a dict of
            some by name; `None` means those of `mesh_dims`, which are `"auto"` unless stated. Other engines refuse
            `"explicit"`. Not compared.

    Raises:
        MeshError: A dim name is empty, repeated, `"unsharded"`, or holds a blank or one of `,|=:`; a size is below 1;
            the number of devices is not the product of the sizes, or that is above a million; a device appears twice;
            device types are mixed.

    Example:
        >>> mesh = Mesh(["TPU:0", "TPU:1", "TPU:2", "TPU:3", "TPU:4", "TPU:5"], [("x", 3), ("y", 2)])
        >>> mesh.coords(3)
        (1, 1)
        >>> mesh.dim_size("x"), mesh.size, mesh.shape
        (3, 6, (3, 2))
        >>> Mesh(None, "batch=2,model=4")
        Mesh(None, [('batch', 2), ('model', 4)])

    References:
        `tf.experimental.dtensor.Mesh`, https://www.tensorflow.org/api_docs/python/tf/experimental/dtensor/Mesh
    """

    devices: tuple[str, ...] | None
    mesh_dims: tuple[MeshDimension, ...]
    name: str
    local_device_ids: tuple[int, ...] = field(compare=False)

    def __init__(
        self,
        devices: Iterable[str] | str | None,
        mesh_dims: str | Mapping[str, int] | Iterable[MeshDimension | tuple[str, int]] | None = None,
        mesh_name: str = "",
        *,
        local_device_ids: Iterable[int] | None = None,
        axis_types: object = None,
    ):
        if mesh_dims is None and isinstance(devices, str):
            devices, mesh_dims = None, devices
        if mesh_dims is None:
            raise MeshError(
                "a mesh needs dims",
                facts={"devices": shorten_repr(devices)},
                why="its dims arrange the devices in a grid",
                fix='pass dims, as in Mesh(devices, "batch=2,model=4"), or Mesh("batch=2,model=4") without devices',
            )
        dims = parse_mesh_dims(mesh_dims)
        check_dims(dims)
        dims = replace_axis_types(dims, axis_types)
        names = None if devices is None else validate_device_names(devices, dims)
        size = math.prod(dim.size for dim in dims)
        check_mesh_devices(names, dims, size)
        _check_mesh_name(mesh_name)
        local = validate_local_device_ids(local_device_ids, names, dims, size)
        object.__setattr__(self, "devices", names)
        object.__setattr__(self, "mesh_dims", dims)
        object.__setattr__(self, "name", convert_to_builtin_str(mesh_name))
        object.__setattr__(self, "local_device_ids", local)

    @property
    def axis_types(self) -> tuple[str, ...]:
        """JAX's type of each mesh dim: `"auto"` or `"explicit"`."""
        return tuple(dim.axis_type for dim in self.mesh_dims)

    @property
    def explicit_dims(self) -> tuple[str, ...]:
        """The names of the mesh dims of type `"explicit"`."""
        return tuple(dim.name for dim in self.mesh_dims if dim.axis_type == "explicit")

    @property
    def dim_names(self) -> tuple[str, ...]:
        """The names of the mesh dims, in order."""
        return tuple(dim.name for dim in self.mesh_dims)

    @property
    # numpy, JAX, and PyTorch have a property `shape`, so this is not a method as in TensorFlow (decisions/0001).
    def shape(self) -> tuple[int, ...]:
        """Sizes of the mesh dims, in order."""
        return tuple(dim.size for dim in self.mesh_dims)

    @property
    def size(self) -> int:
        """The number of devices."""
        return math.prod(self.shape)

    @property
    def strides(self) -> tuple[int, ...]:
        """The distance in device order between neighboring devices along each mesh dim."""
        return (
            tuple(accumulate(reversed(self.shape[1:]), operator.mul, initial=1))[::-1] if self.shape else ()
        )

    @property
    def is_abstract(self) -> bool:
        """Whether the mesh names no devices."""
        return self.devices is None

    @property
    def device_type(self) -> str | None:
        """`"CPU"`, `"GPU"`, or `"TPU"`, or None on an abstract mesh."""
        return next((parse_device_type(name) for name in self.devices or () if name), None)

    @property
    def dim_sizes(self) -> dict[str, int]:
        """The size of each mesh dim by its name."""
        return {dim.name: dim.size for dim in self.mesh_dims}

    def __getitem__(self, dim_name: str) -> MeshDimension:
        for dim in self.mesh_dims:
            if dim.name == dim_name:
                return dim
        raise MeshError(
            f"mesh dim {dim_name!r} does not exist",
            facts={"mesh": str(self)},
            why="the mesh has no dim of that name",
            fix=f"use one of {', '.join(map(repr, self.dim_names))}"
            if self.mesh_dims
            else f"make the mesh with it, as in Mesh(None, [({dim_name!r}, 1)])",
        )

    def __contains__(self, dim_name: object) -> bool:
        return dim_name in self.dim_names

    def dim_size(self, dim_name: str) -> int:
        """Return the number of devices along one mesh dim.

        Raises:
            MeshError: There is no such dim.
        """
        return self[dim_name].size

    def coords(self, device_index: int) -> tuple[int, ...]:
        """Return the coordinates of one device in the grid.

        Args:
            device_index: Its position in the row-major order, 0 to `size - 1`.

        Returns:
            One coordinate for each mesh dim.

        Raises:
            MeshError: The index is out of range.

        Example:
            >>> Mesh(None, "x=4,y=2").coords(5)
            (2, 1)
        """
        index = as_int(device_index)
        if index is None or not 0 <= index < self.size:
            raise MeshError(
                f"device index {device_index!r} is outside the mesh",
                facts={"mesh": str(self)},
                why=f"the mesh has {self.size} devices" if self.size > 1 else "the mesh has one device",
                fix=f"use an index from 0 to {self.size - 1}" if self.size > 1 else "use index 0",
            )
        return tuple(index // stride % size for stride, size in zip(self.strides, self.shape, strict=True))

    def unravel_index(self) -> list[dict[str, int]]:
        """Return the coordinates of all devices, in device order. Each is a dict from dim name to position.

        Example:
            >>> Mesh(None, "x=2,y=2").unravel_index()[1]
            {'x': 0, 'y': 1}
        """
        return [dict(zip(self.dim_names, self.coords(i), strict=True)) for i in range(self.size)]

    def with_devices(self, devices: Iterable[str], *, local_device_ids: Iterable[int] | None = None) -> Mesh:
        """Return a mesh with the dims and name of this mesh, but with these devices."""
        return Mesh(devices, self.mesh_dims, self.name, local_device_ids=local_device_ids)

    def to_string(self) -> str:
        """Return the mesh as text, byte-compatible with TensorFlow's for a mesh that names its devices.

        An abstract mesh, which TensorFlow cannot express, has only the first two fields.

        Example:
            >>> Mesh(["TPU:0"], "x=1", "single").to_string()
            'single|x=1|0|0|/job:localhost/replica:0/task:0/device:TPU:0'
            >>> Mesh(None, "x=2").to_string()
            '|x=2'
        """
        return tf_format.format_mesh(self.to_fields())

    @classmethod
    def from_string(cls, text: str) -> Mesh:
        """Read a mesh from the text that `to_string` or TensorFlow writes.

        Raises:
            MeshError: The text is not of that form.
        """
        return cls.from_fields(tf_format.parse_mesh(text))

    def as_proto(self) -> Any:
        """Return the mesh as a `MeshProto` with the same bytes as TensorFlow's."""
        return tf_format.make_mesh_proto(self.to_fields())

    @classmethod
    def from_proto(cls, proto: Any) -> Mesh:
        """Read a `MeshProto` of layoutmap or of TensorFlow.

        Raises:
            MeshError: The message holds no valid mesh.
        """
        return cls.from_fields(tf_format.read_mesh_proto(proto))

    def to_fields(self) -> tf_format.MeshFields:
        """Return the values that the text and protobuf forms of the mesh contain."""
        return tf_format.MeshFields(
            name=self.name,
            dims=tuple((dim.name, dim.size) for dim in self.mesh_dims),
            devices=self.devices,
            local_device_ids=self.local_device_ids,
        )

    @classmethod
    def from_fields(cls, fields: tf_format.MeshFields) -> Mesh:
        """Make a mesh from the values in its text or protobuf form, and check them."""
        local_ids = None if fields.devices is None else fields.local_device_ids
        return cls(fields.devices, fields.dims, fields.name, local_device_ids=local_ids)

    def __str__(self) -> str:
        return ", ".join(map(str, self.mesh_dims)) or "no dims"

    def __repr__(self) -> str:
        devices = self.devices if self.devices is None else list(self.devices)
        name = f", {self.name!r}" if self.name else ""
        usual = list_named_device_positions(self.devices, self.size)
        local = (
            "" if self.local_device_ids == usual else f", local_device_ids={list(self.local_device_ids)!r}"
        )
        types = dict.fromkeys(self.explicit_dims, "explicit")
        explicit = f", axis_types={types!r}" if types else ""
        return (
            f"Mesh({devices!r}, {[(dim.name, dim.size) for dim in self.mesh_dims]!r}{name}{local}{explicit})"
        )


def _check_mesh_name(name: str) -> None:
    if not isinstance(name, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise MeshError(
            f"mesh name {name!r} is not text",
            why=f"it is {describe_type(name)}",
            fix='leave it out, or pass ""',
        )
    check_name_is_encodable(name, "mesh name")
    if _FORBIDDEN.search(name):
        raise MeshError(
            f"mesh name {name!r} has a bar or a blank",
            why="they separate the fields of a mesh's text form",
            fix=f"name it {_FORBIDDEN.sub('_', name)!r}",
        )


def check_dims_in_mesh(
    label: str,
    dim_names: str | Sequence[str] | None,
    mesh: Mesh,
    why: str,
    error: type[LayoutMapError] = ScopeError,
    fix_ending: str = ", or leave it out",
) -> None:
    """Raise if a mesh lacks one of these dims, or a dim is repeated. `label` names the argument in the message."""
    dims = () if dim_names is None else (dim_names,) if isinstance(dim_names, str) else tuple(dim_names)
    for position, name in enumerate(dims):
        if name not in mesh or name in dims[:position]:
            raise error(
                f"{label} {name!r} is {'named twice' if name in mesh else 'not a dim of the mesh'}",
                facts={"mesh": str(mesh)},
                why=why,
                fix=f"use one of {', '.join(map(repr, mesh.dim_names))}{fix_ending}",
            )


def convert_mesh(mesh: Any) -> Any:
    """Convert a mesh of TensorFlow, JAX, or torch (with dim names) to a `Mesh`, and return other values unchanged."""
    if is_dtensor_instance(mesh, "Mesh"):
        return Mesh.from_string(mesh.to_string())
    kind = (type(mesh).__module__.partition(".")[0], type(mesh).__name__)
    if kind in (("jax", "AbstractMesh"), ("jax", "Mesh")):
        devices = None if kind[1] == "AbstractMesh" else mesh.devices.flat
        names = None if devices is None else [f"{each.platform.upper()}:{each.id}" for each in devices]
        return Mesh(names, dict(mesh.shape), axis_types=list(mesh.axis_types))
    if kind == ("torch", "DeviceMesh") and mesh.mesh_dim_names:
        names = [f"{mesh.device_type.upper()}:{rank}" for rank in mesh.mesh.flatten().tolist()]
        return Mesh(names, list(zip(mesh.mesh_dim_names, mesh.mesh.shape, strict=True)))
    return mesh


def is_dtensor_instance(value: object, name: str) -> bool:
    """Return whether a value is an instance of TensorFlow DTensor's class `name`, without loading TensorFlow."""
    kind = type(value)
    return kind.__name__ == name and kind.__module__.startswith("tensorflow.dtensor.")
