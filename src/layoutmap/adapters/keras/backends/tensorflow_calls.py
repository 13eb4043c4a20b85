"""Calls of layers on the mesh: plain tensors are placed on it, weights are read as DTensor computes with them."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from layoutmap.adapters.keras.backends.tensorflow_functions import computing_for_a_mesh
from layoutmap.adapters.keras.backends.tensorflow_gathering import (
    Gathering,
    between_layers,
    is_pinned,
    pinned,
)
from layoutmap.adapters.keras.backends.tensorflow_unsupported import explained, reading_layout
from layoutmap.adapters.keras.call_stack import is_in_build
from layoutmap.adapters.keras.private import in_stateless_scope
from layoutmap.adapters.keras.protocol import KerasSession
from layoutmap.adapters.keras.training import check_same_batch, place_batch
from layoutmap.adapters.keras.wraps import call_of
from layoutmap.core.errors import LayoutMapWarning
from layoutmap.core.layout import Layout
from layoutmap.engines.agreement import CallSchedule
from layoutmap.engines.patches import temporarily

dtensor = tf.experimental.dtensor


def calling(layer: keras.Layer, session: KerasSession, name: str) -> Callable[..., object]:
    """Return the `call` of a layer; the outermost one takes plain tensors to the mesh and back."""
    plain = _reading_in(layer, session, name)

    @functools.wraps(plain)
    def call(*args: object, **kwargs: object) -> object:
        here = session.on_thread
        if here.is_exporting or here.call_depth or in_stateless_scope():
            return plain(*args, **kwargs)
        with inside_a_call(session):
            given = keras.tree.flatten((args, kwargs))
            if not tf.executing_eagerly() or not any(is_plain(each) for each in given):
                return plain(*args, **kwargs)
            session.refuse_in_a_plan(layer.name)
            # The session's lock first, as where weights are made: two threads would else wait for each other.
            with session.lock:
                args, kwargs = place_batch(densified((args, kwargs), layer), session)
                with explained(f"{layer.name}: the call"), session.engine.run_on(session.policy.mesh):
                    results = plain(*args, **kwargs)
                return keras.tree.map_structure(lambda each: _off_mesh(each, session), results)

    return call


def _reading_in(layer: keras.Layer, session: KerasSession, name: str) -> Callable[..., object]:
    """Return the layer's `call`, in which its weights are read as DTensor can compute with them."""
    plain = call_of(layer, name)

    @functools.wraps(plain)
    def call(*args: object, **kwargs: object) -> object:
        with temporarily(session.on_thread, "reading", reading_layout(layer)):
            if not session.on_thread.call_depth or not is_pinned(layer, session):
                return plain(*args, **kwargs)
            args, kwargs = between_layers((args, kwargs), session)
            results = plain(*args, **kwargs)
            # Where nothing is gathered, only what goes into a loop over time is laid out.
            return between_layers(results, session) if session.on_thread.gathering else results

    return call


@contextmanager
def inside_a_call(session: KerasSession) -> Generator[None]:
    """While open, a layer of the scope is being called, and the layers in it are not the outermost one."""
    here = session.on_thread
    with temporarily(here, "call_depth", here.call_depth + 1), on_mesh(session):
        yield


@contextmanager
def on_mesh(session: KerasSession) -> Generator[None]:
    """While open, in this thread, Keras computes as DTensor can."""
    with computing_for_a_mesh(functools.partial(replicated, session=session)):
        yield


def reading_in_layout(held: Any, layout: Layout, session: KerasSession) -> Callable[[], tf.Tensor]:
    """Return how a sharded weight is read: gathered, where the operations that use it cannot have it sharded.

    It is gathered over the dim of the batch, since DTensor does not join an axis that two operands shard over two
    dims; and over all dims where the layer that is being called needs that.
    """
    plain = held.value
    usual = session.policy.derive_compute_layout(layout)

    def value() -> tf.Tensor:
        read = plain()
        if not session.on_thread.call_depth:
            return tf.constant(session.engine.to_numpy(read)) if is_read_by_a_build() else read
        reading = session.on_thread.reading
        wanted = reading(usual) if reading else usual
        if session.on_thread.gathering >= Gathering.WEIGHTS:
            wanted = Layout.replicated(layout.mesh, layout.rank)
        held.read_layout = wanted
        if session.on_thread.gathering:
            # What else has a gradient for the weight, such as a regularizer, is laid out apart.
            return pinned(read, wanted, session)
        return read if wanted == layout else session.engine.relayout(read, wanted)

    return value


def is_read_by_a_build() -> bool:
    """Whether a layer that is being built computes with its weights, off the mesh: DTensor lacks some operations."""
    return tf.executing_eagerly() and is_in_build()


def is_plain(value: object) -> bool:
    """Whether something is an array that is on no mesh."""
    if isinstance(value, tf.Tensor):
        return not dtensor.is_dtensor(value)
    return isinstance(value, (np.ndarray, tf.SparseTensor))


def densified(values: object, layer: keras.Layer) -> Any:
    """Return dense tensors in the place of sparse ones, of which DTensor holds none."""

    def dense(value: object) -> object:
        if not isinstance(value, tf.SparseTensor):
            return value
        warnings.warn(
            f"{layer.name}: sparse input becomes dense on its way to the mesh, since DTensor holds no sparse tensors",
            LayoutMapWarning,
            stacklevel=2,
        )
        return tf.sparse.to_dense(tf.sparse.reorder(value))

    return keras.tree.map_structure(dense, values, none_is_leaf=True)


def _off_mesh(value: object, session: KerasSession) -> object:
    """Return a result as a plain tensor, so that what follows need not run on the mesh; with gradients."""
    if not isinstance(value, tf.Tensor) or not dtensor.is_dtensor(value):
        return value

    def off_mesh(tensor: tf.Tensor) -> Any:
        def back(upstream: Any) -> tf.Tensor:
            return session.engine.relayout(
                upstream, session.policy.derive_batch_layout(tuple(upstream.shape))
            )

        return tf.constant(session.engine.to_numpy(tensor)), back

    return tf.custom_gradient(off_mesh)(value) if value.dtype.is_floating else off_mesh(value)[0]


def replicated(value: Any, session: KerasSession) -> Any:
    """Return a tensor, replicated; anything else as it is."""
    if not isinstance(value, tf.Tensor):
        return value
    return session.engine.relayout(value, session.policy.replicated(len(value.shape)))


def as_read(gradient: object, held: Any, session: KerasSession) -> Any:
    """Return a gradient in the layout in which its weight took part in the computation."""
    return gradient if held.read_layout is None else session.engine.relayout(gradient, held.read_layout)


def placed(batch: object, session: KerasSession, schedule: CallSchedule | None = None) -> Any:
    """Return a batch on the mesh, compared between the processes if it is due."""

    def as_numpy(value: object) -> object:
        return value.numpy() if isinstance(value, tf.Tensor) and is_plain(value) else value

    batch = keras.tree.map_structure(as_numpy, batch, none_is_leaf=True)
    check_same_batch(batch, session, schedule)
    return place_batch(batch, session)
