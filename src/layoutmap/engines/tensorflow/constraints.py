"""Constrain layouts in compiled functions."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from layoutmap.core.layout import Layout
from layoutmap.engines.protocol import Array
from layoutmap.engines.tensorflow.arrays import (
    check_and_convert_layout,
    get_static_shape,
    relayout_in_trace,
    relayout_tensor,
    unwrap_variable,
)


def constrain_layout(tensor: Array, layout: Layout) -> tf.Tensor:
    """Return a tensor in a layout. In a traced function, DTensor chooses the layout of its gradient.

    So the gradient of a gathered weight is moved to the weight's layout once, and not twice.
    """
    if tensor.shape.rank is not None:
        check_and_convert_layout(layout, get_static_shape(unwrap_variable(tensor)))
    if tf.executing_eagerly() or not tensor.dtype.is_floating:
        return relayout_tensor(tensor, layout)

    @tf.custom_gradient
    def constrain_with_gradient(tensor: Array) -> Any:
        return relayout_in_trace(tensor, layout), lambda upstream: upstream

    return constrain_with_gradient(tensor)
