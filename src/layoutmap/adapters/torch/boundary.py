"""Convert unsharded inputs of a sharded model to DTensors, and its DTensor outputs to unsharded tensors.

Gradients pass through both conversions, so a loss that is computed from the unsharded outputs is correct.
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
from layoutmap.engines.torch.dtensor_ops import check_value_is_not_shard, extract_first_rank_tensor
from layoutmap.engines.torch.modes import skip_function_modes
from layoutmap.engines.torch.operators import Function
from layoutmap.engines.torch.placing import (
    gather_if_sharded,
    redistribute_if_needed,
    reduce_if_partial,
    replicate_tensor,
)
from layoutmap.engines.torch.specs import get_local
from layoutmap.engines.torch.storages import get_storage_key
from layoutmap.engines.torch.trees import tree_leaves, tree_map


def list_tensors(values: object, kind: type = torch.Tensor) -> list[Any]:
    """Return the tensors, or instances of `kind`, in nested containers and dataclasses, in order."""
    matches: list[Any] = []
    for leaf in tree_leaves(values):
        if isinstance(leaf, kind):
            matches.append(leaf)
        elif _is_dataclass_instance(leaf):
            matches += list_tensors([getattr(leaf, each.name) for each in dataclasses.fields(leaf)], kind)
    return matches


def map_tensors(function: Callable[[Any], object], values: object, kind: type = torch.Tensor) -> Any:
    """Return nested containers and dataclasses with a function applied to each tensor, or instance of `kind`."""

    def map_leaf(leaf: Any) -> object:
        if isinstance(leaf, kind):
            return function(leaf)
        if _is_dataclass_instance(leaf) and list_tensors(leaf, kind):
            # `__init__` of a dataclass may compute values or take other arguments, so copy the object instead.
            copied = copy.copy(leaf)
            for each in dataclasses.fields(leaf):
                # object.__setattr__ also works for frozen dataclasses.
                object.__setattr__(copied, each.name, map_tensors(function, getattr(leaf, each.name), kind))
            return copied
        return leaf

    return tree_map(map_leaf, values)


def shard_inputs(values: object, context: ScopeContext) -> Any:
    """Convert unsharded tensors to DTensors. Shard their first axis over the batch dim if it splits evenly."""

    def shard_tensor(tensor: torch.Tensor) -> object:
        if isinstance(tensor, DTensor):
            return tensor
        check_value_is_not_shard("an input", tensor)
        tensor = extract_first_rank_tensor(tensor)
        layout = context.policy.derive_batch_layout(tuple(tensor.shape))
        if not tensor.requires_grad or not torch.is_grad_enabled():
            return context.engine.relayout(tensor, layout)
        mesh, placements = context.engine.make_native_layout(layout, tensor.ndim)
        # `engine.relayout` does not support double backward, so redistribute inputs that require gradients.
        replicated = skip_function_modes(replicate_tensor)(tensor, mesh)
        return skip_function_modes(redistribute_if_needed)(replicated, placements)

    return map_tensors(shard_tensor, values)


def unshard_tensors(values: object) -> Any:
    """Return nested values with each DTensor replaced by its unsharded tensor, which is the same in all processes."""
    return map_tensors(lambda tensor: _apply_to_dtensor(gather_if_sharded, tensor), values)


def reduce_partial_sums(values: object) -> object:
    """Return nested values in which no DTensor is a partial sum, so that programs read complete values."""
    return map_tensors(lambda tensor: _apply_to_dtensor(reduce_if_partial, tensor), values)


def _apply_to_dtensor(function: Function, tensor: torch.Tensor) -> torch.Tensor:
    """Apply a function to a DTensor while its mesh is simulated. Any other tensor is returned without a call.

    Of a simulated local tensor, return the first rank's tensor. Raise for a shard.
    """
    if not isinstance(tensor, DTensor):
        check_value_is_not_shard("an output", tensor)
        return extract_first_rank_tensor(tensor)
    with simulation.simulate_ranks_of_mesh(tensor.device_mesh):
        return function(tensor)


def _is_dataclass_instance(value: object) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def gather_to_cpu(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a dict of the same tensors, with each DTensor unsharded on the CPU. Names of one tensor share a copy.

    All processes must call it.
    """
    cpu_tensors: dict[int, torch.Tensor] = {}
    gathered: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor):
            key = get_storage_key(next(iter(simulation.get_tensors_by_rank(get_local(tensor)).values())))
            if key not in cpu_tensors:
                cpu_tensors[key] = unshard_tensors(tensor.detach()).cpu()
            tensor = cpu_tensors[key]
        gathered[name] = tensor
    return gathered
