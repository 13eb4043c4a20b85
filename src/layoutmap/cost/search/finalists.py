"""Compile the best maps of a search with XLA, and choose the fastest or the first that fits."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import replace

from layoutmap.core.errors import LayoutMapError, LayoutMapWarning, PlanError
from layoutmap.core.text_table import format_bytes
from layoutmap.cost.search.loop import Candidate, MapCost, SearchOutcome, choose_best_candidate, is_better
from layoutmap.cost.verified import StepTooLargeError, Verified

_OTHERS = 2  # number of maps to compile besides the best one
_ERROR = 0.05  # relative error of estimated step times
_SMALL = 1e-3  # seconds; estimates of shorter steps are the least exact, so all maps are compiled


def choose_best_compiled_map(
    outcome: SearchOutcome, compute_compiled_cost: Callable[[Candidate], MapCost]
) -> SearchOutcome:
    """Compile the best and the built-in maps, and return the outcome with the map that is then the best.

    `compute_compiled_cost` compiles a step with a map. If no compiled map fits, as after an early interrupt, the best
    map does not change. Built-in maps that were compiled precede others.
    """
    compiled, failed = dict[object, Candidate](), list[str]()
    is_small = outcome.best.cost is not None and outcome.best.cost.seconds < _SMALL
    error, fastest = 1.0 if is_small else _ERROR, math.inf
    is_complete = outcome.is_complete
    try:
        for each in (outcome.best, *outcome.runners_up[:_OTHERS], *outcome.built_in_maps):
            # Skip a map that is slower than the fastest one even if its estimate is too high by twice the error.
            if each.cost is None or each.cost_key in compiled:
                continue
            if each.cost.seconds * (1 - 2 * error) > fastest:
                continue
            try:
                cost = compute_compiled_cost(each)
            except LayoutMapError as problem:
                failed.append(problem.what)
                continue
            compiled[each.cost_key] = new = replace(each, cost=cost, compiled_bytes=cost.peak_bytes)
            error = max(error, abs(cost.seconds / each.cost.seconds - 1))
            fastest = fastest if new.missing_bytes else min(fastest, cost.seconds)
    except KeyboardInterrupt:
        is_complete = False
    if failed and not compiled:
        warning = LayoutMapWarning(
            "search: XLA could not compile any of the best maps, so the result is chosen by estimates",
            why=failed[0],
            fix="pass verify=False to skip the compiler, or verify=True to see the compiler's whole error",
        )
        warnings.warn(warning, stacklevel=2)
    chosen = choose_best_candidate(list(compiled.values()))
    if chosen is None or chosen.missing_bytes:
        return replace(outcome, is_complete=is_complete)
    compiled_built_in = ((each, compiled.get(each.cost_key, each)) for each in outcome.built_in_maps)
    built_in_maps = [replace(e, cost=m.cost, compiled_bytes=m.compiled_bytes) for e, m in compiled_built_in]
    built_in_maps.sort(key=lambda each: (each.compiled_bytes is None, each.ranking_key))
    fitting = [each for each in compiled.values() if each is not chosen and not each.missing_bytes]
    return replace(
        outcome,
        best=chosen,
        built_in_maps=tuple(built_in_maps),
        runners_up=tuple(sorted(fitting, key=lambda each: each.ranking_key)),
        is_complete=is_complete,
    )


def search_around_best_compiled_map(
    estimated: SearchOutcome, compiled: SearchOutcome, search_around: Callable[[Candidate], SearchOutcome]
) -> SearchOutcome:
    """Search around the best compiled map with `search_around`, unless the estimates had ranked the same map first.

    Returns the better result of `compiled` and the new search. `estimated` is the outcome before maps were compiled.
    """
    first, was = compiled.best, estimated.best.layout_map
    same = next((each for each in compiled.runners_up if each.layout_map is was), None)
    if not compiled.is_complete or first.compiled_bytes is None or first.layout_map is was:
        return compiled
    if same is not None and not is_better(first, same):
        return compiled
    try:
        further = search_around(first)
    except KeyboardInterrupt:
        return replace(compiled, is_complete=False)
    found = replace(compiled, maps=compiled.maps | further.maps, is_complete=further.is_complete)
    assert further.best.cost is not None
    best = replace(further.best, compiled_bytes=further.best.cost.peak_bytes, recomputes=first.recomputes)
    is_new = is_better(best, first)
    return replace(found, best=best, runners_up=(first, *found.runners_up)) if is_new else found


def choose_first_map_that_fits(
    outcome: SearchOutcome, verify: Callable[[Candidate], Verified], max_bytes: int
) -> tuple[SearchOutcome, Verified | None]:
    """Compile the best maps until one fits. Return the outcome with it and its sizes (None if interrupted).

    Raises:
        PlanError: None of the best maps fits as XLA compiles it.
    """
    needed: list[Candidate] = []
    for best in (outcome.best, *outcome.runners_up):
        sizes = {each.cost_key: each.compiled_bytes for each in reversed(needed)}
        built_in_maps = tuple(
            replace(each, compiled_bytes=sizes.get(each.cost_key)) for each in outcome.built_in_maps
        )
        found = replace(outcome, best=best, built_in_maps=built_in_maps)
        try:
            verified = verify(best)
            if verified.peak_bytes <= max_bytes:
                return found, verified
            needed.append(replace(best, compiled_bytes=verified.peak_bytes))
        except StepTooLargeError as error:
            needed.append(replace(best, compiled_bytes=max(error.peak_bytes, max_bytes + 1)))
        except KeyboardInterrupt:
            return replace(found, is_complete=False), None
    raise PlanError(
        "search: none of the best layout maps fits the memory when XLA compiles it",
        facts={
            "limit": format_bytes(max_bytes),
            "compiled": "\n".join(
                f"{each.layout_map.mesh}: {format_bytes(each.compiled_bytes or 0)}" for each in needed
            ),
        },
        why="XLA needs more memory than the estimate",
        fix="search with a smaller memory=, so that the result leaves more memory free",
    )
