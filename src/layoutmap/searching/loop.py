"""The search itself: experts' maps on each mesh, a descent from the best of them, and as few rules as cost no more."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from layoutmap.core.errors import LayoutMapError, PlanError
from layoutmap.core.text_table import size
from layoutmap.rules.rule_set import RuleSet
from layoutmap.searching.descent import Point, Score, Spent, minimum
from layoutmap.searching.experts import Expert
from layoutmap.searching.space import Model, Space

MARGIN = 1.2
"""What is counted is taken times this before it is held against the limit: XLA needs up to that much more."""

_MESHES = 3  # that a descent is worth
TIE = 0.01
"""Of the time: what no estimate tells apart, and no rules are worth that only groups that are alike need."""

_FOUND = "found"
_OTHERS = 4


@dataclass(frozen=True)
class Figures:
    """What a step costs with a map.

    Args:
        seconds: How long it takes.
        peak_bytes: What a device holds at most.
        serial_seconds: How long it takes if nothing overlaps, which decides between maps that take as long.
    """

    seconds: float
    peak_bytes: int
    serial_seconds: float = 0.0


Evaluate = Callable[[RuleSet], Figures]


@dataclass(frozen=True)
class Tried:
    """A map whose cost was counted.

    Args:
        name: Whose map it is.
        layout_map: The map.
        figures: What a step costs with it; `None`: it cannot be used.
        limit: The memory of a device, in bytes.
        why_not: Why it cannot be used.
    """

    name: str
    layout_map: RuleSet
    figures: Figures | None
    limit: int
    why_not: str = ""

    @property
    def missing_bytes(self) -> float:
        """What a device lacks with it, margin included; not below zero."""
        return max(0.0, self.figures.peak_bytes * MARGIN - self.limit) if self.figures else math.inf

    @property
    def score(self) -> Score:
        """What is less is better: what a device lacks, then the time with overlap, then without, to four digits."""
        if self.figures is None:
            return (math.inf, math.inf, math.inf)
        times = (float(f"{seconds:.3e}") for seconds in (self.figures.seconds, self.figures.serial_seconds))
        return (self.missing_bytes, *times)

    @property
    def num_rules(self) -> int:
        """The number of its rules."""
        return len(self.layout_map) + len(self.layout_map.activations)


@dataclass(frozen=True)
class Outcome:
    """What a search has found.

    Args:
        best: The best map.
        experts: Experts' maps, the best first.
        num_tried: For how many maps the cost was counted.
        is_complete: Whether it was not interrupted.
        others: The next best maps that fit, for where the compiler needs more memory than was counted.
    """

    best: Tried
    experts: tuple[Tried, ...]
    num_tried: int
    is_complete: bool
    others: tuple[Tried, ...] = ()


class _Search:
    def __init__(self, evaluate: Evaluate, limit: int, most: int, on_tried: Callable[[int, Tried], object]):
        self._evaluate, self._limit, self._most, self._on_tried = evaluate, limit, most, on_tried
        self._known: dict[str, Tried] = {}
        self._num_alike: int | None = None  # the maps after that give groups that are alike different layouts
        self._fastest: Tried | None = None
        self.experts: list[Tried] = []

    @property
    def num_tried(self) -> int:
        """For how many maps the cost was counted."""
        return len(self._known)

    @property
    def left(self) -> int:
        """For how many more it may be counted."""
        return self._most - len(self._known)

    def tried(self, name: str, layout_map: RuleSet) -> Tried:
        """The cost of a map, counted once."""
        key = layout_map.to_yaml()
        if key not in self._known:
            if not self.left and self._known:
                raise Spent
            try:
                made = Tried(name, layout_map, self._evaluate(layout_map), self._limit)
            except LayoutMapError as error:
                made = Tried(name, layout_map, None, self._limit, error.what)
            self._known[key] = made
            if self._fastest is None or made.score < self._fastest.score:
                self._fastest = made
            self._on_tried(self.num_tried, self._fastest)
        return self._known[key]

    def best(self) -> Tried | None:
        """The map to return: one with different layouts for groups that are alike only if no other one ties with it."""
        every = list(self._known.values())
        plain, apart = least(every[: self._num_alike]), every[self._num_alike :] if self._num_alike else []
        if plain is None or not apart:
            return plain
        fastest = min(apart, key=lambda tried: tried.score)
        is_faster = fastest.score[0] < plain.score[0] or fastest.score[1] < plain.score[1] * (1 - TIE)
        return least([plain, *apart]) if is_faster else plain

    def others(self, best: Tried) -> tuple[Tried, ...]:
        """The next best maps that fit."""
        fitting = [t for t in self._known.values() if not t.missing_bytes and t is not best]
        return tuple(sorted(fitting, key=lambda tried: tried.score)[:_OTHERS])

    def run(self, model: Model, experts: Sequence[Expert], seed: int) -> None:
        """Try the experts' maps, then others on the meshes of the best of them."""
        scores: dict[int, Score] = {}
        for number, expert in enumerate(experts):
            made = self.tried(expert.name, expert.layout_map)
            self.experts.append(Tried(expert.name, made.layout_map, made.figures, self._limit, made.why_not))
            scores[number] = made.score
        order = sorted(scores, key=scores.__getitem__)
        meshes = list(dict.fromkeys(experts[n].grid for n in order))[:_MESHES]
        ends: list[tuple[Score, Space, Point]] = []
        for number, grid in enumerate(meshes):
            mine = [experts[n] for n in order if experts[n].grid == grid]
            space = Space(model, grid, also=[(e.layouts, e.blocks) for e in mine])
            most = self.left if number == len(meshes) - 1 else self.left // 2  # the most for the best
            if most < 1:
                break
            starts = [space.point_of(e.layouts, e.blocks) for e in mine]
            point = minimum(space.sizes, self._score(space), starts, most=most, seed=seed)
            point = self._simplified(space, point)
            ends.append((self._score(space)(point), space, point))
        if ends:
            _, space, point = min(ends, key=lambda end: end[0])
            self._untie(space, point, seed)

    def _score(self, space: Space) -> Callable[[Point], Score]:
        return lambda point: self.tried(_FOUND, space.map_of(point)).score

    def _simplified(self, space: Space, point: Point) -> Point:
        """The same point, with the first choice, which needs no rule, wherever that is no worse."""
        score = self._score(space)
        for n, choice in enumerate(point):
            simpler = (*point[:n], 0, *point[n + 1 :])
            if choice and self.left and score(simpler) <= score(point):
                point = simpler
        return point

    def _untie(self, space: Space, point: Point, seed: int) -> None:
        """Give groups that are alike layouts of their own, if that is worth the rules."""
        layouts, blocks = space.layouts_of(point)
        untied = Space(space.model, space.grid, tied=False, also=[(layouts, blocks)])
        if len(untied.sizes) == len(space.sizes) or self.left < 1:
            return
        start = untied.point_of(layouts, blocks)
        self._num_alike = len(self._known)
        minimum(untied.sizes, self._score(untied), [start], most=self.left, seed=seed)


def least(tried: Sequence[Tried]) -> Tried | None:
    """The map to choose: of those that fit and take as long as the fastest, to 1 %, that with the least memory.

    Of those with as much memory, to 1 %, it is the one with the fewest rules. If none fits, it is the nearest.
    """
    fastest = min(tried, key=lambda each: each.score, default=None)
    if fastest is None or fastest.figures is None or fastest.missing_bytes:
        return fastest
    fitting = [(each, each.figures) for each in tried if each.figures and not each.missing_bytes]
    limit = fastest.figures.seconds * (1 + TIE)
    tied = [(each, figures) for each, figures in fitting if figures.seconds <= limit]
    most = min(figures.peak_bytes for _, figures in tied) * (1 + TIE)
    small = [each for each, figures in tied if figures.peak_bytes <= most]
    return min(small, key=lambda each: (each.num_rules, each.score))


def search(
    model: Model,
    experts: Iterable[Expert],
    evaluate: Evaluate,
    *,
    limit: int,
    most: int,
    seed: int = 0,
    on_tried: Callable[[int, Tried], object] = lambda number, best: None,
) -> Outcome:
    """Find the map with which a step takes least, among those that fit.

    Args:
        model: The model.
        experts: Maps to hold others against, and to start from; their meshes are those that are searched.
        evaluate: What a step costs with a map; raises a `LayoutMapError` for one that cannot be used.
        limit: The memory of a device, in bytes.
        most: For how many maps the cost may be counted.
        seed: Decides the order in which choices are tried.
        on_tried: Called after each map with the number so far and the best of them.

    Returns:
        The best map. An interrupt ends the search, and what it had found by then is returned.

    Raises:
        PlanError: No map that was tried fits; says which came nearest.
        KeyboardInterrupt: It was interrupted before any map was tried.
    """
    searching, is_complete = _Search(evaluate, limit, most, on_tried), True
    try:
        searching.run(model, tuple(experts), seed)
    except Spent:
        pass
    except KeyboardInterrupt:
        if searching.best() is None:
            raise
        is_complete = False
    best = searching.best()
    if best is None or best.missing_bytes:
        raise _nothing_fits(best, limit, searching.num_tried)
    rows = tuple(sorted(searching.experts, key=lambda tried: tried.score))
    return Outcome(best, rows, searching.num_tried, is_complete, searching.others(best))


def _nothing_fits(nearest: Tried | None, limit: int, num_tried: int) -> PlanError:
    if nearest is None or nearest.figures is None:
        return PlanError(
            "search: the cost of no map could be counted",
            facts={"maps": num_tried},
            why=nearest.why_not if nearest else "there is no mesh whose first dim divides the batch",
            fix="plan one map with lm.plan(.., on=), which says more",
        )
    peak = nearest.figures.peak_bytes
    return PlanError(
        "search: no layout map fits the memory",
        facts={
            "limit": size(limit),
            "nearest": f"{nearest.layout_map.mesh}: {size(peak)} on each device, {size(peak * MARGIN)} with the margin",
            "missing": size(nearest.missing_bytes),
            "maps tried": num_tried,
        },
        why=f"what is counted must leave {MARGIN - 1:.0%} of itself free, since XLA may need that much more",
        fix="use more devices or a smaller batch, recompute activations (jax.checkpoint), or raise the limit",
    )
