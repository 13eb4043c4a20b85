"""List the layouts that a search may give to a group of variables, or to the outputs of blocks.

The batch is sharded over one dim of the mesh, the data dim. Most meshes also have a model dim, which shards layers.
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
    replace_unsharded_by_none,
)
from layoutmap.cost.search.groups import VariableGroup


def list_specs_with_none(layout: Layout) -> Specs:
    """Return the sharding specs of a layout, with None for each unsharded axis."""
    return replace_unsharded_by_none(layout.sharding_specs)


@dataclass(frozen=True, slots=True)
class LayoutOption:
    """Choice of a layout for a variable group, independent of the mesh."""

    model_axis: int | None = None  # axis that the model dim shards
    # whether the data dim also shards an axis, so that each use gathers the weight
    shards_data_dim: bool = False


REPLICATED = LayoutOption()


@dataclass(frozen=True, slots=True)
class MeshRoles:
    """Mesh of a search, with the roles of its dims: one shards the batch, and one shards layers."""

    mesh: Mesh
    data_dim: str | None  # dim that shards the batch, and if needed weights; None: no dim shards the batch
    model_dim: str | None  # dim that shards layers; None: all dims larger than 1 shard the batch
    replica_dims: tuple[str, ...] = ()  # further dims that shard the batch, but no weights

    @property
    def batch_dim(self) -> BatchDim | None:
        """The mesh dim or dims that shard the batch, or None if the batch is not sharded."""
        return make_spec((*self.replica_dims, self.data_dim)) if self.data_dim else None

    @property
    def data_dim_size(self) -> int:
        """Number of devices along the data dim."""
        return self.mesh.dim_size(self.data_dim) if self.data_dim else 1

    @property
    def model_dim_size(self) -> int:
        """Number of devices along the model dim."""
        return self.mesh.dim_size(self.model_dim) if self.model_dim else 1


def assign_dim_roles(mesh: Mesh, batch_dim: BatchDim | None) -> MeshRoles:
    """Return a mesh with its dims' roles. Raise if several dims that do not shard the batch have several devices."""
    batch_dims = list_batch_dims(batch_dim)
    others = [dim.name for dim in mesh.mesh_dims if dim.size > 1 and dim.name not in batch_dims]
    if len(others) > 1:
        raise MeshError(
            f"search: the mesh has {len(others)} dims that do not shard the batch",
            facts={"mesh": str(mesh), "batch": format_batch_dim(batch_dim) if batch_dim else "not sharded"},
            why="the search can shard layers over only one dim besides the batch dims",
            fix="leave mesh out, or pass a mesh with one such dim, as in mesh='data=8,model=4'",
        )
    *replicas, data = [dim for dim in batch_dims if mesh.dim_size(dim) > 1] or [None]
    return MeshRoles(mesh, data, others[0] if others else None, tuple(filter(None, replicas)))


def list_search_meshes(
    num_devices: int, batch_size: int | None, max_model_size: int
) -> tuple[MeshRoles, ...]:
    """Return the meshes of `num_devices` devices that a search tries, those with a small model dim first.

    The data dim divides the batch size, if that is known. The model dim is at most `max_model_size`, because each layer
    exchanges activations over it.

    Example:
        >>> [str(roles.mesh) for roles in list_search_meshes(64, 16, 8)]
        ['data=16, model=4', 'data=8, model=8']
    """
    sizes = [n for n in range(1, min(max_model_size, num_devices) + 1) if num_devices % n == 0]
    fitting = [n for n in sizes if batch_size is None or batch_size % (num_devices // n) == 0]
    meshes = [{"data": num_devices // n, "model": n} for n in fitting]
    named = [{name: size for name, size in dims.items() if size > 1} or {"data": 1} for dims in meshes]
    return tuple(assign_dim_roles(Mesh(None, dims), "data" if "data" in dims else None) for dims in named)


def list_group_options(group: VariableGroup, roles: MeshRoles) -> tuple[LayoutOption, ...]:
    """Return the options of a group on a mesh, the simplest first, without options that repeat a layout."""
    options = [
        LayoutOption(axis, data)
        for data in (False, True)[: 1 + (roles.data_dim is not None)]
        for axis in (None, *_list_model_axes(group, roles))
    ]
    by_specs = {make_group_specs(group, option, roles): option for option in reversed(options)}
    return tuple(by_specs.values())[::-1]


def _list_model_axes(group: VariableGroup, roles: MeshRoles) -> list[int]:
    """Return the axes that the model dim can shard evenly, at most one input axis and one output axis.

    Further axes are inside attention heads. If they were sharded, each device would compute a part of every score.
    """
    if roles.model_dim is None:
        return []
    size = roles.model_dim_size
    dividing = [axis for axis in range(group.rank) if group.can_shard(axis, size, whole_heads=True)]
    sides = ([axis for axis in group.find_axes(role) if axis in dividing] for role in ("in", "out"))
    seconds = {axis for side in sides for axis in side[1:]}
    return [axis for axis in dividing if axis not in seconds]


def make_group_specs(group: VariableGroup, option: LayoutOption, roles: MeshRoles) -> Specs:
    """Return the specs that an option gives a group on a mesh. An axis that a dim cannot shard evenly is unsharded."""
    dims: list[tuple[str, ...]] = [()] * group.rank
    axis = option.model_axis
    if roles.model_dim and axis is not None and axis < group.rank:
        dims[axis] = (roles.model_dim,) * group.can_shard(axis, roles.model_dim_size, whole_heads=True)
    if option.shards_data_dim and roles.data_dim:
        axis = _choose_axis_for_data_dim(group, dims, roles)
        if axis is not None:
            dims[axis] = (*dims[axis], roles.data_dim)
    return tuple(None if not each else each[0] if len(each) == 1 else each for each in dims)


def _choose_axis_for_data_dim(
    group: VariableGroup, dims: Sequence[tuple[str, ...]], roles: MeshRoles
) -> int | None:
    """Return the axis to shard over the data dim, preferably a large, unsharded axis without rows, or None."""

    def make_sort_key(axis: int) -> tuple[bool, bool, int]:
        return bool(dims[axis]), axis in group.find_axes("rows"), -group.shape[axis]

    for axis in sorted(range(group.rank), key=make_sort_key):
        if group.can_shard(axis, roles.data_dim_size * (roles.model_dim_size if dims[axis] else 1)):
            return axis
    return None


def make_bias_specs(bias: VariableGroup, kernel: VariableGroup, specs: Specs, roles: MeshRoles) -> Specs:
    """Return a bias's specs: sharded over the model dim if its kernel's outputs are, and never over the data dim."""
    of_role = dict(zip(kernel.roles, specs, strict=True))
    dim = roles.model_dim
    sharded = [dim in _list_spec_dims(of_role.get(role)) if dim else False for role in bias.roles]
    return tuple(
        roles.model_dim if wanted and bias.can_shard(axis, roles.model_dim_size) else None
        for axis, wanted in enumerate(sharded)
    )


def _list_spec_dims(spec: ShardingSpec | None) -> tuple[str, ...]:
    return () if spec is None else (spec,) if isinstance(spec, str) else spec


def list_activation_options(shape: tuple[int, ...], roles: MeshRoles) -> tuple[Specs | None, ...]:
    """Return the specs to try for a block's output of this shape. With `None`, the compiler chooses the layout."""
    if roles.data_dim is None:
        return (None,)
    rest = (None,) * (len(shape) - 1)
    found: list[Specs | None] = [None, (roles.batch_dim, *rest)]
    if roles.model_dim:
        if shape[0] % (count_batch_shards(roles.batch_dim, roles.mesh) * roles.model_dim_size) == 0:
            found.append(((*list_batch_dims(roles.batch_dim), roles.model_dim), *rest))
        if len(shape) > 2 and shape[1] % roles.model_dim_size == 0:
            found.append((roles.batch_dim, roles.model_dim, *rest[1:]))
    return tuple(found)
