"""Choices among alternatives, made by a seed or by Hypothesis."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

T = TypeVar("T")


class Choices:
    """Choices, each of which is a number; the simplest alternative comes first, since Hypothesis shrinks towards 0.

    Args:
        below: Returns a number from 0 to its argument, less 1.
    """

    def __init__(self, below: Callable[[int], int]):
        self.below = below

    @classmethod
    def of_seed(cls, seed: int) -> Choices:
        """The choices that a seed makes: Python keeps the sequence of `random()`, and of no other method, for ever."""
        numbers = random.Random(seed)
        return cls(lambda n: int(numbers.random() * n))

    def one_of(self, *alternatives: T) -> T:
        """One of the arguments."""
        return alternatives[self.below(len(alternatives))]

    def weighted(self, weights: Mapping[T, int]) -> T:
        """One of the keys, as often as their weights say."""
        return self.one_of(*(key for key, weight in weights.items() for _ in range(weight)))

    def one_in(self, number: int) -> bool:
        """True once in so many times."""
        return self.below(number) == number - 1

    def taken(self, alternatives: Iterable[T], number: int) -> list[T]:
        """So many of the alternatives, or all of them if they are fewer, in any order."""
        left = list(alternatives)
        return [left.pop(self.below(len(left))) for _ in range(min(number, len(left)))]
