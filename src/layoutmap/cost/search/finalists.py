"""Compile the best maps of a search with XLA, and choose the fastest or the first that fits."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import replace

from layoutmap.core.errors import LayoutMapError, LayoutMapWarning, PlanError
from layoutmap.core.text_table import format_bytes
from layoutmap.cost.search.loop import Candidate, SearchOutcome, StepFigures, choose_candidate, is_better
from layoutmap.cost.verified import TooLargeError, Verified

_OTHERS = 2  # number of other found maps to compile
_ERROR = 0.05  # relative error of counted times
_SMALL = 1e-3  # seconds; for shorter steps, compile all maps, because XLA changes small collectives most


def choose_best_compiled(
    outcome: SearchOutcome, compile_figures: Callable[[Candidate], StepFigures]
) -> SearchOutcome:
    """Return the outcome with the best map by XLA's compiled figures, among the best and the expert maps.

    `compile_figures` compiles a step with a map. If no compiled map fits, for example after an early interrupt, the
    best map does not change. Compiled expert maps precede those that were only counted.
    """
    compiled, failed = dict[object, Candidate](), list[str]()
    is_small = outcome.best.figures is not None and outcome.best.figures.seconds < _SMALL
    error, fastest = 1.0 if is_small else _ERROR, math.inf
    is_complete = outcome.is_complete
    try:
        for each in (outcome.best, *outcome.runners_up[:_OTHERS], *outcome.experts):
            # Skip a map that would be slower than the best even with its time corrected by twice the error.
            if each.figures is None or each.cost_key in compiled:
                continue
            if each.figures.seconds * (1 - 2 * error) > fastest:
                continue
            try:
                figures = compile_figures(each)
            except LayoutMapError as problem:
                failed.append(problem.what)
                continue
            compiled[each.cost_key] = new = replace(each, figures=figures, compiled_bytes=figures.peak_bytes)
            error = max(error, abs(figures.seconds / each.figures.seconds - 1))
            fastest = fastest if new.missing_bytes else min(fastest, figures.seconds)
    except KeyboardInterrupt:
        is_complete = False
    if failed and not compiled:
        warning = LayoutMapWarning(
            "search: XLA compiles none of the best maps, so the result is chosen by estimates",
            why=failed[0],
            fix="pass verify=False to skip the compiler, or verify=True to see its whole error",
        )
        warnings.warn(warning, stacklevel=2)
    chosen = choose_candidate(list(compiled.values()))
    if chosen is None or chosen.missing_bytes:
        return replace(outcome, is_complete=is_complete)
    compiled_experts = ((each, compiled.get(each.cost_key, each)) for each in outcome.experts)
    experts = [replace(e, figures=m.figures, compiled_bytes=m.compiled_bytes) for e, m in compiled_experts]
    experts.sort(key=lambda each: (each.compiled_bytes is None, each.score))
    fitting = [each for each in compiled.values() if each is not chosen and not each.missing_bytes]
    return replace(
        outcome,
        best=chosen,
        experts=tuple(experts),
        runners_up=tuple(sorted(fitting, key=lambda each: each.score)),
        is_complete=is_complete,
    )


def search_near_compiled(
    counted: SearchOutcome, compiled: SearchOutcome, search_near: Callable[[Candidate], SearchOutcome]
) -> SearchOutcome:
    """Search around the best compiled map with `search_near`, unless counting had ranked the same map first.

    Returns the better result of `compiled` and the new search. `counted` is the outcome before maps were compiled.
    """
    first, was = compiled.best, counted.best.layout_map
    same = next((each for each in compiled.runners_up if each.layout_map is was), None)
    if not compiled.is_complete or first.compiled_bytes is None or first.layout_map is was:
        return compiled
    if same is not None and not is_better(first, same):
        return compiled
    try:
        further = search_near(first)
    except KeyboardInterrupt:
        return replace(compiled, is_complete=False)
    found = replace(compiled, maps=compiled.maps | further.maps, is_complete=further.is_complete)
    assert further.best.figures is not None
    best = replace(further.best, compiled_bytes=further.best.figures.peak_bytes, recomputes=first.recomputes)
    is_new = is_better(best, first)
    return replace(found, best=best, runners_up=(first, *found.runners_up)) if is_new else found


def choose_first_fitting(
    outcome: SearchOutcome, verify: Callable[[Candidate], Verified], max_bytes: int
) -> tuple[SearchOutcome, Verified | None]:
    """Compile the best maps with `verify` until one fits, and return it with XLA's figures, or None after an interrupt.

    Raises:
        PlanError: None of the best maps fits as XLA compiles it.
    """
    needed: list[Candidate] = []
    for best in (outcome.best, *outcome.runners_up):
        sizes = {each.cost_key: each.compiled_bytes for each in reversed(needed)}
        experts = tuple(replace(each, compiled_bytes=sizes.get(each.cost_key)) for each in outcome.experts)
        found = replace(outcome, best=best, experts=experts)
        try:
            verified = verify(best)
            if verified.peak_bytes <= max_bytes:
                return found, verified
            needed.append(replace(best, compiled_bytes=verified.peak_bytes))
        except TooLargeError as error:
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
