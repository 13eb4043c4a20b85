"""Track the open scope of this thread and task in a `ContextVar`, the only ambient state.

A scope applies to the code of its `with` block, in the thread and task that opened it. A thread or task that starts in
the block copies the variable, but the scope does not apply there. It applies nowhere once it is closed, or once an
interrupt has removed its `with` without closing it, even if copies of the variable still reference it. Adapters read
the variable in constructors of a framework, to which no argument can be passed.
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
from layoutmap.engines.patches import SelfClosingContext


class activate_session(SelfClosingContext):
    """Make a session the current one of this thread and task until the block ends.

    Blocks may end in any order, in any task or thread, because a generator that contains one can be closed late.
    """

    def __init__(self, session: Any):
        self.session = session  # `close_context` sets it to None
        self.has_warned = False
        self._thread = threading.get_ident()
        task = _get_asyncio_task()
        self._task = None if task is None else weakref.ref(task)

    def was_opened_by_current_task(self) -> bool:
        """Return whether this thread and task opened the session."""
        task = None if self._task is None else self._task()
        return self._thread == threading.get_ident() and task is _get_asyncio_task()

    def open_context(self) -> None:
        """Make the session the current one."""
        _current.set(_SessionStackEntry(weakref.ref(self), next(_iterate_active_stack_entries(), None)))

    def close_context(self) -> None:
        """Make the enclosing session current again. Do nothing if this session is already closed."""
        self.session = None
        entry = _current.get()
        if entry is not None and entry.activation() is self:
            _current.set(next(_iterate_active_stack_entries(), None))


@dataclass(frozen=True, slots=True)
class _SessionStackEntry:
    """One open session: a weak reference to its `activate_session`, and the entry of the enclosing session, or None."""

    activation: weakref.ref[activate_session]
    outer: _SessionStackEntry | None


_current: ContextVar[_SessionStackEntry | None] = ContextVar("layoutmap_scope", default=None)


# An asyncio task may outlive a scope's `with` block, so a scope affects only its own thread and task (decisions/0031).
def get_current_session() -> Any:
    """Return the session of the innermost scope that is open in this thread and task, or None."""
    return next(_iterate_active_sessions(), None)


def is_session_active(session: Any) -> bool:
    """Return whether a session is open in this thread and task, even if a different session is nested inside it."""
    return any(each is session for each in _iterate_active_sessions())


# A scope does not affect a task that starts inside it, so warn that a model of this task is unsharded (decisions/0031).
def warn_of_model_in_inner_task(library: str, model_name: str) -> None:
    """Warn once for each scope if a model is built in a task or thread that started while the scope was open."""
    entry = _current.get()
    activation = entry and entry.activation()
    if activation is None or activation.session is None or activation.has_warned:
        return
    if activation.session.library != library:
        return
    activation.has_warned = True
    text = format_message(
        f"{model_name}: this model is built in a task or thread that was started in a scope, so it stays unsharded",
        {},
        "a scope applies only to the code of its own block, because a task may run before or after the block ends",
        "build the model in the block itself, or in the task with layout_map.build(make_model)",
    )
    warnings.warn(text, LayoutMapWarning, stacklevel=find_user_stacklevel({library}))


def _iterate_active_sessions() -> Iterator[Any]:
    for entry in _iterate_active_stack_entries():
        activation = entry.activation()
        if activation is not None:
            yield activation.session


def _iterate_active_stack_entries() -> Iterator[_SessionStackEntry]:
    """Yield the entries of the sessions that are open in this thread and task, innermost first."""
    entry = _current.get()
    while entry is not None:
        activation = entry.activation()
        if (
            activation is not None
            and activation.session is not None
            and activation.was_opened_by_current_task()
        ):
            yield entry
        entry = entry.outer


def _get_asyncio_task() -> Any:
    """Return the running asyncio task of this thread, or None."""
    asyncio: Any = sys.modules.get("asyncio")  # without asyncio there are no tasks
    try:
        return asyncio and asyncio.current_task()
    except RuntimeError:  # no event loop runs in this thread
        return None
