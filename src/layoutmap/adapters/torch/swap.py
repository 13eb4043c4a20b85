"""Replace the tensors of a model by sharded ones in modules, optimizers, and other references.

A parameter that becomes a `DTensor` is another object. Modules get it by name. Other references to the old one are
searched for in lists of modules, as in `torch.nn.LSTM`, and in the groups of optimizers that were created in the scope.
An older optimizer raises at its first step, see `optimizer_hooks`, so nothing trains a replaced parameter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch

from layoutmap.engines.torch.modules import get_parameters_and_buffers, list_gradient_hooks_of_others

GetReplacement = Callable[[Any], Any]
ReplaceSlot = Callable[[Any, Any], object]


# torch itself sets these attributes on Parameter and Buffer, so they are not the user's.
_ATTRIBUTES_OF_TORCH = {"_is_param", "_is_buffer", "persistent"}


def list_user_attributes(tensor: torch.Tensor) -> dict[str, object]:
    """Return the attributes that the user's code has set on a tensor."""
    # A detached tensor has the attributes that its class sets on each tensor, so exclude these.
    set_names = set(vars(tensor)) - _ATTRIBUTES_OF_TORCH
    return {name: vars(tensor)[name] for name in set_names - set(vars(tensor.detach()))} if set_names else {}


def copy_user_attributes(old: torch.Tensor, new: torch.Tensor) -> None:
    """Copy the attributes and gradient hooks that the user's code has set on a tensor to its replacement."""
    for name, value in list_user_attributes(old).items():
        if name not in vars(new):
            setattr(new, name, value)
    on_gradient, after_accumulation = list_gradient_hooks_of_others(old)
    if new.requires_grad:  # torch allows hooks only on tensors that require gradients
        for hook in on_gradient:
            new.register_hook(hook)  # pyright: ignore[reportUnknownMemberType]
        for hook in after_accumulation:
            new.register_post_accumulate_grad_hook(hook)  # pyright: ignore[reportUnknownMemberType]


def replace_tensors_in_module(module: torch.nn.Module, get_replacement: GetReplacement) -> None:
    """Replace tensors in a module's attributes and in containers there, except parameters and buffers.

    Args:
        module: The module; not those below it.
        get_replacement: Returns the replacement of a tensor, or the tensor itself.
    """
    members = get_parameters_and_buffers(module)
    for name, value in list(vars(module).items()):
        if value is not members[0] and value is not members[1] and name != "_modules":
            new = _replace_tensors(value, get_replacement)
            if new is not value:
                vars(module)[name] = new


def replace_tensors_in_optimizer(
    optimizer: torch.optim.Optimizer, get_replacement: GetReplacement, replace_slot: ReplaceSlot
) -> None:
    """Replace the parameters and other tensors that an optimizer references, and its slots of these parameters.

    Args:
        optimizer: The optimizer.
        get_replacement: See `replace_tensors_in_module`.
        replace_slot: Returns the replacement of a slot, given the new parameter and the slot.
    """
    for parameter in list(optimizer.state):
        new = get_replacement(parameter)
        if new is not parameter:
            slots = optimizer.state.pop(parameter)
            optimizer.state[new] = {
                name: replace_slot(new, value) if isinstance(value, torch.Tensor) else value
                for name, value in slots.items()
            }
    for name, value in list(vars(optimizer).items()):
        if name != "state":
            vars(optimizer)[name] = _replace_tensors(value, get_replacement)


def _replace_tensors(value: object, get_replacement: GetReplacement) -> object:
    """Return a value with its tensors replaced. A list or mapping is changed in place and returned."""
    if isinstance(value, torch.Tensor):
        return get_replacement(value)
    if type(value) is list:
        elements = cast("list[object]", value)
        # Other objects may reference the list, so change it in place.
        elements[:] = [_replace_tensors(each, get_replacement) for each in elements]
    elif type(value) is tuple:
        items = cast("tuple[object, ...]", value)
        if any(isinstance(each, (torch.Tensor, list, tuple, dict)) for each in items):
            return tuple(_replace_tensors(each, get_replacement) for each in items)
    elif isinstance(value, dict):
        mapping = cast("dict[object, object]", value)
        for key, each in list(mapping.items()):
            new = _replace_tensors(each, get_replacement)
            if new is not each:
                mapping[key] = new
    return cast("object", value)
