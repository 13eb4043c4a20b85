"""List the tensors of a module, and the hooks of modules and tensors."""

# pyright: reportPrivateUsage=false
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle, unserializable_hook  # pyright: ignore[reportUnknownVariableType]

from layoutmap.engines.tested import check_names

check_names(
    "torch",
    (torch.nn.Module, "_parameters _buffers"),
    (torch.nn.Module, "_forward_hooks _forward_pre_hooks _backward_hooks _backward_pre_hooks"),
    (torch.Tensor, "_backward_hooks _post_accumulate_grad_hooks"),
)


_IS_OWN = "_layoutmap_own"  # attribute of this library's hooks


def get_members(module: torch.nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a module's own parameters and buffers by name, as the dicts that torch stores."""
    return module._parameters, module._buffers


def list_modules(
    root: torch.nn.Module, *, remove_duplicate: bool = True
) -> list[tuple[str, torch.nn.Module]]:
    """Return a module and its submodules by name, optionally with each name of a shared one."""
    return [*root.named_modules(remove_duplicate=remove_duplicate)]


def list_module_hooks(module: torch.nn.Module) -> list[list[object]]:
    """Return the hooks that run before and after a module's forward and backward pass."""
    kinds: list[dict[int, Any]] = [
        *(module._forward_pre_hooks, module._forward_hooks),  # pyright: ignore[reportUnknownMemberType]
        *(module._backward_pre_hooks, module._backward_hooks),  # pyright: ignore[reportUnknownMemberType]
    ]
    return [list(hooks.values()) for hooks in kinds]


def list_tensor_hooks(tensor: torch.Tensor) -> tuple[list[object], list[object]]:
    """Return the program's hooks of a tensor's gradient, before and after it is added to `grad`."""
    return (
        [hook for hook in (tensor._backward_hooks or {}).values() if not hasattr(hook, _IS_OWN)],
        [hook for hook in (_get_accumulation_hooks(tensor) or {}).values() if not hasattr(hook, _IS_OWN)],
    )


def has_foreign_hooks(tensor: torch.Tensor) -> bool:
    """Return whether the program or torch has hooks on a tensor's gradient."""
    return any(list_tensor_hooks(tensor))


def add_first_hooks(
    tensor: torch.Tensor,
    before: Callable[[torch.Tensor], torch.Tensor | None],
    after: Callable[[Any], None],
) -> tuple[RemovableHandle, RemovableHandle]:
    """Have functions called before all hooks of a tensor that there are.

    Args:
        tensor: The tensor, a leaf.
        before: Called with its gradient; what it returns takes the gradient's place.
        after: Called with the tensor when the gradient has been added.
    """
    for hook in (before, after):
        unserializable_hook(hook)  # avoids a warning of torch.save
        setattr(hook, _IS_OWN, True)
    untyped: Any = tensor
    handles: tuple[RemovableHandle, RemovableHandle] = (
        untyped.register_hook(before),
        untyped.register_post_accumulate_grad_hook(after),
    )
    kinds: tuple[Any, Any] = tensor._backward_hooks, _get_accumulation_hooks(tensor)
    for hooks, handle in zip(kinds, handles, strict=True):
        others = dict(hooks)
        own = others.pop(handle.id)
        hooks.clear()  # torch calls hooks in insertion order and ignores `move_to_end`
        hooks.update({handle.id: own} | others)
    return handles


def _get_accumulation_hooks(tensor: torch.Tensor) -> dict[int, Any] | None:
    return getattr(tensor, "_post_accumulate_grad_hooks", None)  # unset before the first hook
