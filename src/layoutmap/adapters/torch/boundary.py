"""Plain tensors in, plain tensors out: what goes into a laid out model is sharded, and what comes out is gathered.

Gradients pass both ways, so any loss that is computed with what comes out, plainly, is right.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from layoutmap.adapters.protocol import ScopeContext
from layoutmap.engines.torch import simulation
from layoutmap.engines.torch.dtensor_ops import as_one, refuse_shard
from layoutmap.engines.torch.modes import plainly
from layoutmap.engines.torch.operators import Function
from layoutmap.engines.torch.placing import everywhere, full_tensor, placed_in, reduced
from layoutmap.engines.torch.trees import tree_leaves, tree_map


def tensors_in(values: object, kind: type = torch.Tensor) -> list[Any]:
    """The tensors in nested containers and dataclasses, or what is of another kind, in order."""
    found: list[Any] = []
    for leaf in tree_leaves(values):
        if isinstance(leaf, kind):
            found.append(leaf)
        elif _is_record(leaf):
            found += tensors_in([getattr(leaf, each.name) for each in dataclasses.fields(leaf)], kind)
    return found


def map_tensors(change: Callable[[Any], object], values: object, kind: type = torch.Tensor) -> Any:
    """The same containers and dataclasses with each tensor, or what is of another kind, changed; the rest stays."""

    def of_leaf(leaf: Any) -> object:
        if isinstance(leaf, kind):
            return change(leaf)
        if _is_record(leaf) and tensors_in(leaf, kind):
            changed = copy.copy(leaf)  # a dataclass may take no arguments, or compute in __init__
            for each in dataclasses.fields(leaf):
                # It may be frozen.
                object.__setattr__(changed, each.name, map_tensors(change, getattr(leaf, each.name), kind))
            return changed
        return leaf

    return tree_map(of_leaf, values)


def on_mesh(values: object, context: ScopeContext) -> Any:
    """Plain tensors on the mesh: sharded along their first axis as the batch is where that divides, or replicated."""

    def place(tensor: torch.Tensor) -> object:
        if isinstance(tensor, DTensor):
            return tensor
        refuse_shard("an input", tensor)
        tensor = as_one(tensor)
        layout = context.policy.derive_batch_layout(tuple(tensor.shape))
        if not tensor.requires_grad or not torch.is_grad_enabled():
            return context.engine.relayout(tensor, layout)
        mesh, placements = context.engine.native(layout, tensor.ndim)
        # Not by the engine, so that its gradient has a gradient, too.
        return plainly(lambda: placed_in(everywhere(tensor, mesh), placements))()

    return map_tensors(place, values)


def plain(values: object) -> Any:
    """Plain global tensors, the same in all processes, in the place of `DTensor`s."""
    return map_tensors(lambda tensor: _on_its_mesh(full_tensor, tensor), values)


def summed_up(values: object) -> object:
    """`DTensor`s that are no sum still to be made: what a program reads of them is then right."""
    return map_tensors(lambda tensor: _on_its_mesh(reduced, tensor), values)


def _on_its_mesh(change: Function, tensor: torch.Tensor) -> torch.Tensor:
    """A DTensor as its own mesh has it; a plain tensor stays as it is."""
    if not isinstance(tensor, DTensor):
        refuse_shard("an output", tensor)
        return as_one(tensor)
    with simulation.on_mesh(tensor.device_mesh):
        return change(tensor)


def _is_record(value: object) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)
