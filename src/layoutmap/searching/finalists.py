"""The maps that a search may return, compiled by XLA one after another, until one fits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from layoutmap.core.errors import PlanError
from layoutmap.core.text_table import size
from layoutmap.cost.verified import TooLargeError, Verified
from layoutmap.searching.loop import Outcome, Tried


def first_that_fits(
    outcome: Outcome, verify: Callable[[Tried], Verified], limit: int
) -> tuple[Outcome, Verified | None]:
    """Compile the best maps that were found, and take the first that fits as XLA has compiled it.

    Args:
        outcome: What was found by counting.
        verify: Compiles the step with a map.
        limit: The memory of a device, in bytes.

    Returns:
        What was found, the maps that do not fit with what XLA needs for them, and what XLA made of the best; `None`: an
        interrupt came before.

    Raises:
        PlanError: None of them fits.
    """
    needed: list[Tried] = []
    for best in (outcome.best, *outcome.others):
        found = replace(outcome, best=best, experts=tuple(_with(needed, each) for each in outcome.experts))
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
        "search: no layout map that was found fits the memory as XLA compiles it",
        facts={
            "limit": size(limit),
            "compiled": "\n".join(
                f"{each.layout_map.mesh}: {size(each.compiled_bytes or 0)}" for each in needed
            ),
        },
        why="XLA needs more than was counted, margin included",
        fix="search with a smaller memory=, so that what is found leaves more free",
    )


def _with(compiled: list[Tried], expert: Tried) -> Tried:
    """An expert's map, with what XLA needs for it, or for one that costs the same, where that is known."""
    found = (each.compiled_bytes for each in compiled if each.cost == expert.cost)
    return replace(expert, compiled_bytes=next(found, None))
