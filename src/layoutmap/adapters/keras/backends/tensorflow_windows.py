"""Compute pooling, convolutions, flips, diagonals, and slices with operations that DTensor supports.

A window's places are slices of the array: their mean is average pooling. Gathered, with an axis for places, and times a
filter they are a depthwise convolution. A dilated filter has zeros between its places (why: decisions/0010).

Each function stands for one of Keras or TensorFlow, which it is given with the arguments of a call by their names.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.backend.tensorflow import nn as keras_nn

Plain = Callable[..., Any]
Given = SimpleNamespace
Sizes = int | Sequence[int]


def conv(plain: Plain, given: Given) -> tf.Tensor:
    """Return one convolution per group, concatenated. Keras would use XLA for groups."""
    axis = 1 if _is_first(given) else -1
    kernel = _insert_zeros(given.kernel, given.dilation_rate)
    groups = given.inputs.shape[axis] // kernel.shape[-2]
    rest = {"padding": given.padding, "data_format": given.data_format}
    own = functools.partial(plain, strides=given.strides, **rest)
    if groups == 1:
        return own(given.inputs, kernel)
    if groups == given.inputs.shape[axis]:  # without this, ConvNeXt would need hundreds of convolutions
        apart = tf.reshape(kernel, [*kernel.shape[:-2], groups, -1])
        return keras_nn.depthwise_conv(given.inputs, apart, given.strides, given.padding, given.data_format)
    pairs = zip(tf.split(given.inputs, groups, axis), tf.split(kernel, groups, -1), strict=True)
    return tf.concat([own(*pair) for pair in pairs], axis)


def depthwise_conv(plain: Plain, given: Given) -> tf.Tensor:
    """Return a depthwise convolution as an einsum over windows with one axis per filter position."""
    kernel = _insert_zeros(given.kernel, given.dilation_rate)
    *sizes, channels, multiples = kernel.shape
    values = _move_channels_last(given)
    for i, (size, step) in enumerate(zip(sizes, _expand_sizes(given.strides, len(sizes)), strict=True)):
        values, count = _pad_axis(values, axis := 1 + 2 * i, size, step, given.padding)
        values = tf.gather(values, step * np.arange(count)[:, None] + np.arange(size), axis=axis)
    space, places = "xyz"[: len(sizes)], "ijk"[: len(sizes)]
    axes = "".join(map("".join, zip(space, places, strict=True)))
    total: Any = tf.einsum(f"b{axes}c,{places}cm->b{space}cm", values, kernel)
    return _as_given(tf.reshape(total, [*total.shape[:-2], channels * multiples]), given)


def separable_conv(plain: Plain, given: Given) -> tf.Tensor:
    """Return a depthwise convolution followed by a pointwise one."""
    rest = given.strides, given.padding, given.data_format, given.dilation_rate
    between = keras_nn.depthwise_conv(given.inputs, given.depthwise_kernel, *rest)
    return keras_nn.conv(between, given.pointwise_kernel, 1, "valid", given.data_format)


def average_pool(plain: Plain, given: Given) -> tf.Tensor:
    """Return the average of each window."""
    steps = given.pool_size if given.strides is None else given.strides
    return _as_given(
        _average_windows(_move_channels_last(given), given.pool_size, steps, given.padding), given
    )


def pool(plain: Plain, given: Given) -> tf.Tensor:
    """Return the average of each window for Keras's adaptive pooling."""
    if given.pooling_type != "AVG" or given.dilations or str(given.data_format).startswith("NC"):
        return plain(**vars(given))
    return _average_windows(given.input, given.window_shape, given.strides or 1, given.padding)


def reverse(plain: Plain, given: Given) -> tf.Tensor:
    """Return an array reversed along some axes, by a gather."""
    values, axes = given.tensor, tf.get_static_value(given.axis)
    if axes is None or not values.shape.is_fully_defined():
        # The axis size is known only in the step, so let DTensor report what it cannot do.
        return plain(**vars(given))
    for axis in np.ravel(axes).tolist():
        values = tf.gather(values, tf.range(values.shape[axis] - 1, -1, -1), axis=axis % len(values.shape))
    return values


def repeat(plain: Plain, given: Given) -> tf.Tensor:
    """Repeat elements by joining copies, because the gradient of tiles has ten axes, which DTensor cannot gather."""
    values, times, axis = tf.convert_to_tensor(given.input), given.repeats, given.axis
    if not isinstance(times, int) or axis is None or not values.shape.is_fully_defined():
        return plain(**vars(given))
    axis, shape = axis % values.shape.rank, values.shape.as_list()
    beside = tf.stack([values] * times, axis + 1)
    return tf.reshape(beside, [*shape[:axis], shape[axis] * times, *shape[axis + 1 :]])


def roll(plain: Plain, given: Given) -> tf.Tensor:
    """Shift the elements along some axes, with those at the end moving to the start."""
    values, shifts, axes = given.input, tf.get_static_value(given.shift), tf.get_static_value(given.axis)
    if shifts is None or axes is None or not values.shape.is_fully_defined():
        return plain(**vars(given))
    for shift, axis in zip(np.ravel(shifts).tolist(), np.ravel(axes).tolist(), strict=True):
        size = values.shape[axis]
        last = shift % max(size, 1)
        if last:
            values = tf.concat(tf.split(values, [size - last, last], axis)[::-1], axis)
    return values


def eye(plain: Plain, given: Given) -> tf.Tensor:
    """Return the identity matrix as a constant."""
    if not all(isinstance(each, int | None) for each in (given.N, given.M, given.k)):
        return plain(**vars(given))
    return tf.constant(np.eye(given.N, given.M, given.k), given.dtype or keras.config.floatx())


def diag(plain: Plain, given: Given) -> tf.Tensor:
    """Return diagonal matrices, selected from the values and zeros by a constant mask."""
    values: Any = tf.convert_to_tensor(given.diagonal)
    size, other = values.shape[-1], (given.k, given.num_rows, given.num_cols, given.padding_value)
    if not size or other != (0, -1, -1, 0):
        return plain(**vars(given))
    is_on = np.eye(size, dtype=bool)
    return tf.where(is_on, tf.expand_dims(values, -1), tf.zeros((), values.dtype))


def diag_part(plain: Plain, given: Given) -> tf.Tensor:
    """Return the diagonal as the column sums of a masked matrix."""
    values: Any = tf.convert_to_tensor(given.input)
    rows, columns = values.shape[-2:]
    if given.k != 0 or rows is None or columns is None or values.dtype == tf.bool:
        return plain(**vars(given))
    is_on = np.eye(rows, columns, dtype=bool)
    sums: Any = tf.reduce_sum(tf.where(is_on, values, tf.zeros((), values.dtype)), -1)
    return sums[..., : min(rows, columns)]


def strided_slice(plain: Plain, given: Given) -> tf.Tensor:
    """Return a slice that names each axis, since DTensor mishandles unnamed axes after a new axis."""
    ends = [tf.get_static_value(each) for each in (given.begin, given.end, given.strides)]
    rank = given.input_.shape.rank
    if not given.new_axis_mask or rank is None or any(each is None for each in ends):
        return plain(**vars(given))
    count, dots = len(ends[0]), given.ellipsis_mask.bit_length()
    first = dots - 1 if dots else count
    unnamed = rank - (count - given.new_axis_mask.bit_count() - bool(dots))
    order = [*range(first), *[-1] * unnamed, *range(first + bool(dots), count)]

    def reorder_bits(mask: int, of_unnamed: bool) -> int:
        return sum(1 << at for at, i in enumerate(order) if (of_unnamed if i < 0 else mask >> i & 1))

    named: list[list[int]] = [[1 if i < 0 else each[i] for i in order] for each in ends]
    masks = reorder_bits(given.begin_mask, True), reorder_bits(given.end_mask, True), 0
    masks += reorder_bits(given.new_axis_mask, False), reorder_bits(given.shrink_axis_mask, False)
    return plain(given.input_, *named, *masks, given.var, given.name)


def _average_windows(values: tf.Tensor, size: Sizes, steps: Sizes, padding: str) -> tf.Tensor:
    """Return the averages of windows, one axis after the other, ignoring padding."""
    rank = len(values.shape)
    for axis, (length, step) in enumerate(
        zip(_expand_sizes(size, rank - 2), _expand_sizes(steps, rank - 2), strict=True), 1
    ):
        ones = tf.ones([values.shape[i] if i == axis else 1 for i in range(rank)], values.dtype)
        total, counts = (
            tf.add_n(list(_iterate_places(a, axis, length, step, padding))) for a in (values, ones)
        )
        values = total / counts
    return values


def _is_first(given: Given) -> bool:
    return (given.data_format or keras.config.image_data_format()) == "channels_first"


def _move_channels_last(given: Given) -> Any:
    return keras.ops.moveaxis(given.inputs, 1, -1) if _is_first(given) else given.inputs


def _as_given(values: tf.Tensor, given: Given) -> Any:
    return keras.ops.moveaxis(values, -1, 1) if _is_first(given) else values


def _expand_sizes(sizes: Sizes, num_axes: int) -> Sequence[int]:
    """Expand one size to one per spatial axis."""
    sizes = np.ravel(sizes).tolist()
    return sizes * num_axes if len(sizes) == 1 else sizes


def _insert_zeros(kernel: Any, rates: Sizes) -> Any:
    """Insert zeros between a kernel's elements along each spatial axis."""
    kernel = tf.convert_to_tensor(kernel)
    for axis, rate in enumerate(_expand_sizes(rates, len(kernel.shape) - 2)):
        if rate > 1:
            size = kernel.shape[axis]
            apart = tf.expand_dims(kernel, axis + 1)
            between = [(0, rate - 1) if i == axis + 1 else (0, 0) for i in range(len(apart.shape))]
            apart = tf.pad(apart, between)
            shape = [size * rate if i == axis else n for i, n in enumerate(kernel.shape)]
            kernel = tf.reshape(apart, shape)[(*(slice(None),) * axis, slice(0, (size - 1) * rate + 1))]
    return kernel


def _pad_axis(values: Any, axis: int, size: int, step: int, padding: str) -> tuple[tf.Tensor, int]:
    """Return the array padded along an axis, and the number of windows there."""
    length = values.shape[axis]
    if padding.upper() != "SAME":
        return values, (length - size) // step + 1
    count = math.ceil(length / step)
    missing = max((count - 1) * step + size - length, 0)
    around = (missing // 2, missing - missing // 2)
    return tf.pad(values, [around if i == axis else (0, 0) for i in range(len(values.shape))]), count


def _iterate_places(values: tf.Tensor, axis: int, size: int, step: int, padding: str) -> Iterator[tf.Tensor]:
    """Yield, for each position in a window, the elements of all windows along an axis."""
    values, count = _pad_axis(values, axis, size, step, padding)
    for place in range(size):
        yield values[(*(slice(None),) * axis, slice(place, place + (count - 1) * step + 1, step))]
