"""Compute functions of unsharded tensors on each device's shards of DTensors.

That is right wherever the function treats the positions of an axis apart from each other: images of a batch, heads of
an attention. What is sharded along other axes is gathered first.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Shard

from layoutmap.engines.torch.operators import Args, Function, Kwargs
from layoutmap.engines.torch.placing import (
    extract_shard,
    make_dtensor_from_shards,
    make_replicated_placements,
    redistribute_if_needed,
    reduce_if_partial,
    replicate_tensor,
)
from layoutmap.engines.torch.specs import get_axis
from layoutmap.engines.torch.trees import is_sequence


def find_device_mesh(tensors: Iterable[object]) -> DeviceMesh:
    """Return the `DeviceMesh` of the first DTensor among some values."""
    return next(tensor.device_mesh for tensor in tensors if isinstance(tensor, DTensor))


def find_axes_that_stay_sharded(
    tensors: Sequence[torch.Tensor],
    mesh: DeviceMesh,
    candidate_axes: Container[int],
    *,
    allows_broadcast: bool = False,
    excluded_mesh_dims: Container[int] = (),
    uneven_axes: Container[int] = (),
) -> dict[int, int]:
    """Return a dict from mesh dim to the axis that can stay sharded over it in a computation on shards.

    Args:
        tensors: The DTensors or unsharded tensors that have these axes.
        mesh: The mesh.
        candidate_axes: The axes that may stay sharded.
        allows_broadcast: Whether one tensor's axis may have size 1 where that of others is larger.
        excluded_mesh_dims: Mesh dims over which other tensors stay sharded.
        uneven_axes: The axes that may have uneven shards, if no shard is empty.
    """
    kept: dict[int, int] = {}
    num_shards: dict[int, int] = {}
    placements = [each.placements for each in tensors if isinstance(each, DTensor)]
    for dim in range(mesh.ndim):
        axes = [
            get_axis(of[dim])
            for of in placements
            if type(of[dim]) is Shard and get_axis(of[dim]) in candidate_axes
        ]
        if not axes or dim in excluded_mesh_dims:
            continue
        axis = axes[0]
        number = num_shards.get(axis, 1) * mesh.size(dim)  # earlier dims may shard it, too
        size = tensors[0].shape[axis]
        has_last = size > -(-size // number) * (number - 1)
        is_uneven = axis in uneven_axes and axis not in num_shards and has_last
        if is_uneven or all(
            each.shape[axis] % number == 0 or (allows_broadcast and each.shape[axis] == 1) for each in tensors
        ):
            kept[dim], num_shards[axis] = axis, number
    return kept


def make_placements(mesh: DeviceMesh, axes_by_mesh_dim: Mapping[int, int | None]) -> tuple[Placement, ...]:
    """Return placements that shard the axis `axes_by_mesh_dim[i]` over mesh dim `i`, and replicate over others."""
    placements = make_replicated_placements(mesh)
    for dim, axis in axes_by_mesh_dim.items():
        if axis is not None:
            placements[dim] = Shard(axis)
    return tuple(placements)


def redistribute_to_local_shard(
    tensor: torch.Tensor,
    mesh: DeviceMesh,
    axes_by_mesh_dim: Mapping[int, int | None],
    varying_mesh_dims: Iterable[int],
) -> torch.Tensor:
    """Redistribute a tensor, and return this device's shard of it.

    Args:
        tensor: A DTensor, or a plain tensor that is the same in all processes.
        mesh: The mesh.
        axes_by_mesh_dim: A dict from the position of a mesh dim to the axis that it shards, or to `None`.
        varying_mesh_dims: The mesh dims over which devices compute different values. The gradient of a tensor that is
            replicated over such a dim is a partial sum.
    """
    placements = make_placements(mesh, axes_by_mesh_dim)
    if not isinstance(tensor, DTensor):
        tensor = replicate_tensor(tensor, mesh)
    if tensor.placements != placements:
        tensor = redistribute_if_needed(reduce_if_partial(tensor), placements)
    gradient = list(placements)
    for dim in varying_mesh_dims:
        if placements[dim].is_replicate():
            gradient[dim] = Partial()
    return extract_shard(tensor, gradient)


# DTensor computes some operators incorrectly, so they are computed on shards and wrapped here (decisions/0057).
def wrap_shards_as_dtensor(
    local: torch.Tensor,
    mesh: DeviceMesh,
    axes_by_mesh_dim: Mapping[int, int | None],
    shape: Sequence[int] | None = None,
) -> DTensor:
    """Return all devices' shards as one DTensor, in which mesh dim `i` shards the axis `axes_by_mesh_dim[i]`."""
    return make_dtensor_from_shards(local, mesh, make_placements(mesh, axes_by_mesh_dim), shape)


def make_shard_handler(find_independent_axes: Callable[[int], Container[int]]) -> Function:
    """Return the handler of a function that treats positions along some axes of its first tensor independently.

    Args:
        find_independent_axes: Returns these axes, given the tensor's rank. They may stay sharded, also in the result.
    """

    def compute_on_shards(function: Function, args: Args, kwargs: Kwargs) -> object:
        values: dict[int | str, Any] = {**dict(enumerate(args)), **kwargs}
        first = 0 if args else "input"
        mesh = find_device_mesh(values.values())
        kept = find_axes_that_stay_sharded([values[first]], mesh, find_independent_axes(values[first].ndim))
        for name, value in values.items():
            if isinstance(value, torch.Tensor):
                values[name] = redistribute_to_local_shard(value, mesh, kept if name == first else {}, kept)
        local = function(*(values[i] for i in range(len(args))), **{name: values[name] for name in kwargs})
        if is_sequence(local):
            return type(local)(wrap_shards_as_dtensor(each, mesh, kept) for each in local)
        return wrap_shards_as_dtensor(local, mesh, kept)

    return compute_on_shards
