"""Record the step that each step came from. A run that goes back begins another line in its directory.

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
    """The lineage of one step of a directory.

    Args:
        step: Its number.
        parent: The step that it came from; `None`: none, or it is not known.
        lines: The lines that it is on, its own last: the last step of each that it comes from, by the line's name.
        order: The how many-th save of the directory it was; 0 if it is not known.
        created: When it was saved, in UTC.
        metrics: The numbers that were saved with it.
    """

    step: int
    parent: int | None = None
    lines: Mapping[str, int] = field(default_factory=dict[str, int])
    order: int = 0
    created: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])

    @property
    def line(self) -> str:
        """Name of the line that the step is on."""
        return list(self.lines)[-1]

    def is_descendant(self, other: SavedStep) -> bool:
        """Return whether another step is one of this step's ancestors.

        Example:
            >>> left, new = SavedStep(50, lines={"a": 50}), SavedStep(34, lines={"a": 30, "b": 34})
            >>> [new.is_descendant(SavedStep(20, lines={"a": 20})), new.is_descendant(left), left.is_descendant(new)]
            [True, False, False]
        """
        return other.step != self.step and self.lines.get(other.line, -1) >= other.step


# A run can go back and save again, so each manifest names its parent and its line (decisions/0136).
def extend_lineage(
    step: int, token: str, position: SavedStep | None, there: Iterable[SavedStep]
) -> SavedStep:
    """Return the lineage for the manifest of a step that is saved now.

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
    # Steps that follow on the same line are allowed only if they branched off later.
    is_again = step == position.step
    is_left = any(each.lines.get(position.line, -1) + is_again > position.step for each in known)
    lines = {**position.lines, (token if is_left else position.line): step}
    return SavedStep(step, position.parent if is_again else position.step, lines, order)


# Later steps may belong to another run, so a manager loads and deletes only on its own line (decisions/0136).
class History:
    """The steps of a directory, with the ancestors of each.

    Args:
        storage: The directory.

    Attributes:
        damaged: The steps that were there at the last look and whose manifests cannot be read.
    """

    def __init__(self, storage: Storage):
        self._storage = storage
        self._known: dict[int, SavedStep] = {}
        self._distrusted: set[int] = set()
        self.damaged: list[int] = []

    def note(self, saved: SavedStep) -> None:
        """Record a step that was just saved."""
        self._known[saved.step] = saved
        self._distrusted.discard(saved.step)

    def mark_damaged(self, step: int) -> None:
        """Record a step as damaged, even if the first lines of its manifest can be read."""
        self.forget(step)
        self._distrusted.add(step)

    def forget(self, step: int) -> None:
        """Forget a step that is deleted or will be replaced."""
        self._known.pop(step, None)

    def steps(self) -> dict[int, SavedStep]:
        """Return the lineages of the steps that exist now by number, in rising order."""
        there = self._storage.steps()
        for step in there:
            is_unknown = step not in self._known and step not in self._distrusted
            if is_unknown and (read := _read_lineage(self._storage, step)) is not None:
                self._known[step] = read
        self.damaged = [step for step in there if step not in self._known]
        return {step: self._known[step] for step in there if step in self._known}

    def last(self) -> SavedStep | None:
        """Return the step that was saved last, or `None` without steps.

        One whose manifest cannot be read is the last if its number says so: who loads it hears of it.
        """
        found = max(self.steps().values(), key=lambda each: (each.order, each.step), default=None)
        damaged = [SavedStep(step, lines={"": step}) for step in self.damaged[-1:]]
        return max([*damaged, *filter(None, (found,))], key=lambda each: each.step, default=None)

    def line(self, position: SavedStep | None) -> list[SavedStep]:
        """Return the existing ancestors of a step, and the step itself, in rising order."""
        there = self.steps().values()
        return [e for e in there if position and (e.step == position.step or position.is_descendant(e))]


def find_last_step(storage: Storage) -> int | None:
    """Return the number of the step that was saved last in a directory, or `None` without steps."""
    found = History(storage).last()
    return None if found is None else found.step


def make_lineage_facts(saved: SavedStep) -> dict[str, Any]:
    """Return the entries of a lineage in a manifest."""
    return {"parent": saved.parent, "lines": saved.lines, "order": saved.order}


def parse_lineage(step: int, facts: Mapping[str, Any]) -> SavedStep:
    """Return the lineage of a step from the entries of its manifest."""
    return SavedStep(
        step,
        facts.get("parent"),
        facts.get("lines") or {"": step},
        facts.get("order", 0),
        facts.get("created") or "",
        decode_state(facts.get("metrics", {})),
    )


def _read_lineage(storage: Storage, step: int) -> SavedStep | None:
    """Return the lineage from the head of a step's manifest, or `None` if it cannot be read."""
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
    """Return the entries of a manifest before its metadata, or `None` if the bytes end within them."""
    check_small(f"{storage.where}/{storage.folder(step)}/{NAME}", num_bytes)
    data = bytearray(num_bytes)
    count = storage.read_into(storage.folder(step), NAME, 0, memoryview(data))
    head, is_there, _ = bytes(data[:count]).partition(b',\n "metadata": ')
    if is_there:
        return json.loads(head + b"}")
    # Other programs format JSON differently, so the head is not complete.
    return None if num_bytes == _HEAD_BYTES else json.loads(data)
