"""Sizes that a seed draws: a ratio that is published is the median and the worst of many, not of a chosen few."""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

T = TypeVar("T")


def draw(count: int, seed: int, choices: Mapping[str, Sequence[T]]) -> Iterator[dict[str, T]]:
    """Yield so many drawn sizes: for each name one of its choices."""
    numbers = random.Random(seed)
    for _ in range(count):
        yield {name: numbers.choice(values) for name, values in choices.items()}


def spread(what: str, ratios: Sequence[float]) -> str:
    """Return a line with the median and the worst, which is the largest, of ratios."""
    median, least, worst = statistics.median(ratios), min(ratios), max(ratios)
    return f"{what}: median {median:.2f}, worst {worst:.2f}, best {least:.2f} of {len(ratios)} drawn sizes"
