"""Giving variables their values, each in its layout."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import keras

from layoutmap.adapters.keras.describing import Entry
from layoutmap.adapters.keras.initializers import (
    draws_a_seed,
    initializer_of,
    initializer_of_seed,
    may_draw,
    with_its_seed,
)
from layoutmap.adapters.keras.loading import check_shape, from_host, is_on_host, sharded_on_the_host
from layoutmap.adapters.keras.pending import end_pending, is_pending
from layoutmap.adapters.keras.private import is_seed_state
from layoutmap.adapters.keras.protocol import KerasSession
from layoutmap.core.initializers import Initializer
from layoutmap.core.variables import Assignment
from layoutmap.engines.patches import temporarily


class Materializer:
    """Gives the variables of one scope their values."""

    def __init__(self, session: KerasSession):
        self._session = session
        # What may draw from a generator, in the order of making.
        self._undrawn = deque[weakref.ref[keras.Variable]]()

    def made(self, variable: keras.Variable) -> None:
        """Note a pending variable."""
        if may_draw(variable._initializer) and not is_seed_state(variable):
            self._undrawn.append(weakref.ref(variable))

    def draw_before(self, variable: object, make_now: Callable[[keras.Variable], None]) -> None:
        """Draw what plain Keras has drawn before it makes a variable: each variable draws when it is made.

        Args:
            variable: The variable; does nothing if it does not draw. `None`: up to now.
            make_now: Gives a variable its value at once.
        """
        if self._session.on_thread.is_initializing:
            return
        if variable is not None and not any(ref() is variable for ref in self._undrawn):
            return
        while self._undrawn and (first := self._undrawn.popleft()()) is not variable:
            if first is None or not is_pending(first):
                continue
            if draws_a_seed(first._initializer):
                with self._initializing():
                    first._initializer = with_its_seed(first._initializer, self._off_mesh)
            else:
                make_now(first)

    def draw_in_turn(self, make_now: Callable[[keras.Variable], None]) -> None:
        """Draw one by one where Keras's own initializers, which draw seeds alone, are among others that draw."""
        waiting = [v for ref in self._undrawn if (v := ref()) is not None and is_pending(v)]
        if len({draws_a_seed(v._initializer) for v in waiting}) > 1:
            self.draw_before(None, make_now)
        self._undrawn.clear()

    def initialize(self, todo: Sequence[tuple[Entry, Assignment]]) -> None:
        """Initialize pending variables in the order in which they were made: seed generators advance in that order."""
        if len(todo) > 1:
            order = {id(v): number for number, v in enumerate(self._session.registry.variables())}
            todo = sorted(todo, key=lambda pair: order.get(id(pair[0].variable), 0))
        keyed = {f"{number}:{a.variable.path}": (e.variable, a) for number, (e, a) in enumerate(todo)}
        with self._initializing():
            initializers = {key: self._initializer_of(v) for key, (v, _) in keyed.items()}
            # The state of a generator that a seed was drawn from has a value by now.
            keyed = {key: pair for key, pair in keyed.items() if is_pending(pair[0])}
            arrays = self._session.context.create({key: a for key, (_, a) in keyed.items()}, initializers)
        for key, (variable, assignment) in keyed.items():
            self._first_value(variable, assignment, arrays[key])

    def _initializing(self) -> AbstractContextManager[None]:
        """While open, what is drawn is drawn in turn."""
        return temporarily(self._session.on_thread, "is_initializing", True)

    def initialize_plainly(self, variable: Any) -> None:
        """Initialize a variable that belongs to no model as Keras does, and forget it."""
        end_pending(variable)
        variable._layout = None
        with self._session.backend.outside():
            variable._deferred_initialize()
        self._session.registry.forget(variable)

    def assign(self, variable: keras.Variable, assignment: Assignment, value: object) -> None:
        """Give a pending variable an assigned value; its initializer never runs, and its seed is drawn all the same."""
        if draws_a_seed(variable._initializer):
            with self._initializing():
                with_its_seed(variable._initializer, self._off_mesh)
        if is_on_host(value):
            check_shape(variable, assignment.variable.path, value)
            array = from_host(assignment, value)
        else:
            array = self._session.engine.relayout(value, assignment.layout)
        self._first_value(variable, assignment, array)

    def place(self, variable: keras.Variable, assignment: Assignment) -> None:
        """Place a variable that has its value in its layout."""
        self._store(variable, assignment, self._session.engine.relayout(variable._value, assignment.layout))

    def _first_value(self, variable: keras.Variable, assignment: Assignment, array: object) -> None:
        self._store(variable, assignment, array)
        end_pending(variable)  # after that: an interrupt before leaves it pending
        variable._initializer = None

    def _store(self, variable: keras.Variable, assignment: Assignment, array: Any) -> None:
        session, layout = self._session, assignment.layout
        held = session.engine.variable(array, name=variable.name, trainable=variable.trainable)
        tag = session.backend.store(variable, held, assignment, session)
        sharded_on_the_host(variable, assignment)
        variable.layout = layout
        self._session.registry.set_layout(variable, layout, tag)

    def _initializer_of(self, variable: keras.Variable) -> Initializer:
        shape, dtype = tuple(variable.shape), keras.backend.standardize_dtype(variable._dtype)
        if self._session.context.across and is_seed_state(variable):
            return initializer_of_seed(variable._initializer, shape, dtype)
        return initializer_of(variable._initializer, shape, dtype, self._off_mesh)

    def _off_mesh(self, seed: object) -> object:
        return keras.ops.convert_to_tensor(self._session.engine.to_numpy(seed))
