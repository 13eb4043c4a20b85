"""Pooling, convolutions, flips and rolls by operations that DTensor has rules for, and their gradients too.

A window's places are slices of the array: their mean is average pooling, and the sum of their products with a filter's
places is a depthwise convolution. A filter that is dilated has zeros between its places (why:
decisions/0145).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf


def averages(values: Any, size: Any, steps: Any, padding: str) -> Any:
    """Return the average of each window of an array whose channels are last; padding counts for nothing.

    Args:
        values: The array, of shape (rows, *space, channels).
        size: The sizes of windows along the axes of space, or one for all.
        steps: How far apart windows are, likewise.
        padding: `"SAME"` or `"VALID"`.
    """
    rank = len(values.shape)
    for axis, (length, step) in enumerate(zip(_each(size, rank - 2), _each(steps, rank - 2), strict=True), 1):
        ones = tf.ones([values.shape[i] if i == axis else 1 for i in range(rank)], values.dtype)
        total, counts = (tf.add_n(list(_places(a, axis, length, step, padding))) for a in (values, ones))
        values = total / counts
    return values


def depthwise(values: Any, kernel: Any, steps: Sequence[int], padding: str) -> Any:
    """Return a depthwise convolution of images whose channels are last.

    Args:
        values: The images, of shape (rows, height, width, channels).
        kernel: The filter, of shape (height, width, channels, multiples).
        steps: How far apart windows are along both axes.
        padding: `"SAME"` or `"VALID"`.
    """
    height, width, *sides = kernel.shape
    total = tf.add_n(
        [
            place[..., None] * kernel[i, j]
            for i, rows in enumerate(_places(values, 1, height, steps[0], padding))
            for j, place in enumerate(_places(rows, 2, width, steps[1], padding))
        ]
    )
    return tf.reshape(total, [*total.shape[:3], math.prod(sides)])


def conv(
    plain: Callable[..., Any],
    inputs: Any,
    kernel: Any,
    strides: Any = 1,
    padding: str = "valid",
    data_format: Any = None,
    dilation_rate: Any = 1,
) -> Any:
    """Return one convolution for each group, joined; see `keras.ops.conv`, which has XLA do that."""
    axis = 1 if (data_format or keras.config.image_data_format()) == "channels_first" else -1
    groups = inputs.shape[axis] // kernel.shape[-2]
    own = functools.partial(plain, strides=strides, padding=padding, data_format=data_format)
    kernel = _dilated(tf.convert_to_tensor(kernel), dilation_rate)
    if groups == 1:
        return own(inputs, kernel)
    pairs = zip(tf.split(inputs, groups, axis), tf.split(kernel, groups, -1), strict=True)
    return tf.concat([own(*pair) for pair in pairs], axis)


def depthwise_conv2d(
    plain: Callable[..., Any],
    input: Any,
    filter: Any,
    strides: Any,
    padding: Any,
    data_format: Any = None,
    dilations: Any = None,
    name: Any = None,
) -> Any:
    """Return TensorFlow's own depthwise convolution, with the gradients of the composition."""
    own = functools.partial(plain, strides=strides, padding=padding, data_format=data_format)
    if not isinstance(padding, str):
        return own(input, filter, dilations=dilations)
    first = data_format == "NCHW"

    def composed(values: Any, kernel: Any) -> Any:
        values = tf.transpose(values, [0, 2, 3, 1]) if first else values
        result = depthwise(values, kernel, strides[2:] if first else strides[1:3], padding)
        return tf.transpose(result, [0, 3, 1, 2]) if first else result

    @tf.custom_gradient
    def run(values: Any, kernel: Any) -> tuple[Any, Callable[[Any], Any]]:
        def back(upstream: Any) -> Any:
            with tf.GradientTape() as tape:
                tape.watch([values, kernel])
                result = composed(values, kernel)
            return tape.gradient(result, [values, kernel], upstream)

        return own(values, kernel), back

    return run(tf.convert_to_tensor(input), _dilated(tf.convert_to_tensor(filter), dilations or 1))


def separable_conv2d(
    plain: Callable[..., Any],
    input: Any,
    depthwise_filter: Any,
    pointwise_filter: Any,
    strides: Any,
    padding: Any,
    data_format: Any = None,
    dilations: Any = None,
    name: Any = None,
) -> Any:
    """Return a depthwise convolution, and one by windows of one place after it."""
    between = tf.nn.depthwise_conv2d(input, depthwise_filter, strides, padding, data_format, dilations)
    return tf.nn.conv2d(between, pointwise_filter, 1, "VALID", data_format)


def avg_pool(
    plain: Callable[..., Any],
    input: Any,
    ksize: Any,
    strides: Any,
    padding: Any,
    data_format: Any = None,
    name: Any = None,
) -> Any:
    """Return the composition, where channels are last, as Keras has them."""
    if not isinstance(padding, str) or str(data_format).startswith("NC"):
        return plain(input, ksize, strides, padding, data_format)
    return averages(input, ksize, strides, padding)


def pool(
    plain: Callable[..., Any], input: Any, window_shape: Any, pooling_type: str, *args: Any, **kwargs: Any
) -> Any:
    """Return the composition for averages as Keras asks for them."""
    rest = dict(zip(("strides", "padding", "data_format", "dilations"), args, strict=False)) | kwargs
    if pooling_type != "AVG" or rest.get("dilations") or str(rest.get("data_format")).startswith("NC"):
        return plain(input, window_shape, pooling_type, **rest)
    return averages(input, window_shape, rest.get("strides") or 1, rest.get("padding", "VALID"))


def reverse(plain: Callable[..., Any], tensor: Any, axis: Any, name: Any = None) -> Any:
    """Return the array gathered from the end along some axes."""
    for each in np.ravel(tf.get_static_value(axis)).tolist():
        tensor = tf.gather(tensor, tf.range(tensor.shape[each] - 1, -1, -1), axis=each % len(tensor.shape))
    return tensor


def roll(plain: Callable[..., Any], input: Any, shift: Any, axis: Any, name: Any = None) -> Any:
    """Return the array with its ends joined to its beginnings along some axes."""
    for by, each in zip(np.ravel(tf.get_static_value(shift)).tolist(), np.ravel(axis).tolist(), strict=True):
        size = input.shape[each]
        last = by % size if size else 0
        if last:
            input = tf.concat(tf.split(input, [size - last, last], each)[::-1], each)
    return input


def _each(sizes: Any, num_axes: int) -> Sequence[int]:
    """A size for each axis of space, of what TensorFlow takes: one, one for each, or also for rows and channels."""
    sizes = np.ravel(sizes).tolist()
    return sizes * num_axes if len(sizes) == 1 else sizes[1:-1] if len(sizes) == num_axes + 2 else sizes


def _dilated(kernel: Any, rates: Any) -> Any:
    """A filter with zeros between its places along each axis of space."""
    for axis, rate in enumerate(_each(rates, len(kernel.shape) - 2)):
        if rate > 1:
            size = kernel.shape[axis]
            apart = tf.expand_dims(kernel, axis + 1)
            apart = tf.pad(
                apart, [(0, rate - 1) if i == axis + 1 else (0, 0) for i in range(len(apart.shape))]
            )
            shape = [size * rate if i == axis else n for i, n in enumerate(kernel.shape)]
            kernel = tf.reshape(apart, shape)[(*(slice(None),) * axis, slice(0, (size - 1) * rate + 1))]
    return kernel


def _places(values: Any, axis: int, size: int, step: int, padding: str) -> Iterator[Any]:
    """Each place of the windows along an axis: what all windows have there."""
    length = values.shape[axis]
    windows = -(-length // step) if padding == "SAME" else (length - size) // step + 1
    if padding == "SAME":
        missing = max((windows - 1) * step + size - length, 0)
        around = (missing // 2, missing - missing // 2)
        values = tf.pad(values, [around if i == axis else (0, 0) for i in range(len(values.shape))])
    for place in range(size):
        along = slice(place, place + (windows - 1) * step + 1, step)
        yield values[(*(slice(None),) * axis, along)]
