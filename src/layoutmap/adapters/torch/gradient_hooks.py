"""The gradients of a model's parameters end in the parameters' layouts, whatever becomes of the parameters.

Hooks on a parameter do that. A copy of it has none, nor has one that was frozen when they were set, or one that a
state dict brought; so each call of a model looks whether all that need them have them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from layoutmap.adapters.torch.optimizer_hooks import look_after_optimizers
from layoutmap.engines.torch.gather import Gradients
from layoutmap.engines.torch.modes import plainly
from layoutmap.engines.torch.modules import members_of_module

_WATCHED = "_layoutmap_watched"  # on a parameter: its id, which a copy of it has not


class Watch:
    """Sees to the gradients of the parameters of one module and of those below it."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._modules = [id(each) for each in module.modules()]
        self._held = [
            (members_of_module(each)[0], name, weakref.ref(each))
            for each in module.modules()
            for name, _ in each.named_parameters(recurse=False, remove_duplicate=False)
        ]

    def is_of(self, module: torch.nn.Module) -> bool:
        """Whether the module has the parts that it had, and no others, as adapters are."""
        return self._modules == [id(each) for each in module.modules()]

    @plainly
    def look(self) -> None:
        """Set the hooks of parameters that have none."""
        new: list[torch.Tensor] = []
        holders: dict[int, Callable[[], Any]] = {}  # which hooks may keep, as parameters have the hooks
        for parameters, name, holder in self._held:
            parameter = parameters.get(name)
            if not isinstance(parameter, DTensor) or not (parameter.requires_grad and parameter.is_leaf):
                continue
            if vars(parameter).get(_WATCHED) != id(parameter):
                setattr(parameter, _WATCHED, id(parameter))
                new.append(parameter)
                holders[id(parameter)] = partial(_held_by, holder, name)
        if new:
            look_after_optimizers()
            Gradients(new, refer_to=lambda parameter: holders[id(parameter)])


def _held_by(holder: weakref.ref[torch.nn.Module], name: str) -> object:
    """The parameter that a module holds under a name, if it has one."""
    module = holder()
    return None if module is None else members_of_module(module)[0].get(name)
