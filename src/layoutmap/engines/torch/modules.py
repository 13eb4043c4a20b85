"""The tensors that a module holds, and the hooks of modules and tensors."""

# pyright: reportPrivateUsage=false
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


def modules_of(root: torch.nn.Module, *, remove_duplicate: bool = True) -> list[tuple[str, torch.nn.Module]]:
    """A module and those below it, with their names; with each name of one that has several, if so wished."""
    return [*root.named_modules(remove_duplicate=remove_duplicate)]


def hooks_of_module(module: torch.nn.Module) -> list[list[object]]:
    """The hooks that are called before and after a module, forward and backward."""
    kinds: list[dict[int, Any]] = [
        *(module._forward_pre_hooks, module._forward_hooks),  # pyright: ignore[reportUnknownMemberType]
        *(module._backward_pre_hooks, module._backward_hooks),  # pyright: ignore[reportUnknownMemberType]
    ]
    return [list(hooks.values()) for hooks in kinds]


def hooks_of_tensor(tensor: torch.Tensor) -> tuple[list[object], list[object]]:
    """The hooks of a tensor's gradient, and those that are called when it has been added to `grad`."""
    return (
        list((tensor._backward_hooks or {}).values()),
        list((getattr(tensor, "_post_accumulate_grad_hooks", None) or {}).values()),  # unset before the first  # pyright: ignore[reportUnknownArgumentType]
    )
