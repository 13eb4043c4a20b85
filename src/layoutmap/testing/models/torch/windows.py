"""Modules of torch that move windows over places: convolutions and pooling."""

from __future__ import annotations

from typing import Any

from layoutmap.testing.models.choices import Choices
from layoutmap.testing.models.maps import Shape
from layoutmap.testing.models.values import WIDTHS, divisors


def options_of(**options: Any) -> str:
    """Arguments by name, without those that are `None`."""
    return "".join(f", {name}={value!r}" for name, value in options.items() if value is not None)


def convolution(choices: Choices, shape: Shape) -> tuple[str, str, Shape]:
    """A convolution of any stride, dilation, padding and number of groups."""
    channels, *space = shape
    filters, ones = choices.weighted(WIDTHS), (1,) * len(space)
    groups = choices.one_of(*divisors(channels, filters)) if choices.one_in(2) else 1
    steps = tuple(choices.weighted({1: 3, 2: 2}) for _ in space)
    strides, dilation = (ones, steps) if choices.one_in(3) else (steps, ones)
    padding = choices.one_of(0, "same", 1) if strides == ones else choices.one_of(0, 1)
    mode = (
        choices.one_of(None, None, "reflect", "replicate", "circular")
        if padding == 1 and min(space) > 1
        else None
    )
    sizes = tuple(
        min(choices.weighted({3: 3, 2: 2, 1: 1}), (n - 1) // d + 1)
        for n, d in zip(space, dilation, strict=True)
    )
    places = tuple(
        n if padding == "same" else (n + 2 * (padding == 1) - (size - 1) * d - 1) // step + 1
        for n, size, d, step in zip(space, sizes, dilation, strides, strict=True)
    )
    options = options_of(
        stride=strides if strides != ones else None,
        padding=padding or None,
        dilation=dilation if dilation != ones else None,
        groups=groups if groups > 1 else None,
        bias=False if choices.one_in(4) else None,
        padding_mode=mode,
    )
    return f"nn.Conv{len(space)}d({channels}, {filters}, {sizes}{options})", "{m}({x})", (filters, *places)


def transposed(choices: Choices, shape: Shape) -> tuple[str, str, Shape]:
    """A transposed convolution, which doubles the number of places."""
    channels, *space = shape
    filters = choices.weighted(WIDTHS)
    groups = choices.one_of(*divisors(channels, filters)) if choices.one_in(3) else 1
    size = choices.one_of("2", "4, padding=1", "3, padding=1, output_padding=1")
    options = options_of(stride=2, groups=groups if groups > 1 else None)
    made = f"nn.ConvTranspose{len(space)}d({channels}, {filters}, {size}{options})"
    return made, "{m}({x})", (filters, *(2 * n for n in space))


def pooling(choices: Choices, shape: Shape) -> tuple[str, str, Shape]:
    """The largest or the mean of each window."""
    channels, *space = shape
    size, step = min(choices.weighted({2: 3, 3: 2}), *space), choices.one_of(2, 1)
    made = f"nn.{choices.one_of('Max', 'Avg')}Pool{len(space)}d({size}, stride={step})"
    return made, "{m}({x})", (channels, *((n - size) // step + 1 for n in space))
