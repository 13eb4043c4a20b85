"""Call layers on the mesh: place unsharded tensors on it, and read weights in layouts that DTensor supports."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from layoutmap.adapters.keras.backends.tensorflow_functions import replace_unsupported_functions_temporarily
from layoutmap.adapters.keras.backends.tensorflow_gathering import (
    GatheringLevel,
    allows_only_batch_layout,
    relayout_to_batch_layout,
    relayout_with_gradient,
)
from layoutmap.adapters.keras.backends.tensorflow_unsupported import (
    get_read_layout_converter,
    translate_compiler_refusals,
)
from layoutmap.adapters.keras.call_stack import is_building_layer
from layoutmap.adapters.keras.private import in_stateless_scope
from layoutmap.adapters.keras.protocol import KerasSession
from layoutmap.adapters.keras.training import compare_batch_between_processes, place_batch
from layoutmap.adapters.keras.wraps import get_call_method
from layoutmap.core.errors import LayoutMapWarning
from layoutmap.core.layout import Layout
from layoutmap.engines.agreement import CallComparisonSchedule
from layoutmap.engines.patches import set_attribute_temporarily
from layoutmap.engines.tensorflow.constraints import constrain_layout
from layoutmap.engines.tensorflow.traces import copy_captured_arrays_to_mesh

dtensor = tf.experimental.dtensor


def make_mesh_call_wrapper(
    layer: keras.Layer, session: KerasSession, method_name: str
) -> Callable[..., object]:
    """Return a wrapper of a layer's `call`. The outermost call moves inputs to the mesh, and results back."""
    original = _make_readable_weights_call_wrapper(layer, session, method_name)

    @functools.wraps(original)
    def call_on_mesh(*args: object, **kwargs: object) -> object:
        here = session.thread_state
        if here.is_exporting or here.call_depth or in_stateless_scope():
            return original(*args, **kwargs)
        with set_attribute_temporarily(here, "call_depth", here.call_depth + 1), compute_on_mesh(session):
            if not tf.executing_eagerly():
                results = original(*args, **kwargs)
                copy_captured_arrays_to_mesh(functools.partial(replicate_tensor, session=session))
                return results
            session.raise_if_plan_only(layer.name)
            has_unsharded = any(map(is_unsharded_array, keras.tree.flatten((args, kwargs))))
            # Two threads could deadlock with different orders of locks, so take the session's lock first everywhere.
            with session.lock:
                if has_unsharded:
                    args, kwargs = place_batch(convert_sparse_inputs_to_dense((args, kwargs), layer), session)
                on_mesh = session.engine.run_on(session.policy.mesh)
                with translate_compiler_refusals(f"{layer.name}: the call"), on_mesh:
                    results = original(*args, **kwargs)
                if not has_unsharded:
                    return results
                return keras.tree.map_structure(lambda each: _unshard_result(each, session), results)

    return call_on_mesh


def _make_readable_weights_call_wrapper(
    layer: keras.Layer, session: KerasSession, method_name: str
) -> Callable[..., object]:
    """Return a wrapper of a layer's `call` in which the layer reads its weights in layouts that DTensor supports."""
    original = get_call_method(layer, method_name)

    @functools.wraps(original)
    def call_with_readable_weights(*args: object, **kwargs: object) -> object:
        with set_attribute_temporarily(
            session.thread_state, "to_reading_layout", get_read_layout_converter(layer)
        ):
            if not session.thread_state.call_depth or not allows_only_batch_layout(layer, session):
                return original(*args, **kwargs)
            args, kwargs = relayout_to_batch_layout((args, kwargs), session)
            results = original(*args, **kwargs)
            # At level AS_PLANNED, only recurrent layers get here. DTensor may choose their outputs' layouts, so do not
            # relay these out.
            gathers = session.thread_state.gathering_level
            return relayout_to_batch_layout(results, session) if gathers else results

    return call_with_readable_weights


@contextmanager
def compute_on_mesh(session: KerasSession) -> Generator[None]:
    """Make Keras on this thread compute with operations that DTensor supports until the block ends."""
    with replace_unsupported_functions_temporarily(functools.partial(replicate_tensor, session=session)):
        yield


def make_weight_reader(variable: Any, layout: Layout, session: KerasSession) -> Callable[[], tf.Tensor]:
    """Return a function that reads a sharded weight in a layout that DTensor's operations support.

    The weight is gathered over the dim of the batch, because DTensor cannot sum over an axis that two operands shard
    over different dims. It is gathered over all dims if the layer that is being called needs that.
    """
    original = variable.value
    usual = session.policy.derive_compute_layout(layout)

    def read_value() -> tf.Tensor:
        read = original()
        if not session.thread_state.call_depth:
            return tf.constant(session.engine.to_numpy(read)) if is_building_eagerly() else read
        reading = session.thread_state.to_reading_layout
        wanted = reading(usual) if reading else usual
        if session.thread_state.gathering_level >= GatheringLevel.WEIGHTS:
            wanted = Layout.replicated(layout.mesh, layout.rank)
        variable.read_layout = wanted
        if session.thread_state.gathering_level:
            # Relay out the gradient of this read, too. The optimizer does so for other gradients, such as those of
            # regularizers.
            return relayout_with_gradient(read, wanted)
        return read if wanted == layout else constrain_layout(read, wanted)

    return read_value


def is_building_eagerly() -> bool:
    """Return whether a layer is being built eagerly, so that its weights must be read unsharded."""
    return tf.executing_eagerly() and is_building_layer()


def is_unsharded_array(value: object) -> bool:
    """Return whether a value is an array that is on no mesh."""
    if isinstance(value, tf.Tensor):
        return not dtensor.is_dtensor(value)
    return isinstance(value, (np.ndarray, tf.SparseTensor))


def convert_sparse_inputs_to_dense(values: object, layer: keras.Layer) -> Any:
    """Return nested inputs with dense tensors instead of sparse ones, which DTensor lacks. Warn of each."""

    def convert_to_dense(value: object) -> object:
        if not isinstance(value, tf.SparseTensor):
            return value
        warnings.warn(
            f"{layer.name}: a sparse input is converted to a dense tensor, because DTensor has no sparse tensors",
            LayoutMapWarning,
            stacklevel=2,
        )
        return tf.sparse.to_dense(tf.sparse.reorder(value))

    return keras.tree.map_structure(convert_to_dense, values, none_is_leaf=True)


def _unshard_result(value: object, session: KerasSession) -> object:
    """Return a tensor on the mesh as an unsharded one through which gradients flow. Return other values unchanged."""
    if not isinstance(value, tf.Tensor) or not dtensor.is_dtensor(value):
        return value

    def unshard_tensor(tensor: tf.Tensor) -> Any:
        def backward(upstream: Any) -> tf.Tensor:
            return session.engine.relayout(
                upstream, session.policy.derive_batch_layout(tuple(upstream.shape))
            )

        return tf.constant(session.engine.to_numpy(tensor)), backward

    return tf.custom_gradient(unshard_tensor)(value) if value.dtype.is_floating else unshard_tensor(value)[0]


def replicate_tensor(value: Any, session: KerasSession) -> Any:
    """Return a tensor replicated on the mesh. Return a value that is not a tensor unchanged."""
    if not isinstance(value, tf.Tensor):
        return value
    return constrain_layout(value, session.policy.make_replicated_layout(len(value.shape)))


def relayout_gradient_to_read_layout(gradient: tf.Tensor, variable: Any) -> tf.Tensor:
    """Return a gradient in the layout in which a layer read the weight, or unchanged if no layer read it."""
    return gradient if variable.read_layout is None else constrain_layout(gradient, variable.read_layout)


def compare_and_place_batch(
    batch: object, session: KerasSession, schedule: CallComparisonSchedule | None = None
) -> Any:
    """Compare a batch between the processes, and return it on the mesh."""

    def convert_to_numpy(value: object) -> object:
        return value.numpy() if isinstance(value, tf.Tensor) and is_unsharded_array(value) else value

    batch = keras.tree.map_structure(convert_to_numpy, batch, none_is_leaf=True)
    compare_batch_between_processes(batch, session, schedule)
    return place_batch(batch, session)
