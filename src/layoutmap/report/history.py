"""The steps of a directory as a tree: which came from which, and which was saved last."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Mapping, Sequence

from layoutmap.checkpoint.lineage import SavedStep
from layoutmap.core.errors import counted
from layoutmap.core.text_table import text_table


def history_text(where: str, steps: Iterable[SavedStep]) -> str:
    """Return the steps of a directory as a tree, each under the one that it came from.

    The line of the step that was saved last goes straight down; what was left is beside it.

    Args:
        where: The directory.
        steps: Its steps.

    Example:
        >>> there = [SavedStep(n, lines={"a": n}, order=n) for n in (10, 20, 30)]
        >>> print(history_text("runs/net", [*there, SavedStep(15, lines={"a": 10, "b": 15}, order=40)]))
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
    for each, parent in zip(known, _parents(known), strict=True):
        below.setdefault(parent, []).append(each)
    rows = [
        (f"{mark}{each.step}", each.created.replace("+00:00", "Z"), _numbers(each.metrics))
        for mark, each in _rows(below, _latest(below), None, "")
    ]
    last = max(known, key=lambda each: (each.order, each.step))
    head = f"{where}: {counted(len(known), 'step')}, the last save is step {last.step}"
    return "\n".join([head, "", *text_table(("step", "saved", "metrics"), rows)])


def _parents(known: Sequence[SavedStep]) -> Iterator[int | None]:
    """For each step the nearest existing one of those that it comes from."""
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


def _rows(
    below: Mapping[int | None, Sequence[SavedStep]],
    latest: Mapping[int, tuple[int, int]],
    parent: int | None,
    rest: str,
) -> Iterator[tuple[str, SavedStep]]:
    """Each step below one, with what stands before it."""
    while children := sorted(below.get(parent, ()), key=lambda each: latest[each.step]):
        *sides, main = children
        for side in sides:
            yield f"{rest}|-- ", side
            yield from _rows(below, latest, side.step, f"{rest}|   ")
        yield rest, main
        parent = main.step


def _latest(below: Mapping[int | None, Sequence[SavedStep]]) -> dict[int, tuple[int, int]]:
    """By step: of those that come from it, and itself, the one that was saved last."""
    found: dict[int, tuple[int, int]] = {}
    for each in sorted((e for some in below.values() for e in some), key=lambda each: -each.step):
        found[each.step] = max([(each.order, each.step), *(found[e.step] for e in below.get(each.step, ()))])
    return found


def _numbers(metrics: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.6g}" for name, value in metrics.items())
