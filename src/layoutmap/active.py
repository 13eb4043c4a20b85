"""Which scope is open here: the one piece of ambient state, a `ContextVar`.

A thread or task sees only the scopes that it opened itself. Adapters read it from inside a framework's constructors,
where nothing could be passed to them.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

__all__ = ["current", "entered"]

_current: ContextVar[Any] = ContextVar("layoutmap_scope", default=None)


def current() -> Any:
    """The session of the innermost scope that is open here, or `None`."""
    return _current.get()


@contextmanager
def entered(session: Any) -> Generator[None]:
    """Make a session the current one for a while; afterwards the one before it is current again."""
    token = _current.set(session)
    try:
        yield
    finally:
        _current.reset(token)
