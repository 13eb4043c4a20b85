"""Choose among alternatives by a seed or by Hypothesis."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

T = TypeVar("T")


class Choices:
    """A source of random choices: `draw_below(n)` returns an integer from 0 to `n - 1`.

    List the simplest alternative first, since Hypothesis shrinks each number towards 0.
    """

    def __init__(self, draw_below: Callable[[int], int]):
        self.draw_below = draw_below

    @classmethod
    def from_seed(cls, seed: int) -> Choices:
        """Return choices that only depend on a seed, in all versions of Python.

        Python guarantees the sequence of `random()` across releases, but not those of its other methods.
        """
        numbers = random.Random(seed)
        return cls(lambda n: int(numbers.random() * n))

    def pick(self, *alternatives: T) -> T:
        """Return one of the arguments."""
        return alternatives[self.draw_below(len(alternatives))]

    def pick_weighted(self, frequencies: Mapping[T, int]) -> T:
        """Return one of the keys, with a probability proportional to its frequency."""
        return self.pick(*(key for key, n in frequencies.items() for _ in range(n)))

    def draw_true_once_in(self, num_outcomes: int) -> bool:
        """Return True with a probability of 1 / `num_outcomes`, and otherwise False."""
        return self.draw_below(num_outcomes) == num_outcomes - 1

    def sample(self, alternatives: Iterable[T], num_samples: int) -> list[T]:
        """Return `num_samples` of the alternatives in random order, or all if there are fewer."""
        left = list(alternatives)
        return [left.pop(self.draw_below(len(left))) for _ in range(min(num_samples, len(left)))]
