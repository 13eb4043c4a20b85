"""Record the parent of each saved step. A run that resumes from an earlier step starts another line.

A manifest has, beside the step that it came from (`parent`), the lines that it is on: by name, up to which step. A line
has the id of its first save as its name, and its steps rise. So it is known which steps a run comes from, whichever of
them have been deleted since. `order` counts the saves of a directory: its last step is that of the last save, whatever
its number, and no clock is asked. What was saved without these is on one line, in the order of its numbers.

    "parent": 30, "lines": {"d6df30ab0b700bed": 30, "5a1c0f3b7e9d2a46": 34}, "order": 8,

This is step 34, the eighth save: the run went back to 30 and began the line `5a1c...` there.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from layoutmap.checkpoint.gate import check_small
from layoutmap.checkpoint.manifest import NAME
from layoutmap.checkpoint.states import decode_state
from layoutmap.checkpoint.storage import Storage
from layoutmap.core.errors import CheckpointError

_HEAD_BYTES = 1 << 14


@dataclass(frozen=True, slots=True)
class SavedStep:
    """The lineage of one saved step.

    Args:
        step: Its number.
        parent: The step from which training resumed or continued; `None`: none, or unknown.
        lines: Its lines, its own last: for each line's name, the last step on it among its ancestors.
        order: The number of the save in its directory, counted from 1; 0 if unknown.
        created: When it was saved, in UTC.
        metrics: The metrics that were saved with it.
    """

    step: int
    parent: int | None = None
    lines: Mapping[str, int] = field(default_factory=dict[str, int])
    order: int = 0
    created: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])

    @property
    def line(self) -> str:
        """The name of the step's line."""
        return list(self.lines)[-1]

    def is_descendant(self, other: SavedStep) -> bool:
        """Return whether another step is one of this step's ancestors.

        Example:
            >>> left, new = SavedStep(50, lines={"a": 50}), SavedStep(34, lines={"a": 30, "b": 34})
            >>> [new.is_descendant(SavedStep(20, lines={"a": 20})), new.is_descendant(left), left.is_descendant(new)]
            [True, False, False]
        """
        return other.step != self.step and self.lines.get(other.line, -1) >= other.step


# A run can resume from an earlier step, so each manifest names its parent and its line (decisions/0136).
def extend_lineage(
    step: int, token: str, position: SavedStep | None, there: Iterable[SavedStep]
) -> SavedStep:
    """Return the lineage for the manifest of a new step.

    Args:
        step: Its number.
        token: The id of its save.
        position: The step that the run goes on from, or which was deleted and is saved again; `None`: it begins.
        there: All steps of the directory.

    Example:
        >>> there = [SavedStep(n, lines={"a": n}, order=n) for n in (1, 2, 3)]
        >>> extend_lineage(4, "b", there[2], there).lines, extend_lineage(2, "b", there[0], there).lines
        ({'a': 4}, {'a': 1, 'b': 2})
    """
    known = list(there)
    order = 1 + max((each.order for each in known), default=0)
    if position is None:
        return SavedStep(step, None, {token: step}, order)
    # Later steps of the same line are allowed only if they branched off later.
    is_again = step == position.step
    is_left = any(each.lines.get(position.line, -1) + is_again > position.step for each in known)
    lines = {**position.lines, (token if is_left else position.line): step}
    return SavedStep(step, position.parent if is_again else position.step, lines, order)


# Later steps may belong to another run, so a manager loads and deletes only steps of its own line (decisions/0136).
class History:
    """Track the steps of a directory with their ancestors.

    Args:
        storage: The directory.

    Attributes:
        damaged: The steps that existed at the last check and have an unreadable manifest.
    """

    def __init__(self, storage: Storage):
        self._storage = storage
        self._known: dict[int, SavedStep] = {}
        self._distrusted: set[int] = set()
        self.damaged: list[int] = []

    def note(self, saved: SavedStep) -> None:
        """Record a new step."""
        self._known[saved.step] = saved
        self._distrusted.discard(saved.step)

    def mark_damaged(self, step: int) -> None:
        """Mark a step as damaged, even if the head of its manifest is readable."""
        self.forget(step)
        self._distrusted.add(step)

    def forget(self, step: int) -> None:
        """Remove a step that is deleted or will be replaced."""
        self._known.pop(step, None)

    def steps(self) -> dict[int, SavedStep]:
        """Return the lineage of each existing step, in ascending order."""
        there = self._storage.steps()
        for step in there:
            is_unknown = step not in self._known and step not in self._distrusted
            if is_unknown and (read := _read_lineage(self._storage, step)) is not None:
                self._known[step] = read
        self.damaged = [step for step in there if step not in self._known]
        return {step: self._known[step] for step in there if step in self._known}

    def last(self) -> SavedStep | None:
        """Return the most recently saved step, or `None` without steps.

        One whose manifest cannot be read is the last if its number says so: who loads it hears of it.
        """
        found = max(self.steps().values(), key=lambda each: (each.order, each.step), default=None)
        damaged = [SavedStep(step, lines={"": step}) for step in self.damaged[-1:]]
        return max([*damaged, *filter(None, (found,))], key=lambda each: each.step, default=None)

    def line(self, position: SavedStep | None) -> list[SavedStep]:
        """Return the existing ancestors of a step and the step itself, in ascending order."""
        there = self.steps().values()
        return [e for e in there if position and (e.step == position.step or position.is_descendant(e))]


def find_last_step(storage: Storage) -> int | None:
    """Find the most recently saved step of a directory, or return `None` without steps."""
    found = History(storage).last()
    return None if found is None else found.step


def make_lineage_facts(saved: SavedStep) -> dict[str, Any]:
    """Convert a lineage to entries of a manifest."""
    return {"parent": saved.parent, "lines": saved.lines, "order": saved.order}


def parse_lineage(step: int, facts: Mapping[str, Any]) -> SavedStep:
    """Read a lineage from the entries of a manifest."""
    return SavedStep(
        step,
        facts.get("parent"),
        facts.get("lines") or {"": step},
        facts.get("order", 0),
        facts.get("created") or "",
        decode_state(facts.get("metrics", {})),
    )


def _read_lineage(storage: Storage, step: int) -> SavedStep | None:
    """Read a step's lineage from the head of its manifest, or return `None` if it is unreadable."""
    try:
        size = storage.size(storage.folder(step), NAME) or 0
        found = _read_facts(storage, step, min(size, _HEAD_BYTES)) or _read_facts(storage, step, size)
        saved = parse_lineage(step, found)
        is_right = all(type(number) is int for number in [*saved.lines.values(), saved.order])
        are_numbers = all(type(value) in (int, float) for value in saved.metrics.values())
        return saved if is_right and are_numbers else None
    except (CheckpointError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None  # deleted meanwhile or damaged; opening the step reports it


def _read_facts(storage: Storage, step: int, num_bytes: int) -> Any:
    """Parse the entries of a manifest that precede its metadata, or return `None` if the data ends before."""
    check_small(f"{storage.where}/{storage.folder(step)}/{NAME}", num_bytes)
    data = bytearray(num_bytes)
    count = storage.read_into(storage.folder(step), NAME, 0, memoryview(data))
    head, is_there, _ = bytes(data[:count]).partition(b',\n "metadata": ')
    if is_there:
        return json.loads(head + b"}")
    # The manifest was reformatted by another program, so the head cannot be cut off; parse all of it.
    return None if num_bytes == _HEAD_BYTES else json.loads(data)
