"""Format the result of a search: the verdict, and a table of the result and the expert maps."""

from __future__ import annotations

from layoutmap.core.text_table import format_bytes
from layoutmap.cost.cost import format_duration
from layoutmap.cost.search.loop import TIE, Candidate, Outcome

HEAD = ("map", "mesh", "step", "memory", "")
RIGHT = ("step", "memory")


def compare_with_best_expert(outcome: Outcome) -> str:
    """Return a sentence that compares the result with the best expert map that fits.

    Example:
        >>> from layoutmap.rules.rule_set import RuleSet
        >>> from layoutmap.cost.search.loop import Figures
        >>> seconds = {"found": 0.8, "dp": 1.0}
        >>> tried = [Candidate(name, RuleSet("data=8"), Figures(t, 10), 99) for name, t in seconds.items()]
        >>> compare_with_best_expert(Outcome(tried[0], (tried[1],), frozenset(seconds), True))
        '20 % faster than the best built-in map that fits, dp on data=8'
    """
    best, fitting = outcome.best, [tried for tried in outcome.experts if not tried.missing_bytes]
    if best.figures is None or not fitting or fitting[0].figures is None:
        return "no built-in map fits"
    expert = fitting[0]
    named = f"the best built-in map that fits, {expert.name} on {expert.layout_map.mesh}"
    gain = 1 - best.figures.seconds / fitting[0].figures.seconds
    if best.name == expert.name and best.layout_map == expert.layout_map:
        return f"{expert.name} on {expert.layout_map.mesh}. No searched map beat the built-in ones"
    if gain < TIE:
        saved = 1 - best.figures.peak_bytes / fitting[0].figures.peak_bytes
        less = f", and this one takes {100 * saved:.0f} % less memory" if saved >= TIE else ""
        return f"ties with {named}: the steps differ by less than {100 * TIE:.0f} %{less}"
    return f"{100 * gain:.0f} % faster than {named}"


def make_rows(outcome: Outcome) -> list[tuple[str, ...]]:
    """Return a row for the result and for each expert map, the fastest that fits first."""
    best = outcome.best
    there = [t for t in outcome.experts if (t.layout_map, t.recomputes) == (best.layout_map, best.recomputes)]
    return [
        _make_row(tried, tried in there or tried is best)
        for tried in (*([] if there else [best]), *outcome.experts)
    ]


def _make_row(tried: Candidate, is_found: bool) -> tuple[str, ...]:
    mesh = str(tried.layout_map.mesh)
    if tried.figures is None:
        return (tried.name, mesh, "", "", tried.why_not)
    said = f"lacks {format_bytes(tried.missing_bytes)}" if tried.missing_bytes else "the result" * is_found
    said = f"{said} as XLA compiles it".strip() if tried.compiled_bytes is not None else said
    name = tried.name + ", recomputing" * tried.recomputes
    return (name, mesh, format_duration(tried.figures.seconds), format_bytes(tried.figures.peak_bytes), said)


def explain_recomputing(outcome: Outcome, layers: str, how: str) -> str:
    """Return why the result needs recomputed activations in `layers`, and `how` to recompute, or an empty text."""
    before, best = outcome.without, outcome.best
    if before is None or before.figures is None or best.figures is None:
        return ""
    why = f"no map fits, and the nearest needs {format_bytes(before.figures.peak_bytes)} per device"
    if not before.missing_bytes:
        why = f"the best map takes {format_duration(before.figures.seconds)} a step"
    needed = f"It needs the activations inside of {layers} to be recomputed in the backward pass"
    return f"{needed}: without that {why}.\n{how}"
