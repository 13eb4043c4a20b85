"""Convert unsharded inputs of a sharded model to DTensors, and its DTensor outputs to unsharded tensors.

Gradients pass both ways, so any loss that is computed with what comes out, plainly, is right.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from layoutmap.adapters.protocol import ScopeContext
from layoutmap.engines.torch import simulation
from layoutmap.engines.torch.dtensor_ops import refuse_shard, take_one_rank
from layoutmap.engines.torch.modes import skip_function_modes
from layoutmap.engines.torch.operators import Function
from layoutmap.engines.torch.placing import full_tensor, move_to_placements, reduce_partial, replicate_tensor
from layoutmap.engines.torch.specs import get_local
from layoutmap.engines.torch.storages import get_storage_key
from layoutmap.engines.torch.trees import tree_leaves, tree_map


def list_tensors(values: object, kind: type = torch.Tensor) -> list[Any]:
    """Return the tensors, or values of another `kind`, in nested containers and dataclasses, in order."""
    found: list[Any] = []
    for leaf in tree_leaves(values):
        if isinstance(leaf, kind):
            found.append(leaf)
        elif _is_record(leaf):
            found += list_tensors([getattr(leaf, each.name) for each in dataclasses.fields(leaf)], kind)
    return found


def map_tensors(change: Callable[[Any], object], values: object, kind: type = torch.Tensor) -> Any:
    """Apply a function to the tensors, or values of another `kind`, in nested containers and dataclasses."""

    def change_leaf(leaf: Any) -> object:
        if isinstance(leaf, kind):
            return change(leaf)
        if _is_record(leaf) and list_tensors(leaf, kind):
            # `__init__` may compute or take other arguments, so copy the object.
            changed = copy.copy(leaf)
            for each in dataclasses.fields(leaf):
                # object.__setattr__ also works for frozen dataclasses.
                object.__setattr__(changed, each.name, map_tensors(change, getattr(leaf, each.name), kind))
            return changed
        return leaf

    return tree_map(change_leaf, values)


def place_inputs(values: object, context: ScopeContext) -> Any:
    """Place unsharded tensors on the mesh: sharded over the batch dim if their first axis divides, else replicated."""

    def place(tensor: torch.Tensor) -> object:
        if isinstance(tensor, DTensor):
            return tensor
        refuse_shard("an input", tensor)
        tensor = take_one_rank(tensor)
        layout = context.policy.derive_batch_layout(tuple(tensor.shape))
        if not tensor.requires_grad or not torch.is_grad_enabled():
            return context.engine.relayout(tensor, layout)
        mesh, placements = context.engine.native(layout, tensor.ndim)
        # The engine's function does not support double backward.
        return skip_function_modes(lambda: move_to_placements(replicate_tensor(tensor, mesh), placements))()

    return map_tensors(place, values)


def unshard_tensors(values: object) -> Any:
    """Replace each DTensor in nested containers by its unsharded tensor, which is the same in all processes."""
    return map_tensors(lambda tensor: _apply_on_mesh(full_tensor, tensor), values)


def reduce_partial_sums(values: object) -> object:
    """Reduce each DTensor that is a partial sum, so that programs read complete values."""
    return map_tensors(lambda tensor: _apply_on_mesh(reduce_partial, tensor), values)


def _apply_on_mesh(change: Function, tensor: torch.Tensor) -> torch.Tensor:
    """Apply a function to a DTensor on its mesh, and return any other tensor unchanged."""
    if not isinstance(tensor, DTensor):
        refuse_shard("an output", tensor)
        return take_one_rank(tensor)
    with simulation.simulate_mesh(tensor.device_mesh):
        return change(tensor)


def _is_record(value: object) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def gather_tensors(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return unsharded tensors on the CPU in place of DTensors. Names of one tensor still share one.

    All processes must call it.
    """
    known: dict[int, torch.Tensor] = {}
    made: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor):
            key = get_storage_key(next(iter(simulation.get_pieces(get_local(tensor)).values())))
            if key not in known:
                known[key] = unshard_tensors(tensor.detach()).cpu()
            tensor = known[key]
        made[name] = tensor
    return made
