"""The kinds of layers that are drawn, and what each is made with.

Widths and heads are mostly multiples of 4 and 8, so that most axes divide by the dims of a mesh.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import Any

from layoutmap.testing.models.choices import Choices
from layoutmap.testing.models.keras.describing import Layer
from layoutmap.testing.models.maps import Shape
from layoutmap.testing.models.values import WIDTHS, divisors, heads_of

Options = dict[str, Any]
Maker = Callable[[Choices, Shape], tuple[Options, Shape]]
"""Draws the options of a layer for a shape, and says which shape it puts out."""

WITH_LORA = ("Dense", "EinsumDense", "Embedding", "Conv1D", "Conv2D", "Conv3D")
_ACTIVATIONS = (None, "gelu", "tanh", "relu", "silu", "sigmoid", "softmax")
_OF_KERNELS = {
    (): 12,
    (("use_bias", False),): 2,
    (("kernel_regularizer", "l2"),): 1,
    (("kernel_constraint", "unit_norm"),): 1,
    (("kernel_constraint", "max_norm"),): 1,
}
_MOST_ELEMENTS = 4096
_MOST_STEPS = 64
"""Of a recurrent layer: PyTorch computes each one operation at a time, on all simulated devices."""


def layer_for(
    choices: Choices, shape: Shape, *, attention: bool, favourites: Collection[str] = ()
) -> tuple[str, Options, Shape]:
    """A layer that fits a shape: its kind, its options and the shape that it puts out.

    Args:
        choices: Decides.
        shape: The shape, without the axis of rows.
        attention: Whether it may be called with several values.
        favourites: Kinds that are drawn more often.
    """
    fits = {
        kind: weight + 20 * (kind in favourites)
        for kind, (ranks, weight, make) in KINDS.items()
        if len(shape) in ranks
        and (attention or kind not in ATTENTION)
        and (make not in (_recurrent, _bidirectional) or shape[0] <= _MOST_STEPS)
    }
    while True:
        kind = choices.weighted(fits)
        options, after = KINDS[kind][2](choices, shape)
        if math.prod(after) <= _MOST_ELEMENTS:
            return kind.replace("*", str(len(shape) - 1)), options, after
        del fits[kind]


# -- of features


def _dense(choices: Choices, shape: Shape) -> tuple[Options, Shape]:
    units, activation = choices.weighted(WIDTHS), choices.one_of(*_ACTIVATIONS)
    of_kernel = dict(choices.weighted(_OF_KERNELS))
    return {"units": units, "activation": activation, **of_kernel}, (*shape[:-1], units)


def _around_dense(choices: Choices, shape: Shape) -> tuple[Options, Shape]:
    units = choices.weighted(WIDTHS)
    return {"layer": Layer("Dense", (("units", units),))}, (*shape[:-1], units)


def _einsum_dense(choices: Choices, shape: Shape) -> tuple[Options, Shape]:
    equation, _, _, after = heads_of(choices, shape)
    bias = {"bias_axes": "yz" if "y" in equation else "z"} if choices.one_in(2) else {}
    return {"equation": equation, "output_shape": after, **bias}, after


def _prelu(choices: Choices, shape: Shape) -> tuple[Options, Shape]:
    return {"shared_axes": tuple(range(1, len(shape))) or None} if choices.one_in(2) else {}, shape


def _layer_norm(choices: Choices, shape: Shape) -> tuple[Options, Shape]:
    return {"axis": tuple(range(1, 1 + len(shape)))} if choices.one_in(4) else {}, shape


# -- windows


def _windows(
    choices: Choices, space: Shape, *, dilated: bool = True, equal: bool = False
) -> tuple[Options, Shape]:
    """Windows over some axes, how they step, and the number of places along each axis.

    Args:
        choices: Decides.
        space: The sizes of the axes.
        dilated: Whether the layer knows dilation; Keras allows it without strides only.
        equal: Whether strides must be equal along all axes.
    """
    sizes = tuple(choices.weighted({3: 3, 2: 2, 1: 1, 4: 1}) for _ in space)
    steps = tuple(choices.weighted({1: 3, 2: 2}) for _ in space)
    steps, ones = steps[:1] * len(space) if equal else steps, (1,) * len(space)
    strides, dilation = (ones, steps) if dilated and choices.one_in(3) else (steps, ones)
    reach = [(size - 1) * step + 1 for size, step in zip(sizes, dilation, strict=True)]
    is_valid = all(n >= length for n, length in zip(space, reach, strict=True)) and choices.one_in(2)
    least = reach if is_valid else ones
    places = tuple(-(-(n - length + 1) // s) for n, length, s in zip(space, least, strides, strict=True))
    options: Options = {"strides": strides, "padding": "valid" if is_valid else "same"}
    return {"kernel_size": sizes, **options, **({"dilation_rate": dilation} if dilated else {})}, places


def _convolution(choices: Choices, shape: Shape) -> tuple[Options, Shape]:
    options, places = _windows(choices, shape[:-1])
    if len(places) == 1 and options["padding"] == "same" and choices.one_in(3):
        options["padding"] = "causal"
    filters, activation = choices.weighted(WIDTHS), choices.one_of(*_ACTIVATIONS)
    groups = choices.one_of(*divisors(shape[-1], filters)) if choices.one_in(2) else 1
    options |= {"groups": groups, "activation": activation, **dict(choices.weighted(_OF_KERNELS))}
    return {"filters": filters, **options}, (*places, filters)


def _depthwise(choices: Choices, shape: Shape) -> tuple[Options, Shape]:
    options, places = _windows(choices, shape[:-1], equal=True)
    multiplier = choices.one_of(1, 1, 2)
    return {**options, "depth_multiplier": multiplier}, (*places, multiplier * shape[-1])


def _separable(choices: Choices, shape: Shape) -> tuple[Options, Shape]:
    options, (*places, _) = _depthwise(choices, shape)
    filters = choices.weighted(WIDTHS)
    return {"filters": filters, **options}, (*places, filters)


def _transposed(choices: Choices, shape: Shape) -> tuple[Options, Shape]:
    filters, size = choices.weighted(WIDTHS), choices.one_of(3, 2, 4)
    options = {"filters": filters, "kernel_size": size, "strides": 2, "padding": "same"}
    return options, (*(2 * n for n in shape[:-1]), filters)


def _pooling(choices: Choices, shape: Shape) -> tuple[Options, Shape]:
    options, places = _windows(choices, shape[:-1], dilated=False)
    # Keras on PyTorch cannot average in 3D over more places than there are.
    size = tuple(map(min, options.pop("kernel_size"), shape))
    return {"pool_size": size, **options}, (*places, shape[-1])


# -- sequences


def _recurrent(choices: Choices, shape: Shape) -> tuple[Options, Shape]:
    units, every = choices.weighted(WIDTHS), choices.one_in(2)
    options = {"units": units, "return_sequences": every, "go_backwards": choices.one_in(4)}
    return options, (*(shape[:1] if every else ()), units)


def _bidirectional(choices: Choices, shape: Shape) -> tuple[Options, Shape]:
    options, (*places, units) = _recurrent(choices, shape)
    options["go_backwards"] = False
    layer = Layer(choices.one_of("LSTM", "GRU", "SimpleRNN"), tuple(options.items()))
    merged = choices.one_of("concat", "sum")
    return {"layer": layer, "merge_mode": merged}, (*places, 2 * units if merged == "concat" else units)


def _heads(choices: Choices, shape: Shape) -> tuple[Options, Shape]:
    return {"num_heads": choices.one_of(2, 4, 8, 3), "key_dim": choices.one_of(4, 8)}, shape


def _grouped_heads(choices: Choices, shape: Shape) -> tuple[Options, Shape]:
    heads, groups = choices.one_of((4, 2), (8, 4), (8, 2), (4, 1), (6, 3))
    return {"head_dim": choices.one_of(4, 8), "num_query_heads": heads, "num_key_value_heads": groups}, shape


# -- shapes


def _reshape(choices: Choices, shape: Shape) -> tuple[Options, Shape]:
    """The places in one axis, or the features in two."""
    *places, width = shape
    size = math.gcd(4, width)
    after = (math.prod(places), width) if len(places) > 1 else (*places, width // size, size)
    return {"target_shape": after}, after


_ANY, _PLACES = range(1, 5), range(2, 5)
ATTENTION = ("MultiHeadAttention", "GroupQueryAttention")
"""Layers that are called with what asks and with what is asked."""
KINDS: dict[str, tuple[Collection[int], int, Maker]] = {
    # kind: the ranks that it takes, how often it is drawn, what makes it; a `*` is the number of axes of places
    "Dense": (_ANY, 10, _dense),
    "EinsumDense": (range(1, 4), 5, _einsum_dense),
    "Scale": (_ANY, 2, lambda choices, shape: ({}, shape)),
    "PReLU": (_ANY, 2, _prelu),
    "Dropout": (_ANY, 4, lambda choices, shape: ({"rate": 0.25, "seed": choices.below(9)}, shape)),
    "SpectralNormalization": (_ANY, 1, _around_dense),
    "LayerNormalization": (_ANY, 4, _layer_norm),
    "BatchNormalization": (_ANY, 5, lambda choices, shape: ({"momentum": choices.one_of(0.99, 0.9)}, shape)),
    "RMSNormalization": (_ANY, 3, lambda choices, shape: ({}, shape)),
    "GroupNormalization": (
        _ANY,
        3,
        lambda choices, shape: ({"groups": choices.one_of(*divisors(shape[-1]))}, shape),
    ),
    "Conv*D": (_PLACES, 12, _convolution),
    "DepthwiseConv*D": (range(2, 4), 8, _depthwise),
    "SeparableConv*D": (range(2, 4), 6, _separable),
    "Conv*DTranspose": (_PLACES, 3, _transposed),
    "MaxPooling*D": (_PLACES, 4, _pooling),
    "AveragePooling*D": (_PLACES, 3, _pooling),
    "GlobalAveragePooling*D": (_PLACES, 1, lambda choices, shape: ({}, shape[-1:])),
    "GlobalMaxPooling*D": (_PLACES, 1, lambda choices, shape: ({}, shape[-1:])),
    "UpSampling*D": (
        _PLACES,
        1,
        lambda choices, shape: ({"size": 2}, (*(2 * n for n in shape[:-1]), shape[-1])),
    ),
    "LSTM": ((2,), 4, _recurrent),
    "GRU": ((2,), 4, _recurrent),
    "SimpleRNN": ((2,), 3, _recurrent),
    "Bidirectional": ((2,), 4, _bidirectional),
    "TimeDistributed": (_PLACES, 2, _around_dense),
    "MultiHeadAttention": ((2,), 8, _heads),
    "GroupQueryAttention": ((2,), 7, _grouped_heads),
    "Flatten": (_PLACES, 1, lambda choices, shape: ({}, (math.prod(shape),))),
    "Reshape": (_ANY, 3, _reshape),
    "RepeatVector": ((1,), 2, lambda choices, shape: ({"n": 4}, (4, *shape))),
}
