"""List the layouts that a search may give to a group of variables, or to the outputs of blocks.

The batch is sharded over one dim of the mesh, the data dim. Most meshes have another one, the model dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from layoutmap.core.errors import MeshError
from layoutmap.core.layout import Layout
from layoutmap.core.mesh import Mesh
from layoutmap.core.specs import (
    BatchDim,
    ShardingSpec,
    Specs,
    count_batch_shards,
    format_batch_dim,
    list_batch_dims,
    make_spec,
    replace_unsharded,
)
from layoutmap.cost.search.groups import VariableGroup


def get_specs(layout: Layout) -> Specs:
    """Return the sharding specs of a layout, with None for each unsharded axis."""
    return replace_unsharded(layout.sharding_specs)


@dataclass(frozen=True, slots=True)
class Option:
    """Choice of a layout for a variable group, independent of the mesh."""

    model_axis: int | None = None  # axis sharded over the `model` dim
    shards_data_dim: bool = (
        False  # whether another axis is sharded over the `data` dim, so that the weight is gathered for use
    )


REPLICATED = Option()


@dataclass(frozen=True, slots=True)
class Grid:
    """Mesh of a search, with the roles of its dims: one shards the batch, and one shards layers."""

    mesh: Mesh
    data_dim: str | None  # dim that shards the batch, and weights if needed; None: no dim shards the batch
    model_dim: str | None  # the other dim, which shards layers; None: no other dim has several devices
    replica_dims: tuple[str, ...] = ()  # further dims that shard the batch and no weight

    @property
    def batch_dim(self) -> BatchDim | None:
        """The mesh dim or dims that shard the batch, or None."""
        return make_spec((*self.replica_dims, self.data_dim)) if self.data_dim else None

    @property
    def data_size(self) -> int:
        """Number of devices along the data dim."""
        return self.mesh.dim_size(self.data_dim) if self.data_dim else 1

    @property
    def model_size(self) -> int:
        """Number of devices along the model dim."""
        return self.mesh.dim_size(self.model_dim) if self.model_dim else 1


def make_grid(mesh: Mesh, batch_dim: BatchDim | None) -> Grid:
    """Return a mesh with its dims' roles. Raise a `MeshError` for two dims of several devices besides the batch's."""
    batch_dims = list_batch_dims(batch_dim)
    others = [dim.name for dim in mesh.mesh_dims if dim.size > 1 and dim.name not in batch_dims]
    if len(others) > 1:
        raise MeshError(
            f"search: the mesh has {len(others)} dims besides that of the batch",
            facts={"mesh": str(mesh), "batch": format_batch_dim(batch_dim) if batch_dim else "not sharded"},
            why="the search shards over the batch dim and one other dim",
            fix="search without a mesh, or with a mesh of two dims",
        )
    *replicas, data = [dim for dim in batch_dims if mesh.dim_size(dim) > 1] or [None]
    return Grid(mesh, data, others[0] if others else None, tuple(filter(None, replicas)))


def list_grids(num_devices: int, batch_size: int | None, widest: int) -> tuple[Grid, ...]:
    """Return the meshes of `num_devices` devices that a search tries, those with a small model dim first.

    The data dim divides the batch size, if that is known. The model dim is at most `widest`, because each layer
    exchanges activations over it.

    Example:
        >>> [str(grid.mesh) for grid in list_grids(64, 16, 8)]
        ['data=16, model=4', 'data=8, model=8']
    """
    sizes = [n for n in range(1, min(widest, num_devices) + 1) if num_devices % n == 0]
    fitting = [n for n in sizes if batch_size is None or batch_size % (num_devices // n) == 0]
    meshes = [{"data": num_devices // n, "model": n} for n in fitting]
    named = [{name: size for name, size in dims.items() if size > 1} or {"data": 1} for dims in meshes]
    return tuple(make_grid(Mesh(None, dims), "data" if "data" in dims else None) for dims in named)


def list_group_options(group: VariableGroup, grid: Grid) -> tuple[Option, ...]:
    """Return the options of a group on a mesh, the simplest first, and only one of options with equal layouts."""
    options = [
        Option(axis, data)
        for data in (False, True)[: 1 + (grid.data_dim is not None)]
        for axis in (None, *_list_model_axes(group, grid))
    ]
    by_specs = {make_group_specs(group, option, grid): option for option in reversed(options)}
    return tuple(by_specs.values())[::-1]


def _list_model_axes(group: VariableGroup, grid: Grid) -> list[int]:
    """Return the axes that the model dim can shard. Of several input or output axes, only the first is listed.

    The others are inside of heads. With these sharded, each device would compute a part of every attention score.
    """
    if grid.model_dim is None:
        return []
    size = grid.model_size
    dividing = [axis for axis in range(group.rank) if group.can_shard(axis, size, whole_heads=True)]
    sides = ([axis for axis in group.find_axes(role) if axis in dividing] for role in ("in", "out"))
    seconds = {axis for side in sides for axis in side[1:]}
    return [axis for axis in dividing if axis not in seconds]


def make_group_specs(group: VariableGroup, option: Option, grid: Grid) -> Specs:
    """Return the sharding specs of an option for a group on a mesh. An axis that a dim does not divide is unsharded."""
    dims: list[tuple[str, ...]] = [()] * group.rank
    axis = option.model_axis
    if grid.model_dim and axis is not None and axis < group.rank:
        dims[axis] = (grid.model_dim,) * group.can_shard(axis, grid.model_size, whole_heads=True)
    if option.shards_data_dim and grid.data_dim:
        axis = _choose_axis_for_data(group, dims, grid)
        if axis is not None:
            dims[axis] = (*dims[axis], grid.data_dim)
    return tuple(None if not each else each[0] if len(each) == 1 else each for each in dims)


def _choose_axis_for_data(group: VariableGroup, dims: Sequence[tuple[str, ...]], grid: Grid) -> int | None:
    """Return the axis that the data dim shards: the largest free one, else rows of a table, else the model dim's."""

    def make_sort_key(axis: int) -> tuple[bool, bool, int]:
        return bool(dims[axis]), axis in group.find_axes("rows"), -group.shape[axis]

    for axis in sorted(range(group.rank), key=make_sort_key):
        if group.can_shard(axis, grid.data_size * (grid.model_size if dims[axis] else 1)):
            return axis
    return None


def make_bias_specs(bias: VariableGroup, kernel: VariableGroup, specs: Specs, grid: Grid) -> Specs:
    """Return the specs of a bias: sharded over the model dim if its kernel's outputs are, never over the data dim."""
    of_role = dict(zip(kernel.roles, specs, strict=True))
    dim = grid.model_dim
    sharded = [dim in _list_spec_dims(of_role.get(role)) if dim else False for role in bias.roles]
    return tuple(
        grid.model_dim if wanted and bias.can_shard(axis, grid.model_size) else None
        for axis, wanted in enumerate(sharded)
    )


def _list_spec_dims(spec: ShardingSpec | None) -> tuple[str, ...]:
    return () if spec is None else (spec,) if isinstance(spec, str) else spec


def list_activation_options(shape: tuple[int, ...], grid: Grid) -> tuple[Specs | None, ...]:
    """Return the sharding specs to try for a block's output of this shape. `None` leaves them to the compiler."""
    if grid.data_dim is None:
        return (None,)
    rest = (None,) * (len(shape) - 1)
    found: list[Specs | None] = [None, (grid.batch_dim, *rest)]
    if grid.model_dim:
        if shape[0] % (count_batch_shards(grid.batch_dim, grid.mesh) * grid.model_size) == 0:
            found.append(((*list_batch_dims(grid.batch_dim), grid.model_dim), *rest))
        if len(shape) > 2 and shape[1] % grid.model_size == 0:
            found.append((grid.batch_dim, grid.model_dim, *rest[1:]))
    return tuple(found)
