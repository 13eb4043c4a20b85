"""Compute pooling, convolutions, flips, diagonals, and slices with operations that DTensor supports.

For each position in a window, the elements of all windows at this position are a slice of the array. The mean of these
slices is average pooling. Gathered with an axis for positions, and multiplied by a filter, they are a depthwise
convolution. A dilated filter becomes one with zeros between its elements (decisions/0010).

A function `compute_NAME` replaces the function `NAME` of Keras or TensorFlow. It gets the original function, and the
arguments of a call by name.
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

Original = Callable[..., Any]
Arguments = SimpleNamespace
Sizes = int | Sequence[int]


def compute_conv(original: Original, args: Arguments) -> tf.Tensor:
    """Return a convolution. Several groups are computed one by one, because Keras would use XLA for them."""
    axis = 1 if _has_channels_first(args) else -1
    kernel = _insert_zeros_in_kernel(args.kernel, args.dilation_rate)
    groups = args.inputs.shape[axis] // kernel.shape[-2]
    rest = {"padding": args.padding, "data_format": args.data_format}
    own = functools.partial(original, strides=args.strides, **rest)
    if groups == 1:
        return own(args.inputs, kernel)
    # ConvNeXt has hundreds of groups of one channel, so compute them by one operation.
    if groups == args.inputs.shape[axis]:
        apart = tf.reshape(kernel, [*kernel.shape[:-2], groups, -1])
        return keras_nn.depthwise_conv(args.inputs, apart, args.strides, args.padding, args.data_format)
    pairs = zip(tf.split(args.inputs, groups, axis), tf.split(kernel, groups, -1), strict=True)
    return tf.concat([own(*pair) for pair in pairs], axis)


def compute_depthwise_conv(original: Original, args: Arguments) -> tf.Tensor:
    """Return a depthwise convolution, computed as an einsum of the filter and the elements of all windows."""
    kernel = _insert_zeros_in_kernel(args.kernel, args.dilation_rate)
    *sizes, channels, multiples = kernel.shape
    values = _get_channels_last_inputs(args)
    for i, (size, stride) in enumerate(
        zip(sizes, _list_sizes_per_axis(args.strides, len(sizes)), strict=True)
    ):
        values, count = _pad_and_count_windows(values, axis := 1 + 2 * i, size, stride, args.padding)
        values = tf.gather(values, stride * np.arange(count)[:, None] + np.arange(size), axis=axis)
    space, offsets = "xyz"[: len(sizes)], "ijk"[: len(sizes)]
    axes = "".join(map("".join, zip(space, offsets, strict=True)))
    total: Any = tf.einsum(f"b{axes}c,{offsets}cm->b{space}cm", values, kernel)
    return _restore_channel_position(tf.reshape(total, [*total.shape[:-2], channels * multiples]), args)


def compute_separable_conv(original: Original, args: Arguments) -> tf.Tensor:
    """Return a depthwise convolution followed by a pointwise one."""
    rest = args.strides, args.padding, args.data_format, args.dilation_rate
    between = keras_nn.depthwise_conv(args.inputs, args.depthwise_kernel, *rest)
    return keras_nn.conv(between, args.pointwise_kernel, 1, "valid", args.data_format)


def compute_average_pool(original: Original, args: Arguments) -> tf.Tensor:
    """Return average pooling: the mean of the elements in each window."""
    strides = args.pool_size if args.strides is None else args.strides
    return _restore_channel_position(
        _average_windows(_get_channels_last_inputs(args), args.pool_size, strides, args.padding), args
    )


def compute_pool(original: Original, args: Arguments) -> tf.Tensor:
    """Return the average of each window for `tf.nn.pool`, which Keras's adaptive pooling calls."""
    if args.pooling_type != "AVG" or args.dilations or str(args.data_format).startswith("NC"):
        return original(**vars(args))
    return _average_windows(args.input, args.window_shape, args.strides or 1, args.padding)


def compute_reverse(original: Original, args: Arguments) -> tf.Tensor:
    """Return an array reversed along some axes, computed by a gather."""
    values, axes = args.tensor, tf.get_static_value(args.axis)
    if axes is None or not values.shape.is_fully_defined():
        # The indices of a gather need the size of the axis, so run the original operation. DTensor may refuse it.
        return original(**vars(args))
    for axis in np.ravel(axes).tolist():
        values = tf.gather(values, tf.range(values.shape[axis] - 1, -1, -1), axis=axis % len(values.shape))
    return values


def compute_repeat(original: Original, args: Arguments) -> tf.Tensor:
    """Repeat elements by stacking copies. The original's gradient has ten axes, which DTensor cannot gather."""
    values, times, axis = tf.convert_to_tensor(args.input), args.repeats, args.axis
    if not isinstance(times, int) or axis is None or not values.shape.is_fully_defined():
        return original(**vars(args))
    axis, shape = axis % values.shape.rank, values.shape.as_list()
    beside = tf.stack([values] * times, axis + 1)
    return tf.reshape(beside, [*shape[:axis], shape[axis] * times, *shape[axis + 1 :]])


def compute_roll(original: Original, args: Arguments) -> tf.Tensor:
    """Return an array rolled along some axes: elements that leave at the end come back at the start."""
    values, shifts, axes = (args.input, tf.get_static_value(args.shift), tf.get_static_value(args.axis))
    if shifts is None or axes is None or not values.shape.is_fully_defined():
        return original(**vars(args))
    for shift, axis in zip(np.ravel(shifts).tolist(), np.ravel(axes).tolist(), strict=True):
        size = values.shape[axis]
        last = shift % max(size, 1)
        if last:
            values = tf.concat(tf.split(values, [size - last, last], axis)[::-1], axis)
    return values


def compute_eye(original: Original, args: Arguments) -> tf.Tensor:
    """Return the identity matrix as a constant."""
    if not all(isinstance(each, int | None) for each in (args.N, args.M, args.k)):
        return original(**vars(args))
    return tf.constant(np.eye(args.N, args.M, args.k), args.dtype or keras.config.floatx())


def compute_diag(original: Original, args: Arguments) -> tf.Tensor:
    """Return diagonal matrices, selected from the values and zeros by a constant mask."""
    values: Any = tf.convert_to_tensor(args.diagonal)
    size, other = (values.shape[-1], (args.k, args.num_rows, args.num_cols, args.padding_value))
    if not size or other != (0, -1, -1, 0):
        return original(**vars(args))
    is_on = np.eye(size, dtype=bool)
    return tf.where(is_on, tf.expand_dims(values, -1), tf.zeros((), values.dtype))


def compute_diag_part(original: Original, args: Arguments) -> tf.Tensor:
    """Return the diagonals of matrices as the sums of their rows under a constant mask."""
    values: Any = tf.convert_to_tensor(args.input)
    rows, columns = values.shape[-2:]
    if args.k != 0 or rows is None or columns is None or values.dtype == tf.bool:
        return original(**vars(args))
    is_on = np.eye(rows, columns, dtype=bool)
    sums: Any = tf.reduce_sum(tf.where(is_on, values, tf.zeros((), values.dtype)), -1)
    return sums[..., : min(rows, columns)]


def compute_strided_slice(original: Original, args: Arguments) -> tf.Tensor:
    """Return a slice, computed with an index for each axis, because DTensor cannot omit any after a new axis."""
    ends = [tf.get_static_value(each) for each in (args.begin, args.end, args.strides)]
    rank = args.input_.shape.rank
    if not args.new_axis_mask or rank is None or any(each is None for each in ends):
        return original(**vars(args))
    count, dots = len(ends[0]), args.ellipsis_mask.bit_length()
    first = dots - 1 if dots else count
    unnamed = rank - (count - args.new_axis_mask.bit_count() - bool(dots))
    order = [*range(first), *[-1] * unnamed, *range(first + bool(dots), count)]

    def reorder_mask_bits(mask: int, bit_of_unnamed: bool) -> int:
        return sum(1 << at for at, i in enumerate(order) if (bit_of_unnamed if i < 0 else mask >> i & 1))

    named: list[list[int]] = [[1 if i < 0 else each[i] for i in order] for each in ends]
    masks = reorder_mask_bits(args.begin_mask, True), reorder_mask_bits(args.end_mask, True), 0
    masks += reorder_mask_bits(args.new_axis_mask, False), reorder_mask_bits(args.shrink_axis_mask, False)
    return original(args.input_, *named, *masks, args.var, args.name)


def _average_windows(values: tf.Tensor, size: Sizes, strides: Sizes, padding: str) -> tf.Tensor:
    """Return the mean of each window without its padding, computed along one axis after the other."""
    rank = len(values.shape)
    for axis, (length, stride) in enumerate(
        zip(_list_sizes_per_axis(size, rank - 2), _list_sizes_per_axis(strides, rank - 2), strict=True), 1
    ):
        ones = tf.ones([values.shape[i] if i == axis else 1 for i in range(rank)], values.dtype)
        total, counts = (
            tf.add_n(list(_iterate_window_elements_by_position(a, axis, length, stride, padding)))
            for a in (values, ones)
        )
        values = total / counts
    return values


def _has_channels_first(args: Arguments) -> bool:
    return (args.data_format or keras.config.image_data_format()) == "channels_first"


def _get_channels_last_inputs(args: Arguments) -> Any:
    """Return the inputs of a call with channels as the last axis."""
    return keras.ops.moveaxis(args.inputs, 1, -1) if _has_channels_first(args) else args.inputs


def _restore_channel_position(values: tf.Tensor, args: Arguments) -> Any:
    """Return values with channels moved from the last axis to the one of a call's `data_format`."""
    return keras.ops.moveaxis(values, -1, 1) if _has_channels_first(args) else values


def _list_sizes_per_axis(sizes: Sizes, num_axes: int) -> Sequence[int]:
    """Return one size for each spatial axis. A single size is repeated."""
    sizes = np.ravel(sizes).tolist()
    return sizes * num_axes if len(sizes) == 1 else sizes


def _insert_zeros_in_kernel(kernel: Any, rates: Sizes) -> Any:
    """Return a kernel with zeros between its elements along each spatial axis, which dilates it by `rates`."""
    kernel = tf.convert_to_tensor(kernel)
    for axis, rate in enumerate(_list_sizes_per_axis(rates, len(kernel.shape) - 2)):
        if rate > 1:
            size = kernel.shape[axis]
            apart = tf.expand_dims(kernel, axis + 1)
            between = [(0, rate - 1) if i == axis + 1 else (0, 0) for i in range(len(apart.shape))]
            apart = tf.pad(apart, between)
            shape = [size * rate if i == axis else n for i, n in enumerate(kernel.shape)]
            kernel = tf.reshape(apart, shape)[(*(slice(None),) * axis, slice(0, (size - 1) * rate + 1))]
    return kernel


def _pad_and_count_windows(
    values: Any, axis: int, size: int, stride: int, padding: str
) -> tuple[tf.Tensor, int]:
    """Return an array padded along an axis, and the number of windows along this axis."""
    length = values.shape[axis]
    if padding.upper() != "SAME":
        return values, (length - size) // stride + 1
    count = math.ceil(length / stride)
    missing = max((count - 1) * stride + size - length, 0)
    around = (missing // 2, missing - missing // 2)
    return tf.pad(values, [around if i == axis else (0, 0) for i in range(len(values.shape))]), count


def _iterate_window_elements_by_position(
    values: tf.Tensor, axis: int, size: int, stride: int, padding: str
) -> Iterator[tf.Tensor]:
    """Yield, for each position in a window, the elements of all windows along an axis."""
    values, count = _pad_and_count_windows(values, axis, size, stride, padding)
    for offset in range(size):
        yield values[(*(slice(None),) * axis, slice(offset, offset + (count - 1) * stride + 1, stride))]
