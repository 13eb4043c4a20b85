"""Minimize a function of several choices by coordinate descent from several starts.

The function is called once for each point. If it may be called for all points, an exhaustive search replaces the
descent.
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
    """Score function that remembers its results, and evaluates at most `max_evaluations` points. Less is better."""

    def __init__(self, score: Callable[[Point], Score], max_evaluations: int):
        self._score = score
        self._most = max_evaluations
        self.scores: dict[Point, Score] = {}

    def __call__(self, point: Point) -> Score:
        """Return the score of a point, or raise `BudgetSpent` for a new point without evaluations left."""
        if point not in self.scores:
            if len(self.scores) >= self._most:
                raise BudgetSpent
            self.scores[point] = self._score(point)
        return self.scores[point]

    @property
    def best(self) -> Point:
        """Point with the least score so far, or the first such point."""
        return min(self.scores, key=self.scores.__getitem__)


def find_minimum(
    sizes: Sequence[int],
    score: Callable[[Point], Score],
    starts: Iterable[Point],
    *,
    max_evaluations: int,
    seed: int = 0,
    restarts: int = 0,
) -> Point:
    """Return the point with the least score that coordinate descent finds with at most `max_evaluations` evaluations.

    `sizes` has the number of choices of each coordinate. The search descends from `starts` and from `restarts` random
    points. If evaluations suffice, no change of one coordinate improves the result.

    Raises:
        BudgetSpent: `max_evaluations` is 0.

    Example:
        >>> find_minimum((3, 3), lambda p: ((p[0] - 2) ** 2 + (p[1] - 1) ** 2,), [(0, 0)], most=9)
        (2, 1)
    """
    score_cache, rng = ScoreCache(score, max_evaluations), random.Random(seed)
    try:
        if math.prod(sizes) <= max_evaluations:
            for point in itertools.chain(starts, itertools.product(*map(range, sizes))):
                score_cache(tuple(point))
            return score_cache.best
        random_starts = (tuple(rng.randrange(size) for size in sizes) for _ in range(restarts))
        for start in itertools.chain(starts, random_starts):
            _descend_from(tuple(start), sizes, score_cache, rng)
    except BudgetSpent:
        if not score_cache.scores:
            raise
    return score_cache.best


def _descend_from(point: Point, sizes: Sequence[int], score_cache: ScoreCache, rng: random.Random) -> None:
    """Change one coordinate at a time to its best choice, until no change helps. `score_cache` keeps all scores."""
    score_cache(point)
    coordinates = [n for n, size in enumerate(sizes) if size > 1]
    rng.shuffle(coordinates)
    unchanged = 0
    for n in itertools.cycle(coordinates):
        # Put the current choice first, so that `min` keeps it in ties.
        choices = sorted(range(sizes[n]), key=lambda c: c != point[n])
        best = min(((*point[:n], choice, *point[n + 1 :]) for choice in choices), key=score_cache)
        unchanged = unchanged + 1 if best == point else 0
        point = best
        if unchanged == len(coordinates):
            return
