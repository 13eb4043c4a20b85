"""Assign to slices of DTensors, and handle the gradients of tensors with changed slices.

Torch's slices are views. DTensor's slices along a sharded axis are copies, and an assignment to one is lost without a
word. Where a slice is a view, its gradient goes through a view again, of a gradient that has the layout of the tensor.
What else is done with slices is in `memories`.
"""

from __future__ import annotations

from contextlib import suppress

import torch
from torch.distributed.tensor import DTensor

from layoutmap.engines.torch.dtensor_ops.gathered import compute_on_gathered_tensors
from layoutmap.engines.torch.operators import Args, Function, Kwargs
from layoutmap.engines.torch.placing import (
    find_reachable_placements,
    redistribute_if_needed,
    reduce_if_partial,
    replicate_gradient,
    replicate_tensor,
)
from layoutmap.engines.torch.specs import get_axis
from layoutmap.engines.torch.storages import get_base_tensor


def restore_gradient_layout_in_backward(changed_tensor: torch.Tensor) -> None:
    """Redistribute the gradient of a DTensor to its own layout in backward, after a view of it was changed in place."""
    base = get_base_tensor(changed_tensor)
    if isinstance(base, DTensor) and base.requires_grad and not base.is_leaf:
        mesh, placements = base.device_mesh, find_reachable_placements(base)

        def redistribute_gradient(gradient: torch.Tensor) -> DTensor:
            # torch may pass zeros that are not a DTensor as the gradient, so replicate them on the mesh.
            return redistribute_if_needed(reduce_if_partial(replicate_gradient(gradient, mesh)), placements)

        base.register_hook(redistribute_gradient)  # pyright: ignore[reportUnknownMemberType]


def assign_item(function: Function, args: Args, kwargs: Kwargs) -> object:
    """Compute `x[index] = value`, on shards if the index takes sharded axes as a whole, otherwise gathered."""
    target, index, value = args
    if isinstance(target, DTensor) and _is_index_whole_on_sharded_axes(target, index):
        on_mesh = isinstance(value, torch.Tensor) and not isinstance(value, DTensor)
        with suppress(NotImplementedError):
            function(target, index, replicate_tensor(value, target.device_mesh) if on_mesh else value)
            restore_gradient_layout_in_backward(target)
            return None
    return compute_on_gathered_tensors(function, args, kwargs)


def _is_index_whole_on_sharded_axes(target: DTensor, index: object) -> bool:
    """Return whether an index of slices and integers takes each sharded axis as a whole."""
    parts: list[object] = [*index] if isinstance(index, tuple) else [index]
    if any(not (part is None or part is ... or isinstance(part, (int, slice))) for part in parts):
        return False
    named = sum(part is not None and part is not ... for part in parts)
    if ... not in parts:
        parts.append(...)
    axis, touched = 0, set[int]()
    for part in parts:
        if part is ...:
            axis += target.ndim - named
        elif part is not None:
            if part != slice(None):
                touched.add(axis)
            axis += 1
    return all(p.is_replicate() or (p.is_shard() and get_axis(p) not in touched) for p in target.placements)
