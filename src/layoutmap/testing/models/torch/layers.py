"""Draw torch modules with sliding windows, and modules for sequences: recurrent modules and attention.

Each function draws a module for an input shape without the batch axis. It returns the expression of the module, the
expression of its call, and the output shape.
"""

from __future__ import annotations

from typing import Any

from layoutmap.testing.models.choices import Choices
from layoutmap.testing.models.maps import Shape
from layoutmap.testing.models.values import WIDTHS, find_common_divisors

CALL = "{m}({x})"


def format_keyword_arguments(**options: Any) -> str:
    """Return keyword arguments as source, each after a comma, without those that are `None`."""
    return "".join(f", {name}={value!r}" for name, value in options.items() if value is not None)


def draw_convolution(choices: Choices, shape: Shape) -> tuple[str, str, Shape]:
    """Draw a convolution with random size, stride, dilation, padding, and groups."""
    channels, *space = shape
    filters, ones = choices.pick_weighted(WIDTHS), (1,) * len(space)
    groups = choices.pick(*find_common_divisors(channels, filters)) if choices.draw_true_once_in(2) else 1
    steps = tuple(choices.pick_weighted({1: 3, 2: 2}) for _ in space)
    strides, dilation = (ones, steps) if choices.draw_true_once_in(3) else (steps, ones)
    padding = choices.pick(0, "same", 1) if strides == ones else choices.pick(0, 1)
    mode = None
    if padding == 1 and min(space) > 1:
        mode = choices.pick(None, None, "reflect", "replicate", "circular")
    sizes = tuple(
        min(choices.pick_weighted({3: 3, 2: 2, 1: 1}), (n - 1) // d + 1)
        for n, d in zip(space, dilation, strict=True)
    )
    spatial = tuple(
        n if padding == "same" else (n + 2 * (padding == 1) - (size - 1) * d - 1) // step + 1
        for n, size, d, step in zip(space, sizes, dilation, strides, strict=True)
    )
    options = format_keyword_arguments(
        stride=strides if strides != ones else None,
        padding=padding or None,
        dilation=dilation if dilation != ones else None,
        groups=groups if groups > 1 else None,
        bias=False if choices.draw_true_once_in(4) else None,
        padding_mode=mode,
    )
    return f"nn.Conv{len(space)}d({channels}, {filters}, {sizes}{options})", CALL, (filters, *spatial)


def draw_transposed_convolution(choices: Choices, shape: Shape) -> tuple[str, str, Shape]:
    """Draw a transposed convolution that doubles the size of each spatial axis."""
    channels, *space = shape
    filters = choices.pick_weighted(WIDTHS)
    groups = choices.pick(*find_common_divisors(channels, filters)) if choices.draw_true_once_in(3) else 1
    size = choices.pick("2", "4, padding=1", "3, padding=1, output_padding=1")
    options = format_keyword_arguments(stride=2, groups=groups if groups > 1 else None)
    module = f"nn.ConvTranspose{len(space)}d({channels}, {filters}, {size}{options})"
    return module, CALL, (filters, *(2 * n for n in space))


def draw_pooling(choices: Choices, shape: Shape) -> tuple[str, str, Shape]:
    """Draw maximum or average pooling over windows."""
    channels, *space = shape
    size, step = min(choices.pick_weighted({2: 3, 3: 2}), *space), choices.pick(2, 1)
    module = f"nn.{choices.pick('Max', 'Avg')}Pool{len(space)}d({size}, stride={step})"
    return module, CALL, (channels, *((n - size) // step + 1 for n in space))


def draw_recurrent(choices: Choices, shape: Shape) -> tuple[str, str, Shape]:
    """Draw a recurrent module with a call that uses all outputs, the last output, or the final state."""
    kind, width, both = (
        choices.pick("GRU", "LSTM", "RNN"),
        choices.pick(8, 4, 16, 12),
        choices.draw_true_once_in(3),
    )
    is_projected = kind == "LSTM" and width > 4 and choices.draw_true_once_in(4)
    options = format_keyword_arguments(
        batch_first=True,
        bidirectional=both or None,
        num_layers=2 if choices.draw_true_once_in(4) else None,
        bias=False if choices.draw_true_once_in(6) else None,
        proj_size=4 if is_projected else None,
    )
    size = 4 if is_projected else width
    state = "{m}({x})[1][0][-1]" if kind == "LSTM" else "{m}({x})[1][-1]"
    calls = {
        "{m}({x})[0]": (shape[0], size * (1 + both)),
        "{m}({x})[0][:, -1]": (size * (1 + both),),
        state: (size,),
    }
    return f"nn.{kind}({shape[-1]}, {width}{options})", *choices.pick(*calls.items())


def draw_attention(
    choices: Choices, shape: Shape, key_value: str = "{x}", key_shape: Shape | None = None
) -> tuple[str, str, Shape]:
    """Draw a layer for self-attention, or for cross-attention to the sequence `key_value` of shape `key_shape`."""
    (length, width), (num_keys, size) = shape, key_shape or shape
    options = format_keyword_arguments(
        kdim=size if size != width else None,
        vdim=size if size != width else None,
        dropout=0.25 if choices.draw_true_once_in(5) else None,
        bias=False if choices.draw_true_once_in(5) else None,
        batch_first=True,
    )
    heads = choices.pick(*(n for n in (2, 4, 1, 8, 3, 7) if width % n == 0))
    mask = f", attn_mask=torch.ones({length}, {num_keys}, dtype=torch.bool, device={{x}}.device).triu(1)"
    call = f"{{m}}({{x}}, {key_value}, {key_value}{choices.pick('', ', need_weights=False', mask)})[0]"
    return f"nn.MultiheadAttention({width}, {heads}{options})", call, shape
