"""Track the modules and optimizers created in a scope, with torch's registration hooks.

A module is reported when it is given a parameter, a buffer or a child, or when it is copied; one that
has none of them has nothing to lay out. The hooks are torch's own, and `Module.__setstate__`, which
copies and unpickled modules go through. Torch has no hook for a new optimizer: each adds a group of
parameters, and `add_param_group` reports it. All are in place while a scope is open on some thread,
and look at the scope of their own thread.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.modules.module

from layoutmap.adapters.current import get_current_session, warn_in_inner_task
from layoutmap.adapters.torch.paths import has_forward, is_keras_module
from layoutmap.core.errors import ScopeError
from layoutmap.engines.patches import Attribute, Closing, Item, Patches
from layoutmap.engines.tested import check_names

_of_modules: Any = torch.nn.modules.module  # untyped module of torch

check_names(
    "torch",
    (_of_modules, "_global_module_registration_hooks _global_parameter_registration_hooks"),
    (_of_modules, "_global_buffer_registration_hooks"),
)


def install_hooks() -> Closing:
    """Return a context in which the hooks are installed. Threads and nested scopes share them."""
    return _PATCHES.activate()


def _note_registration(module: torch.nn.Module, name: str, registered: object) -> None:
    watcher = get_current_session()
    if watcher is None:  # the hooks are global, but a scope belongs to one thread
        warn_in_inner_task("torch", type(module).__name__)
    elif watcher.library == "torch":
        watcher.note_module(module)


def _check_parameter(module: torch.nn.Module, name: str, parameter: object) -> None:
    _note_registration(module, name, parameter)
    watcher = get_current_session()
    if (
        watcher is not None
        and watcher.library != "torch"
        and has_forward(module)
        and not is_keras_module(module)
    ):
        raise ScopeError(
            f"{type(module).__name__}: a torch module is built in a scope for {watcher.library} models",
            facts={"parameter": name},
            why=f"{watcher.library} is imported too, and a scope is for one library: this module would "
            "stay unsharded",
            fix='pass library="torch"',
        )


def _wrap_setstate(plain: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(plain)
    def setstate(module: torch.nn.Module, state: dict[str, object]) -> None:
        plain(module, state)
        _note_registration(module, "", None)

    return setstate


def _wrap_add_param_group(plain: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(plain)
    def add_param_group(optimizer: torch.optim.Optimizer, param_group: dict[str, object]) -> None:
        plain(optimizer, param_group)
        watcher = get_current_session()
        if watcher is not None and watcher.library == "torch":
            watcher.note_optimizer(optimizer)

    return add_param_group


_PATCHES = Patches(
    [
        Item(_of_modules._global_module_registration_hooks, "layoutmap", _note_registration),
        Item(_of_modules._global_parameter_registration_hooks, "layoutmap", _check_parameter),
        Item(_of_modules._global_buffer_registration_hooks, "layoutmap", _note_registration),
        Attribute(torch.nn.Module, "__setstate__", _wrap_setstate),  # copies bypass registration hooks
        Attribute(torch.optim.Optimizer, "add_param_group", _wrap_add_param_group),  # also called by __init__
    ]
)
