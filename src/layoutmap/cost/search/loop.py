"""Search layout maps: try built-in maps on each mesh, vary the best ones, and drop needless rules."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass, replace

from layoutmap.core.errors import LayoutMapError, PlanError
from layoutmap.core.text_table import format_bytes
from layoutmap.cost.search.built_in_maps import BuiltInMap
from layoutmap.cost.search.descent import BudgetSpentError, Point, RankingKey, find_minimum
from layoutmap.cost.search.space import LayoutSpace, SearchedModel
from layoutmap.rules.rule_set import RuleSet

_MESHES = 3  # number of meshes on which the search tries maps other than the built-in ones
TIE = 0.01
"""Relative difference of time or memory below which two maps tie, because estimates are less exact."""

_FAR = 2  # if the best built-in map needs this many times the memory, search only with recomputing
_SEARCHED = "found"
_OTHERS = 4


@dataclass(frozen=True)
class MapCost:
    """Time and peak memory of a step with a layout map."""

    seconds: float
    peak_bytes: int  # bytes of memory of each device at the peak
    serial_seconds: float = 0.0  # time if nothing overlapped, which decides between equally fast maps


EvaluateFn = Callable[[RuleSet], MapCost]
OnTried = Callable[[int, "Candidate"], object]


@dataclass(frozen=True)
class Candidate:
    """Layout map with its cost."""

    name: str  # name of a built-in map, such as "fully sharded", or "found"
    layout_map: RuleSet
    cost: MapCost | None  # cost of the map; None: the map cannot be used
    max_bytes: int  # bytes of memory of a device
    why_not: str = ""  # why the map cannot be used; empty: it can
    recomputes: bool = False  # whether blocks recompute activations in the backward pass
    compiled_bytes: int | None = None  # peak according to XLA's compiler; None: not compiled

    @property
    def missing_bytes(self) -> float:
        """Bytes by which the step exceeds the memory limit: 0 if it fits, infinite if the map cannot be used."""
        needed = self.compiled_bytes or (self.cost.peak_bytes if self.cost else math.inf)
        return max(0.0, needed - self.max_bytes)

    @property
    def cost_key(self) -> object:
        """Key that is equal for maps with equal cost on one mesh, even if their rules differ."""
        return self.layout_map.mesh, self.cost, self.recomputes

    @property
    def ranking_key(self) -> RankingKey:
        """Sort key, smaller is better: missing bytes, then time with overlap, then time without overlap."""
        if self.cost is None:
            return (math.inf, math.inf, math.inf)
        times = (float(f"{seconds:.3e}") for seconds in (self.cost.seconds, self.cost.serial_seconds))
        return (self.missing_bytes, *times)

    @property
    def num_rules(self) -> int:
        """Number of rules."""
        return len(self.layout_map) + len(self.layout_map.activations)


@dataclass(frozen=True)
class SearchOutcome:
    """Outcome of a search."""

    best: Candidate
    built_in_maps: tuple[Candidate, ...]  # the best one first
    maps: frozenset[str]  # YAML text of each map that was tried, with activations stored or recomputed
    is_complete: bool  # False if the search was interrupted
    runners_up: tuple[Candidate, ...] = ()  # next best maps, in case XLA needs more memory for the best
    without_recomputing: Candidate | None = None  # best map without recomputing, if `best` recomputes

    @property
    def num_tried(self) -> int:
        """Number of maps that were tried."""
        return len(self.maps)


class _BudgetedSearch:
    def __init__(
        self, evaluate: EvaluateFn, max_bytes: int, max_maps: int, on_tried: OnTried, recomputes: bool = False
    ):
        self._evaluate, self._limit, self._most, self._on_tried = evaluate, max_bytes, max_maps, on_tried
        self._recomputes = recomputes
        self._known: dict[str, Candidate] = {}
        self._num_alike: int | None = None  # number of maps tried while similar groups had equal layouts
        self._fastest: Candidate | None = None
        self.built_in_maps: list[Candidate] = []

    @property
    def tried_yaml_texts(self) -> Set[str]:
        """YAML of the maps that were tried."""
        return self._known.keys()

    @property
    def num_maps_left(self) -> int:
        """Number of maps that may still be tried."""
        return self._most - len(self._known)

    def evaluate_map(self, name: str, layout_map: RuleSet) -> Candidate:
        """Return a map with its cost. Raise `BudgetSpentError` for a new map after `max_maps` maps."""
        key = layout_map.to_yaml()
        if key not in self._known:
            if not self.num_maps_left and self._known:
                raise BudgetSpentError
            cost, why_not = None, ""
            try:
                cost = self._evaluate(layout_map)
            except LayoutMapError as error:
                why_not = error.what
            candidate = Candidate(name, layout_map, cost, self._limit, why_not, self._recomputes)
            self._known[key] = candidate
            if self._fastest is None or candidate.ranking_key < self._fastest.ranking_key:
                self._fastest = candidate
            self._on_tried(len(self._known), self._fastest)
        return self._known[key]

    def choose_best_map(self) -> Candidate | None:
        """Return the best map, or None. Unequal layouts of similar groups must be better by more than `TIE`."""
        tried = list(self._known.values())
        shared, separate = (
            choose_best_candidate(tried[: self._num_alike]),
            tried[self._num_alike :] if self._num_alike else [],
        )
        if shared is None or not separate:
            return shared
        fastest = min(separate, key=lambda candidate: candidate.ranking_key)
        return choose_best_candidate([shared, *separate]) if is_better(fastest, shared) else shared

    @property
    def tried_candidates(self) -> Sequence[Candidate]:
        """All maps that were tried."""
        return list(self._known.values())

    def search_from_built_in_maps(
        self,
        model: SearchedModel,
        built_in_maps: Sequence[BuiltInMap],
        seed: int,
        is_promising: Callable[[], bool],
    ) -> None:
        """Try the built-in maps. If `is_promising()` is then true, search on the meshes of the best built-in maps.

        Raises:
            BudgetSpentError: `max_maps` maps were counted.
        """
        ranking_keys: dict[int, RankingKey] = {}
        for position, built_in in enumerate(built_in_maps):
            candidate = self.evaluate_map(built_in.name, built_in.layout_map)
            self.built_in_maps.append(replace(candidate, name=built_in.name))
            ranking_keys[position] = candidate.ranking_key
        if not is_promising():
            return
        order = sorted(ranking_keys, key=ranking_keys.__getitem__)
        meshes = list(dict.fromkeys(built_in_maps[n].roles for n in order))[:_MESHES]
        ends: list[tuple[RankingKey, LayoutSpace, Point]] = []
        for position, roles in enumerate(meshes):
            on_mesh = [built_in_maps[n] for n in order if built_in_maps[n].roles == roles]
            space = LayoutSpace(model, roles, extra_layouts=[(e.layouts, e.output_specs) for e in on_mesh])
            # Meshes with the best built-in maps come first, so give each mesh half of the maps that are left, and the
            # last one all.
            max_maps = self.num_maps_left if position == len(meshes) - 1 else self.num_maps_left // 2
            if max_maps < 1:
                break
            starts = [space.find_point(e.layouts, e.output_specs) for e in on_mesh]
            compute_key = self._make_ranking_key_function(space)
            point = find_minimum(space.num_choices, compute_key, starts, max_evaluations=max_maps, seed=seed)
            point = self._make_point_without_needless_rules(space, point)
            ends.append((compute_key(point), space, point))
        if ends:
            _, space, point = min(ends, key=lambda end: end[0])
            self._try_separate_layouts(space, point, seed)

    def _make_ranking_key_function(self, space: LayoutSpace) -> Callable[[Point], RankingKey]:
        return lambda point: self.evaluate_map(_SEARCHED, space.make_layout_map(point)).ranking_key

    def _make_point_without_needless_rules(self, space: LayoutSpace, point: Point) -> Point:
        """Return a point in which groups have their first choice, which needs no rule, if the map is then not worse."""
        compute_key = self._make_ranking_key_function(space)
        for n, choice in enumerate(point):
            simpler = (*point[:n], 0, *point[n + 1 :])
            if choice and self.num_maps_left and compute_key(simpler) <= compute_key(point):
                point = simpler
        return point

    def _try_separate_layouts(self, space: LayoutSpace, point: Point, seed: int) -> None:
        """Try maps in which similar groups may have different layouts, until the budget is used."""
        layouts, blocks = space.get_layouts_of_point(point)
        untied = LayoutSpace(space.model, space.roles, tie_similar=False, extra_layouts=[(layouts, blocks)])
        if len(untied.num_choices) == len(space.num_choices) or self.num_maps_left < 1:
            return
        start = untied.find_point(layouts, blocks)
        self._num_alike = len(self._known)
        compute_key = self._make_ranking_key_function(untied)
        find_minimum(untied.num_choices, compute_key, [start], max_evaluations=self.num_maps_left, seed=seed)


def choose_best_candidate(candidates: Sequence[Candidate]) -> Candidate | None:
    """Return the map with the least memory among the maps that fit and are at most 1 % slower than the fastest.

    If several need at most 1 % more memory than the smallest, it has the fewest rules of them. If no map fits, return
    the map that exceeds the limit least. Without maps, return None.
    """
    fastest = min(candidates, key=lambda each: each.ranking_key, default=None)
    if fastest is None or fastest.cost is None or fastest.missing_bytes:
        return fastest
    fitting = [(each, each.cost) for each in candidates if each.cost and not each.missing_bytes]
    most_seconds = fastest.cost.seconds * (1 + TIE)
    tied = [(each, cost) for each, cost in fitting if cost.seconds <= most_seconds]
    most_bytes = min(cost.peak_bytes for _, cost in tied) * (1 + TIE)
    small = [each for each, cost in tied if cost.peak_bytes <= most_bytes]
    return min(small, key=lambda each: (each.num_rules, each.ranking_key))


def is_better(new: Candidate, old: Candidate) -> bool:
    """Return whether `new` exceeds the memory limit by less than `old`, or equally but is faster by over `TIE`."""
    return (new.ranking_key[0], new.ranking_key[1]) < (old.ranking_key[0], old.ranking_key[1] * (1 - TIE))


# The search ends after a number of maps, not after a time, so that equal seeds give equal results (decisions/0094).
def search_maps(
    model: SearchedModel,
    built_in_maps: Iterable[BuiltInMap],
    evaluate: EvaluateFn,
    *,
    max_bytes: int,
    max_maps: int,
    evaluate_remat: EvaluateFn | None = None,
    seed: int = 0,
    on_tried: OnTried = lambda num_tried, best: None,
) -> SearchOutcome:
    """Find the fastest map among those that fit the memory, or the best so far after an interrupt.

    `evaluate` is called for at most `max_maps` maps, and raises a `LayoutMapError` for an unusable one.
    `evaluate_remat` recomputes activations. It is called for as many maps if no map fits, or if a map that does not fit
    would be faster.

    Raises:
        PlanError: No map that was tried fits. The error names the nearest map.
        KeyboardInterrupt: The search was interrupted before any map was tried.
    """
    built_in_maps, is_complete = tuple(built_in_maps), True
    usual = _BudgetedSearch(evaluate, max_bytes, max_maps, on_tried)

    def show_progress(_: int, best: Candidate) -> None:
        on_tried(len(usual.tried_yaml_texts | remat.tried_yaml_texts), best)

    remat = _BudgetedSearch(evaluate_remat or evaluate, max_bytes, max_maps, show_progress, True)
    try:
        with contextlib.suppress(BudgetSpentError):
            usual.search_from_built_in_maps(
                model, built_in_maps, seed, lambda: not (evaluate_remat and _needs_far_too_much_memory(usual))
            )
        if evaluate_remat is not None and _can_recomputing_help(usual):
            with contextlib.suppress(BudgetSpentError):
                remat.search_from_built_in_maps(
                    model, built_in_maps, seed, lambda: _is_remat_better(usual, remat)
                )
    except KeyboardInterrupt:
        if usual.choose_best_map() is None:
            raise
        is_complete = False
    searches, maps = (usual, remat), frozenset(usual.tried_yaml_texts | remat.tried_yaml_texts)
    best, without_recomputing = usual.choose_best_map(), None
    if _is_remat_better(usual, remat):
        best, without_recomputing = remat.choose_best_map(), best
    if best is None or best.missing_bytes:
        raise _make_no_fit_error(best, max_bytes, len(maps))
    # Of each built-in map with and without recomputing, keep the better one. The keys are name and mesh.
    rows: dict[object, Candidate] = {}
    found = (each for search in searches for each in search.built_in_maps)
    for each in sorted(found, key=lambda each: each.ranking_key):
        rows.setdefault((each.name, each.layout_map.mesh), each)
    tried = (t for search in searches for t in reversed(search.tried_candidates))
    fitting = {t.cost_key: t for t in tried if not t.missing_bytes and t.cost_key != best.cost_key}
    runners_up = sorted(fitting.values(), key=lambda candidate: candidate.ranking_key)
    return SearchOutcome(
        best, tuple(rows.values()), maps, is_complete, tuple(runners_up[:_OTHERS]), without_recomputing
    )


def _needs_far_too_much_memory(search: _BudgetedSearch) -> bool:
    """Return whether the best map of a search needs more than `_FAR` times the memory of a device."""
    best = search.choose_best_map()
    return best is not None and best.missing_bytes > (_FAR - 1) * best.max_bytes


def _can_recomputing_help(search: _BudgetedSearch) -> bool:
    """Return whether no map of a search fits the memory, or a map that does not fit would be faster."""
    best = search.choose_best_map()
    if best is None or best.cost is None or best.missing_bytes:
        return True
    return min(t.cost.seconds for t in search.tried_candidates if t.cost) < best.cost.seconds * (1 - TIE)


def _is_remat_better(usual: _BudgetedSearch, remat: _BudgetedSearch) -> bool:
    """Return whether the best map with recomputing is better than the best map without it."""
    before, best = usual.choose_best_map(), remat.choose_best_map()
    return before is not None and best is not None and is_better(best, before)


def _make_no_fit_error(nearest: Candidate | None, max_bytes: int, num_tried: int) -> PlanError:
    if nearest is None or nearest.cost is None:
        return PlanError(
            "search: the cost of no map could be computed",
            facts={"maps": num_tried},
            why=nearest.why_not if nearest else "no mesh of the search can shard the batch evenly",
            fix="plan one map with lm.plan(.., on=..), which shows all errors",
        )
    peak = nearest.cost.peak_bytes
    return PlanError(
        "search: no layout map fits the memory",
        facts={
            "limit": format_bytes(max_bytes),
            "nearest": f"{nearest.layout_map.mesh}: {format_bytes(peak)} per device"
            + ", activations recomputed" * nearest.recomputes,
            "missing": format_bytes(nearest.missing_bytes),
            "maps tried": num_tried,
        },
        why="with each map in the search, a step is estimated to need more memory than a device has",
        fix="use more devices or a smaller batch, or raise the limit"
        if nearest.recomputes
        else "use more devices or a smaller batch, recompute activations (jax.checkpoint), or raise the limit",
    )
