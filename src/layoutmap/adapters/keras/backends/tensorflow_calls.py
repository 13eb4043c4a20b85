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

from layoutmap.adapters.keras.backends.tensorflow_functions import compute_for_mesh
from layoutmap.adapters.keras.backends.tensorflow_gathering import (
    Gathering,
    is_pinned,
    pin_layer_values,
    pin_layout,
)
from layoutmap.adapters.keras.backends.tensorflow_unsupported import explain_errors, get_reading_layout
from layoutmap.adapters.keras.call_stack import is_in_build
from layoutmap.adapters.keras.private import in_stateless_scope
from layoutmap.adapters.keras.protocol import KerasSession
from layoutmap.adapters.keras.training import check_same_batch, place_batch
from layoutmap.adapters.keras.wraps import get_call
from layoutmap.core.errors import LayoutMapWarning
from layoutmap.core.layout import Layout
from layoutmap.engines.agreement import CallSchedule
from layoutmap.engines.patches import set_temporarily
from layoutmap.engines.tensorflow.constraints import constrain_layout
from layoutmap.engines.tensorflow.traces import place_captured_arrays

dtensor = tf.experimental.dtensor


def wrap_call(layer: keras.Layer, session: KerasSession, name: str) -> Callable[..., object]:
    """Return a layer's `call` that moves unsharded tensors to the mesh and back in the outermost layer."""
    plain = _wrap_reading_call(layer, session, name)

    @functools.wraps(plain)
    def call(*args: object, **kwargs: object) -> object:
        here = session.on_thread
        if here.is_exporting or here.call_depth or in_stateless_scope():
            return plain(*args, **kwargs)
        with set_temporarily(here, "call_depth", here.call_depth + 1), compute_on_mesh(session):
            if not tf.executing_eagerly():
                results = plain(*args, **kwargs)
                place_captured_arrays(functools.partial(replicate_tensor, session=session))
                return results
            session.refuse_in_a_plan(layer.name)
            has_unsharded = any(map(is_unsharded_array, keras.tree.flatten((args, kwargs))))
            # Take the session's lock first, as weight creation does. Another order could deadlock two threads.
            with session.lock:
                if has_unsharded:
                    args, kwargs = place_batch(make_dense((args, kwargs), layer), session)
                with explain_errors(f"{layer.name}: the call"), session.engine.run_on(session.policy.mesh):
                    results = plain(*args, **kwargs)
                if not has_unsharded:
                    return results
                return keras.tree.map_structure(lambda each: _unshard_result(each, session), results)

    return call


def _wrap_reading_call(layer: keras.Layer, session: KerasSession, name: str) -> Callable[..., object]:
    """Wrap a layer's `call` to read weights in layouts with which DTensor can compute."""
    plain = get_call(layer, name)

    @functools.wraps(plain)
    def call(*args: object, **kwargs: object) -> object:
        with set_temporarily(session.on_thread, "reading", get_reading_layout(layer)):
            if not session.on_thread.call_depth or not is_pinned(layer, session):
                return plain(*args, **kwargs)
            args, kwargs = pin_layer_values((args, kwargs), session)
            results = plain(*args, **kwargs)
            # Before any gathering, only the inputs of loops over time need a layout.
            return pin_layer_values(results, session) if session.on_thread.gathering else results

    return call


@contextmanager
def compute_on_mesh(session: KerasSession) -> Generator[None]:
    """Make Keras compute with operations that DTensor supports, on this thread."""
    with compute_for_mesh(functools.partial(replicate_tensor, session=session)):
        yield


def make_weight_reader(held: Any, layout: Layout, session: KerasSession) -> Callable[[], tf.Tensor]:
    """Return the function that reads a sharded weight, gathered where its operations require it.

    It is gathered over the dim of the batch, since DTensor does not join an axis that two operands shard over two
    dims; and over all dims where the layer that is being called needs that.
    """
    plain = held.value
    usual = session.policy.derive_compute_layout(layout)

    def read_value() -> tf.Tensor:
        read = plain()
        if not session.on_thread.call_depth:
            return tf.constant(session.engine.to_numpy(read)) if is_building_eagerly() else read
        reading = session.on_thread.reading
        wanted = reading(usual) if reading else usual
        if session.on_thread.gathering >= Gathering.WEIGHTS:
            wanted = Layout.replicated(layout.mesh, layout.rank)
        held.read_layout = wanted
        if session.on_thread.gathering:
            # The optimizer places other gradients of the weight, such as a regularizer's.
            return pin_layout(read, wanted)
        return read if wanted == layout else constrain_layout(read, wanted)

    return read_value


def is_building_eagerly() -> bool:
    """Return whether a layer is being built eagerly, so that its weights must be read unsharded."""
    return tf.executing_eagerly() and is_in_build()


def is_unsharded_array(value: object) -> bool:
    """Return whether a value is an array that is on no mesh."""
    if isinstance(value, tf.Tensor):
        return not dtensor.is_dtensor(value)
    return isinstance(value, (np.ndarray, tf.SparseTensor))


def make_dense(values: object, layer: keras.Layer) -> Any:
    """Convert sparse tensors in nested inputs to dense ones, which DTensor requires."""

    def convert_sparse(value: object) -> object:
        if not isinstance(value, tf.SparseTensor):
            return value
        warnings.warn(
            f"{layer.name}: sparse input becomes dense on its way to the mesh, since DTensor holds no sparse tensors",
            LayoutMapWarning,
            stacklevel=2,
        )
        return tf.sparse.to_dense(tf.sparse.reorder(value))

    return keras.tree.map_structure(convert_sparse, values, none_is_leaf=True)


def _unshard_result(value: object, session: KerasSession) -> object:
    """Unshard a result. Gradients flow through."""
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
    """Return a replicated tensor, and any other value unchanged."""
    if not isinstance(value, tf.Tensor):
        return value
    return constrain_layout(value, session.policy.replicated(len(value.shape)))


def relayout_as_read(gradient: tf.Tensor, held: Any) -> tf.Tensor:
    """Move a gradient to the layout in which the layer read the weight."""
    return gradient if held.read_layout is None else constrain_layout(gradient, held.read_layout)


def place_on_mesh(batch: object, session: KerasSession, schedule: CallSchedule | None = None) -> Any:
    """Return a batch on the mesh, after the processes have compared it if a comparison is due."""

    def as_numpy(value: object) -> object:
        return value.numpy() if isinstance(value, tf.Tensor) and is_unsharded_array(value) else value

    batch = keras.tree.map_structure(as_numpy, batch, none_is_leaf=True)
    check_same_batch(batch, session, schedule)
    return place_batch(batch, session)
