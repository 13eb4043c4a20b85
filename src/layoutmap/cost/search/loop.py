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
from layoutmap.cost.search.space import LayoutSpace, SearchedModel
from layoutmap.rules.rule_set import RuleSet

_MESHES = 3  # number of meshes to search by descent
TIE = 0.01
"""Share of the time below which two maps tie: no estimate tells them apart, and it is worth no additional rules."""

_FAR = 2  # if the best expert map needs this multiple of the memory, no layout fits, so skip the search
_SEARCHED = "found"
_OTHERS = 4


@dataclass(frozen=True)
class StepFigures:
    """Time and peak memory of a step with a layout map."""

    seconds: float
    peak_bytes: int  # per device
    serial_seconds: float = 0.0  # time without overlap; between equally fast maps, the smaller one wins


EvaluateFn = Callable[[RuleSet], StepFigures]
OnTried = Callable[[int, "Candidate"], object]


@dataclass(frozen=True)
class Candidate:
    """Layout map with its counted cost."""

    name: str  # such as "fully sharded" for an expert map, or "found"
    layout_map: RuleSet
    figures: StepFigures | None  # None: the map cannot be used
    max_bytes: int  # memory of a device in bytes
    why_not: str = ""  # why the map cannot be used
    recomputes: bool = False  # whether blocks recompute activations in the backward pass
    compiled_bytes: int | None = None  # peak by XLA's compiler; None: not compiled

    @property
    def missing_bytes(self) -> float:
        """Bytes by which the step exceeds the memory limit, or zero if it fits."""
        needed = self.compiled_bytes or (self.figures.peak_bytes if self.figures else math.inf)
        return max(0.0, needed - self.max_bytes)

    @property
    def cost_key(self) -> object:
        """Key that is equal for maps with equal cost on one mesh, regardless of their rules."""
        return self.layout_map.mesh, self.figures, self.recomputes

    @property
    def score(self) -> Score:
        """Sort key, smaller is better: missing bytes, time with overlap, and time without overlap."""
        if self.figures is None:
            return (math.inf, math.inf, math.inf)
        times = (float(f"{seconds:.3e}") for seconds in (self.figures.seconds, self.figures.serial_seconds))
        return (self.missing_bytes, *times)

    @property
    def num_rules(self) -> int:
        """Number of rules."""
        return len(self.layout_map) + len(self.layout_map.activations)


@dataclass(frozen=True)
class SearchOutcome:
    """Outcome of a search."""

    best: Candidate
    experts: tuple[Candidate, ...]  # the maps that a human expert would try, best first
    maps: frozenset[
        str
    ]  # YAML of each map that was tried, so that a map that is also counted with recomputing counts once
    is_complete: bool  # False after an interrupt
    runners_up: tuple[Candidate, ...] = ()  # next best, in case XLA needs more memory
    without_recomputing: Candidate | None = None  # best map without recomputing, if the best one recomputes

    @property
    def num_tried(self) -> int:
        """Number of maps that were tried."""
        return len(self.maps)


class _LimitedSearch:
    def __init__(
        self, evaluate: EvaluateFn, max_bytes: int, max_maps: int, on_tried: OnTried, recomputes: bool = False
    ):
        self._evaluate, self._limit, self._most, self._on_tried = evaluate, max_bytes, max_maps, on_tried
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
        """Return a map with its cost, which is counted once. Raise `BudgetSpent` if `max_maps` others were counted."""
        key = layout_map.to_yaml()
        if key not in self._known:
            if not self.num_left and self._known:
                raise BudgetSpent
            figures, why_not = None, ""
            try:
                figures = self._evaluate(layout_map)
            except LayoutMapError as error:
                why_not = error.what
            candidate = Candidate(name, layout_map, figures, self._limit, why_not, self._recomputes)
            self._known[key] = candidate
            if self._fastest is None or candidate.score < self._fastest.score:
                self._fastest = candidate
            self._on_tried(len(self._known), self._fastest)
        return self._known[key]

    def choose_best(self) -> Candidate | None:
        """Return the best map, or None. Different layouts for similar groups must be better than shared ones."""
        tried = list(self._known.values())
        shared, separate = (
            choose_candidate(tried[: self._num_alike]),
            tried[self._num_alike :] if self._num_alike else [],
        )
        if shared is None or not separate:
            return shared
        fastest = min(separate, key=lambda candidate: candidate.score)
        return choose_candidate([shared, *separate]) if is_better(fastest, shared) else shared

    @property
    def candidates(self) -> Sequence[Candidate]:
        """All maps that were tried."""
        return list(self._known.values())

    def search_from(
        self, model: SearchedModel, experts: Sequence[ExpertMap], seed: int, is_promising: Callable[[], bool]
    ) -> None:
        """Try the expert maps. If `is_promising()` then holds, search on the meshes of the best expert maps.

        Raises:
            BudgetSpent: `max_maps` maps were counted.
        """
        scores: dict[int, Score] = {}
        for position, expert in enumerate(experts):
            candidate = self.evaluate_map(expert.name, expert.layout_map)
            self.experts.append(replace(candidate, name=expert.name))
            scores[position] = candidate.score
        if not is_promising():
            return
        order = sorted(scores, key=scores.__getitem__)
        meshes = list(dict.fromkeys(experts[n].grid for n in order))[:_MESHES]
        ends: list[tuple[Score, LayoutSpace, Point]] = []
        for position, grid in enumerate(meshes):
            on_grid = [experts[n] for n in order if experts[n].grid == grid]
            space = LayoutSpace(model, grid, extra_layouts=[(e.layouts, e.output_specs) for e in on_grid])
            # Meshes are in the order of their expert maps, so each but the last gets half of the remaining budget.
            max_maps = self.num_left if position == len(meshes) - 1 else self.num_left // 2
            if max_maps < 1:
                break
            starts = [space.find_point(e.layouts, e.output_specs) for e in on_grid]
            score = self._make_scorer(space)
            point = find_minimum(space.sizes, score, starts, max_evaluations=max_maps, seed=seed)
            point = self._drop_needless_rules(space, point)
            ends.append((score(point), space, point))
        if ends:
            _, space, point = min(ends, key=lambda end: end[0])
            self._separate_groups(space, point, seed)

    def _make_scorer(self, space: LayoutSpace) -> Callable[[Point], Score]:
        return lambda point: self.evaluate_map(_SEARCHED, space.make_layout_map(point)).score

    def _drop_needless_rules(self, space: LayoutSpace, point: Point) -> Point:
        """Return the point with each group at its first choice, which needs no rule, unless the cost rises by that."""
        score = self._make_scorer(space)
        for n, choice in enumerate(point):
            simpler = (*point[:n], 0, *point[n + 1 :])
            if choice and self.num_left and score(simpler) <= score(point):
                point = simpler
        return point

    def _separate_groups(self, space: LayoutSpace, point: Point, seed: int) -> None:
        """Try maps in which similar groups have separate layouts, with the remaining budget."""
        layouts, blocks = space.get_layouts(point)
        untied = LayoutSpace(space.model, space.grid, tie_similar=False, extra_layouts=[(layouts, blocks)])
        if len(untied.sizes) == len(space.sizes) or self.num_left < 1:
            return
        start = untied.find_point(layouts, blocks)
        self._num_alike = len(self._known)
        score = self._make_scorer(untied)
        find_minimum(untied.sizes, score, [start], max_evaluations=self.num_left, seed=seed)


def choose_candidate(candidates: Sequence[Candidate]) -> Candidate | None:
    """Return the map with the least memory among the maps that fit and are at most 1 % slower than the fastest.

    Among those that need at most 1 % more memory, it is the map with the fewest rules. If no map fits, it is the one
    that exceeds the memory limit least, and without maps it is None.
    """
    fastest = min(candidates, key=lambda each: each.score, default=None)
    if fastest is None or fastest.figures is None or fastest.missing_bytes:
        return fastest
    fitting = [(each, each.figures) for each in candidates if each.figures and not each.missing_bytes]
    most_seconds = fastest.figures.seconds * (1 + TIE)
    tied = [(each, figures) for each, figures in fitting if figures.seconds <= most_seconds]
    most_bytes = min(figures.peak_bytes for _, figures in tied) * (1 + TIE)
    small = [each for each, figures in tied if figures.peak_bytes <= most_bytes]
    return min(small, key=lambda each: (each.num_rules, each.score))


def is_better(new: Candidate, old: Candidate) -> bool:
    """Return whether `new` lacks less memory than `old`, or lacks as much and is faster by more than `TIE`."""
    return (new.score[0], new.score[1]) < (old.score[0], old.score[1] * (1 - TIE))


# The budget is a number of maps, not a time, so that equal seeds give equal results (decisions/0094).
def search_maps(
    model: SearchedModel,
    experts: Iterable[ExpertMap],
    evaluate: EvaluateFn,
    *,
    max_bytes: int,
    max_maps: int,
    evaluate_remat: EvaluateFn | None = None,
    seed: int = 0,
    on_tried: OnTried = lambda num_tried, best: None,
) -> SearchOutcome:
    """Find the fastest map among those that fit the memory, or the best so far after an interrupt.

    `evaluate` counts at most `max_maps` maps, and raises a `LayoutMapError` for an unusable one. `evaluate_remat`
    counts as many again, with recomputed activations. It is used if no map fits without recomputing, or if a map that
    does not fit would be faster.

    Raises:
        PlanError: No map that was tried fits. The error names the nearest map.
        KeyboardInterrupt: The search was interrupted before any map was tried.
    """
    experts, is_complete = tuple(experts), True
    usual = _LimitedSearch(evaluate, max_bytes, max_maps, on_tried)

    def show_progress(_: int, best: Candidate) -> None:
        on_tried(len(usual.maps | remat.maps), best)

    remat = _LimitedSearch(evaluate_remat or evaluate, max_bytes, max_maps, show_progress, True)
    try:
        with contextlib.suppress(BudgetSpent):
            usual.search_from(model, experts, seed, lambda: not (evaluate_remat and _is_far_too_large(usual)))
        if evaluate_remat is not None and _can_recomputing_help(usual):
            with contextlib.suppress(BudgetSpent):
                remat.search_from(model, experts, seed, lambda: _is_remat_better(usual, remat))
    except KeyboardInterrupt:
        if usual.choose_best() is None:
            raise
        is_complete = False
    searches, maps = (usual, remat), frozenset(usual.maps | remat.maps)
    best, without_recomputing = usual.choose_best(), None
    if _is_remat_better(usual, remat):
        best, without_recomputing = remat.choose_best(), best
    if best is None or best.missing_bytes:
        raise _make_no_fit_error(best, max_bytes, len(maps))
    rows: dict[object, Candidate] = {}  # the better variant of each expert map
    for expert in sorted((e for search in searches for e in search.experts), key=lambda expert: expert.score):
        rows.setdefault((expert.name, expert.layout_map.mesh), expert)
    tried = (t for search in searches for t in reversed(search.candidates))
    fitting = {t.cost_key: t for t in tried if not t.missing_bytes and t.cost_key != best.cost_key}
    runners_up = sorted(fitting.values(), key=lambda candidate: candidate.score)
    return SearchOutcome(
        best, tuple(rows.values()), maps, is_complete, tuple(runners_up[:_OTHERS]), without_recomputing
    )


def _is_far_too_large(search: _LimitedSearch) -> bool:
    best = search.choose_best()
    return best is not None and best.missing_bytes > (_FAR - 1) * best.max_bytes


def _can_recomputing_help(search: _LimitedSearch) -> bool:
    """Return whether no map of a search fits the memory, or a map that does not fit would be faster."""
    best = search.choose_best()
    if best is None or best.figures is None or best.missing_bytes:
        return True
    return min(t.figures.seconds for t in search.candidates if t.figures) < best.figures.seconds * (1 - TIE)


def _is_remat_better(usual: _LimitedSearch, remat: _LimitedSearch) -> bool:
    """Return whether the best map with recomputed activations is better than the best map without."""
    before, best = usual.choose_best(), remat.choose_best()
    return before is not None and best is not None and is_better(best, before)


def _make_no_fit_error(nearest: Candidate | None, max_bytes: int, num_tried: int) -> PlanError:
    if nearest is None or nearest.figures is None:
        return PlanError(
            "search: the cost of no map could be counted",
            facts={"maps": num_tried},
            why=nearest.why_not if nearest else "no mesh of the search can shard the batch evenly",
            fix="plan one map with lm.plan(.., on=), which shows the reason",
        )
    peak = nearest.figures.peak_bytes
    return PlanError(
        "search: no layout map fits the memory",
        facts={
            "limit": format_bytes(max_bytes),
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
