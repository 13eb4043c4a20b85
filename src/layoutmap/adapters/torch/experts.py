"""Compute layers of experts of transformers on the tokens and experts of each process.

Such a layer sorts its tokens by expert, and DTensor would gather the tokens of all processes to sort them, and the
weights of all experts. But the layer treats its tokens independently, so each process sorts and computes only the
tokens of its shard. If the weights are sharded by expert, it computes only its experts, and the results are summed.
"""

# pyright: reportPrivateUsage=false
from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.modules.dropout as dropout
import torch.nn.modules.module as torch_module
from torch.distributed.tensor import DTensor, Partial, Placement, Shard

from layoutmap.adapters.torch.fsdp_own import swap_tensors_temporarily
from layoutmap.adapters.torch.paths import TensorAttribute
from layoutmap.engines.patches import set_attribute_temporarily
from layoutmap.engines.tested import check_names_exist
from layoutmap.engines.torch import simulation
from layoutmap.engines.torch.devices import get_part_of_device_mesh
from layoutmap.engines.torch.dtensor_ops.guard import DifferentMeshesError
from layoutmap.engines.torch.dtensor_ops.lookups import convert_to_local_rows, sum_local_tensors_to_dtensor
from layoutmap.engines.torch.dtensor_ops.shards import (
    find_axes_that_stay_sharded,
    redistribute_to_local_shard,
)
from layoutmap.engines.torch.modes import skip_function_modes
from layoutmap.engines.torch.modules import has_module_hooks_of_others
from layoutmap.engines.torch.operators import Function
from layoutmap.engines.torch.placing import (
    extract_shard,
    gather_if_sharded,
    make_dtensor_from_shards,
    make_replicated_placements,
)
from layoutmap.engines.torch.specs import DTensorSpec, get_axis, get_spec

check_names_exist("torch", (torch_module, "_has_any_global_hook"), (dropout, "_DropoutNd"))

# The `forward` that the decorator `use_experts_implementation` of transformers gives a layer of experts.
_FORWARD_OF_EXPERTS = "use_experts_implementation.<locals>.wrapper.<locals>.forward"
_SORTING = ("batched_mm", "grouped_mm")
"""Implementations that skip tokens whose expert is `num_experts`, which stands for the experts of other processes."""


def is_layer_of_experts(module: torch.nn.Module) -> bool:
    """Return whether a module is a layer of experts of transformers, which treats its tokens independently."""
    # A parametrized module has a class without a `forward` of its own, and is excluded.
    code = getattr(vars(type(module)).get("forward"), "__code__", None)
    return (
        getattr(code, "co_qualname", "") == _FORWARD_OF_EXPERTS
        and _get_implementation(module) in (*_SORTING, "eager", None)
        and not getattr(module, "_is_expert_parallel", False)
    )


# DTensor would gather all tokens to sort them by expert, so compute those of this process (decisions/0311).
def compute_experts(module: torch.nn.Module, forward: Function, *tensors: Any) -> object:
    """Return the output of a layer of experts. Each process computes the tokens and experts of its shards, if it can.

    Args:
        module: The layer.
        forward: Its forward.
        tensors: The tokens (tokens, width), and the numbers and weights of the experts of each (tokens, experts).
    """
    part = _take_local_part(module, tensors)
    if part is None:
        return forward(*tensors)
    try:
        with ExitStack() as stack:
            stack.enter_context(swap_tensors_temporarily(part.weights))
            for name, value in part.attributes.items():
                stack.enter_context(set_attribute_temporarily(module, name, value))
            # Without other dims, all tensors are plain, and function modes for DTensors have nothing to do.
            result = (forward if part.other_dims else skip_function_modes(forward))(*part.tensors)
    except DifferentMeshesError:
        result: Any = None
    if isinstance(result, DTensor) != bool(part.other_dims):
        return forward(*tensors)  # the layer combined its tokens with a tensor on the mesh from elsewhere
    return _combine_results(result, tensors[0], part)


def compute_share_of_experts(module: Any) -> float:
    """Return the share of a layer's experts that this process computes when the layer is called."""
    specs = [get_spec(each) for each in module.parameters() if isinstance(each, DTensor)]
    if not specs or _needs_all_tokens(module):
        return 1.0
    dims, num_experts = _find_expert_dims(module, specs, _list_sharded_dims(specs))
    return num_experts / module.num_experts if dims else 1.0


@dataclass(frozen=True, slots=True)
class _LocalPart:
    """The part of a layer of experts that this process computes.

    Args:
        token_axes: A dict from the position of each mesh dim that shards the tokens to their axis, 0.
        expert_dims: The positions of the mesh dims that shard the weights by expert.
        other_dims: The positions of the mesh dims that shard the weights along other axes.
        tensors: The layer's arguments, as plain tensors, or as DTensors on the other dims.
        weights: For each weight its attribute, the weight, and this process's part of it, as `tensors`.
        attributes: Attributes of the layer to set.
    """

    token_axes: Mapping[int, int]
    expert_dims: tuple[int, ...]
    other_dims: tuple[int, ...]
    tensors: Sequence[torch.Tensor]
    weights: Sequence[tuple[TensorAttribute, torch.Tensor, torch.Tensor]]
    attributes: Mapping[str, object]


@skip_function_modes
def _take_local_part(module: Any, tensors: Sequence[Any]) -> _LocalPart | None:
    """Return this process's part of a layer of experts, or None if it computes the whole layer."""
    weights: dict[TensorAttribute, Any] = {
        TensorAttribute(each, name): weight
        for each in module.modules()
        for name, weight in each.named_parameters(recurse=False, remove_duplicate=False)
    }
    are_on_mesh = all(isinstance(each, DTensor) for each in (*tensors, *weights.values()))
    if simulation.is_simulated() or not are_on_mesh or _needs_all_tokens(module):
        return None
    if any(each.ndim != 2 for each in tensors) or not tensors[0].shape[0]:
        return None
    mesh, specs = tensors[0].device_mesh, [get_spec(each) for each in weights.values()]
    sharded = _list_sharded_dims(specs)
    token_axes = find_axes_that_stay_sharded(tensors, mesh, {0}, excluded_mesh_dims=sharded)
    expert_dims, num_experts = _find_expert_dims(module, specs, sharded)
    other_dims = tuple(dim for dim in sharded if dim not in expert_dims)
    if not token_axes and not expert_dims:
        return None

    def wrap(
        local: torch.Tensor, placements: Sequence[Placement], shape: Sequence[int] | None
    ) -> torch.Tensor:
        if not other_dims:
            return local
        inner = get_part_of_device_mesh(mesh, other_dims)
        return make_dtensor_from_shards(local, inner, [placements[dim] for dim in other_dims], shape)

    def take_weight(weight: DTensor, spec: DTensorSpec) -> torch.Tensor:
        gradient = [Partial() if dim in token_axes else each for dim, each in enumerate(spec.placements)]
        shape = (num_experts, *weight.shape[1:]) if expert_dims else weight.shape
        return wrap(extract_shard(weight, gradient), spec.placements, shape)

    shards = [redistribute_to_local_shard(each, mesh, token_axes, expert_dims) for each in tensors]
    attributes: dict[str, object] = {}
    if expert_dims:
        attributes = {"num_experts": num_experts, "_is_expert_parallel": True}
        numbers, is_here = convert_to_local_rows(shards[1], module.num_experts, mesh, expert_dims)
        shards[1:] = numbers.masked_fill(~is_here, num_experts), shards[2].masked_fill(~is_here, 0)
    return _LocalPart(
        token_axes,
        expert_dims,
        other_dims,
        [wrap(each, make_replicated_placements(mesh), None) for each in shards],
        [
            (at, each, take_weight(each, spec))
            for (at, each), spec in zip(weights.items(), specs, strict=True)
        ],
        attributes,
    )


def _list_sharded_dims(specs: Sequence[DTensorSpec]) -> list[int]:
    by_dim = enumerate(zip(*(each.placements for each in specs), strict=True))
    return [dim for dim, placements in by_dim if not all(each.is_replicate() for each in placements)]


def _get_implementation(module: Any) -> str | None:
    return getattr(getattr(module, "config", None), "_experts_implementation", None)


def _find_expert_dims(
    module: Any, specs: Sequence[DTensorSpec], sharded_dims: Sequence[int]
) -> tuple[tuple[int, ...], int]:
    """Return the mesh dims that shard all weights evenly by expert, and the number of experts in a shard."""
    if _get_implementation(module) not in _SORTING or not hasattr(module, "_is_expert_parallel"):
        return (), 0
    count: int = module.num_experts
    if any(each.shape[0] != count for each in specs):
        return (), 0
    dims: list[int] = []
    for dim in sharded_dims:
        placements = [each.placements[dim] for each in specs]
        size = specs[0].mesh.size(dim)
        if count % size == 0 and all(type(each) is Shard and get_axis(each) == 0 for each in placements):
            dims.append(dim)
            count //= size
    return tuple(dims), count


@skip_function_modes
def _combine_results(result: torch.Tensor, tokens: DTensor, part: _LocalPart) -> DTensor:
    """Return the results of all processes as one DTensor, summed over experts."""
    shape = (tokens.shape[0], *result.shape[1:])
    local = gather_if_sharded(result)
    return sum_local_tensors_to_dtensor(local, tokens.device_mesh, part.token_axes, part.expert_dims, shape)


def _needs_all_tokens(module: torch.nn.Module) -> bool:
    """Return whether code inside of a layer may need the tokens of all processes.

    Hooks do, and draws of random numbers. Tensors that are not parameters would combine with those of one process.
    """
    inner = [each for each in module.modules() if each is not module]
    return bool(
        torch_module._has_any_global_hook()  # pyright: ignore[reportUnknownArgumentType]
        or any(map(has_module_hooks_of_others, inner))
        or any(isinstance(each, dropout._DropoutNd) and each.training and each.p > 0 for each in inner)
        or next(module.buffers(), None) is not None
        or any(isinstance(value, torch.Tensor) for each in module.modules() for value in vars(each).values())
    )
