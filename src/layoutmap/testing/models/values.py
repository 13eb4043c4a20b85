"""Draw inputs, outputs, and sizes, most of which mesh dims divide, for the models of all libraries."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from layoutmap.testing.models.choices import Choices
from layoutmap.testing.models.maps import Shape

WIDTHS = {8: 6, 16: 5, 4: 2, 24: 2, 12: 2, 32: 1, 6: 1, 7: 1}
"""Numbers of features, with how often each is drawn. Most are multiples of 4 or 8, so that mesh dims divide them."""


@dataclass(frozen=True)
class ModelValue:
    """An input or an output of a model."""

    name: str  # name of the variable in the program
    shape: Shape  # shape of one row; for logits, without the axis of classes
    classes: int | None = None  # vocabulary size or number of classes; None if the values are floats
    loss: str = ""  # expression of the loss of an output, in the syntax of the library

    def make_batch_code(self, rows: int) -> str:
        """Return the expression that draws a batch of this value from `rng`."""
        shape = (rows, *self.shape)
        if self.classes:
            return f"rng.integers(0, {self.classes}, {shape})"
        return f"rng.normal(size={shape}).astype('float32')"


def make_whole_batch_code(inputs: Sequence[ModelValue], outputs: Sequence[ModelValue], rows: int) -> str:
    """Return the expression of a batch, which is inputs and targets drawn from `rng`."""
    return ", ".join(
        make_list_code([value.make_batch_code(rows) for value in values]) for values in (inputs, outputs)
    )


def make_list_code(expressions: list[str]) -> str:
    """Return one expression unchanged, and several as the expression of a list."""
    return expressions[0] if len(expressions) == 1 else f"[{', '.join(expressions)}]"


def find_common_divisors(*numbers: int) -> list[int]:
    """Return those of the numbers 1, 2, 3, 4, 7, and 8 that divide all arguments."""
    return [n for n in (2, 4, 8, 1, 3, 7) if all(number % n == 0 for number in numbers)]


def draw_heads_einsum(choices: Choices, shape: Shape) -> tuple[str, Shape, int, Shape]:
    """Draw an einsum that splits features into attention heads, or merges heads into features.

    Returns the equation, the kernel's shape, the number of contracted axes, and the result's shape.
    """
    axes = "bcd"[: len(shape)]
    merges = len(shape) == 3 or (len(shape) == 2 and choices.draw_true_once_in(3))
    contracted, free = (axes[-2:], axes[:-2]) if merges else (axes[-1:], axes[:-1])
    sizes = (choices.pick_weighted(WIDTHS),) if merges else (choices.pick(4, 2, 8), choices.pick(4, 8))
    new = "z" if merges else "yz"
    equation = f"a{free}{contracted},{contracted}{new}->a{free}{new}"
    return equation, (*shape[len(free) :], *sizes), len(contracted), (*shape[: len(free)], *sizes)


def draw_padding(
    choices: Choices, space: Shape, sizes: Shape, strides: Shape, dilation: Shape
) -> tuple[bool, Shape]:
    """Draw whether windows must stay inside the input. Return this boolean, and the output size along each axis."""
    lengths = tuple((size - 1) * step + 1 for size, step in zip(sizes, dilation, strict=True))
    is_valid = all(
        n >= length for n, length in zip(space, lengths, strict=True)
    ) and choices.draw_true_once_in(2)
    least = lengths if is_valid else (1,) * len(space)
    spatial = tuple(-(-(n - length + 1) // s) for n, length, s in zip(space, least, strides, strict=True))
    return is_valid, spatial


def make_losses_code(outputs: Sequence[ModelValue], output_letter: str) -> str:
    """Return the sum of all losses. In a loss, replace `output_letter` by its output, and `t` by its target."""
    names = [("outputs", "targets")]
    if len(outputs) > 1:
        names = [(f"outputs[{n}]", f"targets[{n}]") for n in range(len(outputs))]
    letters = (dict(zip((output_letter, "t"), pair, strict=True)) for pair in names)
    return " + ".join(
        re.sub(rf"\b[{output_letter}t]\b", lambda match, names=names: names[match[0]], value.loss)
        for value, names in zip(outputs, letters, strict=True)
    )
