"""Which scope is open here: the one piece of ambient state, a `ContextVar`.

A scope belongs to the code between its `with` and its end, in the thread and the task that opened it. Threads and tasks
that inherit the variable with a copy of their maker's context do not inherit the scope, and a scope that is closed is
nobody's, wherever a copy of the variable still names it. Adapters read it from inside a framework's constructors, where
nothing could be passed to them.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

__all__ = ["current", "entered", "is_entered"]


class _Entry:
    """One `with` of a session, where it was entered."""

    def __init__(self, session: Any, outer: _Entry | None):
        self.session = session  # `None` once it is closed
        self.outer = outer
        self._thread = threading.get_ident()
        task = _task()
        self._task = None if task is None else weakref.ref(task)

    def is_here(self) -> bool:
        """Whether this is the thread and the task that entered."""
        task = None if self._task is None else self._task()
        return self._thread == threading.get_ident() and task is _task()


_current: ContextVar[_Entry | None] = ContextVar("layoutmap_scope", default=None)


def current() -> Any:
    """The session of the innermost scope that is open in this thread and task, or `None`."""
    return next((entry.session for entry in _entries()), None)


def is_entered(session: Any) -> bool:
    """Whether a session is open in this thread and task, perhaps around another one."""
    return any(entry.session is session for entry in _entries())


@contextmanager
def entered(session: Any) -> Generator[None]:
    """Make a session the current one of this thread and task for a while; afterwards the one before it is again.

    It may end in any order and anywhere: a generator that holds it can be closed late, by another task or thread.
    """
    entry = _Entry(session, next(_entries(), None))
    _current.set(entry)
    try:
        yield
    finally:
        entry.session = None
        if _current.get() is entry:
            _current.set(next(_entries(), None))


def _entries() -> Iterator[_Entry]:
    """What is open in this thread and task, the innermost first."""
    entry = _current.get()
    while entry is not None:
        if entry.session is not None and entry.is_here():
            yield entry
        entry = entry.outer


def _task() -> Any:
    """The task of asyncio that runs here, or `None`."""
    asyncio: Any = sys.modules.get("asyncio")  # a program that has not imported it has no tasks
    try:
        return asyncio and asyncio.current_task()
    except RuntimeError:  # no loop runs in this thread
        return None
