"""The tensors that a module holds, and the hooks of modules and tensors."""

from __future__ import annotations

from typing import Any

import torch

from layoutmap.engines.tested import check_names

check_names(
    "torch",
    (torch.nn.Module, "_parameters _buffers"),
    (torch.nn.Module, "_forward_hooks _forward_pre_hooks _backward_hooks _backward_pre_hooks"),
    (torch.Tensor, "_backward_hooks _post_accumulate_grad_hooks"),
)


def members_of_module(module: torch.nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """The parameters and the buffers that a module itself holds, by name; to be changed in place."""
    return module._parameters, module._buffers


def hooks_of_module(module: torch.nn.Module) -> list[list[object]]:
    """The hooks that are called before and after a module, forward and backward."""
    kinds = (
        *(module._forward_pre_hooks, module._forward_hooks),
        *(module._backward_pre_hooks, module._backward_hooks),
    )
    return [list(hooks.values()) for hooks in kinds]


def hooks_of_tensor(tensor: torch.Tensor) -> tuple[list[object], list[object]]:
    """The hooks of a tensor's gradient, and those that are called when it has been added to `grad`."""
    return (
        list((tensor._backward_hooks or {}).values()),
        list((getattr(tensor, "_post_accumulate_grad_hooks", None) or {}).values()),  # unset before the first
    )
