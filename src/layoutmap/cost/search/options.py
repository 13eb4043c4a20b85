"""The layouts that a search may give a group: what divides, and what the roles of the axes make sensible.

The batch is sharded over one dim of the mesh, `data`; most meshes have another one, `model`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from layoutmap.core.errors import MeshError
from layoutmap.core.layout import Layout
from layoutmap.core.mesh import Mesh
from layoutmap.core.specs import ShardingSpec, Specs, replace_unsharded
from layoutmap.cost.search.groups import Group


def specs_in(layout: Layout) -> Specs:
    """The specs of a layout, `None` for an axis that is not sharded."""
    return replace_unsharded(layout.sharding_specs)


@dataclass(frozen=True, slots=True)
class Option:
    """A layout that a search may choose for a group.

    Args:
        model: The axis that is sharded over `model`; `None`: none is.
        data: Whether another axis is sharded over `data`, so that the weight is gathered where it is used.
    """

    model: int | None = None
    data: bool = False


REPLICATED = Option()


@dataclass(frozen=True, slots=True)
class Grid:
    """A mesh, and what a search does with its dims.

    Args:
        mesh: The mesh.
        data: The dim that the batch is sharded over; `None`: there is none of several devices.
        model: The other dim; `None`: there is none of several devices.
    """

    mesh: Mesh
    data: str | None
    model: str | None

    @property
    def num_data(self) -> int:
        """The number of parts of the batch."""
        return self.mesh.dim_size(self.data) if self.data else 1

    @property
    def num_model(self) -> int:
        """The number of devices along the other dim."""
        return self.mesh.dim_size(self.model) if self.model else 1


def grid_of(mesh: Mesh, data: str | None) -> Grid:
    """The grid of a mesh with at most one dim of several devices besides `data`.

    Raises:
        MeshError: It has more.
    """
    others = [dim.name for dim in mesh.mesh_dims if dim.size > 1 and dim.name != data]
    if len(others) > 1:
        raise MeshError(
            f"search: the mesh has {len(others)} dims besides that of the batch",
            facts={"mesh": str(mesh), "batch": data or "not sharded"},
            why="layouts are searched over the dim of the batch and one other",
            fix="search without a mesh, or with one of two dims",
        )
    sharded = data if data is not None and mesh.dim_size(data) > 1 else None
    return Grid(mesh, sharded, others[0] if others else None)


def grids(num_devices: int, batch_size: int | None, widest: int) -> tuple[Grid, ...]:
    """The shapes of meshes that are tried, those with a small `model` first.

    Args:
        num_devices: The number of devices.
        batch_size: Size of the batch, which `data` must divide; `None`: it is not known.
        widest: The largest `model`: activations cross it in each layer, so it stays within the fast network.

    Example:
        >>> [str(grid.mesh) for grid in grids(64, 16, 8)]
        ['data=16, model=4', 'data=8, model=8']
    """
    sizes = [n for n in range(1, min(widest, num_devices) + 1) if num_devices % n == 0]
    fitting = [n for n in sizes if batch_size is None or batch_size % (num_devices // n) == 0]
    return tuple(_grid(num_devices // n, n) for n in fitting)


def _grid(data: int, model: int) -> Grid:
    dims = {name: size for name, size in (("data", data), ("model", model)) if size > 1}
    return grid_of(Mesh(None, dims or {"data": 1}), "data" if data > 1 else None)


def options_of(group: Group, grid: Grid) -> tuple[Option, ...]:
    """The options of a group on a mesh, the simplest first; no two of them give it one layout."""
    options = [
        Option(axis, data)
        for data in (False, True)[: 1 + (grid.data is not None)]
        for axis in (None, *_model_axes(group, grid))
    ]
    return tuple({specs_of(group, option, grid): option for option in reversed(options)}.values())[::-1]


def _model_axes(group: Group, grid: Grid) -> list[int]:
    """The axes that can be sharded over `model`: of several that are summed over, or come out, the first that divides.

    The others are parts of heads; to shard them makes each device compute a part of every score.
    """
    if grid.model is None:
        return []
    dividing = [axis for axis in range(group.rank) if group.divides(axis, grid.num_model, heads=True)]
    sides = ([axis for axis in group.axes(role) if axis in dividing] for role in ("in", "out"))
    seconds = {axis for side in sides for axis in side[1:]}
    return [axis for axis in dividing if axis not in seconds]


def specs_of(group: Group, option: Option, grid: Grid) -> Specs:
    """The sharding specs of an option for one group; what does not divide is left unsharded."""
    dims: list[tuple[str, ...]] = [()] * group.rank
    axis = option.model
    if grid.model and axis is not None and axis < group.rank:
        dims[axis] = (grid.model,) * group.divides(axis, grid.num_model, heads=True)
    if option.data and grid.data:
        axis = _data_axis(group, dims, grid)
        if axis is not None:
            dims[axis] = (*dims[axis], grid.data)
    return tuple(None if not each else each[0] if len(each) == 1 else each for each in dims)


def _data_axis(group: Group, dims: Sequence[tuple[str, ...]], grid: Grid) -> int | None:
    """The axis for `data`: the largest that is free, but for the rows of a table, then the one that has `model`."""

    def order(axis: int) -> tuple[bool, bool, int]:
        return bool(dims[axis]), axis in group.axes("rows"), -group.shape[axis]

    for axis in sorted(range(group.rank), key=order):
        if group.divides(axis, grid.num_data * (grid.num_model if dims[axis] else 1)):
            return axis
    return None


def bias_specs(bias: Group, kernel: Group, specs: Specs, grid: Grid) -> Specs:
    """The specs of a bias: over `model` as the outputs of its kernel are, and never over `data`."""
    of_role = dict(zip(kernel.roles, specs, strict=True))
    sharded = [grid.model in _dims(of_role.get(role)) if grid.model else False for role in bias.roles]
    return tuple(
        grid.model if wanted and bias.divides(axis, grid.num_model) else None
        for axis, wanted in enumerate(sharded)
    )


def _dims(spec: ShardingSpec | None) -> tuple[str, ...]:
    return () if spec is None else (spec,) if isinstance(spec, str) else spec


def activation_options(shape: tuple[int, ...], grid: Grid) -> tuple[Specs | None, ...]:
    """The layouts that are tried for the output of a block, its batch first; `None`: the compiler chooses."""
    if grid.data is None:
        return (None,)
    rest = (None,) * (len(shape) - 1)
    found: list[Specs | None] = [None, (grid.data, *rest)]
    if grid.model:
        if shape[0] % (grid.num_data * grid.num_model) == 0:
            found.append(((grid.data, grid.model), *rest))
        if len(shape) > 2 and shape[1] % grid.num_model == 0:
            found.append((grid.data, grid.model, *rest[1:]))
    return tuple(found)
