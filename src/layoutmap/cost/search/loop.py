"""Search layout maps: try expert maps on each mesh, descend from the best, and drop needless rules."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass, replace

from layoutmap.core.errors import LayoutMapError, PlanError
from layoutmap.core.text_table import format_bytes
from layoutmap.cost.search.descent import BudgetSpent, Point, Score, find_minimum
from layoutmap.cost.search.experts import ExpertMap
from layoutmap.cost.search.space import Model, Space
from layoutmap.rules.rule_set import RuleSet

_MESHES = 3  # number of meshes to search by descent
TIE = 0.01
"""Of the time: what no estimate tells apart, and no rules are worth that only groups that are alike need."""

_FAR = 2  # if the best expert map needs this multiple of the memory, no layout fits
_FOUND = "found"
_OTHERS = 4


@dataclass(frozen=True)
class Figures:
    """Figures of a step with a layout map."""

    seconds: float
    peak_bytes: int  # per device
    serial_seconds: float = 0.0  # without overlap, which decides between equally fast maps


Evaluate = Callable[[RuleSet], Figures]
OnTried = Callable[[int, "Candidate"], object]


@dataclass(frozen=True)
class Candidate:
    """Layout map with its counted cost."""

    name: str  # of its origin
    layout_map: RuleSet
    figures: Figures | None  # None: the map cannot be used
    limit: int  # memory of a device in bytes
    why_not: str = ""
    recomputes: bool = False  # whether blocks recompute activations in the backward pass
    compiled_bytes: int | None = None  # peak by XLA's compiler; None: not compiled

    @property
    def missing_bytes(self) -> float:
        """Bytes that a device lacks, at least zero."""
        needed = self.compiled_bytes or (self.figures.peak_bytes if self.figures else math.inf)
        return max(0.0, needed - self.limit)

    @property
    def cost(self) -> object:
        """Value that is equal for maps of equal cost, regardless of their rules."""
        return self.layout_map.mesh, self.figures, self.recomputes

    @property
    def score(self) -> Score:
        """Sort key of maps: missing bytes, time with overlap, and time without overlap."""
        if self.figures is None:
            return (math.inf, math.inf, math.inf)
        times = (float(f"{seconds:.3e}") for seconds in (self.figures.seconds, self.figures.serial_seconds))
        return (self.missing_bytes, *times)

    @property
    def num_rules(self) -> int:
        """Number of rules."""
        return len(self.layout_map) + len(self.layout_map.activations)


@dataclass(frozen=True)
class Outcome:
    """Outcome of a search."""

    best: Candidate
    experts: tuple[Candidate, ...]  # best first
    maps: frozenset[
        str
    ]  # YAML of each map that was tried, so that one that is counted in two ways is one map
    is_complete: bool  # False after an interrupt
    others: tuple[Candidate, ...] = ()  # next best that fit, in case the compiler needs more memory
    without: Candidate | None = None  # best map without recomputing, if the best one recomputes

    @property
    def num_tried(self) -> int:
        """Number of maps that were tried."""
        return len(self.maps)


class _Search:
    def __init__(
        self, evaluate: Evaluate, limit: int, most: int, on_tried: OnTried, recomputes: bool = False
    ):
        self._evaluate, self._limit, self._most, self._on_tried = evaluate, limit, most, on_tried
        self._recomputes = recomputes
        self._known: dict[str, Candidate] = {}
        self._num_alike: int | None = None  # number of maps tried before similar groups get different layouts
        self._fastest: Candidate | None = None
        self.experts: list[Candidate] = []

    @property
    def maps(self) -> Set[str]:
        """YAML of the maps that were counted."""
        return self._known.keys()

    @property
    def num_left(self) -> int:
        """Number of maps that may still be counted."""
        return self._most - len(self._known)

    def evaluate_map(self, name: str, layout_map: RuleSet) -> Candidate:
        """Return a map with its cost, which is counted once."""
        key = layout_map.to_yaml()
        if key not in self._known:
            if not self.num_left and self._known:
                raise BudgetSpent
            figures, why_not = None, ""
            try:
                figures = self._evaluate(layout_map)
            except LayoutMapError as error:
                why_not = error.what
            made = Candidate(name, layout_map, figures, self._limit, why_not, self._recomputes)
            self._known[key] = made
            if self._fastest is None or made.score < self._fastest.score:
                self._fastest = made
            self._on_tried(len(self._known), self._fastest)
        return self._known[key]

    def choose_best(self) -> Candidate | None:
        """Return the best map. Different layouts for similar groups must beat every shared layout."""
        every = list(self._known.values())
        plain, apart = (
            choose_candidate(every[: self._num_alike]),
            every[self._num_alike :] if self._num_alike else [],
        )
        if plain is None or not apart:
            return plain
        fastest = min(apart, key=lambda tried: tried.score)
        return choose_candidate([plain, *apart]) if is_better(fastest, plain) else plain

    @property
    def candidates(self) -> Sequence[Candidate]:
        """All maps that were tried."""
        return list(self._known.values())

    def run(
        self, model: Model, experts: Sequence[ExpertMap], seed: int, is_promising: Callable[[], bool]
    ) -> None:
        """Try the expert maps, and then search on the meshes of the best ones if that is promising.

        Raises:
            BudgetSpent: All maps that may be counted are.
        """
        scores: dict[int, Score] = {}
        for number, expert in enumerate(experts):
            made = self.evaluate_map(expert.name, expert.layout_map)
            self.experts.append(replace(made, name=expert.name))
            scores[number] = made.score
        if not is_promising():
            return
        order = sorted(scores, key=scores.__getitem__)
        meshes = list(dict.fromkeys(experts[n].grid for n in order))[:_MESHES]
        ends: list[tuple[Score, Space, Point]] = []
        for number, grid in enumerate(meshes):
            mine = [experts[n] for n in order if experts[n].grid == grid]
            space = Space(model, grid, also=[(e.layouts, e.blocks) for e in mine])
            # The best mesh gets the largest budget.
            most = self.num_left if number == len(meshes) - 1 else self.num_left // 2
            if most < 1:
                break
            starts = [space.find_point(e.layouts, e.blocks) for e in mine]
            point = find_minimum(space.sizes, self._make_score(space), starts, most=most, seed=seed)
            point = self._simplify_point(space, point)
            ends.append((self._make_score(space)(point), space, point))
        if ends:
            _, space, point = min(ends, key=lambda end: end[0])
            self._separate_groups(space, point, seed)

    def _make_score(self, space: Space) -> Callable[[Point], Score]:
        return lambda point: self.evaluate_map(_FOUND, space.make_layout_map(point)).score

    def _simplify_point(self, space: Space, point: Point) -> Point:
        """Return the point with groups at their first choice, which needs no rule, where the cost does not rise."""
        score = self._make_score(space)
        for n, choice in enumerate(point):
            simpler = (*point[:n], 0, *point[n + 1 :])
            if choice and self.num_left and score(simpler) <= score(point):
                point = simpler
        return point

    def _separate_groups(self, space: Space, point: Point, seed: int) -> None:
        """Give similar groups separate layouts if that is worth the extra rules."""
        layouts, blocks = space.get_layouts(point)
        untied = Space(space.model, space.grid, tied=False, also=[(layouts, blocks)])
        if len(untied.sizes) == len(space.sizes) or self.num_left < 1:
            return
        start = untied.find_point(layouts, blocks)
        self._num_alike = len(self._known)
        find_minimum(untied.sizes, self._make_score(untied), [start], most=self.num_left, seed=seed)


def choose_candidate(tried: Sequence[Candidate]) -> Candidate | None:
    """Return the map with the least memory among those that fit and are within 1 % of the fastest.

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


def is_better(new: Candidate, old: Candidate) -> bool:
    """Return whether a map lacks less memory than another one, or is faster by more than a tie."""
    return (new.score[0], new.score[1]) < (old.score[0], old.score[1] * (1 - TIE))


# The budget is a number of maps and not a time, so that a seed gives one result (decisions/0094).
def search_maps(
    model: Model,
    experts: Iterable[ExpertMap],
    evaluate: Evaluate,
    *,
    limit: int,
    most: int,
    recomputing: Evaluate | None = None,
    seed: int = 0,
    on_tried: OnTried = lambda number, best: None,
) -> Outcome:
    """Find the fastest map among those that fit, or the best so far after an interrupt.

    At most `most` maps are counted by `evaluate`, which raises a `LayoutMapError` for an unusable map, and as many by
    `recomputing`, which counts steps that recompute activations. That is tried if nothing fits without it, or if a map
    that does not fit would be faster.

    Raises:
        PlanError: No map that was tried fits. It names the nearest.
        KeyboardInterrupt: It was interrupted before any map was tried.
    """
    experts, is_complete = tuple(experts), True
    plain = _Search(evaluate, limit, most, on_tried)

    def show_again(_: int, best: Candidate) -> None:
        on_tried(len(plain.maps | again.maps), best)

    again = _Search(recomputing or evaluate, limit, most, show_again, True)
    try:
        with contextlib.suppress(BudgetSpent):
            plain.run(
                model, experts, seed, lambda: recomputing is None or not _is_far(plain.choose_best(), limit)
            )
        if recomputing is not None and _can_gain(plain):
            with contextlib.suppress(BudgetSpent):
                again.run(model, experts, seed, lambda: _is_remat_better(plain, again))
    except KeyboardInterrupt:
        if plain.choose_best() is None:
            raise
        is_complete = False
    runs, maps = (plain, again), frozenset(plain.maps | again.maps)
    best, without = plain.choose_best(), None
    if _is_remat_better(plain, again):
        best, without = again.choose_best(), best
    if best is None or best.missing_bytes:
        raise _make_no_fit_error(best, limit, len(maps))
    rows: dict[object, Candidate] = {}  # better of both variants of each expert map
    for tried in sorted((t for run in runs for t in run.experts), key=lambda tried: tried.score):
        rows.setdefault((tried.name, tried.layout_map.mesh), tried)
    every = (t for run in runs for t in reversed(run.candidates))
    fitting = {t.cost: t for t in every if not t.missing_bytes and t.cost != best.cost}
    others = sorted(fitting.values(), key=lambda tried: tried.score)
    return Outcome(best, tuple(rows.values()), maps, is_complete, tuple(others[:_OTHERS]), without)


def _is_far(best: Candidate | None, limit: int) -> bool:
    return best is not None and best.missing_bytes > (_FAR - 1) * limit


def _can_gain(searched: _Search) -> bool:
    """Return whether nothing fits, or a map that does not fit would be faster."""
    best = searched.choose_best()
    if best is None or best.figures is None or best.missing_bytes:
        return True
    return min(t.figures.seconds for t in searched.candidates if t.figures) < best.figures.seconds * (1 - TIE)


def _is_remat_better(plain: _Search, again: _Search) -> bool:
    """Return whether a map with recomputed activations is better than all maps without."""
    before, best = plain.choose_best(), again.choose_best()
    return before is not None and best is not None and is_better(best, before)


def _make_no_fit_error(nearest: Candidate | None, limit: int, num_tried: int) -> PlanError:
    if nearest is None or nearest.figures is None:
        return PlanError(
            "search: the cost of no map could be counted",
            facts={"maps": num_tried},
            why=nearest.why_not if nearest else "no mesh has a first dim that divides the batch",
            fix="plan one map with lm.plan(.., on=), which shows the reason",
        )
    peak = nearest.figures.peak_bytes
    return PlanError(
        "search: no layout map fits the memory",
        facts={
            "limit": format_bytes(limit),
            "nearest": f"{nearest.layout_map.mesh}: {format_bytes(peak)} per device"
            + ", activations recomputed" * nearest.recomputes,
            "missing": format_bytes(nearest.missing_bytes),
            "maps tried": num_tried,
        },
        why="with each map in the search, a step needs more memory than a device has; the estimate is "
        "an upper bound",
        fix="use more devices or a smaller batch, or raise the limit"
        if nearest.recomputes
        else "use more devices or a smaller batch, recompute activations (jax.checkpoint), or raise the limit",
    )
