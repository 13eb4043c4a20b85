"""Minimize a function of several choices by coordinate descent from several starts.

What a point costs is a function that is asked once for each point. An exhaustive search takes the place of the descent
where all points are fewer than it may ask for.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

Point = tuple[int, ...]
Score = tuple[float, ...]
T = TypeVar("T")


class BudgetSpent(Exception):
    """Raised when the search has used all its evaluations."""


class ScoreCache:
    """Score function that evaluates each point once, and at most `most` points. Less is better."""

    def __init__(self, score: Callable[[Point], Score], most: int):
        self._score = score
        self._most = most
        self.scores: dict[Point, Score] = {}

    def __call__(self, point: Point) -> Score:
        """Return the score of a point."""
        if point not in self.scores:
            if len(self.scores) >= self._most:
                raise BudgetSpent
            self.scores[point] = self._score(point)
        return self.scores[point]

    @property
    def best(self) -> Point:
        """Best point so far, and the first of equal ones."""
        return min(self.scores, key=self.scores.__getitem__)


def find_minimum(
    sizes: Sequence[int],
    score: Callable[[Point], Score],
    starts: Iterable[Point],
    *,
    most: int,
    seed: int = 0,
    restarts: int = 0,
) -> Point:
    """Return a point with a small score that no single change improves, after at most `most` evaluations.

    `sizes` are the numbers of choices per coordinate. The search descends from `starts` and from `restarts` random
    points.

    Raises:
        BudgetSpent: `most` is 0.

    Example:
        >>> find_minimum((3, 3), lambda p: ((p[0] - 2) ** 2 + (p[1] - 1) ** 2,), [(0, 0)], most=9)
        (2, 1)
    """
    asked, chance = ScoreCache(score, most), random.Random(seed)
    try:
        if math.prod(sizes) <= most:
            for point in itertools.chain(starts, itertools.product(*map(range, sizes))):
                asked(tuple(point))
            return asked.best
        by_chance = (tuple(chance.randrange(size) for size in sizes) for _ in range(restarts))
        for start in itertools.chain(starts, by_chance):
            _descend(tuple(start), sizes, asked, chance)
    except BudgetSpent:
        if not asked.scores:
            raise
    return asked.best


def _descend(point: Point, sizes: Sequence[int], asked: ScoreCache, chance: random.Random) -> None:
    asked(point)
    coordinates = [n for n, size in enumerate(sizes) if size > 1]
    chance.shuffle(coordinates)
    unchanged = 0
    for n in itertools.cycle(coordinates):
        # The current choice first, so that ties keep it.
        choices = sorted(range(sizes[n]), key=lambda c: c != point[n])
        best = min(((*point[:n], choice, *point[n + 1 :]) for choice in choices), key=asked)
        unchanged = unchanged + 1 if best == point else 0
        point = best
        if unchanged == len(coordinates):
            return
