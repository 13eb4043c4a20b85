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
RankingKey = tuple[float, ...]
T = TypeVar("T")


class BudgetSpentError(Exception):
    """Raised when the search has used all its evaluations."""


class RankingKeyCache:
    """Function that computes the ranking key of each point once, and of at most `max_evaluations` points."""

    def __init__(self, compute_key: Callable[[Point], RankingKey], max_evaluations: int):
        self._compute_key = compute_key
        self._most = max_evaluations
        self.keys_by_point: dict[Point, RankingKey] = {}

    def __call__(self, point: Point) -> RankingKey:
        """Return the ranking key of a point. Raise `BudgetSpentError` if it is unknown and no evaluations are left."""
        if point not in self.keys_by_point:
            if len(self.keys_by_point) >= self._most:
                raise BudgetSpentError
            self.keys_by_point[point] = self._compute_key(point)
        return self.keys_by_point[point]

    @property
    def best_point(self) -> Point:
        """Point with the smallest key so far, the first one if several have it."""
        return min(self.keys_by_point, key=self.keys_by_point.__getitem__)


def find_minimum(
    num_choices: Sequence[int],
    compute_key: Callable[[Point], RankingKey],
    starts: Iterable[Point],
    *,
    max_evaluations: int,
    seed: int = 0,
    restarts: int = 0,
) -> Point:
    """Return the point with the smallest key that coordinate descent finds in at most `max_evaluations` evaluations.

    `num_choices` has the number of choices of each coordinate. The search descends from `starts` and from `restarts`
    random points. If evaluations suffice, no change of one coordinate improves the result.

    Raises:
        BudgetSpentError: `max_evaluations` is 0.

    Example:
        >>> find_minimum((3, 3), lambda p: ((p[0] - 2) ** 2 + (p[1] - 1) ** 2,), [(0, 0)], max_evaluations=9)
        (2, 1)
    """
    key_cache, rng = RankingKeyCache(compute_key, max_evaluations), random.Random(seed)
    try:
        if math.prod(num_choices) <= max_evaluations:
            for point in itertools.chain(starts, itertools.product(*map(range, num_choices))):
                key_cache(tuple(point))
            return key_cache.best_point
        random_starts = (tuple(rng.randrange(size) for size in num_choices) for _ in range(restarts))
        for start in itertools.chain(starts, random_starts):
            _descend_from(tuple(start), num_choices, key_cache, rng)
    except BudgetSpentError:
        if not key_cache.keys_by_point:
            raise
    return key_cache.best_point


def _descend_from(
    point: Point, num_choices: Sequence[int], key_cache: RankingKeyCache, rng: random.Random
) -> None:
    """Change one coordinate at a time to its best choice, until no change helps. The result is in `key_cache`."""
    key_cache(point)
    coordinates = [n for n, size in enumerate(num_choices) if size > 1]
    rng.shuffle(coordinates)
    unchanged = 0
    for n in itertools.cycle(coordinates):
        # Put the current choice first, because `min` returns the first of the choices with equal keys.
        choices = sorted(range(num_choices[n]), key=lambda c: c != point[n])
        best = min(((*point[:n], choice, *point[n + 1 :]) for choice in choices), key=key_cache)
        unchanged = unchanged + 1 if best == point else 0
        point = best
        if unchanged == len(coordinates):
            return
