"""Keep the gradients of a model's parameters in the parameters' layouts.

Hooks on a parameter do that. A copy of it has none, nor has one that was frozen when they were set, or one that a
state dict brought; so each call of a model looks whether all that need them have them.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from layoutmap.adapters.torch.optimizer_hooks import check_optimizers
from layoutmap.core.errors import LayoutMapWarning
from layoutmap.core.layout import Layout
from layoutmap.core.users_line import find_user_stacklevel
from layoutmap.engines.torch.gather import Gradients
from layoutmap.engines.torch.modes import skip_function_modes
from layoutmap.engines.torch.modules import get_members

_WATCHED = "_layoutmap_watched"  # this attribute has the parameter's id, so that copies are detected


class GradientHooks:
    """Hooks on the gradients of a module's parameters, those of its submodules included.

    Args:
        module: The module.
        laid_out: The paths of modules in layouts, and the layouts that their weights were given, by id.
    """

    def __init__(
        self, module: torch.nn.Module, laid_out: Mapping[int, tuple[str, Mapping[str, Layout]]]
    ) -> None:
        self._laid_out = laid_out
        self._reported: set[tuple[str, str]] = set()
        self._modules = [id(each) for each in module.modules()]
        self._held = [
            (get_members(each)[0], name, weakref.ref(each))
            for each in module.modules()
            for name, _ in each.named_parameters(recurse=False, remove_duplicate=False)
        ]

    def has_same_submodules(self, module: torch.nn.Module) -> bool:
        """Return whether the module has the same submodules as when the hooks were set."""
        return self._modules == [id(each) for each in module.modules()]

    @skip_function_modes
    def look(self) -> None:
        """Set hooks on parameters that have none."""
        new: list[torch.Tensor] = []
        holders: dict[int, Callable[[], Any]] = {}  # weak references, because parameters own the hooks
        for parameters, name, holder in self._held:
            parameter = parameters.get(name)
            if type(parameter) is torch.nn.Parameter:
                self._warn_of_replaced(name, parameter, holder())
            if not isinstance(parameter, DTensor) or not (parameter.requires_grad and parameter.is_leaf):
                continue
            if vars(parameter).get(_WATCHED) != id(parameter):
                setattr(parameter, _WATCHED, id(parameter))
                new.append(parameter)
                holders[id(parameter)] = partial(_find_parameter, holder, name)
        if new:
            check_optimizers()
            Gradients(new, refer_to=lambda parameter: holders[id(parameter)])

    def _warn_of_replaced(
        self, name: str, parameter: torch.nn.Parameter, holder: torch.nn.Module | None
    ) -> None:
        """Warn once of an unsharded parameter that replaced a sharded one."""
        path, layouts = self._laid_out.get(id(holder), ("", {}))
        if name not in layouts or (path, name) in self._reported:
            return
        self._reported.add((path, name))
        kind = type(holder).__name__
        warning = LayoutMapWarning(
            f"{path or kind}.{name}: the parameter was replaced by an unsharded one",
            facts={"shape": tuple(parameter.shape), "layout was": str(layouts[name])},
            why="every device holds all of it, and an existing optimizer still trains the former parameter",
            fix="assign values in place: module.weight.data.copy_(values); or shard it: "
            "layout_map.apply(model)",
        )
        warnings.warn(warning, stacklevel=find_user_stacklevel({"torch"}))


def _find_parameter(holder: weakref.ref[torch.nn.Module], name: str) -> object:
    """Return the parameter that a module stores under a name, or None."""
    module = holder()
    return None if module is None else get_members(module)[0].get(name)
