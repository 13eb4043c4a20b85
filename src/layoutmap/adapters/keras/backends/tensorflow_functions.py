"""Replace functions of Keras that DTensor cannot compute, while a sharded model is called or updated.

Random functions draw global arrays: DTensor draws other numbers for each way in which a random array is sharded, so a
dropout mask would depend on the mesh. Every device draws all of it and keeps its part; that costs drawing time, and no
traffic.

A division of rows (the gradient of an embedding) by an array divides those rows only. Keras also looks for zeros and
NaNs in the divisor, to give NaN there, and DTensor cannot lay out how many it finds.

A loop over an axis is unrolled: DTensor has no rule for the list of tensors in which TensorFlow's collects results. A
`TensorArray` is one of Python's, as outside of compiled functions.

Functions of TensorFlow itself: arrays are joined along an axis that is counted from the start, since DTensor refuses to
join sharded ones along a sharded axis, and does so wrongly if the axis is negative. What `tensorflow_products` and
`tensorflow_windows` have is computed as they say.

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
from layoutmap.adapters.keras.backends.tensorflow_windows import Plain
from layoutmap.engines.patches import Attribute, Patches, set_temporarily

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
def compute_for_mesh(replicate: Replicate) -> Generator[None]:
    """Make Keras on this thread compute with operations that DTensor supports until the block ends."""
    with _PATCHES.activate(), set_temporarily(_current, "replicate", replicate):
        yield


def _replace_function(module: object, name: str, by: Plain) -> Attribute:
    """Patch a function so that threads computing on a mesh call `by` instead."""

    def make(plain: Plain) -> Plain:
        @functools.wraps(plain)
        def call_replacement(*args: object, **kwargs: object) -> object:
            replicate: Replicate | None = getattr(_current, "replicate", None)
            return plain(*args, **kwargs) if replicate is None else by(plain, replicate, *args, **kwargs)

        return call_replacement

    return Attribute(module, name, make)


def _replicate_random(plain: Plain, replicate: Replicate, *args: object, **kwargs: object) -> object:
    return replicate(plain(*args, **kwargs))


def _unroll_loop(plain: Plain, replicate: Replicate, *args: object, **kwargs: object) -> object:
    return plain(*args, **{**kwargs, "unroll": True})


def _compute_dropout(
    plain: Plain, replicate: Replicate, inputs: tf.Tensor, rate: float, *args: object, **kwargs: object
) -> tf.Tensor:
    if rate in (0.0, 1.0):
        return plain(inputs, rate, *args, **kwargs)
    # Dropout of a tensor of ones gives the scaled mask.
    return inputs * replicate(plain(tf.ones(inputs.shape, inputs.dtype), rate, *args, **kwargs))


def _divide(plain: Plain, replicate: Replicate, x1: object, x2: tf.Tensor) -> object:
    if isinstance(x1, tf.IndexedSlices) and len(getattr(x2, "shape", ())):
        return tf.IndexedSlices(plain(x1.values, tf.gather(x2, x1.indices)), x1.indices, x1.dense_shape)
    return plain(x1, x2)


def _concatenate(
    plain: Plain, replicate: Replicate, values: object, axis: object, name: str = "concat"
) -> object:
    rank = len(values[0].shape) if isinstance(values, list | tuple) and values else 0
    return plain(values, axis % rank if rank and isinstance(axis, int) else axis, name)


def _split(
    plain: Plain,
    replicate: Replicate,
    value: tf.Tensor,
    num_or_size_splits: object,
    axis: object = 0,
    **kwargs: object,
) -> object:
    # The gradient of a split concatenates, which DTensor cannot do along sharded axes.
    axis = axis % len(value.shape) if isinstance(axis, int) else axis
    return plain(value, num_or_size_splits, axis, **kwargs)


def _create_array(plain: Plain, replicate: Replicate, *args: object, **kwargs: object) -> object:
    with tf.init_scope():
        return plain(*args, **kwargs)


def _scan(
    plain: Plain,
    replicate: Replicate,
    f: Plain,
    init: object,
    xs: object = None,
    *args: object,
    **kwargs: object,
) -> tuple[object, object]:
    leaves = [] if xs is None else [tf.convert_to_tensor(x) for x in tree.flatten(xs)]
    if not leaves or not leaves[0].shape[0]:
        return plain(f, init, xs, *args, **kwargs)
    rows = [tree.pack_sequence_as(xs, row) for row in zip(*map(tf.unstack, leaves), strict=True)]
    is_reversed, made = kwargs.get("reverse", False), list[Any]()
    for row in rows[::-1] if is_reversed else rows:
        init, each = f(init, row)
        made.append(each)
    return init, tree.map_structure(lambda *each: tf.stack(each), *(made[::-1] if is_reversed else made))


def _map(plain: Plain, replicate: Replicate, f: Plain, xs: object) -> object:
    return _scan(lambda *_: (None, plain(f, xs)), replicate, lambda carry, x: (carry, f(x)), None, xs)[1]


def _make_replacement(name: str) -> Plain:
    """Return the replacement for a function of Keras or TensorFlow."""
    by = getattr(tensorflow_windows, name)

    def call_replacement(plain: Plain, replicate: Replicate, *args: object, **kwargs: object) -> object:
        given = inspect.signature(plain).bind(*args, **kwargs)
        given.apply_defaults()
        return by(plain, SimpleNamespace(**given.arguments))

    return call_replacement


_PATCHES = Patches(
    [
        *(_replace_function(keras_random, name, _replicate_random) for name in _RANDOM),
        _replace_function(keras_random, "dropout", _compute_dropout),
        _replace_function(keras_numpy, "divide", _divide),
        _replace_function(keras_numpy, "eye", _make_replacement("eye")),
        _replace_function(tf, "concat", _concatenate),
        _replace_function(
            tf, "einsum", lambda plain, replicate, *args, **kwargs: compute_einsum(plain, *args, **kwargs)
        ),
        _replace_function(tf, "split", _split),
        _replace_function(tf, "TensorArray", _create_array),
        *(_replace_function(tf, name, _make_replacement(name)) for name in _OF_ARRAYS),
        _replace_function(array_ops, "strided_slice", _make_replacement("strided_slice")),
        *(_replace_function(tf.linalg, name, _make_replacement(name)) for name in _OF_DIAGONALS),
        *(_replace_function(keras_nn, name, _make_replacement(name)) for name in _OF_WINDOWS),
        *(_replace_function(keras_backend, name, _unroll_loop) for name in _OF_TIME),
        _replace_function(keras_core, "map", _map),
        _replace_function(keras_core, "scan", _scan),
        _replace_function(
            keras_backend, "convert_to_numpy", lambda plain, replicate, value: plain(replicate(value))
        ),
        _replace_function(tf.nn, "pool", _make_replacement("pool")),
    ]
)
