"""Replace functions of Keras that DTensor cannot compute, while a sharded model is called or updated.

Random functions draw global arrays, because DTensor draws different numbers for each layout of a random array. So a
dropout mask would depend on the mesh. Each device draws the whole array, and keeps its part.

A division of rows (the gradient of an embedding) by an array divides those rows only. Keras also looks for zeros and
NaNs in the divisor, to return NaN there, and DTensor has no layout for an unknown number of them.

A loop over an axis is unrolled, because DTensor has no rule for the list of tensors in which TensorFlow's loop
collects results. A `TensorArray` is created eagerly, as a list of Python.

Functions of TensorFlow itself: arrays are joined along an axis that is counted from the start, since DTensor refuses to
join arrays along a sharded axis, and joins them incorrectly if the axis is negative. `tensorflow_products` and
`tensorflow_windows` compute the others.

Private names of Keras that are replaced while such a call runs, and put back after it, tested on Keras 3.15:

    keras.src.backend.tensorflow.random         dropout, uniform, normal, truncated_normal, randint
    keras.src.backend.tensorflow.numpy          divide, eye
    keras.src.backend.tensorflow.nn             conv, depthwise_conv, separable_conv, average_pool
    keras.src.backend                           rnn, lstm, gru, convert_to_numpy
    keras.src.backend.tensorflow.core           map, scan
    tensorflow                                  concat, einsum, repeat, split, reverse, roll, TensorArray
    tensorflow.linalg                           diag, diag_part
    tensorflow.python.ops.array_ops             strided_slice
    tensorflow.nn                               pool
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import tensorflow as tf
from keras import tree
from keras.src import backend as keras_backend
from keras.src.backend.tensorflow import core as keras_core
from keras.src.backend.tensorflow import nn as keras_nn
from keras.src.backend.tensorflow import numpy as keras_numpy
from keras.src.backend.tensorflow import random as keras_random
from tensorflow.python.ops import array_ops

from layoutmap.adapters.keras.backends import tensorflow_windows
from layoutmap.adapters.keras.backends.tensorflow_products import compute_einsum
from layoutmap.adapters.keras.backends.tensorflow_windows import Original
from layoutmap.engines.patches import AttributePatch, PatchGroup, set_attribute_temporarily

Replicate = Callable[[object], Any]  # returns a replicated tensor
_RANDOM = ("uniform", "normal", "truncated_normal", "randint")
_OF_ARRAYS = ("repeat", "reverse", "roll")
_OF_DIAGONALS = ("diag", "diag_part")
_OF_TIME = ("rnn", "lstm", "gru")
_OF_WINDOWS = ("conv", "depthwise_conv", "separable_conv", "average_pool")
REPLACED = [
    (keras_random, (*_RANDOM, "dropout")),
    (keras_numpy, ("divide", "eye")),
    (keras_nn, _OF_WINDOWS),
    (keras_backend, (*_OF_TIME, "convert_to_numpy")),
    (keras_core, ("map", "scan")),
    (tf, ("concat", "einsum", "split", "TensorArray", *_OF_ARRAYS)),
    (tf.linalg, _OF_DIAGONALS),
    (array_ops, ("strided_slice",)),
    (tf.nn, ("pool",)),
]
"""The replaced functions by module."""

_current = threading.local()


@contextmanager
def replace_unsupported_functions_temporarily(replicate: Replicate) -> Generator[None]:
    """Make Keras on this thread compute with operations that DTensor supports until the block ends."""
    with _PATCHES.activate(), set_attribute_temporarily(_current, "replicate", replicate):
        yield


def _make_function_patch(module: object, name: str, replacement: Original) -> AttributePatch:
    """Return a patch of a function. Threads that compute on a mesh then call `replacement` instead of it."""

    def make_wrapper(original: Original) -> Original:
        @functools.wraps(original)
        def call_replacement(*args: object, **kwargs: object) -> object:
            replicate: Replicate | None = getattr(_current, "replicate", None)
            call = original if replicate is None else functools.partial(replacement, original, replicate)
            return call(*args, **kwargs)

        return call_replacement

    return AttributePatch(module, name, make_wrapper)


def _draw_replicated_array(
    original: Original, replicate: Replicate, *args: object, **kwargs: object
) -> object:
    """Return a replicated random array, so that its numbers do not depend on the mesh."""
    return replicate(original(*args, **kwargs))


def _unroll_loop(original: Original, replicate: Replicate, *args: object, **kwargs: object) -> object:
    return original(*args, **{**kwargs, "unroll": True})


def _compute_dropout(
    original: Original, replicate: Replicate, inputs: tf.Tensor, rate: float, *args: object, **kwargs: object
) -> tf.Tensor:
    if rate in (0.0, 1.0):
        return original(inputs, rate, *args, **kwargs)
    # Dropout of a tensor of ones gives the scaled mask, so replicate only this mask.
    return inputs * replicate(original(tf.ones(inputs.shape, inputs.dtype), rate, *args, **kwargs))


def _divide_indexed_slices(original: Original, replicate: Replicate, x1: object, x2: tf.Tensor) -> object:
    if isinstance(x1, tf.IndexedSlices) and len(getattr(x2, "shape", ())):
        return tf.IndexedSlices(original(x1.values, tf.gather(x2, x1.indices)), x1.indices, x1.dense_shape)
    return original(x1, x2)


def _concatenate_along_nonnegative_axis(
    original: Original, replicate: Replicate, values: object, axis: object, name: str = "concat"
) -> object:
    rank = len(values[0].shape) if isinstance(values, list | tuple) and values else 0
    return original(values, axis % rank if rank and isinstance(axis, int) else axis, name)


def _split_along_nonnegative_axis(
    original: Original,
    replicate: Replicate,
    value: tf.Tensor,
    num_or_size_splits: object,
    axis: object = 0,
    **kwargs: object,
) -> object:
    # The gradient of a split is a concatenation, which DTensor gets wrong along negative axes, so count from the start.
    axis = axis % len(value.shape) if isinstance(axis, int) else axis
    return original(value, num_or_size_splits, axis, **kwargs)


def _create_tensor_array_eagerly(
    original: Original, replicate: Replicate, *args: object, **kwargs: object
) -> object:
    with tf.init_scope():
        return original(*args, **kwargs)


def _compute_unrolled_scan(
    original: Original,
    replicate: Replicate,
    f: Original,
    init: object,
    xs: object = None,
    *args: object,
    **kwargs: object,
) -> tuple[object, object]:
    leaves = [] if xs is None else [tf.convert_to_tensor(x) for x in tree.flatten(xs)]
    if not leaves or not leaves[0].shape[0]:
        return original(f, init, xs, *args, **kwargs)
    rows = [tree.pack_sequence_as(xs, row) for row in zip(*map(tf.unstack, leaves), strict=True)]
    is_reversed, made = kwargs.get("reverse", False), list[Any]()
    for row in rows[::-1] if is_reversed else rows:
        init, each = f(init, row)
        made.append(each)
    return init, tree.map_structure(lambda *each: tf.stack(each), *(made[::-1] if is_reversed else made))


def _compute_unrolled_map(original: Original, replicate: Replicate, f: Original, xs: object) -> object:
    return _compute_unrolled_scan(
        lambda *_: (None, original(f, xs)), replicate, lambda carry, x: (carry, f(x)), None, xs
    )[1]


def _make_window_replacement(name: str) -> Original:
    """Return the replacement of a function, which calls `tensorflow_windows.compute_NAME` with named arguments."""
    replacement = getattr(tensorflow_windows, f"compute_{name}")

    def call_replacement(original: Original, replicate: Replicate, *args: object, **kwargs: object) -> object:
        bound_arguments = inspect.signature(original).bind(*args, **kwargs)
        bound_arguments.apply_defaults()
        return replacement(original, SimpleNamespace(**bound_arguments.arguments))

    return call_replacement


_PATCHES = PatchGroup(
    [
        *(_make_function_patch(keras_random, name, _draw_replicated_array) for name in _RANDOM),
        _make_function_patch(keras_random, "dropout", _compute_dropout),
        _make_function_patch(keras_numpy, "divide", _divide_indexed_slices),
        _make_function_patch(keras_numpy, "eye", _make_window_replacement("eye")),
        _make_function_patch(tf, "concat", _concatenate_along_nonnegative_axis),
        _make_function_patch(
            tf,
            "einsum",
            lambda original, replicate, *args, **kwargs: compute_einsum(original, *args, **kwargs),
        ),
        _make_function_patch(tf, "split", _split_along_nonnegative_axis),
        _make_function_patch(tf, "TensorArray", _create_tensor_array_eagerly),
        *(_make_function_patch(tf, name, _make_window_replacement(name)) for name in _OF_ARRAYS),
        _make_function_patch(array_ops, "strided_slice", _make_window_replacement("strided_slice")),
        *(_make_function_patch(tf.linalg, name, _make_window_replacement(name)) for name in _OF_DIAGONALS),
        *(_make_function_patch(keras_nn, name, _make_window_replacement(name)) for name in _OF_WINDOWS),
        *(_make_function_patch(keras_backend, name, _unroll_loop) for name in _OF_TIME),
        _make_function_patch(keras_core, "map", _compute_unrolled_map),
        _make_function_patch(keras_core, "scan", _compute_unrolled_scan),
        _make_function_patch(
            keras_backend, "convert_to_numpy", lambda original, replicate, value: original(replicate(value))
        ),
        _make_function_patch(tf.nn, "pool", _make_window_replacement("pool")),
    ]
)
