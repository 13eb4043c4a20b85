"""Define a layout: for each axis of a tensor, the mesh dim over which it is sharded, or `UNSHARDED`.

Shard arithmetic lives here too: how many shards, which device holds which, how large they are. It is plain integer
arithmetic on values; no framework is needed and nothing is allocated. The file is longer than others since one class
has all methods of TensorFlow's `Layout`, each documented.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from layoutmap.core import tf_format
from layoutmap.core.arguments import as_int, describe_type, validate_axis, validate_rank, validate_shape
from layoutmap.core.errors import LayoutError, LayoutMapError
from layoutmap.core.mesh import UNSHARDED, Mesh, convert_mesh, is_dtensor_instance
from layoutmap.core.old_names import DeprecatedAlias
from layoutmap.core.specs import ShardingSpec, format_specs, list_spec_dims, make_spec, normalize_specs

__all__ = ["UNSHARDED", "Layout", "validate_memory_kind", "convert_layout"]

MEMORY_KINDS = ("device", "pinned_host", "unpinned_host")
"""The kinds of memory that a layout can name, as JAX calls them."""

_MEMORY_SPEC = "memory"
"""The word that begins the spec for host memory, which follows the specs of the axes in text and protobuf."""


@dataclass(frozen=True, slots=True, init=False, repr=False)
class Layout:
    """One sharding spec for each axis of a tensor, on a mesh.

    Args:
        sharding_specs: For each axis the name of a mesh dim, a tuple of names (major to minor: the first splits
            coarsest), or `UNSHARDED`; `None` means `UNSHARDED`. A tuple of one name is that name.
        mesh: The mesh, or one of `tf.experimental.dtensor`.
        memory: The memory that stores the shards: `"device"`, or host memory, which is `"pinned_host"` or
            `"unpinned_host"`. `None`: that of the devices, and an array that exists stays in its memory.

    Raises:
        LayoutError: A spec is no dim of the mesh, a dim is used twice, or there is no such memory.

    Example:
        >>> mesh = Mesh(None, "batch=2,model=4")
        >>> layout = Layout([UNSHARDED, "model"], mesh)
        >>> layout
        Layout(['unsharded', 'model'], Mesh(None, [('batch', 2), ('model', 4)]))
        >>> layout.local_shape_from_global_shape((512, 1024))
        (512, 256)
        >>> Layout([("batch", "model"), None], mesh).num_shards(0)
        8

    References:
        `tf.experimental.dtensor.Layout`,
        https://www.tensorflow.org/api_docs/python/tf/experimental/dtensor/Layout
    """

    sharding_specs: tuple[ShardingSpec, ...]
    mesh: Mesh
    shard_counts: tuple[int, ...] = field(compare=False)
    """The number of shards along each axis."""
    memory: str | None = field(compare=False)
    """The argument `memory`. `None` and `"device"` compare equal, but `"device"` moves arrays out of host memory."""
    host_memory: str
    """The kind of host memory that stores the shards, or an empty string for the memory of the devices."""

    def __init__(
        self,
        sharding_specs: Iterable[str | Sequence[str] | None],
        mesh: Mesh,
        *,
        memory: str | None = None,
    ):
        mesh = convert_mesh(mesh)
        if not isinstance(mesh, Mesh):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise LayoutError(
                f"a layout needs a mesh, not {mesh!r}",
                why=f"it is {describe_type(mesh)}, not a layoutmap.Mesh",
                fix='make one: layoutmap.create_mesh("batch=2,model=4")',
            )
        validate_memory_kind(memory, "layout")
        self._set_fields(normalize_specs(sharding_specs, mesh), mesh, memory)

    def _set_fields(self, specs: tuple[ShardingSpec, ...], mesh: Mesh, memory: str | None) -> None:
        object.__setattr__(self, "sharding_specs", specs)
        object.__setattr__(self, "mesh", mesh)
        sizes = mesh.dim_sizes
        counts = tuple(math.prod(sizes[dim] for dim in list_spec_dims(spec)) for spec in specs)
        object.__setattr__(self, "shard_counts", counts)
        object.__setattr__(self, "memory", memory)
        object.__setattr__(self, "host_memory", "" if memory in (None, "device") else memory)

    # -- constructors

    @classmethod
    def from_valid_specs(cls, specs: Iterable[ShardingSpec], mesh: Mesh, memory: str | None = None) -> Layout:
        """Make a layout from valid specs, without checking them.

        Args:
            specs: For each axis a dim, a tuple of dims, which may be empty, or `UNSHARDED`, of a layout on this mesh.
            mesh: The mesh.
            memory: See `Layout`.
        """
        layout = object.__new__(cls)
        layout._set_fields(tuple(map(make_spec, map(list_spec_dims, specs))), mesh, memory)
        return layout

    @classmethod
    def replicated(cls, mesh: Mesh, rank: int) -> Layout:
        """Make a layout in which every device stores the whole tensor.

        Raises:
            LayoutError: The rank is negative.
        """
        if not isinstance(mesh, Mesh):  # pyright: ignore[reportUnnecessaryIsInstance]
            return cls((UNSHARDED,) * validate_rank(rank), mesh)
        return cls.from_valid_specs((UNSHARDED,) * validate_rank(rank), mesh)

    @classmethod
    def batch_sharded(cls, mesh: Mesh, batch_dim: ShardingSpec, rank: int, axis: int = 0) -> Layout:
        """Make a layout in which one axis, by default the first, is sharded over one mesh dim or several.

        Args:
            mesh: The mesh.
            batch_dim: The mesh dim, or a tuple of several, major to minor.
            rank: The number of axes.
            axis: The axis that is sharded, 0 to `rank - 1`.

        Raises:
            LayoutError: There is no such axis or mesh dim.

        Example:
            >>> Layout.batch_sharded(Mesh(None, "x=2"), "x", rank=3).sharding_specs
            ('x', 'unsharded', 'unsharded')
        """
        rank = validate_rank(rank)
        axis = validate_axis(axis, rank)
        return cls([batch_dim if i == axis else UNSHARDED for i in range(rank)], mesh)

    @classmethod
    def inner_sharded(cls, mesh: Mesh, inner_dim: str, rank: int) -> Layout:
        """Make a layout in which the last axis is sharded over one mesh dim.

        Raises:
            LayoutError: The rank is 0, or there is no such mesh dim.
        """
        rank = validate_rank(rank)
        if not rank:
            raise LayoutError(
                "a layout of rank 0 has no inner axis",
                why="a scalar has no axes to shard",
                fix="use Layout.replicated(mesh, 0)",
            )
        return cls.batch_sharded(mesh, inner_dim, rank, axis=rank - 1)

    def delete(self, dims: int | Iterable[int]) -> Layout:
        """Return this layout without some axes, as for a tensor that is reduced over them.

        Args:
            dims: The axes to leave out, or one axis.

        Raises:
            LayoutError: There is no such axis.

        Example:
            >>> Layout(["x", "y"], Mesh(None, "x=2,y=2")).delete(0).sharding_specs
            ('y',)
        """
        axes: Iterable[Any] = dims if isinstance(dims, Iterable) and not isinstance(dims, str) else [dims]
        gone = {validate_axis(axis, self.rank) for axis in axes}
        kept = (s for i, s in enumerate(self.sharding_specs) if i not in gone)
        return Layout.from_valid_specs(kept, self.mesh, self.memory)

    def replace_memory(self, memory: str | None) -> Layout:
        """Return this layout with a different kind of memory.

        Args:
            memory: See `Layout`.

        Raises:
            LayoutError: There is no such memory.

        Example:
            >>> print(Layout(["x", None], Mesh(None, "x=2")).replace_memory("pinned_host"))
            (x, unsharded) in pinned_host
        """
        validate_memory_kind(memory, "layout")
        return Layout.from_valid_specs(self.sharding_specs, self.mesh, memory)

    # -- queries

    @property
    def rank(self) -> int:
        """The number of axes."""
        return len(self.sharding_specs)

    def list_mesh_dims(self, axis: int) -> tuple[str, ...]:
        """Return the mesh dims over which an axis is sharded, major to minor, or an empty tuple if it is not sharded.

        Raises:
            LayoutError: There is no such axis.
        """
        return list_spec_dims(self.sharding_specs[validate_axis(axis, self.rank)])

    def num_shards(self, axis: int) -> int:
        """Return the number of shards along an axis.

        Raises:
            LayoutError: There is no such axis.
        """
        return self.shard_counts[validate_axis(axis, self.rank)]

    @property
    def num_distinct_shards(self) -> int:
        """Number of different shards. The devices store `mesh.size / num_distinct_shards` copies of each."""
        return math.prod(self.shard_counts)

    def is_fully_replicated(self) -> bool:
        """Return whether every device stores the whole tensor. A mesh dim of size 1 shards nothing."""
        return self.num_distinct_shards == 1

    def offset_to_shard(self) -> list[tuple[int, ...]]:
        """Return the shard that each device stores, in mesh order, as its position along each axis.

        Example:
            >>> Layout(["x", UNSHARDED], Mesh(None, "x=2,y=2")).offset_to_shard()
            [(0, 0), (0, 0), (1, 0), (1, 0)]
        """
        return [self.locate_shard(i) for i in range(self.mesh.size)]

    def locate_shard(self, device_index: int) -> tuple[int, ...]:
        """Return the shard that one device stores, as its position among the shards along each axis.

        Raises:
            MeshError: There is no such device.
        """
        sizes = self.mesh.dim_sizes
        at = dict(zip(self.mesh.dim_names, self.mesh.coords(device_index), strict=True))
        offset: list[int] = []
        for spec in self.sharding_specs:
            position = 0
            for dim in list_spec_dims(spec):
                position = position * sizes[dim] + at[dim]
            offset.append(position)
        return tuple(offset)

    def offset_tuple_to_global_index(self, offset_tuple: Sequence[int]) -> int:
        """Return the position of a shard among all shards in row-major order.

        Args:
            offset_tuple: The shard, as its position along each axis, as `offset_to_shard` returns it.

        Raises:
            LayoutError: There is no such shard.

        Example:
            >>> Layout(["x", "y"], Mesh(None, "x=2,y=2")).offset_tuple_to_global_index((1, 0))
            2
        """
        counts, index = self.shard_counts, 0
        offset_tuple = tuple(-1 if (i := as_int(n)) is None else i for n in offset_tuple)
        why = (
            ""
            if len(offset_tuple) == self.rank
            else f"the layout has rank {self.rank}, not {len(offset_tuple)}"
        )
        for axis, (i, count) in enumerate(zip(offset_tuple, counts, strict=not why)):
            index = index * count + i
            if not why and not 0 <= i < count:
                why = f"axis {axis} is " + (f"split into {count} shards" if count > 1 else "not sharded")
        if why:
            raise LayoutError(
                f"there is no shard {tuple(offset_tuple)}",
                facts={"layout": str(self), "mesh": str(self.mesh)},
                why=why,
                fix=f"give one number for each axis; the last shard is {tuple(n - 1 for n in counts)}",
            )
        return index

    def local_shape_from_global_shape(self, global_shape: Sequence[int | None]) -> tuple[int | None, ...]:
        """Return the shape of the largest shard. All shards have this shape if each axis can be split evenly.

        Args:
            global_shape: The global shape; `None` or -1 stands for an unknown size and stays.

        Raises:
            LayoutError: The rank differs, or a size is below -1.
        """
        shape = validate_shape(global_shape)
        self.check_rank(shape)
        return tuple(
            n if n is None or n < 0 else -(-n // count)
            for n, count in zip(shape, self.shard_counts, strict=True)
        )

    def global_shape_from_local_shape(self, local_shape: Sequence[int | None]) -> tuple[int | None, ...]:
        """Return the global shape of a tensor with equal shards of this shape. Unknown sizes stay unknown.

        Raises:
            LayoutError: The rank differs, or a size is below -1.
        """
        shape = validate_shape(local_shape)
        self.check_rank(shape)
        return tuple(
            n if n is None or n < 0 else n * count for n, count in zip(shape, self.shard_counts, strict=True)
        )

    def shard_shape(self, global_shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the largest shard of a tensor with a fully known shape.

        Raises:
            LayoutError: The rank differs, or a size is unknown.
        """
        shape = self.local_shape_from_global_shape(global_shape)
        if any(n is None or n < 0 for n in shape):
            raise LayoutError(
                f"the shape {tuple(global_shape)} is not fully known",
                facts={"layout": str(self), "mesh": str(self.mesh)},
                why="None and -1 stand for a size that is not known yet",
                fix="give all sizes, or call local_shape_from_global_shape, which accepts unknown sizes",
            )
        return tuple(n for n in shape if n is not None)

    def shard_slices(self, global_shape: Sequence[int], device_index: int) -> tuple[slice, ...]:
        """Return the slices of a tensor that one device stores, with a start and a stop for each axis.

        Along an axis that cannot be split evenly, the last shards have fewer elements or none.

        Args:
            global_shape: The global shape.
            device_index: The device's position in mesh order.

        Raises:
            LayoutError: The rank differs.
            MeshError: There is no such device.

        Example:
            >>> Layout(["x", None], Mesh(None, "x=2")).shard_slices((5, 4), device_index=1)
            (slice(3, 5, None), slice(0, 4, None))
        """
        shape = self.shard_shape(global_shape)
        # Shards have ceil(n / shards) elements, as in torch.chunk and DTensor (decisions/0231).
        parts = zip(self.locate_shard(device_index), shape, validate_shape(global_shape), strict=True)
        return tuple(slice(min(i * part, n or 0), min((i + 1) * part, n or 0)) for i, part, n in parts)

    def pad_shape(self, global_shape: Sequence[int]) -> tuple[int, ...]:
        """Return a shape with the size of each axis rounded up to a multiple of its number of shards.

        Raises:
            LayoutError: The rank differs, or a size is unknown.

        Example:
            >>> Layout(["x", None], Mesh(None, "x=4")).pad_shape((13, 3))
            (16, 3)
        """
        sizes = zip(self.shard_shape(global_shape), self.shard_counts, strict=True)
        return tuple(part * count for part, count in sizes)

    def find_uneven_axes(self, global_shape: Sequence[int | None]) -> tuple[int, ...]:
        """Return the axes of a shape that the layout cannot split evenly. Unknown sizes count as even."""
        sizes = zip(validate_shape(global_shape), self.shard_counts, strict=True)
        return tuple(axis for axis, (n, count) in enumerate(sizes) if n is not None and n >= 0 and n % count)

    def check_rank(self, shape: tuple[int | None, ...], name: str = "layout") -> None:
        """Raise a `LayoutError` if a shape does not have this layout's rank."""
        if len(shape) != self.rank:
            raise self.make_rank_error(shape, name)

    def check_fits(self, shape: tuple[int | None, ...], name: str = "layout") -> None:
        """Raise a `LayoutError` if a shape does not have this layout's rank or cannot be split evenly."""
        self.check_rank(shape, name)
        for axis in self.find_uneven_axes(shape):
            raise self.make_uneven_error(shape, axis, name)

    def make_rank_error(self, shape: tuple[int | None, ...], name: str = "layout") -> LayoutError:
        """Return, but do not raise, the error for a tensor that does not have this layout's rank."""
        fitted = (*self.sharding_specs[: len(shape)], *[UNSHARDED] * (len(shape) - self.rank))
        return LayoutError(
            f"{name}: a layout of rank {self.rank} does not fit a tensor of rank {len(shape)}",
            facts={"shape": shape, "layout": str(self), "mesh": str(self.mesh)},
            why="a layout has one sharding spec for each axis",
            fix=f"use {format_specs(fitted)}, or change the rule so that it does not match this tensor",
        )

    def make_uneven_error(
        self, shape: tuple[int | None, ...], axis: int, name: str = "layout"
    ) -> LayoutError:
        """Return, but do not raise, the error for an axis of a shape that this layout cannot split evenly."""
        size, count = validate_shape(shape)[axis] or 0, self.num_shards(axis)
        fitting = tuple(UNSHARDED if i == axis else s for i, s in enumerate(self.sharding_specs))
        return LayoutError(
            f"{name}: axis {axis} cannot be split evenly",
            facts={"shape": shape, "layout": str(self), "mesh": str(self.mesh)},
            why=f"{size} is not a multiple of {count}",
            fix=f"pad axis {axis} to {-(-size // count) * count}, or leave it unsharded: {format_specs(fitting)}",
        )

    mesh_dims_of = DeprecatedAlias("list_mesh_dims")
    shard_offset = DeprecatedAlias("locate_shard")
    uneven_axes = DeprecatedAlias("find_uneven_axes")
    rank_error = DeprecatedAlias("make_rank_error")
    uneven_error = DeprecatedAlias("make_uneven_error")

    # -- text and protobuf

    def to_string(self) -> str:
        """Return the layout as text, byte-compatible with TensorFlow's.

        An axis sharded over several mesh dims, which TensorFlow cannot express, is written `x:y`. Host memory, which
        it cannot express either, follows the axes as `memory::pinned_host`.

        Example:
            >>> Layout(["x", None], Mesh(["TPU:0"], "x=1")).to_string()
            'sharding_specs:x,unsharded, mesh:|x=1|0|0|/job:localhost/replica:0/task:0/device:TPU:0'
        """
        return tf_format.format_layout(self._to_fields())

    @classmethod
    def from_string(cls, layout_str: str) -> Layout:
        """Read a layout from the text that `to_string` or TensorFlow writes.

        Raises:
            LayoutError: The text is not of that form, or holds no valid layout.
            MeshError: The part of the text after `mesh:` holds no valid mesh.
        """
        return cls._from_fields(tf_format.parse_layout(layout_str))

    def as_proto(self) -> Any:
        """Return the layout as a `LayoutProto` with the same bytes as TensorFlow's."""
        return tf_format.make_layout_proto(self._to_fields())

    @classmethod
    def from_proto(cls, layout_proto: Any) -> Layout:
        """Read a `LayoutProto` of layoutmap or of TensorFlow.

        Raises:
            LayoutError: The message holds no valid layout.
            MeshError: Its `mesh_config` holds no valid mesh.
        """
        return cls._from_fields(tf_format.read_layout_proto(layout_proto))

    def mesh_proto(self) -> Any:
        """Return the mesh as a `MeshProto`."""
        return self.mesh.as_proto()

    def serialized_string(self) -> bytes:
        """Return the bytes of `as_proto()`."""
        return tf_format.serialize_message(self.as_proto())

    @classmethod
    def from_str(cls, proto_str: bytes) -> Layout:
        """Return the layout that `serialized_string` has written as bytes.

        Raises:
            LayoutError: The bytes hold no valid layout.
            MeshError: Their `mesh_config` holds no valid mesh.
        """
        return cls._from_fields(tf_format.read_layout_proto(proto_str))

    def _to_fields(self) -> tf_format.LayoutFields:
        specs = [(s,) if isinstance(s, str) else s for s in self.sharding_specs]
        # No mesh dim has an empty name, so readers recognize this entry as a memory kind, and TensorFlow
        # rejects it (decisions/0263).
        if self.host_memory:
            specs.append((_MEMORY_SPEC, "", self.host_memory))
        return tf_format.LayoutFields(tuple(specs), self.mesh.to_fields())

    @classmethod
    def _from_fields(cls, fields: tf_format.LayoutFields) -> Layout:
        specs, memory = fields.specs, None
        if specs and specs[-1][:2] == (_MEMORY_SPEC, ""):
            specs, memory = specs[:-1], ":".join(specs[-1][2:])
        return cls(specs, Mesh.from_fields(fields.mesh), memory=memory)

    def __str__(self) -> str:
        specs = format_specs(self.sharding_specs)
        return f"{specs} in {self.host_memory}" if self.host_memory else specs

    def __repr__(self) -> str:
        memory = f", memory={self.memory!r}" if self.memory else ""
        return f"Layout({list(self.sharding_specs)!r}, {self.mesh!r}{memory})"


def validate_memory_kind(memory: object, where: str, error: type[LayoutMapError] = LayoutError) -> str | None:
    """Check that a value is None or the name of a kind of memory, and return it.

    Raises:
        LayoutMapError: There is no such kind. The error is of the type `error`.
    """
    if memory is None or memory in MEMORY_KINDS:
        return memory  # type: ignore[return-value]
    raise error(
        f"{where}: memory={memory!r} is not a kind of memory",
        why='arrays are in the memory of the devices, "device", or of the host, "pinned_host" or "unpinned_host"',
        fix='use "pinned_host", from which devices copy fastest'
        if "host" in str(memory)
        else "use one of these",
    )


def convert_layout(value: Any, mesh: Mesh | None = None, rank: int | None = None) -> Layout:
    """Convert a layout of TensorFlow or JAX, or sharding specs with a mesh, to a `Layout`.

    Args:
        value: A `Layout`, a TensorFlow layout, a `NamedSharding`, or sharding specs: a tuple, a list, or a
            `PartitionSpec`.
        mesh: The mesh of sharding specs.
        rank: The rank of the tensor. A `PartitionSpec` with fewer entries is padded with unsharded axes.

    Raises:
        LayoutError: The value is none of these, or the specs do not fit the mesh.
        LayoutMapError: There is no mesh to bind the specs to.
    """
    if isinstance(value, Layout):
        return value
    if is_dtensor_instance(value, "Layout"):
        return Layout.from_string(value.to_string())
    memory = None
    if _is_jax_instance(value, "NamedSharding"):
        memory, mesh, value = _find_memory_kind(value), convert_mesh(value.mesh), value.spec
    if _is_jax_instance(value, "PartitionSpec"):
        if getattr(value, "unreduced", None):
            raise LayoutError(
                f"{value} is not a layout",
                why=f"its sum over {', '.join(sorted(value.unreduced))} is pending, and layouts have no partial sums",
                fix="add it up first: jax.reshard(x, jax.P(..)) without unreduced",
            )
        value = (*value, *[None] * ((rank or 0) - len(value)))
    if not isinstance(value, (tuple, list)):
        fix = 'use a Layout, or a tuple of sharding specs such as (None, "model")'
        if isinstance(value, str):
            fix = f"for a tensor of one axis write ({value!r},), of two (None, {value!r})"
        raise LayoutError(f"{value!r} is not a layout", why=f"it is {describe_type(value)}", fix=fix)
    if mesh is None:
        raise LayoutMapError(
            f"sharding specs {value!r} have no mesh",
            why="sharding specs need the layout map's mesh, and this map has none",
            fix="create the map with a mesh, LayoutMap(mesh), or pass a Layout",
        )
    return Layout(value, mesh, memory=memory)  # pyright: ignore[reportUnknownArgumentType]


def _find_memory_kind(sharding: Any) -> str | None:
    """Return the memory kind of JAX's `NamedSharding`, or None if this is the default memory of the devices."""
    is_abstract = type(sharding.mesh).__name__ == "AbstractMesh"
    usual = None if is_abstract else sharding.mesh.devices.flat[0].default_memory().kind
    return None if sharding.memory_kind == usual else sharding.memory_kind


def _is_jax_instance(value: object, name: str) -> bool:
    """Return whether a value is an instance of JAX's class with this name, without importing JAX."""
    kind = type(value)
    # Some JAX releases name the class of `jax.sharding.PartitionSpec` `P`, so both names count.
    return kind.__module__.partition(".")[0] == "jax" and kind.__name__ in (
        name,
        "P" if name[0] == "P" else name,
    )
