"""Format the steps of a directory as a tree by their parents, and mark the latest."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Mapping, Sequence

from layoutmap.checkpoint.lineage import SavedStep
from layoutmap.core.errors import format_count
from layoutmap.core.text_table import format_table


def format_history(where: str, steps: Iterable[SavedStep]) -> str:
    """Format the steps of a directory as a tree, each below its parent.

    The line of the step that was saved last goes straight down; what was left is beside it.

    Args:
        where: The directory.
        steps: Its steps.

    Example:
        >>> there = [SavedStep(n, lines={"a": n}, order=n) for n in (10, 20, 30)]
        >>> print(format_history("runs/net", [*there, SavedStep(15, lines={"a": 10, "b": 15}, order=40)]))
        runs/net: 4 steps, the last save is step 15
        <BLANKLINE>
        step    saved  metrics
        ------  -----  -------
        10
        |-- 20
        |   30
        15
    """
    known = sorted(steps, key=lambda each: each.step)
    below: dict[int | None, list[SavedStep]] = {}
    for each, parent in zip(known, _find_parents(known), strict=True):
        below.setdefault(parent, []).append(each)
    rows = [
        (f"{mark}{each.step}", each.created.replace("+00:00", "Z"), _format_metrics(each.metrics))
        for mark, each in _iterate_rows(below, _find_latest(below), None, "")
    ]
    last = max(known, key=lambda each: (each.order, each.step))
    head = f"{where}: {format_count(len(known), 'step')}, the last save is step {last.step}"
    return "\n".join([head, "", *format_table(("step", "saved", "metrics"), rows)])


def _find_parents(known: Sequence[SavedStep]) -> Iterator[int | None]:
    """Yield the nearest existing ancestor of each step."""
    on: dict[str, list[int]] = {}
    for each in known:
        on.setdefault(each.line, []).append(each.step)
    for each in known:
        before = [
            steps[at - 1]
            for name, until in each.lines.items()
            if (at := bisect.bisect(steps := on.get(name, []), min(until, each.step - 1)))
        ]
        yield max(before, default=None)


def _iterate_rows(
    below: Mapping[int | None, Sequence[SavedStep]],
    latest: Mapping[int, tuple[int, int]],
    parent: int | None,
    rest: str,
) -> Iterator[tuple[str, SavedStep]]:
    """Yield each descendant of a step with its indentation."""
    while children := sorted(below.get(parent, ()), key=lambda each: latest[each.step]):
        *sides, main = children
        for side in sides:
            yield f"{rest}|-- ", side
            yield from _iterate_rows(below, latest, side.step, f"{rest}|   ")
        yield rest, main
        parent = main.step


def _find_latest(below: Mapping[int | None, Sequence[SavedStep]]) -> dict[int, tuple[int, int]]:
    """Return, for each step, the most recent save among itself and its descendants."""
    found: dict[int, tuple[int, int]] = {}
    for each in sorted((e for some in below.values() for e in some), key=lambda each: -each.step):
        found[each.step] = max([(each.order, each.step), *(found[e.step] for e in below.get(each.step, ()))])
    return found


def _format_metrics(metrics: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.6g}" for name, value in metrics.items())
