"""Modules of torch that are drawn: the expression that makes each, how it is called, and what it returns.

Modules for places take their channels first, whatever the first axis is called.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection

from layoutmap.testing.models.choices import Choices
from layoutmap.testing.models.maps import Shape
from layoutmap.testing.models.values import WIDTHS, divisors

Drawing = tuple[str, str, Shape]
"""What is made, the lines that use it, and the shape of the result, without rows.

In the lines `{m}` is what was made, `{x}` the value given and `{y}` the result. The first line is its expression.
"""
Maker = Callable[[Choices, Shape], Drawing]
CALL = "{m}({x})"
ACTIVATIONS = ("ReLU()", "GELU()", "Tanh()", "SiLU()", "Sigmoid()", "ELU()", "Softplus()", "Mish()", "LeakyReLU(0.1)",
               "Hardtanh()", "Softsign()", "Hardswish()", "GELU('tanh')", "LogSigmoid()", "SELU()", "ReLU6()")  # fmt: skip


def _options(**options: object) -> str:
    """Arguments by name, without those that are `None`."""
    return "".join(f", {name}={value!r}" for name, value in options.items() if value is not None)


def _same(made: str) -> Maker:
    """A module that keeps the shape; in `made`, `{w}` is the width and `{c}` the number of channels."""

    def make(choices: Choices, shape: Shape) -> Drawing:
        number = str(len(shape) - 1)
        filled = made.replace("{w}", str(shape[-1])).replace("{c}", str(shape[0])).replace("*", number)
        return filled, CALL, shape

    return make


# -- of features


def _linear(choices: Choices, shape: Shape) -> Drawing:
    width = choices.weighted(WIDTHS)
    bias = False if choices.one_in(4) else None
    return f"nn.Linear({shape[-1]}, {width}{_options(bias=bias)})", CALL, (*shape[:-1], width)


def _bilinear(choices: Choices, shape: Shape) -> Drawing:
    width = choices.one_of(8, 4, 16)
    return f"nn.Bilinear({shape[-1]}, {shape[-1]}, {width})", "{m}({x}, {x})", (*shape[:-1], width)


def _activation(choices: Choices, shape: Shape) -> Drawing:
    return f"nn.{choices.one_of(*ACTIVATIONS)}", CALL, shape


def _prelu(choices: Choices, shape: Shape) -> Drawing:
    return f"nn.PReLU({choices.one_of('', shape[0])})", CALL, shape


def _softmax(choices: Choices, shape: Shape) -> Drawing:
    kind = choices.one_of("Softmax", "LogSoftmax", "Softmin")
    return f"nn.{kind}(dim={choices.one_of(-1, 1)})", CALL, shape


def _glu(choices: Choices, shape: Shape) -> Drawing:
    return (
        ("nn.GLU()", CALL, (*shape[:-1], shape[-1] // 2))
        if shape[-1] % 2 == 0
        else _same("nn.Tanh()")(choices, shape)
    )


def _norm_of_axes(kind: str) -> Maker:
    def make(choices: Choices, shape: Shape) -> Drawing:
        axes = choices.one_of(shape[-1], shape)
        affine = False if choices.one_in(6) else None
        return f"nn.{kind}({axes}{_options(elementwise_affine=affine)}, eps=1e-3)", CALL, shape

    return make


def _batch_norm(choices: Choices, shape: Shape) -> Drawing:
    options = choices.one_of({}, {}, {"momentum": 0.3}, {"affine": False}, {"track_running_stats": False})
    return f"nn.BatchNorm{max(1, len(shape) - 1)}d({shape[0]}{_options(**options)}, eps=1e-3)", CALL, shape


def _instance_norm(choices: Choices, shape: Shape) -> Drawing:
    options = choices.one_of({"affine": True}, {}, {"affine": True, "track_running_stats": True})
    return f"nn.InstanceNorm{len(shape) - 1}d({shape[0]}{_options(**options)}, eps=1e-3)", CALL, shape


def _group_norm(choices: Choices, shape: Shape) -> Drawing:
    return f"nn.GroupNorm({choices.one_of(*divisors(shape[0]))}, {shape[0]}, eps=1e-3)", CALL, shape


def _dropout(choices: Choices, shape: Shape) -> Drawing:
    by_channels = f"Dropout{len(shape) - 1}d" if len(shape) > 1 else "Dropout"
    return f"nn.{choices.one_of('Dropout', by_channels, 'AlphaDropout')}(0.25)", CALL, shape


# -- windows


def _sizes(choices: Choices, space: Shape, most: Shape) -> Shape:
    return tuple(min(choices.weighted({3: 3, 2: 2, 1: 1, 4: 1}), n) for n in most)


def _convolution(choices: Choices, shape: Shape) -> Drawing:
    channels, *space = shape
    filters = choices.weighted(WIDTHS)
    groups = choices.one_of(*divisors(channels, filters)) if choices.one_in(2) else None
    steps = tuple(choices.weighted({1: 3, 2: 2}) for _ in space)
    strides, dilation = ((1,) * len(space), steps) if choices.one_in(3) else (steps, (1,) * len(space))
    sizes = tuple(
        min(choices.weighted({3: 3, 2: 2, 1: 1}), (n - 1) // d + 1)
        for n, d in zip(space, dilation, strict=True)
    )
    padding = choices.one_of("valid", "same", 1) if max(strides) == 1 else choices.one_of(0, 1)
    mode = choices.one_of(None, None, "reflect", "replicate", "circular") if padding == 1 else None
    places = tuple(
        n if padding == "same" else (n + 2 * (padding == 1) - (size - 1) * d - 1) // step + 1
        for n, size, d, step in zip(space, sizes, dilation, strides, strict=True)
    )
    options = _options(
        stride=strides if max(strides) > 1 else None,
        padding=padding,
        dilation=dilation if max(dilation) > 1 else None,
        groups=groups,
        bias=False if choices.one_in(4) else None,
        padding_mode=mode,
    )
    return f"nn.Conv{len(space)}d({channels}, {filters}, {sizes}{options})", CALL, (filters, *places)


def _transposed(choices: Choices, shape: Shape) -> Drawing:
    channels, *space = shape
    filters = choices.weighted(WIDTHS)
    groups = choices.one_of(*divisors(channels, filters)) if choices.one_in(3) else None
    size, more = choices.one_of((2, {}), (4, {"padding": 1}), (3, {"padding": 1, "output_padding": 1}))
    options = _options(stride=2, **more, groups=groups)
    places = tuple(2 * n for n in space)
    return f"nn.ConvTranspose{len(space)}d({channels}, {filters}, {size}{options})", CALL, (filters, *places)


def _pooling(choices: Choices, shape: Shape) -> Drawing:
    channels, *space = shape
    number, sizes = len(space), tuple(min(choices.weighted({2: 3, 3: 2, 1: 1}), n) for n in space)
    step = choices.one_of(2, 1)
    places = tuple((n - size) // step + 1 for n, size in zip(space, sizes, strict=True))
    kind = choices.one_of(f"MaxPool{number}d", f"AvgPool{number}d", f"LPPool{number}d")
    power = "2, " if kind.startswith("LP") else ""
    line = "{m}({x} + 4)" if power else CALL  # the gradient of a root is not finite at zero
    return f"nn.{kind}({power}{sizes if number > 1 else sizes[0]}, stride={step})", line, (channels, *places)


def _adaptive(choices: Choices, shape: Shape) -> Drawing:
    channels, *space = shape
    places, kind = tuple(choices.one_of(1, 2, n) for n in space), choices.one_of("Avg", "Max")
    made = f"nn.Adaptive{kind}Pool{len(space)}d({places if len(places) > 1 else places[0]})"
    return made, CALL, (channels, *places)


def _upsample(choices: Choices, shape: Shape) -> Drawing:
    number = len(shape) - 1
    linear = {1: "linear", 2: "bilinear", 3: "trilinear"}[number]
    mode = choices.one_of("nearest", linear, *(["bicubic"] if number == 2 else []))
    return f"nn.Upsample(scale_factor=2, mode={mode!r})", CALL, (shape[0], *(2 * n for n in shape[1:]))


def _padding(choices: Choices, shape: Shape) -> Drawing:
    number = len(shape) - 1
    made = choices.one_of("Zero", "Reflection", "Replication", "Circular") + f"Pad{number}d(1)"
    return f"nn.{made}", CALL, (shape[0], *(n + 2 for n in shape[1:]))


def _pixels(choices: Choices, shape: Shape) -> Drawing:
    channels, height, width = shape
    if channels % 4 == 0:
        return "nn.PixelShuffle(2)", CALL, (channels // 4, 2 * height, 2 * width)
    return f"nn.ChannelShuffle({choices.one_of(*divisors(channels))})", CALL, shape


# -- sequences


def _recurrent(choices: Choices, shape: Shape) -> Drawing:
    kind, width, both = choices.one_of("GRU", "LSTM", "RNN"), choices.one_of(8, 4, 16, 12), choices.one_in(3)
    options = _options(
        batch_first=True,
        bidirectional=both or None,
        num_layers=2 if choices.one_in(4) else None,
        bias=False if choices.one_in(6) else None,
        proj_size=4 if kind == "LSTM" and width > 4 and choices.one_in(4) else None,
    )
    size = 4 if "proj_size" in options else width
    state = "{m}({x})[1][0][-1]" if kind == "LSTM" else "{m}({x})[1][-1]"
    line, after = choices.one_of(
        ("{m}({x})[0]", (shape[0], size * (1 + both))),
        ("{m}({x})[0][:, -1]", (size * (1 + both),)),
        (state, (size,)),
    )
    return f"nn.{kind}({shape[-1]}, {width}{options})", line, after


def _cell(choices: Choices, shape: Shape) -> Drawing:
    kind, width = choices.one_of("GRUCell", "RNNCell", "LSTMCell"), choices.one_of(8, 4, 16)
    made, zeros = f"nn.{kind}({shape[-1]}, {width})", f"{{x}}.new_zeros({{x}}.shape[0], {width})"
    if kind == "LSTMCell":
        return (
            made,
            f"c = {zeros}\nfor each in {{x}}.unbind(1):\n    {{y}}, c = {{m}}(each, ({{y}}, c))",
            (width,),
        )
    return made, f"{zeros}\nfor t in range({shape[0]}):\n    {{y}} = {{m}}({{x}}[:, t], {{y}})", (width,)


def heads_of(choices: Choices, width: int) -> int:
    """A number of heads that divides a width."""
    return choices.one_of(*(n for n in (2, 4, 1, 8, 3, 7) if width % n == 0))


def attention_of(choices: Choices, width: int, other: int, length: int, keys: int) -> tuple[str, str]:
    """An attention module, and what is passed to it beside three values.

    Args:
        choices: Decides.
        width: The width of what asks.
        other: The width of what is asked.
        length: The number of places that ask.
        keys: The number of places that are asked.
    """
    options = _options(
        kdim=other if other != width else None,
        vdim=other if other != width else None,
        dropout=0.25 if choices.one_in(5) else None,
        bias=False if choices.one_in(5) else None,
    )
    made = f"nn.MultiheadAttention({width}, {heads_of(choices, width)}{options}, batch_first=True)"
    mask = f"torch.ones({length}, {keys}, dtype=torch.bool).triu(1)"
    return made, choices.one_of("", ", need_weights=False", f", attn_mask={mask}")


def _attention(choices: Choices, shape: Shape) -> Drawing:
    length, width = shape
    made, passed = attention_of(choices, width, width, length, length)
    return made, f"{{m}}({{x}}, {{x}}, {{x}}{passed})[0]", shape


def _encoder(choices: Choices, shape: Shape) -> Drawing:
    length, width = shape
    options = _options(
        dropout=choices.one_of(0.0, 0.1),
        activation="gelu" if choices.one_in(2) else None,
        norm_first=True if choices.one_in(2) else None,
    )
    made = f"nn.TransformerEncoderLayer({width}, {heads_of(choices, width)}, 16{options}, batch_first=True)"
    if choices.one_in(4):
        return f"nn.TransformerEncoder({made}, 2, enable_nested_tensor=False)", CALL, shape
    mask = f", src_mask=nn.Transformer.generate_square_subsequent_mask({length}), is_causal=True"
    return made, f"{{m}}({{x}}{choices.one_of('', mask)})", shape


def _grouped_attention(choices: Choices, shape: Shape) -> Drawing:
    heads, groups = choices.one_of((4, 2), (4, 4), (8, 2), (4, 1), (6, 3))
    made = f"Attention({shape[-1]}, {heads}, {groups}, {choices.one_of(4, 8)}, causal={choices.one_of(True, False)})"
    return made, CALL, shape


def _gated_unit(choices: Choices, shape: Shape) -> Drawing:
    return f"GatedUnit({shape[-1]}, {choices.weighted(WIDTHS)})", CALL, shape


def _experts(choices: Choices, shape: Shape) -> Drawing:
    return f"Experts({shape[-1]}, {choices.one_of(8, 16)}, {choices.one_of(4, 8, 2)})", CALL, shape


# -- shapes


def _flatten(choices: Choices, shape: Shape) -> Drawing:
    if len(shape) > 2 and choices.one_in(2):
        return "nn.Flatten(2)", CALL, (shape[0], math.prod(shape[1:]))
    return "nn.Flatten()", CALL, (math.prod(shape),)


def _unflatten(choices: Choices, shape: Shape) -> Drawing:
    size = math.gcd(4, shape[-1])
    return f"nn.Unflatten(-1, (-1, {size}))", CALL, (*shape[:-1], shape[-1] // size, size)


_ANY, _PLACES, _SEQUENCE = range(1, 5), range(2, 5), (2,)
MODULES: dict[str, tuple[Collection[int], int, Maker]] = {
    # kind: the ranks that it takes, how often it is drawn, what draws it
    "Linear": (_ANY, 12, _linear),
    "Bilinear": ((1, 2), 3, _bilinear),
    "Activation": (_ANY, 5, _activation),
    "PReLU": (_ANY, 3, _prelu),
    "Softmax": (_ANY, 2, _softmax),
    "GLU": (_ANY, 2, _glu),
    "LayerNorm": (_ANY, 5, _norm_of_axes("LayerNorm")),
    "RMSNorm": (_ANY, 4, _norm_of_axes("RMSNorm")),
    "BatchNorm": (_ANY, 6, _batch_norm),
    "InstanceNorm": (_PLACES, 4, _instance_norm),
    "GroupNorm": (_ANY, 5, _group_norm),
    "Dropout": (_ANY, 5, _dropout),
    "Conv": (_PLACES, 14, _convolution),
    "ConvTranspose": (_PLACES, 5, _transposed),
    "Pooling": (_PLACES, 5, _pooling),
    "AdaptivePooling": (_PLACES, 4, _adaptive),
    "Upsample": (_PLACES, 3, _upsample),
    "Padding": (_PLACES, 3, _padding),
    "PixelShuffle": ((3,), 5, _pixels),
    "Recurrent": (_SEQUENCE, 9, _recurrent),
    "Cell": (_SEQUENCE, 5, _cell),
    "MultiheadAttention": (_SEQUENCE, 8, _attention),
    "TransformerEncoder": (_SEQUENCE, 6, _encoder),
    "GroupedAttention": (_SEQUENCE, 8, _grouped_attention),
    "GatedUnit": (_ANY, 3, _gated_unit),
    "Experts": (_ANY, 3, _experts),
    "Flatten": (_PLACES, 3, _flatten),
    "Unflatten": (range(1, 4), 4, _unflatten),
}
