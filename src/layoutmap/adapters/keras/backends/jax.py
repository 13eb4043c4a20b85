"""Keras on JAX: `Variable._value` is a `jax.Array`, `Variable._layout` may be a `NamedSharding`."""

from __future__ import annotations

import functools
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import jax
import jax.core
import keras
import numpy as np

from layoutmap.adapters.keras.backends.jax_processes import GATHERED, wrap_save
from layoutmap.adapters.keras.backends.jax_steps import (
    PRIVATE,
    make_training_wraps,
    pin_layout,
    place_on_mesh,
    read_logical,
    read_state,
    read_stored,
)
from layoutmap.adapters.keras.private import in_stateless_scope
from layoutmap.adapters.keras.protocol import Backend, KerasSession, WrappedMethods
from layoutmap.adapters.keras.training import make_for_training, record_gradients
from layoutmap.adapters.keras.wraps import get_session
from layoutmap.core.errors import ScopeError
from layoutmap.core.layout import Layout
from layoutmap.core.variables import Assignment, VariableSpec
from layoutmap.engines import get_engine
from layoutmap.engines.jax.ambient import leave_ambient_mesh
from layoutmap.engines.jax.padded import PaddedArray, explain_no_padding, wrap
from layoutmap.engines.patches import set_temporarily


class JaxBackend(Backend):
    """Keras on JAX (see `layoutmap.adapters.keras.protocol`)."""

    engine_name = "jax"
    chooses_layouts = True
    stored_types = (PaddedArray,)
    read_value = read_stored = staticmethod(read_stored)
    global_init = MappingProxyType(
        {
            "Orthogonal": "the QR decomposition of an orthogonal matrix needs all of it",
            "Constant": "its constant is an array, all of which exists already",
        }
    )

    def explain_no_padding(self, variable: VariableSpec, layout: Layout) -> str:
        """Return why a variable cannot be stored padded, or an empty text if it can."""
        if jax.process_count() > 1:
            return "Keras in several processes stores no padding"
        return variable.no_padding or explain_no_padding(variable, layout)

    def list_private_names(self) -> Sequence[tuple[object, Sequence[str]]]:
        """Return the private names of Keras's trainer that `jax_steps` wraps."""
        return PRIVATE

    @contextmanager
    def leave_tracing(self) -> Generator[None]:
        """Run the block outside any trace and without the mesh of `jax.set_mesh`."""
        # ensure_compile_time_eval would fold global arrays into constants.
        with jax.core.eval_context(), leave_ambient_mesh():
            yield

    def is_tracing(self) -> bool:
        """Return whether the code runs in a compiled function's trace."""
        return isinstance(jax.numpy.add(0, 0), jax.core.Tracer)

    def store(
        self, variable: keras.Variable, held: object, assignment: Assignment, session: KerasSession
    ) -> object:
        """Give a variable its value and the sharding that later values keep."""
        native = session.engine.native(assignment.layout, assignment.layout.rank)
        # Keras passes a variable's `_layout` to its slots, so a sharding object of its own identifies the weight
        # of a slot.
        tag = jax.sharding.NamedSharding(native.mesh, native.spec, memory_kind=native.memory_kind)
        variable._layout = tag
        variable._value = held
        # Keras has no hook for this, so set the method on the instance. A copy of the variable gets its own.
        own = variable.__dict__
        own["__array__"] = functools.partial(_convert_to_array, variable)
        own.pop("_direct_assign", None)
        own.pop("_maybe_autocast", None)
        if assignment.is_padded or assignment.layout.host_memory:
            own["_maybe_autocast"] = functools.partial(read_logical, variable)
        if session.context.across or assignment.is_padded:
            own["_direct_assign"] = functools.partial(_assign_value, variable)
        return tag

    # `with_sharding_constraint` works with and without a trace, so no `Distribution` is needed (decisions/0007).
    def relayout_output(
        self,
        array: object,
        layout: Layout,
        session: KerasSession,
    ) -> object:
        """Constrain an array in a trace to a layout, or redistribute it outside one."""
        return jax.lax.with_sharding_constraint(array, session.engine.native(layout, layout.rank))

    def make_layer_wraps(self, layer: keras.Layer, session: KerasSession) -> WrappedMethods:
        """Wrap `_maybe_build` so that it refuses arrays on another mesh or on explicit axes."""
        build = layer._maybe_build

        @functools.wraps(build)
        def maybe_build(call_spec: Any) -> object:
            _check_set_mesh(layer, call_spec.first_arg, session)
            return build(call_spec)

        return {"_maybe_build": maybe_build}

    @staticmethod
    def make_training_wraps(model: keras.Model, session: KerasSession) -> WrappedMethods:
        """Return the methods to wrap on a model so that steps place batches and keep layouts."""
        wraps = make_training_wraps(model, session)
        if session.context.across:
            wraps = {**wraps, **{name: wrap_save(model, session, name) for name in ("save", "save_weights")}}
        return wraps

    @contextmanager
    def match_runs(self, model: object) -> Generator[None]:
        """Use all rows of the batch from each process until the block ends, instead of only its own."""
        session = get_session(model)
        if session is None:
            yield
            return
        with set_temporarily(session.on_thread, "has_all_rows", True):
            yield

    def gradients(
        self, model: keras.Model, x: object, y: object, sample_weight: object
    ) -> tuple[dict[str, object], list[object]]:
        """Return the logs of a training step, and the gradients that it passes to optimizers, in its layouts."""
        session, batch = get_session(model), (x, y, sample_weight)
        weights = model.trainable_variables

        def step(state: object, data: object) -> object:
            with record_gradients(model) as found:
                logs, _ = model.train_step(state, data)
            gradients = [found.get(id(variable)) for variable in weights]
            return logs, [
                each if each is None else pin_layout(each, v)
                for each, v in zip(gradients, weights, strict=True)
            ]

        with leave_ambient_mesh():
            # create loss trackers now, because they would store tracers during a trace
            make_for_training(model, session, batch)
            if session is not None:
                batch = place_on_mesh(batch, session)
            logs, gradients = jax.jit(step)(read_state(model), batch)
        gradients = [None if g is None else wrap(g, v.shape) for g, v in zip(gradients, weights, strict=True)]
        return jax.tree.map(get_engine("jax").to_numpy, (logs, gradients))


def _check_set_mesh(layer: keras.Layer, given: object, session: KerasSession) -> None:
    set_mesh = jax.sharding.get_abstract_mesh()
    if set_mesh.empty or not isinstance(given, jax.Array) or in_stateless_scope():
        return
    is_auto = all(kind == jax.sharding.AxisType.Auto for kind in set_mesh.axis_types)
    if is_auto and set_mesh.size == session.policy.mesh.size:
        return
    raise ScopeError(
        f"{layer.name}: called while jax.set_mesh is set to another mesh than that of its weights",
        facts={"set mesh": str(set_mesh.shape_tuple), "mesh": str(session.policy.mesh)},
        why="JAX cannot combine arrays of two meshes, and a layout map uses axes of type Auto",
        fix="with jax.set_mesh(None): model(x); fit, evaluate and predict do so themselves",
    )


def _assign_value(variable: keras.Variable, value: object) -> None:
    if isinstance(value, jax.core.Tracer) or not getattr(value, "is_fully_addressable", True):
        type(variable)._direct_assign(variable, value)
    else:  # JAX would send the full value to all processes, so each process shards its own copy
        variable._value = get_engine("jax").relayout(value, variable.layout, pad=True)


def _convert_to_array(variable: keras.Variable, dtype: Any = None, copy: bool | None = None) -> object:
    # JAX caches the host copy, so drop it. Otherwise a save leaves the whole model in host memory.
    known = variable.__dict__.get(GATHERED)
    return np.asarray(
        get_engine("jax").to_numpy(read_stored(variable)) if known is None else known, dtype=dtype
    )
