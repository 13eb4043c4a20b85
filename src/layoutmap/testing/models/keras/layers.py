"""Draw the options of each kind of Keras layer.

Most widths and heads are multiples of 4 or 8, so that the dims of a mesh divide most axes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import Any

from layoutmap.testing.models.choices import Choices
from layoutmap.testing.models.keras.model import DrawnLayer
from layoutmap.testing.models.maps import Shape
from layoutmap.testing.models.values import WIDTHS, draw_heads_einsum, draw_padding, find_common_divisors

Options = dict[str, Any]
DrawOptions = Callable[[Choices, Shape], tuple[Options, Shape]]
"""Draws the options of a layer for an input shape without rows. Returns them with the output shape."""

WITH_LORA = ("Dense", "EinsumDense", "Embedding", "Conv1D", "Conv2D", "Conv3D")
_ACTIVATIONS = (None, "gelu", "tanh", "relu", "silu", "sigmoid", "softmax")
_KERNEL_OPTIONS = {
    (): 12,
    (("use_bias", False),): 2,
    (("kernel_regularizer", "l2"),): 1,
    (("kernel_constraint", "unit_norm"),): 1,
    (("kernel_constraint", "max_norm"),): 1,
}


# -- layers of features


def _draw_dense_options(choices: Choices, shape: Shape) -> tuple[Options, Shape]:
    units, activation = choices.pick_weighted(WIDTHS), choices.pick(*_ACTIVATIONS)
    kernel_options = dict(choices.pick_weighted(_KERNEL_OPTIONS))
    return {"units": units, "activation": activation, **kernel_options}, (*shape[:-1], units)


def _draw_dense_wrapper_options(choices: Choices, shape: Shape) -> tuple[Options, Shape]:
    units = choices.pick_weighted(WIDTHS)
    return {"layer": DrawnLayer("Dense", (("units", units),))}, (*shape[:-1], units)


def _draw_einsum_dense_options(choices: Choices, shape: Shape) -> tuple[Options, Shape]:
    equation, _, _, after = draw_heads_einsum(choices, shape)
    bias = {"bias_axes": "yz" if "y" in equation else "z"} if choices.draw_true_once_in(2) else {}
    return {"equation": equation, "output_shape": after, **bias}, after


def _draw_prelu_options(choices: Choices, shape: Shape) -> tuple[Options, Shape]:
    return {"shared_axes": tuple(range(1, len(shape))) or None} if choices.draw_true_once_in(2) else {}, shape


def _draw_layer_norm_options(choices: Choices, shape: Shape) -> tuple[Options, Shape]:
    return {"axis": tuple(range(1, 1 + len(shape)))} if choices.draw_true_once_in(4) else {}, shape


# -- layers with windows


def _draw_window_options(
    choices: Choices, space: Shape, *, allow_dilation: bool = True, same_stride: bool = False
) -> tuple[Options, Shape]:
    """Return random options of windows, and the output's spatial shape. Keras cannot combine dilation and strides."""
    sizes = tuple(choices.pick_weighted({3: 3, 2: 2, 1: 1, 4: 1}) for _ in space)
    steps = tuple(choices.pick_weighted({1: 3, 2: 2}) for _ in space)
    steps, ones = steps[:1] * len(space) if same_stride else steps, (1,) * len(space)
    strides, dilation = (ones, steps) if allow_dilation and choices.draw_true_once_in(3) else (steps, ones)
    is_valid, spatial = draw_padding(choices, space, sizes, strides, dilation)
    options: Options = {"strides": strides, "padding": "valid" if is_valid else "same"}
    return {
        "kernel_size": sizes,
        **options,
        **({"dilation_rate": dilation} if allow_dilation else {}),
    }, spatial


def _draw_convolution_options(choices: Choices, shape: Shape) -> tuple[Options, Shape]:
    options, spatial = _draw_window_options(choices, shape[:-1])
    if len(spatial) == 1 and options["padding"] == "same" and choices.draw_true_once_in(3):
        options["padding"] = "causal"
    filters, activation = choices.pick_weighted(WIDTHS), choices.pick(*_ACTIVATIONS)
    groups = choices.pick(*find_common_divisors(shape[-1], filters)) if choices.draw_true_once_in(2) else 1
    options |= {"groups": groups, "activation": activation, **dict(choices.pick_weighted(_KERNEL_OPTIONS))}
    return {"filters": filters, **options}, (*spatial, filters)


def _draw_depthwise_options(choices: Choices, shape: Shape) -> tuple[Options, Shape]:
    options, spatial = _draw_window_options(choices, shape[:-1], same_stride=True)
    multiplier = choices.pick(1, 1, 2)
    return {**options, "depth_multiplier": multiplier}, (*spatial, multiplier * shape[-1])


def _draw_separable_options(choices: Choices, shape: Shape) -> tuple[Options, Shape]:
    options, (*spatial, _) = _draw_depthwise_options(choices, shape)
    filters = choices.pick_weighted(WIDTHS)
    return {"filters": filters, **options}, (*spatial, filters)


def _draw_transposed_options(choices: Choices, shape: Shape) -> tuple[Options, Shape]:
    filters, size = choices.pick_weighted(WIDTHS), choices.pick(3, 2, 4)
    options = {"filters": filters, "kernel_size": size, "strides": 2, "padding": "same"}
    return options, (*(2 * n for n in shape[:-1]), filters)


def _draw_pooling_options(choices: Choices, shape: Shape) -> tuple[Options, Shape]:
    options, spatial = _draw_window_options(choices, shape[:-1], allow_dilation=False)
    # In 3D, Keras on PyTorch cannot average over a window larger than the input, so limit the window's size.
    size = tuple(map(min, options.pop("kernel_size"), shape))
    return {"pool_size": size, **options}, (*spatial, shape[-1])


# -- layers of sequences


def _draw_recurrent_options(choices: Choices, shape: Shape) -> tuple[Options, Shape]:
    units, all_steps = choices.pick_weighted(WIDTHS), choices.draw_true_once_in(2)
    options = {"units": units, "return_sequences": all_steps, "go_backwards": choices.draw_true_once_in(4)}
    return options, (*(shape[:1] if all_steps else ()), units)


def _draw_bidirectional_options(choices: Choices, shape: Shape) -> tuple[Options, Shape]:
    options, (*spatial, units) = _draw_recurrent_options(choices, shape)
    options["go_backwards"] = False
    layer = DrawnLayer(choices.pick("LSTM", "GRU", "SimpleRNN"), tuple(options.items()))
    merge_mode = choices.pick("concat", "sum")
    return {"layer": layer, "merge_mode": merge_mode}, (
        *spatial,
        2 * units if merge_mode == "concat" else units,
    )


def _draw_attention_options(choices: Choices, shape: Shape) -> tuple[Options, Shape]:
    return {"num_heads": choices.pick(2, 4, 8, 3), "key_dim": choices.pick(4, 8)}, shape


def _draw_grouped_attention_options(choices: Choices, shape: Shape) -> tuple[Options, Shape]:
    heads, groups = choices.pick((4, 2), (8, 4), (8, 2), (4, 1), (6, 3))
    return {"head_dim": choices.pick(4, 8), "num_query_heads": heads, "num_key_value_heads": groups}, shape


# -- layers that reshape


def _draw_reshape_options(choices: Choices, shape: Shape) -> tuple[Options, Shape]:
    """Return options and output shape of a `Reshape` that flattens all axes but the last, or splits the last."""
    *spatial, width = shape
    size = math.gcd(4, width)
    after = (math.prod(spatial), width) if len(spatial) > 1 else (*spatial, width // size, size)
    return {"target_shape": after}, after


_ANY, _SPATIAL = range(1, 5), range(2, 5)
ATTENTION = ("MultiHeadAttention", "GroupQueryAttention")  # layers that are called with a query and a value
RECURRENT = ("LSTM", "GRU", "SimpleRNN", "Bidirectional")
KINDS: dict[str, tuple[Collection[int], int, DrawOptions]] = {
    # By kind: (accepted ranks, frequency, function that draws options). `*` in a kind stands for the number of spatial
    # axes.
    "Dense": (_ANY, 10, _draw_dense_options),
    "EinsumDense": (range(1, 4), 5, _draw_einsum_dense_options),
    "Scale": (_ANY, 2, lambda choices, shape: ({}, shape)),
    "PReLU": (_ANY, 2, _draw_prelu_options),
    "Dropout": (_ANY, 4, lambda choices, shape: ({"rate": 0.25, "seed": choices.draw_below(9)}, shape)),
    "SpectralNormalization": (_ANY, 1, _draw_dense_wrapper_options),
    "LayerNormalization": (_ANY, 4, _draw_layer_norm_options),
    "BatchNormalization": (_ANY, 5, lambda choices, shape: ({"momentum": choices.pick(0.99, 0.9)}, shape)),
    "RMSNormalization": (_ANY, 3, lambda choices, shape: ({}, shape)),
    "GroupNormalization": (
        _ANY,
        3,
        lambda choices, shape: ({"groups": choices.pick(*find_common_divisors(shape[-1]))}, shape),
    ),
    "Conv*D": (_SPATIAL, 12, _draw_convolution_options),
    "DepthwiseConv*D": (range(2, 4), 8, _draw_depthwise_options),
    "SeparableConv*D": (range(2, 4), 6, _draw_separable_options),
    "Conv*DTranspose": (_SPATIAL, 3, _draw_transposed_options),
    "MaxPooling*D": (_SPATIAL, 4, _draw_pooling_options),
    "AveragePooling*D": (_SPATIAL, 3, _draw_pooling_options),
    "GlobalAveragePooling*D": (_SPATIAL, 1, lambda choices, shape: ({}, shape[-1:])),
    "GlobalMaxPooling*D": (_SPATIAL, 1, lambda choices, shape: ({}, shape[-1:])),
    "UpSampling*D": (
        _SPATIAL,
        1,
        lambda choices, shape: ({"size": 2}, (*(2 * n for n in shape[:-1]), shape[-1])),
    ),
    "LSTM": ((2,), 4, _draw_recurrent_options),
    "GRU": ((2,), 4, _draw_recurrent_options),
    "SimpleRNN": ((2,), 3, _draw_recurrent_options),
    "Bidirectional": ((2,), 4, _draw_bidirectional_options),
    "TimeDistributed": (_SPATIAL, 2, _draw_dense_wrapper_options),
    "MultiHeadAttention": ((2,), 8, _draw_attention_options),
    "GroupQueryAttention": ((2,), 7, _draw_grouped_attention_options),
    "Flatten": (_SPATIAL, 1, lambda choices, shape: ({}, (math.prod(shape),))),
    "Reshape": (_ANY, 3, _draw_reshape_options),
    "RepeatVector": ((1,), 2, lambda choices, shape: ({"n": 4}, (4, *shape))),
}
