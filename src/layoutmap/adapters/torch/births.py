"""Which modules come to life while a scope is open: torch's registration hooks report them.

A module is reported when it is given a parameter, a buffer or a child, or when it is copied; one that has none of them
has nothing to lay out. The hooks are torch's own and public, but for `Module.__setstate__`, which copies and unpickled
modules go through. They are in place while a scope is open on some thread, and look at the scope of their own thread.
"""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import torch
from torch.nn.modules import module as of_modules

from layoutmap.active import current
from layoutmap.adapters.torch.paths import has_forward, is_of_keras
from layoutmap.errors import ScopeError

__all__ = ["installed", "refused"]


@runtime_checkable
class _Watcher(Protocol):
    def module_born(self, module: torch.nn.Module) -> None: ...


_lock = threading.Lock()
_num_users = 0
_handles: list[Any] = []
_plain_setstate = torch.nn.Module.__setstate__


@contextmanager
def installed() -> Generator[None]:
    """Keep the hooks in place for a while; they are counted, so that threads and nested scopes share them."""
    global _num_users
    with _lock:
        if not _num_users:
            _install()
        _num_users += 1
    try:
        yield
    finally:
        with _lock:
            _num_users -= 1
            if not _num_users:
                _remove()


def _install() -> None:
    _handles.extend(
        (
            of_modules.register_module_module_registration_hook(_registered),
            of_modules.register_module_parameter_registration_hook(_registered),
            of_modules.register_module_buffer_registration_hook(_registered),
        )
    )
    torch.nn.Module.__setstate__ = _setstate  # pyright: ignore[reportAttributeAccessIssue]


def _remove() -> None:
    torch.nn.Module.__setstate__ = _plain_setstate
    for handle in _handles:
        handle.remove()
    _handles.clear()


def _registered(module: torch.nn.Module, name: str, registered: Any) -> None:
    watcher = current()
    if isinstance(watcher, _Watcher):
        watcher.module_born(module)


def _setstate(module: torch.nn.Module, state: dict[str, Any]) -> None:
    _plain_setstate(module, state)
    _registered(module, "", None)


@contextmanager
def refused(library: str) -> Generator[None]:
    """While open, a torch module that gets a parameter in the scope is refused: the scope sees another library's.

    Args:
        library: The library that the scope was opened for.
    """

    def refuse(module: torch.nn.Module, name: str, parameter: Any) -> None:
        if current() is not None and has_forward(module) and not is_of_keras(module):
            raise ScopeError(
                f"{type(module).__name__}: a torch module is built in a scope for {library} models",
                facts={"parameter": name},
                why=f"{library} is imported too, and a scope works inside one library: this would not be laid out",
                mend='pass library="torch"',
            )

    handle = of_modules.register_module_parameter_registration_hook(refuse)
    try:
        yield
    finally:
        handle.remove()
