"""List the layouts that a search may give a group of variables.

The batch is sharded over one dim of the mesh, `data`; most meshes have another one, `model`.
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
    replace_unsharded,
    spec_from_dims,
)
from layoutmap.cost.search.groups import VariableGroup


def get_specs(layout: Layout) -> Specs:
    """Return the specs of a layout, with None for an unsharded axis."""
    return replace_unsharded(layout.sharding_specs)


@dataclass(frozen=True, slots=True)
class Option:
    """Layout that a search may choose for a group."""

    model: int | None = None  # axis sharded over the `model` dim
    data: bool = (
        False  # whether another axis is sharded over the `data` dim, so that the weight is gathered for use
    )


REPLICATED = Option()


@dataclass(frozen=True, slots=True)
class Grid:
    """Mesh with the dim of the batch and the dim of the model."""

    mesh: Mesh
    data: str | None  # dim that shards the batch, and weights if needed; None: one device
    model: str | None  # the other dim; None: one device
    replicas: tuple[str, ...] = ()  # further dims that shard the batch and no weight

    @property
    def batch(self) -> BatchDim | None:
        """The dims that the batch is sharded over."""
        return spec_from_dims((*self.replicas, self.data)) if self.data else None

    @property
    def num_data(self) -> int:
        """Number of devices along `data`."""
        return self.mesh.dim_size(self.data) if self.data else 1

    @property
    def num_model(self) -> int:
        """Number of devices along the other dim."""
        return self.mesh.dim_size(self.model) if self.model else 1


def make_grid(mesh: Mesh, batch_dim: BatchDim | None) -> Grid:
    """Return the grid of a mesh with at most one dim of several devices besides those of the batch."""
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
    """Return the grids to try, those with a small `model` dim first.

    `data` must divide the batch size if it is known. `model` is at most `widest`, since activations cross it in each
    layer.

    Example:
        >>> [str(grid.mesh) for grid in list_grids(64, 16, 8)]
        ['data=16, model=4', 'data=8, model=8']
    """
    sizes = [n for n in range(1, min(widest, num_devices) + 1) if num_devices % n == 0]
    fitting = [n for n in sizes if batch_size is None or batch_size % (num_devices // n) == 0]
    meshes = [{"data": num_devices // n, "model": n} for n in fitting]
    named = [{name: size for name, size in dims.items() if size > 1} or {"data": 1} for dims in meshes]
    return tuple(make_grid(Mesh(None, dims), "data" if "data" in dims else None) for dims in named)


def list_options(group: VariableGroup, grid: Grid) -> tuple[Option, ...]:
    """Return the options of a group on a mesh, the simplest first, without equal layouts."""
    options = [
        Option(axis, data)
        for data in (False, True)[: 1 + (grid.data is not None)]
        for axis in (None, *_list_model_axes(group, grid))
    ]
    return tuple({make_specs(group, option, grid): option for option in reversed(options)}.values())[::-1]


def _list_model_axes(group: VariableGroup, grid: Grid) -> list[int]:
    """Return the axes that `model` can shard, of several inputs or outputs only the first.

    The others are parts of heads; to shard them makes each device compute a part of every score.
    """
    if grid.model is None:
        return []
    dividing = [axis for axis in range(group.rank) if group.can_shard(axis, grid.num_model, heads=True)]
    sides = ([axis for axis in group.find_axes(role) if axis in dividing] for role in ("in", "out"))
    seconds = {axis for side in sides for axis in side[1:]}
    return [axis for axis in dividing if axis not in seconds]


def make_specs(group: VariableGroup, option: Option, grid: Grid) -> Specs:
    """Return the specs of an option for a group. An axis that does not divide stays unsharded."""
    dims: list[tuple[str, ...]] = [()] * group.rank
    axis = option.model
    if grid.model and axis is not None and axis < group.rank:
        dims[axis] = (grid.model,) * group.can_shard(axis, grid.num_model, heads=True)
    if option.data and grid.data:
        axis = _choose_data_axis(group, dims, grid)
        if axis is not None:
            dims[axis] = (*dims[axis], grid.data)
    return tuple(None if not each else each[0] if len(each) == 1 else each for each in dims)


def _choose_data_axis(group: VariableGroup, dims: Sequence[tuple[str, ...]], grid: Grid) -> int | None:
    """Return the axis for `data`: the largest free one, else the rows of a table, else that of `model`."""

    def order(axis: int) -> tuple[bool, bool, int]:
        return bool(dims[axis]), axis in group.find_axes("rows"), -group.shape[axis]

    for axis in sorted(range(group.rank), key=order):
        if group.can_shard(axis, grid.num_data * (grid.num_model if dims[axis] else 1)):
            return axis
    return None


def make_bias_specs(bias: VariableGroup, kernel: VariableGroup, specs: Specs, grid: Grid) -> Specs:
    """Return the specs of a bias, sharded over `model` like its kernel's outputs, never over `data`."""
    of_role = dict(zip(kernel.roles, specs, strict=True))
    sharded = [grid.model in _list_dims(of_role.get(role)) if grid.model else False for role in bias.roles]
    return tuple(
        grid.model if wanted and bias.can_shard(axis, grid.num_model) else None
        for axis, wanted in enumerate(sharded)
    )


def _list_dims(spec: ShardingSpec | None) -> tuple[str, ...]:
    return () if spec is None else (spec,) if isinstance(spec, str) else spec


def list_activation_options(shape: tuple[int, ...], grid: Grid) -> tuple[Specs | None, ...]:
    """Return the layouts to try for a block's output. None lets the compiler choose."""
    if grid.data is None:
        return (None,)
    rest = (None,) * (len(shape) - 1)
    found: list[Specs | None] = [None, (grid.batch, *rest)]
    if grid.model:
        if shape[0] % (count_batch_shards(grid.batch, grid.mesh) * grid.num_model) == 0:
            found.append(((*list_batch_dims(grid.batch), grid.model), *rest))
        if len(shape) > 2 and shape[1] % grid.num_model == 0:
            found.append((grid.batch, grid.model, *rest[1:]))
    return tuple(found)
