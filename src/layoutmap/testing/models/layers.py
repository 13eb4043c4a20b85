"""The kinds of layers that are drawn, and what each is made with.

Each function returns the options of a layer for a shape, and the shape that it puts out; `None` where it does not fit.
Widths and heads are mostly multiples of 4 and 8, so that most axes divide by the dims of a mesh.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import Any

from layoutmap.testing.models.choices import Choices
from layoutmap.testing.models.describing import Layer, Shape

Options = dict[str, Any]
Made = tuple[Options, Shape] | None

WIDTHS = {8: 6, 16: 5, 4: 2, 24: 2, 12: 2, 32: 1, 6: 1, 7: 1}
WITH_LORA = ("Dense", "EinsumDense", "Embedding", "Conv1D", "Conv2D", "Conv3D")
_ACTIVATIONS = (None, "gelu", "tanh", "relu", "silu", "sigmoid", "softmax")
_KERNEL: dict[Any, int] = {
    (): 12,
    (("use_bias", False),): 2,
    (("kernel_regularizer", "l2"),): 1,
    (("kernel_constraint", "unit_norm"),): 1,
    (("kernel_constraint", "max_norm"),): 1,
}
_MOST_ELEMENTS = 4096


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
    rank = len(shape)
    fits = {
        kind: weight + 20 * (kind in favourites)
        for kind, (ranks, weight, _) in KINDS.items()
        if rank in ranks
    }
    if not attention:
        fits = {kind: weight for kind, weight in fits.items() if kind not in ATTENTION}
    while True:
        kind = choices.weighted(fits)
        made = KINDS[kind][2](choices, shape)
        if made and math.prod(made[1]) <= _MOST_ELEMENTS:
            return kind.replace("*", str(rank - 1)), *made
        del fits[kind]


# -- of features


def _dense(choices: Choices, shape: Shape) -> Made:
    units = choices.weighted(WIDTHS)
    activation = choices.one_of(*_ACTIVATIONS)
    return {"units": units, "activation": activation, **_kernel(choices)}, (*shape[:-1], units)


def _kernel(choices: Choices) -> Options:
    """What a kernel has besides, now and then."""
    return dict(choices.weighted(_KERNEL))


def _einsum_dense(choices: Choices, shape: Shape) -> Made:
    """Makes heads of features, or features of heads; `a` is the axis of rows."""
    *space, last = "abcdef"[1 : 1 + len(shape)]
    if len(shape) > 2 or (len(shape) == 2 and choices.one_in(3)):
        summed, kept, sides = [space.pop(), last], "z", (choices.weighted(WIDTHS),)
    else:
        summed, kept, sides = [last], "yz", (choices.one_of(4, 2, 8), choices.one_of(4, 8))
    free = "".join(space)
    equation = f"a{free}{''.join(summed)},{''.join(summed)}{kept}->a{free}{kept}"
    output = (*shape[: len(space)], *sides)
    bias = {"bias_axes": kept} if choices.one_in(2) else {}
    return {"equation": equation, "output_shape": output, **bias}, output


def _prelu(choices: Choices, shape: Shape) -> Made:
    shared = tuple(range(1, len(shape)))
    return ({"shared_axes": shared} if shared and choices.one_in(2) else {}), shape


def _dropout(choices: Choices, shape: Shape) -> Made:
    return {"rate": 0.25, "seed": choices.below(9)}, shape


def _as_it_is(_: Choices, shape: Shape) -> Made:
    return {}, shape


def _spectral(choices: Choices, shape: Shape) -> Made:
    units = choices.weighted(WIDTHS)
    return {"layer": Layer("Dense", (("units", units),))}, (*shape[:-1], units)


# -- norms


def _layer_norm(choices: Choices, shape: Shape) -> Made:
    several = len(shape) > 1 and choices.one_in(4)
    return ({"axis": tuple(range(1, 1 + len(shape)))} if several else {}), shape


def _batch_norm(choices: Choices, shape: Shape) -> Made:
    return {"momentum": 0.9} if choices.one_in(2) else {}, shape


def _group_norm(choices: Choices, shape: Shape) -> Made:
    return {"groups": choices.one_of(*_divisors(shape[-1]))}, shape


def _divisors(*numbers: int) -> list[int]:
    return [n for n in (2, 4, 8, 1, 3, 7) if all(number % n == 0 for number in numbers)]


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
    steps = steps[:1] * len(space) if equal else steps
    dilation = steps if dilated and choices.one_in(3) else (1,) * len(space)
    strides = (1,) * len(space) if dilation == steps else steps
    reach = [(size - 1) * each + 1 for size, each in zip(sizes, dilation, strict=True)]
    fits = all(n >= length for n, length in zip(space, reach, strict=True))
    padding = "valid" if fits and choices.one_in(2) else "same"
    least = [1 if padding == "same" else length for length in reach]
    places = tuple(-(-(n - length + 1) // s) for n, length, s in zip(space, least, strides, strict=True))
    options: Options = {"kernel_size": sizes, "strides": strides, "padding": padding}
    return options | ({"dilation_rate": dilation} if max(dilation) > 1 else {}), places


def _convolution(choices: Choices, shape: Shape) -> Made:
    options, places = _windows(choices, shape[:-1])
    if len(places) == 1 and options["padding"] == "same" and choices.one_in(3):
        options["padding"] = "causal"
    filters = choices.weighted(WIDTHS)
    groups = choices.one_of(*_divisors(shape[-1], filters)) if choices.one_in(2) else 1
    options |= {"groups": groups, "activation": choices.one_of(*_ACTIVATIONS), **_kernel(choices)}
    return {"filters": filters, **options}, (*places, filters)


def _depthwise(choices: Choices, shape: Shape) -> Made:
    options, places = _windows(choices, shape[:-1], equal=True)
    multiplier = choices.one_of(1, 1, 2)
    return {**options, "depth_multiplier": multiplier}, (*places, multiplier * shape[-1])


def _separable(choices: Choices, shape: Shape) -> Made:
    options, places = _windows(choices, shape[:-1], equal=True)
    filters = choices.weighted(WIDTHS)
    return {"filters": filters, **options, "depth_multiplier": choices.one_of(1, 1, 2)}, (*places, filters)


def _transposed(choices: Choices, shape: Shape) -> Made:
    filters, size = choices.weighted(WIDTHS), choices.one_of(3, 2, 4)
    options = {"filters": filters, "kernel_size": size, "strides": 2, "padding": "same"}
    return options, (*(2 * n for n in shape[:-1]), filters)


def _pooling(choices: Choices, shape: Shape) -> Made:
    options, places = _windows(choices, shape[:-1], dilated=False)
    return {"pool_size": options.pop("kernel_size"), **options}, (*places, shape[-1])


def _global_pooling(choices: Choices, shape: Shape) -> Made:
    keep = choices.one_in(4)
    return ({"keepdims": True} if keep else {}), (*((1,) * (len(shape) - 1) if keep else ()), shape[-1])


def _upsampling(choices: Choices, shape: Shape) -> Made:
    return {"size": 2}, (*(2 * n for n in shape[:-1]), shape[-1])


def _zero_padding(choices: Choices, shape: Shape) -> Made:
    return {"padding": 1}, (*(n + 2 for n in shape[:-1]), shape[-1])


# -- sequences


def _recurrent(choices: Choices, shape: Shape) -> Made:
    units, every = choices.weighted(WIDTHS), choices.one_in(2)
    options = {"units": units, "return_sequences": every}
    if choices.one_in(4):
        options["go_backwards"] = True
    return options, (*(shape[:1] if every else ()), units)


def _bidirectional(choices: Choices, shape: Shape) -> Made:
    units, every = choices.weighted(WIDTHS), choices.one_in(2)
    kind = choices.one_of("LSTM", "GRU", "SimpleRNN")
    layer = Layer(kind, (("units", units), ("return_sequences", every)))
    merged = choices.one_of("concat", "sum")
    width = 2 * units if merged == "concat" else units
    return {"layer": layer, "merge_mode": merged}, (*(shape[:1] if every else ()), width)


def _time_distributed(choices: Choices, shape: Shape) -> Made:
    units = choices.weighted(WIDTHS)
    return {"layer": Layer("Dense", (("units", units),))}, (*shape[:-1], units)


def _heads(choices: Choices) -> Options:
    return {"num_heads": choices.one_of(2, 4, 8, 3), "key_dim": choices.one_of(4, 8)}


def _grouped_heads(choices: Choices) -> Options:
    heads, groups = choices.one_of((4, 2), (8, 4), (8, 2), (4, 1), (6, 3))
    return {"head_dim": choices.one_of(4, 8), "num_query_heads": heads, "num_key_value_heads": groups}


ATTENTION: dict[str, Callable[[Choices], Options]] = {
    "MultiHeadAttention": _heads,
    "GroupQueryAttention": _grouped_heads,
}
"""Layers that are called with what asks and with what is asked."""


# -- shapes


def _flatten(choices: Choices, shape: Shape) -> Made:
    return ({}, (math.prod(shape),)) if math.prod(shape) <= 512 else None


def _reshape(choices: Choices, shape: Shape) -> Made:
    """The features in two axes, or the places in one."""
    if len(shape) > 2:
        target = (math.prod(shape[:-1]), shape[-1])
    elif shape[-1] % 4 == 0:
        target = (*shape[:-1], shape[-1] // 4, 4)
    else:
        return None
    return {"target_shape": target}, target


def _permute(choices: Choices, shape: Shape) -> Made:
    return {"dims": tuple(range(len(shape), 0, -1))}, shape[::-1]


def _repeat(choices: Choices, shape: Shape) -> Made:
    return {"n": 4}, (4, *shape)


_ANY, _PLACES = range(1, 5), range(2, 5)
KINDS: dict[str, tuple[Collection[int], int, Callable[[Choices, Shape], Made]]] = {
    # kind: the ranks that it takes, how often it is drawn, what makes it; a `*` is the number of axes of places
    "Dense": (_ANY, 10, _dense),
    "EinsumDense": (range(1, 4), 5, _einsum_dense),
    "Scale": (_ANY, 2, _as_it_is),
    "PReLU": (_ANY, 2, _prelu),
    "Dropout": (_ANY, 4, _dropout),
    "SpectralNormalization": (_ANY, 1, _spectral),
    "LayerNormalization": (_ANY, 4, _layer_norm),
    "BatchNormalization": (_ANY, 5, _batch_norm),
    "RMSNormalization": (_ANY, 3, _as_it_is),
    "GroupNormalization": (_ANY, 3, _group_norm),
    "UnitNormalization": (_ANY, 1, _as_it_is),
    "Conv*D": (_PLACES, 12, _convolution),
    "DepthwiseConv*D": (range(2, 4), 8, _depthwise),
    "SeparableConv*D": (range(2, 4), 6, _separable),
    "Conv*DTranspose": (_PLACES, 3, _transposed),
    "MaxPooling*D": (_PLACES, 4, _pooling),
    "AveragePooling*D": (_PLACES, 3, _pooling),
    "GlobalAveragePooling*D": (_PLACES, 1, _global_pooling),
    "GlobalMaxPooling*D": (_PLACES, 1, _global_pooling),
    "UpSampling*D": (_PLACES, 1, _upsampling),
    "ZeroPadding*D": (_PLACES, 1, _zero_padding),
    "LSTM": ((2,), 4, _recurrent),
    "GRU": ((2,), 4, _recurrent),
    "SimpleRNN": ((2,), 3, _recurrent),
    "Bidirectional": ((2,), 4, _bidirectional),
    "TimeDistributed": (_PLACES, 2, _time_distributed),
    "MultiHeadAttention": ((2,), 8, lambda choices, shape: (_heads(choices), shape)),
    "GroupQueryAttention": ((2,), 7, lambda choices, shape: (_grouped_heads(choices), shape)),
    "Flatten": (_PLACES, 1, _flatten),
    "Reshape": (range(1, 5), 3, _reshape),
    "Permute": (_PLACES, 1, _permute),
    "RepeatVector": ((1,), 2, _repeat),
}
