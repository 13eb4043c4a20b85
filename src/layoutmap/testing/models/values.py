"""Parts of drawn models of any library: inputs, outputs, and shapes that divide by the dims of a mesh."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from layoutmap.testing.models.choices import Choices
from layoutmap.testing.models.maps import Shape

WIDTHS = {8: 6, 16: 5, 4: 2, 24: 2, 12: 2, 32: 1, 6: 1, 7: 1}
"""Numbers of features, and how often each is drawn: mostly multiples of 4 and 8, which divide by the dims of a mesh."""


@dataclass(frozen=True)
class Value:
    """An input or an output of a model.

    Args:
        name: What the program calls it.
        shape: The shape of one row of data; of an output that has logits of classes it lacks their axis.
        classes: How many tokens or classes there are; `None`: the data are numbers.
        loss: The loss of an output, as its library writes it.
    """

    name: str
    shape: Shape
    classes: int | None = None
    loss: str = ""

    def data(self, rows: int) -> str:
        """The expression that draws a batch of it from `rng`."""
        shape = (rows, *self.shape)
        if self.classes:
            return f"rng.integers(0, {self.classes}, {shape})"
        return f"rng.normal(size={shape}).astype('float32')"


def batch_source(inputs: Sequence[Value], outputs: Sequence[Value], rows: int) -> str:
    """The expression of a batch, inputs and targets, drawn from `rng`."""
    return ", ".join(one_or_list([each.data(rows) for each in values]) for values in (inputs, outputs))


def one_or_list(parts: list[str]) -> str:
    """The expression of one part, or of a list of several."""
    return parts[0] if len(parts) == 1 else f"[{', '.join(parts)}]"


def divisors(*numbers: int) -> list[int]:
    """Small numbers that divide all of these."""
    return [n for n in (2, 4, 8, 1, 3, 7) if all(number % n == 0 for number in numbers)]


def heads_of(choices: Choices, shape: Shape) -> tuple[str, Shape, int, Shape]:
    """An equation that makes heads of features, or features of heads.

    Returns:
        The equation, the kernel's shape, the number of its axes that the product adds up over, and the result's shape.
    """
    axes = "bcd"[: len(shape)]
    joins = len(shape) == 3 or (len(shape) == 2 and choices.one_in(3))
    summed, free = (axes[-2:], axes[:-2]) if joins else (axes[-1:], axes[:-1])
    sides = (choices.weighted(WIDTHS),) if joins else (choices.one_of(4, 2, 8), choices.one_of(4, 8))
    made = "z" if joins else "yz"
    equation, kernel = f"a{free}{summed},{summed}{made}->a{free}{made}", (*shape[len(free) :], *sides)
    return equation, kernel, len(summed), (*shape[: len(free)], *sides)
