"""Compute layers of experts of transformers on the tokens and experts of each process.

Such a layer sorts its tokens by expert, and DTensor would gather the tokens of all processes to sort them, and the
weights of all experts.
"""

# pyright: reportPrivateUsage=false
from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
import torch.nn.modules.dropout as dropout
import torch.nn.modules.module as torch_module
from torch.distributed.tensor import DTensor

from layoutmap.adapters.torch.fsdp_own import swap_tensors_temporarily
from layoutmap.adapters.torch.paths import TensorAttribute
from layoutmap.engines.patches import set_attribute_temporarily
from layoutmap.engines.tested import check_names_exist
from layoutmap.engines.torch import simulation
from layoutmap.engines.torch.dtensor_ops import (
    DifferentMeshesError,
    compute_share_of_experts,
    divide_experts,
    ignore_gathering_temporarily,
)
from layoutmap.engines.torch.modes import skip_function_modes
from layoutmap.engines.torch.modules import has_module_hooks_of_others
from layoutmap.engines.torch.operators import Function

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
    weights: dict[TensorAttribute, Any] = {
        TensorAttribute(each, name): weight
        for each in module.modules()
        for name, weight in each.named_parameters(recurse=False, remove_duplicate=False)
    }
    are_on_mesh = len(tensors) == 3 and all(
        isinstance(each, DTensor) for each in (*tensors, *weights.values())
    )
    if not are_on_mesh or needs_all_tokens(module):
        return forward(*tensors)
    divided = divide_experts(tensors, [*weights.values()], _count_divisible_experts(module))
    if divided is None:
        return forward(*tensors)
    if simulation.is_simulated():  # this process computes the tokens of all simulated devices
        with ignore_gathering_temporarily():
            return forward(*tensors)
    local_tensors = divided.take_tensors(tensors)
    changed = [(at, weight, divided.take_weight(weight)) for at, weight in weights.items()]
    try:
        with ExitStack() as stack:
            stack.enter_context(swap_tensors_temporarily(changed))
            if divided.expert_dims:
                stack.enter_context(
                    set_attribute_temporarily(module, "num_experts", divided.num_local_experts)
                )
                stack.enter_context(set_attribute_temporarily(module, "_is_expert_parallel", True))
            # Without other dims, all tensors are plain, and function modes for DTensors have nothing to do.
            result = (forward if divided.other_dims else skip_function_modes(forward))(*local_tensors)
    except DifferentMeshesError:
        result: Any = None
    if isinstance(result, DTensor) != bool(divided.other_dims):
        return forward(*tensors)  # the layer combined its tokens with a tensor on the mesh from elsewhere
    return divided.combine_results(result, tensors[0])


def compute_local_share_of_experts(module: torch.nn.Module) -> float:
    """Return the share of a layer's experts that this process computes when the layer is called."""
    weights = [each for each in module.parameters() if isinstance(each, DTensor)]
    num_experts = _count_divisible_experts(module)
    if num_experts is None or not weights or needs_all_tokens(module):
        return 1.0
    return compute_share_of_experts(weights, num_experts)


def _get_implementation(module: Any) -> str | None:
    return getattr(getattr(module, "config", None), "_experts_implementation", None)


def _count_divisible_experts(module: Any) -> int | None:
    """Return the number of experts in a layer, or None if a process cannot compute some of them alone."""
    is_divisible = _get_implementation(module) in _SORTING and hasattr(module, "_is_expert_parallel")
    return module.num_experts if is_divisible else None


def needs_all_tokens(module: torch.nn.Module) -> bool:
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
