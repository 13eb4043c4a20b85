"""Keep the gradients of a model's parameters in the parameters' layouts.

Hooks on the parameters do that. A copy of a parameter has none, nor has one that was frozen when they were set, or one
that a state dict replaced. So each call of a model installs the missing hooks.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from layoutmap.adapters.torch.optimizer_hooks import enable_optimizer_checks
from layoutmap.core.errors import LayoutMapWarning
from layoutmap.core.layout import Layout
from layoutmap.core.users_line import find_user_stacklevel
from layoutmap.engines.torch.gather import GradientReducer
from layoutmap.engines.torch.modes import skip_function_modes
from layoutmap.engines.torch.modules import get_parameters_and_buffers

_HOOKED_ID = (
    "_layoutmap_watched"  # attribute with the hooked parameter's id, which differs from the id of its copy
)


class GradientHooks:
    """Hooks on the gradients of a module's parameters, those of its submodules included.

    Args:
        module: The module.
        layouts_by_module: By the id of each sharded module, its path and the layouts of its weights by name.
    """

    def __init__(
        self, module: torch.nn.Module, layouts_by_module: Mapping[int, tuple[str, Mapping[str, Layout]]]
    ) -> None:
        self._layouts_by_module = layouts_by_module
        self._reported: set[tuple[str, str]] = set()
        self._modules = [id(each) for each in module.modules()]
        self._parameter_slots = [
            (get_parameters_and_buffers(each)[0], name, weakref.ref(each))
            for each in module.modules()
            for name, _ in each.named_parameters(recurse=False, remove_duplicate=False)
        ]

    def has_same_submodules(self, module: torch.nn.Module) -> bool:
        """Return whether the module has the same submodules as when the hooks were set."""
        return self._modules == [id(each) for each in module.modules()]

    @skip_function_modes
    def install_missing_hooks(self) -> None:
        """Install hooks on the parameters that require gradients and have no hooks yet."""
        unhooked: list[torch.Tensor] = []
        holders: dict[int, Callable[[], Any]] = {}  # weak references, because parameters own the hooks
        for parameters, name, holder in self._parameter_slots:
            parameter = parameters.get(name)
            if type(parameter) is torch.nn.Parameter:
                self._warn_of_unsharded_replacement(name, parameter, holder())
            if not isinstance(parameter, DTensor) or not (parameter.requires_grad and parameter.is_leaf):
                continue
            if vars(parameter).get(_HOOKED_ID) != id(parameter):
                setattr(parameter, _HOOKED_ID, id(parameter))
                unhooked.append(parameter)
                holders[id(parameter)] = partial(_get_parameter, holder, name)
        if unhooked:
            enable_optimizer_checks()
            GradientReducer(unhooked, make_reference=lambda parameter: holders[id(parameter)])

    def _warn_of_unsharded_replacement(
        self, name: str, parameter: torch.nn.Parameter, holder: torch.nn.Module | None
    ) -> None:
        """Warn once if the user's code has replaced a sharded parameter by an unsharded one."""
        path, layouts = self._layouts_by_module.get(id(holder), ("", {}))
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


def _get_parameter(holder: weakref.ref[torch.nn.Module], name: str) -> object:
    """Return the parameter that a module stores under a name, or None if the parameter or module no longer exists."""
    module = holder()
    return None if module is None else get_parameters_and_buffers(module)[0].get(name)
