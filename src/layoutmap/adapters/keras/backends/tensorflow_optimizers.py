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
    relayout_gradient_to_read_layout,
    replicate_tensor,
)
from layoutmap.adapters.keras.pending import is_pending
from layoutmap.adapters.keras.protocol import KerasSession
from layoutmap.engines.tensorflow.constraints import constrain_layout


def make_var_key_wrapper(optimizer: keras.Optimizer) -> Callable[..., object]:
    """Return a wrapper of an optimizer's `_var_key` that returns a key without initializing a pending variable."""
    original = optimizer._var_key

    @functools.wraps(original)
    def get_key(variable: keras.Variable) -> object:
        # Keras's key would initialize a pending variable, so use the id instead until `update_value_references` runs.
        return id(variable) if is_pending(variable) else original(variable)

    return get_key


def make_apply_wrapper(optimizer: keras.Optimizer, session: KerasSession) -> Callable[..., object]:
    """Return a wrapper of `apply` that runs on the mesh, with each gradient in the layout of its weight.

    Without that, DTensor chooses layouts for the backward pass that suit the optimizer, and fails (Muon on a
    transformer).
    """
    original = optimizer.apply

    @functools.wraps(original)
    def apply_on_mesh(
        grads: Iterable[object], trainable_variables: Iterable[keras.Variable] | None = None
    ) -> object:
        weights = optimizer._trainable_variables if trainable_variables is None else trainable_variables
        weights, grads = list(weights), list(grads)
        with contextlib.ExitStack() as stack:
            if tf.executing_eagerly():
                stack.enter_context(session.lock)
                stack.enter_context(session.engine.run_on(session.policy.mesh))
            stack.enter_context(compute_on_mesh(session))
            laid_out = [_relayout_gradient(g, v, session) for g, v in zip(grads, weights, strict=True)]
            return original(laid_out, trainable_variables)

    return apply_on_mesh


def _relayout_gradient(
    gradient: object, weight: keras.Variable | tf.Variable, session: KerasSession
) -> object:
    """Return a gradient in the layout of its weight. Updates of single rows are replicated instead."""
    layout = getattr(weight, "layout", None)
    if layout is None or not isinstance(gradient, tf.Tensor):
        return _replicate_row_updates(gradient, weight, session)
    held: Any = weight if isinstance(weight, tf.Variable) else weight.value
    # DTensor computes the gradient in the layout in which the layer read the weight, so first constrain it to that.
    gradient = constrain_layout(relayout_gradient_to_read_layout(gradient, held), layout)
    held.read_layout = None  # so that the optimizer reads the weight in its stored layout
    return gradient


def wrap_to_assign_dense_values(
    method: Callable[..., object], session: KerasSession
) -> Callable[..., object]:
    """Wrap an optimizer's method such as `assign_add` to get dense values, because DTensor cannot add single rows.

    The rows stay rows until then, as in unsharded Keras, where a row that occurs twice counts twice in a mean of
    squares.
    """

    @functools.wraps(method)
    def assign_dense(variable: keras.Variable, value: object) -> object:
        rows = _replicate_row_updates(value, variable, session)
        return method(variable, tf.convert_to_tensor(rows) if isinstance(rows, tf.IndexedSlices) else rows)

    return assign_dense


def _replicate_row_updates(value: object, variable: keras.Variable, session: KerasSession) -> object:
    """Return the update of a variable's rows as replicated rows, because DTensor would sum only local rows.

    Their number and that of the variable's rows become constants, because DTensor does not shard arrays of unknown
    size. Other values are returned unchanged.
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
