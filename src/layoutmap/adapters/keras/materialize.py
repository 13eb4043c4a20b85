"""Compute the values of variables in their layouts."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import keras

from layoutmap.adapters.keras.describing import Entry
from layoutmap.adapters.keras.initializers import (
    can_draw,
    freeze_seed,
    has_seed_generator,
    make_initializer,
    make_seed_initializer,
)
from layoutmap.adapters.keras.loading import check_shape, is_on_host, place_host_array, shard_host_assignments
from layoutmap.adapters.keras.pending import end_pending, is_pending
from layoutmap.adapters.keras.private import is_seed_state
from layoutmap.adapters.keras.protocol import KerasSession
from layoutmap.core.initializers import Initializer
from layoutmap.core.variables import Assignment
from layoutmap.engines.patches import set_temporarily


class Materializer:
    """Compute the values of one scope's variables."""

    def __init__(self, session: KerasSession):
        self._session = session
        # variables that may draw from a generator, in order of creation
        self._undrawn = deque[weakref.ref[keras.Variable]]()

    def record_pending(self, variable: keras.Variable) -> None:
        """Record a pending variable."""
        if can_draw(variable._initializer) and not is_seed_state(variable):
            self._undrawn.append(weakref.ref(variable))

    def draw_earlier_seeds(self, variable: object, make_now: Callable[[keras.Variable], None]) -> None:
        """Draw the seeds that unsharded Keras would have drawn before this variable, or all so far for None.

        Does nothing if the variable does not draw. `make_now` gives a variable its value at once.
        """
        if self._session.on_thread.is_initializing:
            return
        if variable is not None and not any(ref() is variable for ref in self._undrawn):
            return
        while self._undrawn and (first := self._undrawn.popleft()()) is not variable:
            if first is None or not is_pending(first):
                continue
            if has_seed_generator(first._initializer):
                with self._mark_initializing():
                    first._initializer = freeze_seed(first._initializer, self._unshard_seed)
            else:
                make_now(first)

    def draw_in_turn(self, make_now: Callable[[keras.Variable], None]) -> None:
        """Draw seeds one by one in creation order, if custom initializers may draw from the same generator."""
        waiting = [v for ref in self._undrawn if (v := ref()) is not None and is_pending(v)]
        if len({has_seed_generator(v._initializer) for v in waiting}) > 1:
            self.draw_earlier_seeds(None, make_now)
        self._undrawn.clear()

    def initialize(self, todo: Sequence[tuple[Entry, Assignment]]) -> None:
        """Initialize pending variables in creation order, because seed generators advance in that order."""
        if len(todo) > 1:
            order = {id(v): number for number, v in enumerate(self._session.registry.variables())}
            todo = sorted(todo, key=lambda pair: order.get(id(pair[0].variable), 0))
        keyed = {f"{number}:{a.variable.path}": (e.variable, a) for number, (e, a) in enumerate(todo)}
        with self._mark_initializing():
            initializers = {key: self._make_initializer(v) for key, (v, _) in keyed.items()}
            # Generator states that were already used have values.
            keyed = {key: pair for key, pair in keyed.items() if is_pending(pair[0])}
            arrays = self._session.context.create({key: a for key, (_, a) in keyed.items()}, initializers)
        for key, (variable, assignment) in keyed.items():
            self._set_first_value(variable, assignment, arrays[key])

    def _mark_initializing(self) -> AbstractContextManager[None]:
        """Mark that initializers run until the block ends, so that their draws do not trigger earlier ones."""
        return set_temporarily(self._session.on_thread, "is_initializing", True)

    def initialize_unsharded(self, variable: Any) -> None:
        """Initialize a variable outside any model as Keras does, and stop tracking it."""
        end_pending(variable)
        variable._layout = None
        with self._session.backend.leave_tracing():
            variable._deferred_initialize()
        self._session.registry.remove_variable(variable)

    def assign(self, variable: keras.Variable, assignment: Assignment, value: object) -> None:
        """Store a value in a pending variable. Its initializer draws its seed but never runs."""
        if has_seed_generator(variable._initializer):
            with self._mark_initializing():
                freeze_seed(variable._initializer, self._unshard_seed)
        if is_on_host(value):
            check_shape(variable, assignment.variable.path, value)
            array = place_host_array(assignment, value)
        else:
            array = self._session.engine.relayout(value, assignment.layout, pad=assignment.is_padded)
        self._set_first_value(variable, assignment, array)

    def place(self, variable: keras.Variable, assignment: Assignment) -> None:
        """Move an existing value to the variable's layout."""
        layout, pad = assignment.layout, assignment.is_padded
        array = self._session.engine.relayout(variable._value, layout, pad=pad)
        self._store(variable, assignment, array)

    def _set_first_value(self, variable: keras.Variable, assignment: Assignment, array: object) -> None:
        self._store(variable, assignment, array)
        end_pending(variable)  # last, so that after an interrupt the variable is still pending
        variable._initializer = None

    def _store(self, variable: keras.Variable, assignment: Assignment, array: Any) -> None:
        session, layout = self._session, assignment.layout
        held = session.engine.variable(array, name=variable.path, trainable=variable.trainable)
        tag = session.backend.store(variable, held, assignment, session)
        shard_host_assignments(variable, assignment)
        variable.layout = layout
        self._session.registry.set_layout(variable, layout, tag)

    def _make_initializer(self, variable: keras.Variable) -> Initializer:
        shape, dtype = tuple(variable.shape), keras.backend.standardize_dtype(variable._dtype)
        if self._session.context.across and is_seed_state(variable):
            return make_seed_initializer(variable._initializer, shape, dtype)
        return make_initializer(variable._initializer, shape, dtype, self._unshard_seed)

    def _unshard_seed(self, seed: object) -> object:
        return keras.ops.convert_to_tensor(self._session.engine.to_numpy(seed))
