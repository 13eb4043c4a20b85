"""Put the tensors of a layout in the places of those that a model was built with, wherever these are referred to.

A parameter that becomes a `DTensor` is another object. Modules get it by name; what else holds the old one, a list in a
module (as in `torch.nn.LSTM`) or the groups of an optimizer, is looked through, so that nothing trains a stale one.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any

import torch

from layoutmap.adapters.torch.paths import Place
from layoutmap.engines.torch.private import hooks_of_tensor, members_of_module, own_attributes

__all__ = ["carry_over", "optimizers_of", "put", "replace_in_module", "replace_in_optimizer"]

Swap = Callable[[Any], Any]


def put(place: Place, tensor: Any) -> None:
    """Have a module hold another tensor under a name that it has."""
    parameters, buffers = members_of_module(place.module)
    (parameters if place.name in parameters else buffers)[place.name] = tensor


def carry_over(old: torch.Tensor, new: torch.Tensor) -> None:
    """Give a tensor the attributes and gradient hooks that a program has set on the one it takes the place of."""
    for name, value in own_attributes(old).items():
        if name not in vars(new):
            setattr(new, name, value)
    on_gradient, after_accumulation = hooks_of_tensor(old)
    if new.requires_grad:
        for hook in on_gradient:
            new.register_hook(hook)
        for hook in after_accumulation:
            new.register_post_accumulate_grad_hook(hook)


def replace_in_module(module: torch.nn.Module, swap: Swap) -> None:
    """Replace tensors in a module's other attributes, and in lists, tuples and mappings there.

    Args:
        module: The module; not those below it.
        swap: Gives what takes a tensor's place, or the tensor itself.
    """
    members = members_of_module(module)
    for name, value in list(vars(module).items()):
        if value is not members[0] and value is not members[1] and name != "_modules":
            new = _replaced(value, swap)
            if new is not value:
                vars(module)[name] = new


def optimizers_of(tensors: Sequence[torch.Tensor]) -> list[torch.optim.Optimizer]:
    """All optimizers of this process that hold one of some tensors.

    They are found upwards, from a tensor to the list of a group's parameters, to the group, to the list of groups. To
    take hold of all objects there are, and look among them, would keep alive what other threads are done with, until it
    goes in this thread; torch has been seen to abort the process then.
    """
    lists = _holders(tensors, list)
    params = set(map(id, lists))
    groups = [group for group in _holders(lists, dict) if id(dict.get(group, "params")) in params]
    of_groups = _holders(groups, list)
    attributes = _holders(of_groups, dict)
    found = _holders([*of_groups, *attributes], torch.optim.Optimizer)
    ids = {id(tensor) for tensor in tensors}
    return [
        optimizer
        for optimizer in found
        if any(id(p) in ids for group in optimizer.param_groups for p in group["params"])
    ]


def _holders(things: Sequence[Any], kind: type) -> list[Any]:
    """The objects of a type that refer to one of some things themselves, each once."""
    if not things:
        return []
    # By their types: to ask an object what it is may run code of its own.
    return [
        thing for thing in gc.get_referrers(*things) if thing is not things and issubclass(type(thing), kind)
    ]


def replace_in_optimizer(
    optimizer: torch.optim.Optimizer, swap: Swap, slot: Callable[[Any, Any], Any]
) -> None:
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
            vars(optimizer)[name] = _replaced(value, swap)


def _replaced(value: Any, swap: Swap) -> Any:
    """A value with tensors replaced; lists and mappings are changed in place."""
    if isinstance(value, torch.Tensor):
        return swap(value)
    if type(value) is list:
        value[:] = [_replaced(each, swap) for each in value]
    elif type(value) is tuple and any(isinstance(each, (torch.Tensor, list, tuple, dict)) for each in value):
        return tuple(_replaced(each, swap) for each in value)
    elif isinstance(value, dict):
        for key, each in list(value.items()):
            new = _replaced(each, swap)
            if new is not each:
                value[key] = new
    return value
