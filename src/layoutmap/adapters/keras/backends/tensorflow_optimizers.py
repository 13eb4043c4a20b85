"""Update weights on the mesh."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable
from typing import Any

import keras
import tensorflow as tf

from layoutmap.adapters.keras.backends.tensorflow_calls import (
    compute_on_mesh,
    relayout_as_read,
    replicate_tensor,
)
from layoutmap.adapters.keras.pending import is_pending
from layoutmap.adapters.keras.protocol import KerasSession
from layoutmap.engines.tensorflow.constraints import constrain_layout


def wrap_var_key(optimizer: keras.Optimizer) -> Callable[..., object]:
    """Wrap an optimizer's `_var_key` so that it initializes no variable."""
    plain = optimizer._var_key

    @functools.wraps(plain)
    def get_key(variable: keras.Variable) -> object:
        # A key must not create a variable's value. Keys are computed again after materialization.
        return id(variable) if is_pending(variable) else plain(variable)

    return get_key


def wrap_apply(optimizer: keras.Optimizer, session: KerasSession) -> Callable[..., object]:
    """Wrap `apply` to run on the mesh, with each gradient in the layout of its weight.

    Without that, DTensor chooses layouts for the backward pass that suit the optimizer, and fails (Muon on a
    transformer).
    """
    plain = optimizer.apply

    @functools.wraps(plain)
    def apply(grads: Iterable[object], trainable_variables: Iterable[keras.Variable] | None = None) -> object:
        weights = optimizer._trainable_variables if trainable_variables is None else trainable_variables
        weights, grads = list(weights), list(grads)
        with contextlib.ExitStack() as stack:
            if tf.executing_eagerly():
                stack.enter_context(session.lock)
                stack.enter_context(session.engine.run_on(session.policy.mesh))
            stack.enter_context(compute_on_mesh(session))
            laid_out = [_place_gradient(g, v, session) for g, v in zip(grads, weights, strict=True)]
            return plain(laid_out, trainable_variables)

    return apply


def _place_gradient(gradient: object, weight: keras.Variable | tf.Variable, session: KerasSession) -> object:
    layout = getattr(weight, "layout", None)
    if layout is None or not isinstance(gradient, tf.Tensor):
        return _replicate_rows(gradient, weight, session)
    held: Any = weight if isinstance(weight, tf.Variable) else weight.value
    # First use the layout in which the layer read the weight, so that backward mirrors forward.
    gradient = constrain_layout(relayout_as_read(gradient, held), layout)
    held.read_layout = None  # updates read the variable in its own layout
    return gradient


def wrap_assign(method: Callable[..., object], session: KerasSession) -> Callable[..., object]:
    """Wrap an assignment method to use dense values, because DTensor cannot add single rows.

    The rows stay rows until then, as in plain Keras, where a row that occurs twice counts twice in a mean of squares.
    """

    @functools.wraps(method)
    def assign(variable: keras.Variable, value: object) -> object:
        rows = _replicate_rows(value, variable, session)
        return method(variable, tf.convert_to_tensor(rows) if isinstance(rows, tf.IndexedSlices) else rows)

    return assign


def _replicate_rows(value: object, variable: keras.Variable, session: KerasSession) -> object:
    """Replicate the update of a variable's rows, because DTensor would sum only local rows.

    Their number, and that of the variable's, are made constants: DTensor does not shard what has an unknown size.
    """
    if not isinstance(value, tf.IndexedSlices):
        return value
    shape = tuple(variable.shape)
    indices = replicate_tensor(value.indices, session)
    values = value.values
    if indices.shape.is_fully_defined():
        values = tf.reshape(values, [*indices.shape, *shape[1:]])
    values = replicate_tensor(values, session)
    return tf.IndexedSlices(values, indices, tf.constant(shape, indices.dtype))
