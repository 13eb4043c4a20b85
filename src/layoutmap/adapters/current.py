"""Track the open scope of this thread and task in a `ContextVar`, the only ambient state.

A scope belongs to the code between its `with` and its end, in the thread and the task that opened it. Threads and tasks
that inherit the variable with a copy of their maker's context do not inherit the scope, and a scope that is closed is
nobody's, wherever a copy of the variable still names it; so is one whose `with` is gone without an end, as an interrupt
can leave it. Adapters read it from inside a framework's constructors, where nothing could be passed to them.
"""

from __future__ import annotations

import sys
import threading
import warnings
import weakref
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from layoutmap.core.errors import LayoutMapWarning, format_message
from layoutmap.core.users_line import find_user_stacklevel
from layoutmap.engines.patches import Closing


class active_session(Closing):
    """Make a session the current one of this thread and task until the block ends.

    It may end in any order and anywhere: a generator that holds it can be closed late, by another task or thread.
    """

    def __init__(self, session: Any):
        self.session = session  # None after the scope is closed
        self.was_told = False
        self._thread = threading.get_ident()
        task = _get_asyncio_task()
        self._task = None if task is None else weakref.ref(task)

    def is_in_opening_task(self) -> bool:
        """Return whether this thread and task opened the session."""
        task = None if self._task is None else self._task()
        return self._thread == threading.get_ident() and task is _get_asyncio_task()

    def open(self) -> None:
        """Make the session the current one."""
        _current.set(_SessionStackEntry(weakref.ref(self), next(_iterate_links(), None)))

    def close(self) -> None:
        """Make the enclosing session current again, unless this one is closed already."""
        self.session = None
        link = _current.get()
        if link is not None and link.entry() is self:
            _current.set(next(_iterate_links(), None))


@dataclass(frozen=True, slots=True)
class _SessionStackEntry:
    """Weak reference to an open session, with the link of its enclosing session."""

    entry: weakref.ref[active_session]
    outer: _SessionStackEntry | None


_current: ContextVar[_SessionStackEntry | None] = ContextVar("layoutmap_scope", default=None)


# Tasks may outlive or overlap the block, so a scope affects only its own thread and task (decisions/0031).
def get_current_session() -> Any:
    """Return the session of the innermost scope that is open in this thread and task, or None."""
    return next(_iterate_sessions(), None)


def is_session_active(session: Any) -> bool:
    """Return whether a session is open in this thread and task, even if another one is nested inside it."""
    return any(each is session for each in _iterate_sessions())


# A new task copies the context, but a model built there would stay unsharded without a warning (decisions/0031).
def warn_in_inner_task(library: str, name: str) -> None:
    """Warn once per scope of a model built in a task or thread that was started inside the scope."""
    link = _current.get()
    entry = link and link.entry()
    if entry is None or entry.session is None or entry.session.library != library or entry.was_told:
        return
    entry.was_told = True
    text = format_message(
        f"{name}: it is built in a task or thread that was started inside of a scope, so it is not laid out",
        {},
        "a scope holds for the code of its block alone, since a task may run before its end, after it, or meanwhile",
        "build the model in the block itself, or in the task with layout_map.build(make_model)",
    )
    warnings.warn(text, LayoutMapWarning, stacklevel=find_user_stacklevel({library}))


def _iterate_sessions() -> Iterator[Any]:
    for link in _iterate_links():
        entry = link.entry()
        if entry is not None:
            yield entry.session


def _iterate_links() -> Iterator[_SessionStackEntry]:
    """Yield the sessions that are open in this thread and task, innermost first."""
    link = _current.get()
    while link is not None:
        entry = link.entry()
        if entry is not None and entry.session is not None and entry.is_in_opening_task():
            yield link
        link = link.outer


def _get_asyncio_task() -> Any:
    """Return the current asyncio task, or None."""
    asyncio: Any = sys.modules.get("asyncio")  # without asyncio there are no tasks
    try:
        return asyncio and asyncio.current_task()
    except RuntimeError:  # no event loop runs in this thread
        return None
