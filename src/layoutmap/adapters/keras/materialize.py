"""Giving variables their values, each in its layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from layoutmap.adapters.keras.describing import Entry
from layoutmap.adapters.keras.initializers import initializer_of, initializer_of_seed
from layoutmap.adapters.keras.loading import check_shape, from_host, is_on_host, sharded_on_the_host
from layoutmap.adapters.keras.pending import end_pending
from layoutmap.adapters.keras.private import is_seed_state
from layoutmap.adapters.keras.protocol import KerasSession
from layoutmap.adapters.keras.registry import Registry
from layoutmap.core.initializers import Initializer
from layoutmap.core.variables import Assignment

__all__ = ["Materializer"]


class Materializer:
    """Gives the variables of one scope their values.

    Args:
        session: The scope.
        registry: Its variables.
    """

    def __init__(self, session: KerasSession, registry: Registry):
        self._session = session
        self._registry = registry

    def initialize(self, todo: Sequence[tuple[Entry, Assignment]]) -> None:
        """Initialize pending variables in the order in which they were made: seed generators advance in that order."""
        order = {id(v): number for number, v in enumerate(self._registry.variables())}
        todo = sorted(todo, key=lambda pair: order.get(id(pair[0].variable), 0))
        keyed = {f"{number}:{a.variable.path}": (e.variable, a) for number, (e, a) in enumerate(todo)}
        initializers = {key: self._initializer_of(v) for key, (v, _) in keyed.items()}
        arrays = self._session.context.create({key: a for key, (_, a) in keyed.items()}, initializers)
        for key, (variable, assignment) in keyed.items():
            self._first_value(variable, assignment, arrays[key])

    def initialize_plainly(self, variable: Any) -> None:
        """Initialize a variable that belongs to no model as Keras does, and forget it."""
        end_pending(variable)
        variable._layout = None
        with self._session.backend.outside():
            variable._deferred_initialize()
        self._registry.forget(variable)

    def assign(self, variable: Any, assignment: Assignment, value: Any) -> None:
        """Give a pending variable an assigned value; its initializer never runs."""
        if is_on_host(value):
            check_shape(variable, assignment.variable.path, value)
            array = from_host(assignment, value)
        else:
            array = self._session.engine.relayout(value, assignment.layout)
        self._first_value(variable, assignment, array)

    def place(self, variable: Any, assignment: Assignment) -> None:
        """Place a variable that has its value in its layout."""
        self._store(variable, assignment, self._session.engine.relayout(variable._value, assignment.layout))

    def _first_value(self, variable: Any, assignment: Assignment, array: Any) -> None:
        self._store(variable, assignment, array)
        end_pending(variable)  # after that: an interrupt before leaves it pending
        variable._initializer = None

    def _store(self, variable: Any, assignment: Assignment, array: Any) -> None:
        session, layout = self._session, assignment.layout
        held = session.engine.variable(array, name=variable.name, trainable=variable.trainable)
        tag = session.backend.store(variable, held, assignment, session)
        sharded_on_the_host(variable, assignment)
        variable.layout = layout
        self._registry.set_layout(variable, layout, tag)

    def _initializer_of(self, variable: Any) -> Initializer:
        shape, dtype = tuple(variable.shape), keras.backend.standardize_dtype(variable._dtype)
        if self._session.context.across and is_seed_state(variable):
            return initializer_of_seed(variable._initializer, shape, dtype)
        return initializer_of(variable._initializer, shape, dtype, self._off_mesh)

    def _off_mesh(self, seed: Any) -> Any:
        return keras.ops.convert_to_tensor(self._session.engine.to_numpy(seed))
