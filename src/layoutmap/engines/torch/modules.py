"""List the tensors of a module, and the hooks of modules and tensors."""

# pyright: reportPrivateUsage=false
from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.utils.hooks import RemovableHandle, unserializable_hook  # pyright: ignore[reportUnknownVariableType]

from layoutmap.engines.tested import check_names_exist

check_names_exist(
    "torch",
    (torch.nn.Module, "_parameters _buffers"),
    (torch.nn.Module, "_forward_hooks _forward_pre_hooks _backward_hooks _backward_pre_hooks"),
    (torch.Tensor, "_backward_hooks _post_accumulate_grad_hooks"),
)

H = TypeVar("H", bound=Callable[..., object])

_IS_OWN = "_layoutmap_own"  # attribute that distinguishes layoutmap's hooks from those of a program


def get_parameters_and_buffers(module: torch.nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the dicts in which torch stores a module's own parameters and buffers by name."""
    return module._parameters, module._buffers


def list_modules(
    root: torch.nn.Module, *, remove_duplicate: bool = True
) -> list[tuple[str, torch.nn.Module]]:
    """Return a module and its submodules, with names. With `remove_duplicate`, a shared module has one name."""
    return [*root.named_modules(remove_duplicate=remove_duplicate)]


def list_module_hooks(module: torch.nn.Module) -> list[list[object]]:
    """Return four lists of a module's hooks: before and after forward, and before and after backward."""
    kinds: list[dict[int, Any]] = [
        *(module._forward_pre_hooks, module._forward_hooks),  # pyright: ignore[reportUnknownMemberType]
        *(module._backward_pre_hooks, module._backward_hooks),  # pyright: ignore[reportUnknownMemberType]
    ]
    return [list(hooks.values()) for hooks in kinds]


def mark_own_hook(hook: H) -> H:
    """Mark a hook as layoutmap's, and return it."""
    setattr(hook, _IS_OWN, True)
    return hook


def has_module_hooks_of_others(module: torch.nn.Module) -> bool:
    """Return whether a module has hooks that are not layoutmap's."""
    return any(not hasattr(hook, _IS_OWN) for hooks in list_module_hooks(module) for hook in hooks)


def list_gradient_hooks_of_others(tensor: torch.Tensor) -> tuple[list[object], list[object]]:
    """Return other code's hooks of a tensor's gradient: those before it is added to `grad`, and those after."""
    return (
        [hook for hook in (tensor._backward_hooks or {}).values() if not hasattr(hook, _IS_OWN)],
        [hook for hook in (_get_accumulation_hooks(tensor) or {}).values() if not hasattr(hook, _IS_OWN)],
    )


def has_hooks_of_others(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's gradient has hooks that are not layoutmap's."""
    return any(list_gradient_hooks_of_others(tensor))


def prepend_gradient_hooks(
    tensor: torch.Tensor,
    before_accumulation: Callable[[torch.Tensor], torch.Tensor | None],
    after_accumulation: Callable[[Any], None],
) -> tuple[RemovableHandle, RemovableHandle]:
    """Register two gradient hooks that run before a tensor's other hooks. Return their handles.

    Args:
        tensor: The tensor, a leaf.
        before_accumulation: Called with the new gradient. A tensor that it returns replaces the gradient.
        after_accumulation: Called with the tensor after the gradient was added to `grad`.
    """
    for hook in (before_accumulation, after_accumulation):
        unserializable_hook(hook)  # torch.save would warn of a hook without this
        mark_own_hook(hook)
    untyped: Any = tensor
    handles: tuple[RemovableHandle, RemovableHandle] = (
        untyped.register_hook(before_accumulation),
        untyped.register_post_accumulate_grad_hook(after_accumulation),
    )
    kinds: tuple[Any, Any] = tensor._backward_hooks, _get_accumulation_hooks(tensor)
    for hooks, handle in zip(kinds, handles, strict=True):
        others = dict(hooks)
        own = others.pop(handle.id)
        hooks.clear()  # torch calls hooks in the order of this dict, so insert them again, the own hook first
        hooks.update({handle.id: own} | others)
    return handles


def _get_accumulation_hooks(tensor: torch.Tensor) -> dict[int, Any] | None:
    # The attribute does not exist before the first hook is registered.
    return getattr(tensor, "_post_accumulate_grad_hooks", None)
