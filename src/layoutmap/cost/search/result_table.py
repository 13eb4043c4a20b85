"""Format the result of a search: a comparison with the best built-in map, and a table of the result and these maps."""

from __future__ import annotations

from layoutmap.core.text_table import format_bytes
from layoutmap.cost.cost import format_duration
from layoutmap.cost.search.loop import TIE, Candidate, SearchOutcome

RESULT_HEAD = ("map", "mesh", "step", "memory", "")
RIGHT_ALIGNED = ("step", "memory")


def compare_with_best_built_in_map(outcome: SearchOutcome) -> str:
    """Return a sentence that compares the result with the best built-in map that fits.

    Example:
        >>> from layoutmap.rules.rule_set import RuleSet
        >>> from layoutmap.cost.search.loop import MapCost
        >>> seconds = {"found": 0.8, "dp": 1.0}
        >>> found = [Candidate(name, RuleSet("data=8"), MapCost(t, 10), 99) for name, t in seconds.items()]
        >>> compare_with_best_built_in_map(SearchOutcome(found[0], (found[1],), frozenset(seconds), True))
        '20 % faster than the best built-in map that fits, dp on data=8'
    """
    best, fitting = (
        outcome.best,
        [candidate for candidate in outcome.built_in_maps if not candidate.missing_bytes],
    )
    if best.cost is None or not fitting or fitting[0].cost is None:
        return "no built-in map fits"
    built_in = fitting[0]
    named = f"the best built-in map that fits, {built_in.name} on {built_in.layout_map.mesh}"
    gain = 1 - best.cost.seconds / fitting[0].cost.seconds
    if best.name == built_in.name and best.layout_map == built_in.layout_map:
        return f"{built_in.name} on {built_in.layout_map.mesh}. No searched map beat the built-in ones"
    if gain < TIE:
        saved = 1 - best.cost.peak_bytes / fitting[0].cost.peak_bytes
        less = f", and this one takes {100 * saved:.0f} % less memory" if saved >= TIE else ""
        return f"ties with {named}: the steps differ by less than {100 * TIE:.0f} %{less}"
    return f"{100 * gain:.0f} % faster than {named}"


def make_result_rows(outcome: SearchOutcome) -> list[tuple[str, ...]]:
    """Return table rows for the result and the built-in maps, best first, with one row if both are the same map."""
    best = outcome.best
    there = [
        t for t in outcome.built_in_maps if (t.layout_map, t.recomputes) == (best.layout_map, best.recomputes)
    ]
    return [
        _make_candidate_row(candidate, candidate in there or candidate is best)
        for candidate in (*([] if there else [best]), *outcome.built_in_maps)
    ]


def _make_candidate_row(candidate: Candidate, is_result: bool) -> tuple[str, ...]:
    mesh = str(candidate.layout_map.mesh)
    cost, missing = candidate.cost, candidate.missing_bytes
    if cost is None:
        return (candidate.name, mesh, "", "", candidate.why_not)
    status = f"lacks {format_bytes(missing)}" if missing else "the result" * is_result
    status = f"{status} as XLA compiles it".strip() if candidate.compiled_bytes is not None else status
    name = candidate.name + ", recomputing" * candidate.recomputes
    return (name, mesh, format_duration(cost.seconds), format_bytes(cost.peak_bytes), status)


def explain_recomputation(outcome: SearchOutcome, layers_text: str, instructions: str) -> str:
    """Return a text on why and how to recompute activations, or "" if the best map recomputes none."""
    before, best = outcome.without_recomputing, outcome.best
    if before is None or before.cost is None or best.cost is None:
        return ""
    why = f"no map fits, and the nearest needs {format_bytes(before.cost.peak_bytes)} per device"
    if not before.missing_bytes:
        why = f"the best map takes {format_duration(before.cost.seconds)} a step"
    needed = f"It needs the activations inside of {layers_text} to be recomputed in the backward pass"
    return f"{needed}: without that {why}.\n{instructions}"
