"""Format the steps of a directory as a tree by their parents, and name the step that was saved last."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Mapping, Sequence

from layoutmap.checkpoint.lineage import StepLineage
from layoutmap.core.errors import format_count
from layoutmap.core.text_table import format_table


def format_step_history(where: str, steps: Iterable[StepLineage]) -> str:
    """Return the steps of a directory as the text of a tree, with each step below its parent.

    The ancestors of the step that was saved last are not indented; other branches are.

    Args:
        where: The directory.
        steps: Its steps.

    Example:
        >>> there = [StepLineage(n, lines={"a": n}, order=n) for n in (10, 20, 30)]
        >>> print(format_step_history("runs/net", [*there, StepLineage(15, lines={"a": 10, "b": 15}, order=40)]))
        runs/net: 4 steps, the last save is step 15
        <BLANKLINE>
        step    saved  metrics
        ------  -----  -------
        10
        |-- 20
        |   30
        15
    """
    known = sorted(steps, key=lambda saved: saved.step)
    children: dict[int | None, list[StepLineage]] = {}
    for saved, parent in zip(known, _iterate_nearest_existing_ancestors(known), strict=True):
        children.setdefault(parent, []).append(saved)
    rows = [
        (f"{mark}{saved.step}", saved.created.replace("+00:00", "Z"), _format_metrics(saved.metrics))
        for mark, saved in _iterate_tree_rows(children, _find_latest_saves_of_subtrees(children), None, "")
    ]
    last = max(known, key=lambda saved: (saved.order, saved.step))
    head = f"{where}: {format_count(len(known), 'step')}, the last save is step {last.step}"
    return "\n".join([head, "", *format_table(("step", "saved", "metrics"), rows)])


def _iterate_nearest_existing_ancestors(steps: Sequence[StepLineage]) -> Iterator[int | None]:
    """Yield for each step the number of its nearest ancestor that still exists, or None if no ancestor exists."""
    steps_by_branch: dict[str, list[int]] = {}
    for each in steps:
        steps_by_branch.setdefault(each.branch_name, []).append(each.step)
    for each in steps:
        before = [
            on_branch[at - 1]
            for name, until in each.lines.items()
            if (at := bisect.bisect(on_branch := steps_by_branch.get(name, []), min(until, each.step - 1)))
        ]
        yield max(before, default=None)


def _iterate_tree_rows(
    children: Mapping[int | None, Sequence[StepLineage]],
    latest_saves: Mapping[int, tuple[int, int]],
    parent: int | None,
    prefix: str,
) -> Iterator[tuple[str, StepLineage]]:
    """Yield a pair for each descendant of a step, in the order of the rows: its indentation as text, and the step."""
    while siblings := sorted(children.get(parent, ()), key=lambda each: latest_saves[each.step]):
        *sides, main = siblings
        for side in sides:
            yield f"{prefix}|-- ", side
            yield from _iterate_tree_rows(children, latest_saves, side.step, f"{prefix}|   ")
        yield prefix, main
        parent = main.step


def _find_latest_saves_of_subtrees(
    children: Mapping[int | None, Sequence[StepLineage]],
) -> dict[int, tuple[int, int]]:
    """Return a dict from step to the last saved step among it and its descendants, as save order and number."""
    found: dict[int, tuple[int, int]] = {}
    for each in sorted((e for some in children.values() for e in some), key=lambda each: -each.step):
        found[each.step] = max(
            [(each.order, each.step), *(found[e.step] for e in children.get(each.step, ()))]
        )
    return found


def _format_metrics(metrics: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.6g}" for name, value in metrics.items())
