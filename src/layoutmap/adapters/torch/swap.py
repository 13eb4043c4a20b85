"""Replace the tensors of a model by sharded ones in modules, optimizers, and other references.

A parameter that becomes a `DTensor` is another object. Modules get it by name; what else holds the old one, a list in a
module (as in `torch.nn.LSTM`) or the groups of an optimizer that was made in the scope, is looked through. An optimizer
that was made before is refused at its first step, by `optimizer_hooks`: so nothing trains a stale parameter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch

from layoutmap.engines.torch.modules import get_members, list_tensor_hooks

Swap = Callable[[Any], Any]
Slot = Callable[[Any, Any], object]


# torch itself sets these attributes on Parameter and Buffer.
_NO_ATTRIBUTES = {"_is_param", "_is_buffer", "persistent"}


def list_user_attributes(tensor: torch.Tensor) -> dict[str, object]:
    """Return the attributes that a program has set on a tensor."""
    # Attributes that a subclass sets on all of its tensors are removed below.
    ours = set(vars(tensor)) - _NO_ATTRIBUTES
    return {name: vars(tensor)[name] for name in ours - set(vars(tensor.detach()))} if ours else {}


def copy_user_attributes(old: torch.Tensor, new: torch.Tensor) -> None:
    """Copy the attributes and gradient hooks that a program has set on a tensor to its replacement."""
    for name, value in list_user_attributes(old).items():
        if name not in vars(new):
            setattr(new, name, value)
    on_gradient, after_accumulation = list_tensor_hooks(old)
    if new.requires_grad:  # torch allows hooks only on tensors that require gradients
        for hook in on_gradient:
            new.register_hook(hook)  # pyright: ignore[reportUnknownMemberType]
        for hook in after_accumulation:
            new.register_post_accumulate_grad_hook(hook)  # pyright: ignore[reportUnknownMemberType]


def replace_in_module(module: torch.nn.Module, swap: Swap) -> None:
    """Replace tensors in a module's other attributes, and in lists, tuples and mappings there.

    Args:
        module: The module; not those below it.
        swap: Gives what takes a tensor's place, or the tensor itself.
    """
    members = get_members(module)
    for name, value in list(vars(module).items()):
        if value is not members[0] and value is not members[1] and name != "_modules":
            new = _replace_tensors(value, swap)
            if new is not value:
                vars(module)[name] = new


def replace_in_optimizer(optimizer: torch.optim.Optimizer, swap: Swap, slot: Slot) -> None:
    """Replace tensors in an optimizer.

    Args:
        optimizer: The optimizer.
        swap: See `replace_in_module`.
        slot: Gives what takes the place of a slot: called with the new parameter and the slot.
    """
    for parameter in list(optimizer.state):
        new = swap(parameter)
        if new is not parameter:
            slots = optimizer.state.pop(parameter)
            optimizer.state[new] = {
                name: slot(new, value) if isinstance(value, torch.Tensor) else value
                for name, value in slots.items()
            }
    for name, value in list(vars(optimizer).items()):
        if name != "state":
            vars(optimizer)[name] = _replace_tensors(value, swap)


def _replace_tensors(value: object, swap: Swap) -> object:
    """Return a value with its tensors replaced. Lists and mappings are changed in place."""
    if isinstance(value, torch.Tensor):
        return swap(value)
    if type(value) is list:
        held = cast("list[object]", value)
        # Other objects may reference the list, so change it in place.
        held[:] = [_replace_tensors(each, swap) for each in held]
    elif type(value) is tuple:
        items = cast("tuple[object, ...]", value)
        if any(isinstance(each, (torch.Tensor, list, tuple, dict)) for each in items):
            return tuple(_replace_tensors(each, swap) for each in items)
    elif isinstance(value, dict):
        named = cast("dict[object, object]", value)
        for key, each in list(named.items()):
            new = _replace_tensors(each, swap)
            if new is not each:
                named[key] = new
    return cast("object", value)
