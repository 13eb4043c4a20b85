"""Track the modules and optimizers created in a scope, with torch's registration hooks.

Torch's hooks report a module when it gets a parameter, a buffer, or a child. A module without any of these has nothing
to shard. Copied and unpickled modules are reported by a patch of `Module.__setstate__`. Torch has no hook for a new
optimizer, so a patch of `add_param_group` reports it. The hooks are installed while a scope is open on any thread, and
report to the scope of the thread that calls them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.modules.module

from layoutmap.adapters.current import get_current_session, warn_of_model_in_inner_task
from layoutmap.adapters.torch.paths import has_forward, is_keras_module
from layoutmap.core.errors import ScopeError
from layoutmap.engines.patches import AttributePatch, ItemPatch, PatchGroup, SelfClosingContext
from layoutmap.engines.tested import check_names_exist

_torch_module: Any = torch.nn.modules.module  # untyped module of torch

check_names_exist(
    "torch",
    (_torch_module, "_global_module_registration_hooks _global_parameter_registration_hooks"),
    (_torch_module, "_global_buffer_registration_hooks"),
)


def install_creation_hooks() -> SelfClosingContext:
    """Return a context in which creation hooks are installed. Threads and nested scopes share them."""
    return _PATCHES.activate()


def _report_module_to_scope(module: torch.nn.Module, name: str, registered: object) -> None:
    """Report a module to the open scope for torch when it gets a tensor or child."""
    session = get_current_session()
    if session is None:  # hooks are global, so a thread without a scope calls them, too
        warn_of_model_in_inner_task("torch", type(module).__name__)
    elif session.library == "torch":
        session.track_module(module)


def _report_or_reject_module(module: torch.nn.Module, name: str, parameter: object) -> None:
    """Report a module that gets a parameter to a scope for torch, or raise in a scope for another library."""
    _report_module_to_scope(module, name, parameter)
    session = get_current_session()
    if (
        session is not None
        and session.library != "torch"
        and has_forward(module)
        and not is_keras_module(module)
    ):
        raise ScopeError(
            f"{type(module).__name__}: a torch module is built in a scope for {session.library} models",
            facts={"parameter": name},
            why=f"{session.library} is imported too, and a scope is for one library: this module would "
            "stay unsharded",
            fix='pass library="torch" to the scope, or build the module outside of it',
        )


def _wrap_setstate(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def setstate(module: torch.nn.Module, state: dict[str, object]) -> None:
        original(module, state)
        _report_module_to_scope(module, "", None)

    return setstate


def _wrap_add_param_group(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def add_param_group(optimizer: torch.optim.Optimizer, param_group: dict[str, object]) -> None:
        original(optimizer, param_group)
        session = get_current_session()
        if session is not None and session.library == "torch":
            session.track_optimizer(optimizer)

    return add_param_group


_PATCHES = PatchGroup(
    [
        ItemPatch(_torch_module._global_module_registration_hooks, "layoutmap", _report_module_to_scope),
        ItemPatch(_torch_module._global_parameter_registration_hooks, "layoutmap", _report_or_reject_module),
        ItemPatch(_torch_module._global_buffer_registration_hooks, "layoutmap", _report_module_to_scope),
        # Copying a module bypasses the hooks, but calls `__setstate__`, so report the copy there.
        AttributePatch(torch.nn.Module, "__setstate__", _wrap_setstate),
        # Each new optimizer calls `add_param_group`.
        AttributePatch(torch.optim.Optimizer, "add_param_group", _wrap_add_param_group),
    ]
)
