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
    from_shards,
    make_replicated_placements,
    move_to_placements,
    reduce_partial,
    replicate_tensor,
    take_shard,
)
from layoutmap.engines.torch.specs import get_axis
from layoutmap.engines.torch.trees import is_sequence


def find_mesh(tensors: Iterable[object]) -> DeviceMesh:
    """Return the mesh of the first DTensor."""
    return next(tensor.device_mesh for tensor in tensors if isinstance(tensor, DTensor))


def find_kept_axes(
    tensors: Sequence[torch.Tensor],
    mesh: DeviceMesh,
    free: Container[int],
    *,
    broadcast: bool = False,
    taken: Container[int] = (),
    uneven: Container[int] = (),
) -> dict[int, int]:
    """Return the axis that stays sharded over each mesh dim, by the number of the dim.

    Args:
        tensors: The tensors that have these axes, DTensors or plain.
        mesh: The mesh.
        free: The axes that may stay sharded.
        broadcast: Whether an axis of size 1 goes with the others' axis of any size.
        taken: Mesh dims over which other tensors stay sharded.
        uneven: The axes that need not divide, if no shard of them is empty.
    """
    kept: dict[int, int] = {}
    num_shards: dict[int, int] = {}
    placements = [each.placements for each in tensors if isinstance(each, DTensor)]
    for dim in range(mesh.ndim):
        axes = [
            get_axis(of[dim]) for of in placements if type(of[dim]) is Shard and get_axis(of[dim]) in free
        ]
        if not axes or dim in taken:
            continue
        axis = axes[0]
        number = num_shards.get(axis, 1) * mesh.size(dim)  # several dims may shard one axis
        size = tensors[0].shape[axis]
        has_last = size > -(-size // number) * (number - 1)
        is_uneven = axis in uneven and axis not in num_shards and has_last
        if is_uneven or all(
            each.shape[axis] % number == 0 or (broadcast and each.shape[axis] == 1) for each in tensors
        ):
            kept[dim], num_shards[axis] = axis, number
    return kept


def make_placements(mesh: DeviceMesh, axes: Mapping[int, int | None]) -> tuple[Placement, ...]:
    """Return the placements that shard an axis over each mesh dim, by the number of the dim."""
    placements = make_replicated_placements(mesh)
    for dim, axis in axes.items():
        if axis is not None:
            placements[dim] = Shard(axis)
    return tuple(placements)


def take_local_shard(
    tensor: torch.Tensor, mesh: DeviceMesh, axes: Mapping[int, int | None], apart: Iterable[int]
) -> torch.Tensor:
    """Return this device's shard of a tensor after redistributing it.

    Args:
        tensor: A DTensor, or a plain tensor that is the same in all processes.
        mesh: The mesh.
        axes: Its axis that is sharded over each mesh dim, by the dim's number.
        apart: The mesh dims over which devices compute different things. A tensor that is replicated over one has a
            part of its gradient on each.
    """
    placements = make_placements(mesh, axes)
    if not isinstance(tensor, DTensor):
        tensor = replicate_tensor(tensor, mesh)
    if tensor.placements != placements:
        tensor = move_to_placements(reduce_partial(tensor), placements)
    gradient = list(placements)
    for dim in apart:
        if placements[dim].is_replicate():
            gradient[dim] = Partial()
    return take_shard(tensor, gradient)


# DTensor computes some operators incorrectly, so corrections join the shards' results (decisions/0057).
def join_shards(
    local: torch.Tensor,
    mesh: DeviceMesh,
    axes: Mapping[int, int | None],
    shape: Sequence[int] | None = None,
) -> DTensor:
    """Return the DTensor of all devices' shards. See `take_local_shard` and `from_shards`."""
    return from_shards(local, mesh, make_placements(mesh, axes), shape)


def make_shard_handler(free: Callable[[int], Container[int]]) -> Function:
    """Return the handler of an operator that is independent along some axes of its first tensor.

    Args:
        free: These axes, given the tensor's rank. They may stay sharded, and so are the result's then.
    """

    def compute(function: Function, args: Args, kwargs: Kwargs) -> object:
        values: dict[int | str, Any] = {**dict(enumerate(args)), **kwargs}
        first = 0 if args else "input"
        mesh = find_mesh(values.values())
        kept = find_kept_axes([values[first]], mesh, free(values[first].ndim))
        for name, value in values.items():
            if isinstance(value, torch.Tensor):
                values[name] = take_local_shard(value, mesh, kept if name == first else {}, kept)
        local = function(*(values[i] for i in range(len(args))), **{name: values[name] for name in kwargs})
        if is_sequence(local):
            return type(local)(join_shards(each, mesh, kept) for each in local)
        return join_shards(local, mesh, kept)

    return compute
