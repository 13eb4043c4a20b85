"""Compile the best maps of a search with XLA, and choose the fastest or the first that fits."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import replace

from layoutmap.core.errors import LayoutMapError, LayoutMapWarning, PlanError
from layoutmap.core.text_table import format_bytes
from layoutmap.cost.search.loop import Candidate, Figures, Outcome, choose_candidate, is_better
from layoutmap.cost.verified import TooLargeError, Verified

_OTHERS = 2  # number of other found maps to compile
_ERROR = 0.05  # relative error of counted times
_SMALL = 1e-3  # compile steps shorter than this (in seconds), because XLA changes small collectives most


def choose_compiled(outcome: Outcome, compiled: Callable[[Candidate], Figures]) -> Outcome:
    """Choose among the best maps and the expert maps by XLA's figures of a step, which `compiled` returns.

    Returns `outcome` if an interrupt came before any map was compiled or if the compiler fails. Compiled expert maps
    come before those that were only counted.
    """
    made, failed = dict[object, Candidate](), list[str]()
    is_small = outcome.best.figures is not None and outcome.best.figures.seconds < _SMALL
    error, fastest = 1.0 if is_small else _ERROR, math.inf
    is_complete = outcome.is_complete
    try:
        for each in (outcome.best, *outcome.others[:_OTHERS], *outcome.experts):
            # Skip maps that are slower than the best even with twice the usual counting error.
            if each.figures is None or each.cost in made or each.figures.seconds * (1 - 2 * error) > fastest:
                continue
            try:
                figures = compiled(each)
            except LayoutMapError as problem:
                failed.append(problem.what)
                continue
            made[each.cost] = new = replace(each, figures=figures, compiled_bytes=figures.peak_bytes)
            error = max(error, abs(figures.seconds / each.figures.seconds - 1))
            fastest = fastest if new.missing_bytes else min(fastest, figures.seconds)
    except KeyboardInterrupt:
        is_complete = False
    if failed and not made:
        warning = LayoutMapWarning(
            "search: XLA compiles none of the best maps, so the result is chosen by estimates",
            why=failed[0],
            fix="pass verify=False to skip the compiler, or verify=True to see its whole error",
        )
        warnings.warn(warning, stacklevel=2)
    chosen = choose_candidate(list(made.values()))
    if chosen is None or chosen.missing_bytes:
        return replace(outcome, is_complete=is_complete)
    compiled_experts = ((each, made.get(each.cost, each)) for each in outcome.experts)
    experts = [replace(e, figures=m.figures, compiled_bytes=m.compiled_bytes) for e, m in compiled_experts]
    experts.sort(key=lambda each: (each.compiled_bytes is None, each.score))
    fitting = [each for each in made.values() if each is not chosen and not each.missing_bytes]
    return replace(
        outcome,
        best=chosen,
        experts=tuple(experts),
        others=tuple(sorted(fitting, key=lambda each: each.score)),
        is_complete=is_complete,
    )


def extend_search(counted: Outcome, compiled: Outcome, near: Callable[[Candidate], Outcome]) -> Outcome:
    """Search further from the best compiled map, by `near`, if counting had chosen a worse one.

    Returns the result of both searches, or `compiled` if counts were right or after an interrupt.
    """
    first, was = compiled.best, counted.best.layout_map
    same = next((each for each in compiled.others if each.layout_map is was), None)
    if not compiled.is_complete or first.compiled_bytes is None or first.layout_map is was:
        return compiled
    if same is not None and not is_better(first, same):
        return compiled
    try:
        further = near(first)
    except KeyboardInterrupt:
        return replace(compiled, is_complete=False)
    found = replace(compiled, maps=compiled.maps | further.maps, is_complete=further.is_complete)
    assert further.best.figures is not None
    best = replace(further.best, compiled_bytes=further.best.figures.peak_bytes, recomputes=first.recomputes)
    return replace(found, best=best, others=(first, *found.others)) if is_better(best, first) else found


def choose_fitting(
    outcome: Outcome, verify: Callable[[Candidate], Verified], limit: int
) -> tuple[Outcome, Verified | None]:
    """Compile the best maps by `verify`, and choose the first that fits. Without figures, an interrupt came before.

    Raises:
        PlanError: None of them fits.
    """
    needed: list[Candidate] = []
    for best in (outcome.best, *outcome.others):
        sizes = {each.cost: each.compiled_bytes for each in reversed(needed)}
        experts = tuple(replace(each, compiled_bytes=sizes.get(each.cost)) for each in outcome.experts)
        found = replace(outcome, best=best, experts=experts)
        try:
            made = verify(best)
            if made.peak_bytes <= limit:
                return found, made
            needed.append(replace(best, compiled_bytes=made.peak_bytes))
        except TooLargeError as error:
            needed.append(replace(best, compiled_bytes=max(error.peak_bytes, limit + 1)))
        except KeyboardInterrupt:
            return replace(found, is_complete=False), None
    raise PlanError(
        "search: none of the best layout maps fits the memory when XLA compiles it",
        facts={
            "limit": format_bytes(limit),
            "compiled": "\n".join(
                f"{each.layout_map.mesh}: {format_bytes(each.compiled_bytes or 0)}" for each in needed
            ),
        },
        why="XLA needs more memory than the estimate",
        fix="search with a smaller memory=, so that the result leaves more memory free",
    )
