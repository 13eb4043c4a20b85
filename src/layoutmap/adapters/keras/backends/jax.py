"""Store and train Keras variables on JAX: `_value` is a `jax.Array`, and `_layout` may be a `NamedSharding`."""

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

from layoutmap.adapters.keras.backends.jax_processes import GATHERED, make_write_once_save_wrapper
from layoutmap.adapters.keras.backends.jax_steps import (
    PRIVATE_NAMES,
    constrain_to_layout,
    make_training_method_wrappers,
    place_on_mesh,
    read_stored_array,
    read_training_state,
    read_unpadded_value,
)
from layoutmap.adapters.keras.private import in_stateless_scope
from layoutmap.adapters.keras.protocol import Backend, KerasSession, WrappedMethods
from layoutmap.adapters.keras.training import create_training_variables, record_gradients_instead_of_applying
from layoutmap.adapters.keras.wraps import get_session
from layoutmap.core.errors import ScopeError
from layoutmap.core.layout import Layout
from layoutmap.core.variables import Assignment, VariableSpec
from layoutmap.engines import get_engine
from layoutmap.engines.jax.ambient import suspend_ambient_mesh
from layoutmap.engines.jax.padded import PaddedArray, explain_why_padding_is_impossible, wrap_padded_array
from layoutmap.engines.patches import set_attribute_temporarily


class JaxBackend(Backend):
    """Adapt layoutmap to Keras on JAX (see `layoutmap.adapters.keras.protocol`)."""

    engine_name = "jax"
    compiler_chooses_layouts = True
    stored_types = (PaddedArray,)
    read_value = read_stored_array = staticmethod(read_stored_array)
    global_init_reasons = MappingProxyType(
        {
            "Orthogonal": "the QR decomposition of an orthogonal matrix needs the whole matrix",
            "Constant": "its constant is an array that already exists as a whole",
        }
    )

    def explain_why_padding_is_impossible(self, variable: VariableSpec, layout: Layout) -> str:
        """Return why a variable cannot be stored with padding in a layout, or an empty text if it can."""
        if jax.process_count() > 1:
            return "Keras in several processes stores no padding"
        return variable.no_padding or explain_why_padding_is_impossible(variable, layout)

    def list_required_private_names(self) -> Sequence[tuple[object, Sequence[str]]]:
        """Return pairs of a Keras class and its private methods that `jax_steps` wraps."""
        return PRIVATE_NAMES

    @contextmanager
    def suspend_tracing(self) -> Generator[None]:
        """Run the block outside any trace and without the mesh of `jax.set_mesh`."""
        # `jax.ensure_compile_time_eval` would make global arrays constants of the trace, so use `eval_context`.
        with jax.core.eval_context(), suspend_ambient_mesh():
            yield

    def is_tracing(self) -> bool:
        """Return whether the code runs in a compiled function's trace."""
        return isinstance(jax.numpy.add(0, 0), jax.core.Tracer)

    def store_value(
        self, variable: keras.Variable, value: object, assignment: Assignment, session: KerasSession
    ) -> object:
        """Store a value, and a new sharding in `_layout`. Return the sharding, which identifies the variable."""
        native = session.engine.make_native_layout(assignment.layout, assignment.layout.rank)
        # Keras copies `_layout` to the slots of a weight, so a separate object for each weight identifies its slots.
        keras_layout = jax.sharding.NamedSharding(native.mesh, native.spec, memory_kind=native.memory_kind)
        variable._layout = keras_layout
        variable._value = value
        # Keras has no hook for reading values, so set methods on the instance. A copy of the variable gets its own.
        own = variable.__dict__
        own["__array__"] = functools.partial(_convert_to_numpy_array, variable)
        own.pop("_direct_assign", None)
        own.pop("_maybe_autocast", None)
        if assignment.is_padded or assignment.layout.host_memory:
            own["_maybe_autocast"] = functools.partial(read_unpadded_value, variable)
        if session.context.spans_processes or assignment.is_padded:
            own["_direct_assign"] = functools.partial(_assign_value, variable)
        return keras_layout

    # `with_sharding_constraint` works with and without a trace, so no `Distribution` is needed (decisions/0007).
    def relayout_output(self, array: object, layout: Layout, session: KerasSession) -> object:
        """Return an array in a layout: constrained to it in a trace, and redistributed outside a trace."""
        return jax.lax.with_sharding_constraint(array, session.engine.make_native_layout(layout, layout.rank))

    def make_layer_method_wrappers(self, layer: keras.Layer, session: KerasSession) -> WrappedMethods:
        """Return a wrapper of `_maybe_build` that raises if a layer's weights do not fit `jax.set_mesh`'s mesh."""
        build = layer._maybe_build

        @functools.wraps(build)
        def maybe_build(call_spec: Any) -> object:
            _check_ambient_mesh(layer, call_spec.first_arg, session)
            return build(call_spec)

        return {"_maybe_build": maybe_build}

    @staticmethod
    def make_training_method_wrappers(model: keras.Model, session: KerasSession) -> WrappedMethods:
        """Return wrappers of a model's methods, by name. They place batches on the mesh, and keep layouts."""
        wrappers = make_training_method_wrappers(model, session)
        if session.context.spans_processes:
            wrappers = {
                **wrappers,
                **{
                    name: make_write_once_save_wrapper(model, session, name)
                    for name in ("save", "save_weights")
                },
            }
        return wrappers

    @contextmanager
    def match_draws_and_rows_temporarily(self, model: object) -> Generator[None]:
        """Make steps take the whole batch from each process, instead of its own rows, until the block ends."""
        session = get_session(model)
        if session is None:
            yield
            return
        with set_attribute_temporarily(session.thread_state, "has_whole_batch", True):
            yield

    def compute_losses_and_gradients(
        self, model: keras.Model, x: object, y: object, sample_weight: object
    ) -> tuple[dict[str, object], list[object]]:
        """Return the logs of a training step, and the gradients that it passes to optimizers, as numpy arrays."""
        session, batch = get_session(model), (x, y, sample_weight)
        weights = model.trainable_variables

        def compute_logs_and_gradients(state: object, data: object) -> object:
            with record_gradients_instead_of_applying(model) as found:
                logs, _ = model.train_step(state, data)
            gradients = [found.get(id(variable)) for variable in weights]
            return logs, [
                each if each is None else constrain_to_layout(each, v)
                for each, v in zip(gradients, weights, strict=True)
            ]

        with suspend_ambient_mesh():
            # Loss trackers that are created in a trace would store tracers, so create them now.
            create_training_variables(model, session, batch)
            if session is not None:
                batch = place_on_mesh(batch, session)
            logs, gradients = jax.jit(compute_logs_and_gradients)(read_training_state(model), batch)
        gradients = [
            None if g is None else wrap_padded_array(g, v.shape)
            for g, v in zip(gradients, weights, strict=True)
        ]
        return jax.tree.map(get_engine("jax").to_numpy, (logs, gradients))


def _check_ambient_mesh(layer: keras.Layer, argument: object, session: KerasSession) -> None:
    """Raise if `argument` is a JAX array, and a layer's weights do not fit the mesh of `jax.set_mesh`."""
    ambient_mesh = jax.sharding.get_abstract_mesh()
    if ambient_mesh.empty or not isinstance(argument, jax.Array) or in_stateless_scope():
        return
    is_auto = all(kind == jax.sharding.AxisType.Auto for kind in ambient_mesh.axis_types)
    if is_auto and ambient_mesh.size == session.policy.mesh.size:
        return
    raise ScopeError(
        f"{layer.name}: the layer cannot be called on the mesh of jax.set_mesh",
        facts={"set mesh": str(ambient_mesh.shape_tuple), "mesh": str(session.policy.mesh)},
        why="JAX cannot combine arrays of different meshes, and a layout map needs axes of type Auto",
        fix="unset that mesh: with jax.set_mesh(None): model(x); fit, evaluate, and predict do so themselves",
    )


def _assign_value(variable: keras.Variable, value: object) -> None:
    """Assign a value to a variable in the variable's layout. Keras calls this instead of its own `_direct_assign`."""
    if isinstance(value, jax.core.Tracer) or not getattr(value, "is_fully_addressable", True):
        type(variable)._direct_assign(variable, value)
    else:  # JAX would send the global value to all processes, so each process shards its own copy
        variable._value = get_engine("jax").relayout(value, variable.layout, pad=True)


def _convert_to_numpy_array(variable: keras.Variable, dtype: Any = None, copy: bool | None = None) -> object:
    # JAX would cache the host copy, so a save would leave the whole model in host memory. `to_numpy` caches nothing.
    """Return the global value of a variable as a numpy array. This replaces `__array__`."""
    known = variable.__dict__.get(GATHERED)
    return np.asarray(
        get_engine("jax").to_numpy(read_stored_array(variable)) if known is None else known, dtype=dtype
    )
