"""Compute the values of variables in their layouts."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import keras

from layoutmap.adapters.keras.describing import DescribedVariable
from layoutmap.adapters.keras.initializers import (
    can_draw_seeds,
    convert_initializer,
    copy_with_fixed_seed,
    has_seed_generator,
    make_seed_initializer,
)
from layoutmap.adapters.keras.loading import (
    check_value_shape,
    install_host_value_sharding,
    is_host_array,
    shard_host_array,
)
from layoutmap.adapters.keras.pending import is_pending, restore_variable_class
from layoutmap.adapters.keras.private import is_seed_state
from layoutmap.adapters.keras.protocol import KerasSession
from layoutmap.core.initializers import Initializer
from layoutmap.core.variables import Assignment
from layoutmap.engines.patches import set_attribute_temporarily


class Materializer:
    """Compute the values of one scope's variables."""

    def __init__(self, session: KerasSession):
        self._session = session
        # pending variables that may draw a seed, in the order of creation
        self._undrawn = deque[weakref.ref[keras.Variable]]()

    def record_pending_variable(self, variable: keras.Variable) -> None:
        """Record a variable if its initializer may draw a seed, so that draws follow the order of creation."""
        if can_draw_seeds(variable._initializer) and not is_seed_state(variable):
            self._undrawn.append(weakref.ref(variable))

    def draw_seeds_of_earlier_variables(
        self, variable: object, initialize_pending_variable: Callable[[keras.Variable], None]
    ) -> None:
        """Draw the seeds of variables created before `variable`, or of all if it is None, as unsharded Keras does.

        Does nothing if the variable does not draw. `initialize_pending_variable` gives a variable its value at once.
        """
        if self._session.thread_state.is_running_initializers:
            return
        if variable is not None and not any(ref() is variable for ref in self._undrawn):
            return
        while self._undrawn and (first := self._undrawn.popleft()()) is not variable:
            if first is None or not is_pending(first):
                continue
            if has_seed_generator(first._initializer):
                with self._mark_initializing_temporarily():
                    first._initializer = copy_with_fixed_seed(first._initializer, self._unshard_seed)
            else:
                initialize_pending_variable(first)

    def draw_seeds_in_creation_order(
        self, initialize_pending_variable: Callable[[keras.Variable], None]
    ) -> None:
        """Draw all pending seeds in order if custom initializers may draw from the same generators as Keras's."""
        waiting = [v for ref in self._undrawn if (v := ref()) is not None and is_pending(v)]
        if len({has_seed_generator(v._initializer) for v in waiting}) > 1:
            self.draw_seeds_of_earlier_variables(None, initialize_pending_variable)
        self._undrawn.clear()

    def initialize_variables(self, pairs: Sequence[tuple[DescribedVariable, Assignment]]) -> None:
        """Initialize pending variables in creation order, because seed generators advance in that order."""
        if len(pairs) > 1:
            order = {id(v): number for number, v in enumerate(self._session.registry.list_variables())}
            pairs = sorted(pairs, key=lambda pair: order.get(id(pair[0].variable), 0))
        keyed = {f"{number}:{a.variable.path}": (e.variable, a) for number, (e, a) in enumerate(pairs)}
        with self._mark_initializing_temporarily():
            initializers = {key: self._convert_initializer(v) for key, (v, _) in keyed.items()}
            # Converting an initializer draws its seed, and so may initialize a pending state of a generator. Leave out
            # such states.
            keyed = {key: pair for key, pair in keyed.items() if is_pending(pair[0])}
            arrays = self._session.context.create_arrays(
                {key: a for key, (_, a) in keyed.items()}, initializers
            )
        for key, (variable, assignment) in keyed.items():
            self._store_first_value(variable, assignment, arrays[key])

    def _mark_initializing_temporarily(self) -> AbstractContextManager[None]:
        """Mark initializers as running until the block ends, so that their draws cause none for earlier variables."""
        return set_attribute_temporarily(self._session.thread_state, "is_running_initializers", True)

    def initialize_variable_unsharded(self, variable: Any) -> None:
        """Initialize a variable of no model as Keras does, unsharded, and remove it from the registry."""
        restore_variable_class(variable)
        variable._layout = None
        with self._session.backend.suspend_tracing():
            variable._deferred_initialize()
        self._session.registry.remove_variable(variable)

    def assign_first_value(self, variable: keras.Variable, assignment: Assignment, value: object) -> None:
        """Store a value in a pending variable. Its initializer only draws its seed, as unsharded Keras does."""
        if has_seed_generator(variable._initializer):
            with self._mark_initializing_temporarily():
                copy_with_fixed_seed(variable._initializer, self._unshard_seed)
        if is_host_array(value):
            check_value_shape(variable, assignment.variable.path, value)
            array = shard_host_array(assignment, value)
        else:
            array = self._session.engine.relayout(value, assignment.layout, pad=assignment.is_padded)
        self._store_first_value(variable, assignment, array)

    def relayout_variable(self, variable: keras.Variable, assignment: Assignment) -> None:
        """Convert a variable's existing value to its assigned layout."""
        layout, pad = assignment.layout, assignment.is_padded
        array = self._session.engine.relayout(variable._value, layout, pad=pad)
        self._store_array(variable, assignment, array)

    def _store_first_value(self, variable: keras.Variable, assignment: Assignment, array: object) -> None:
        """Store the first value of a pending variable, and restore its class, so that it is no longer pending."""
        self._store_array(variable, assignment, array)
        restore_variable_class(variable)  # last, so that after an interrupt the variable is still pending
        variable._initializer = None

    def _store_array(self, variable: keras.Variable, assignment: Assignment, array: Any) -> None:
        """Store an array in a variable, shard later assignments from the host, and record the layout."""
        session, layout = self._session, assignment.layout
        value = session.engine.make_variable(array, name=variable.path, trainable=variable.trainable)
        keras_layout = session.backend.store_value(variable, value, assignment, session)
        install_host_value_sharding(variable, assignment)
        variable.layout = layout
        self._session.registry.set_layout(variable, layout, keras_layout)

    def _convert_initializer(self, variable: keras.Variable) -> Initializer:
        """Return layoutmap's initializer for the Keras initializer of a variable."""
        shape, dtype = tuple(variable.shape), keras.backend.standardize_dtype(variable._dtype)
        if self._session.context.spans_processes and is_seed_state(variable):
            return make_seed_initializer(variable._initializer, shape, dtype)
        return convert_initializer(variable._initializer, shape, dtype, self._unshard_seed)

    def _unshard_seed(self, seed: object) -> object:
        """Return the global value of a drawn seed as a tensor of Keras."""
        return keras.ops.convert_to_tensor(self._session.engine.to_numpy(seed))
