"""Constrain layouts in compiled functions."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from layoutmap.core.layout import Layout
from layoutmap.engines.protocol import Array
from layoutmap.engines.tensorflow.arrays import (
    fit_layout,
    move_tensor,
    read_shape,
    relayout_in_trace,
    unwrap_variable,
)


def constrain_layout(tensor: Array, layout: Layout) -> tf.Tensor:
    """Constrain a tensor to a layout. In a traced function, DTensor chooses the layout of its gradient.

    That saves the collective that brings the gradient of a gathered weight into the weight's layout twice.
    """
    if tensor.shape.rank is not None:
        fit_layout(layout, read_shape(unwrap_variable(tensor)))
    if tf.executing_eagerly() or not tensor.dtype.is_floating:
        return move_tensor(tensor, layout)

    @tf.custom_gradient
    def constrain(tensor: Array) -> Any:
        return relayout_in_trace(tensor, layout), lambda upstream: upstream

    return constrain(tensor)
