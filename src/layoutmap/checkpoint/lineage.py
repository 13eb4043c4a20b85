"""Record the parent of each saved step. A run that resumes from an earlier step starts a new branch.

A branch is a sequence of ascending steps, each saved by a run that continued from the step before. Its name is the id
of its first save. A manifest has the step that its run came from (`parent`), and the last step on each branch among its
ancestors (`lines`). So the ancestors of a step are known even if some are deleted. `order` counts the saves of a
directory, so its last step is known without a clock. Steps without these entries are on one branch, by their numbers.

    "parent": 30, "lines": {"d6df30ab0b700bed": 30, "5a1c0f3b7e9d2a46": 34}, "order": 8,

This is step 34, the eighth save: the run went back to step 30 and began the branch `5a1c...` there.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from layoutmap.checkpoint.gate import check_size_limit
from layoutmap.checkpoint.manifest import NAME
from layoutmap.checkpoint.states import decode_state
from layoutmap.checkpoint.storage import Storage
from layoutmap.core.errors import CheckpointError

_HEAD_BYTES = 1 << 14


@dataclass(frozen=True, slots=True)
class StepLineage:
    """The lineage of one saved step: the step that it continues, and the branches that lead to it.

    Args:
        step: The number of the step.
        parent: The step from which training resumed or continued; `None`: training began without one, or it is unknown.
        lines: For each branch of the training history by name, the last step on it among the step and its ancestors.
            The step's own branch is last.
        order: How many saves the directory had with this one; 0 if unknown.
        created: The time of the save, in UTC.
        metrics: The metrics that were saved with the step.
    """

    step: int
    parent: int | None = None
    lines: Mapping[str, int] = field(default_factory=dict[str, int])
    order: int = 0
    created: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])

    @property
    def branch_name(self) -> str:
        """The name of the branch of the training history that contains the step."""
        return list(self.lines)[-1]

    def has_ancestor(self, other: StepLineage) -> bool:
        """Return whether the other step is one of this step's ancestors.

        Example:
            >>> left, new = StepLineage(50, lines={"a": 50}), StepLineage(34, lines={"a": 30, "b": 34})
            >>> [new.has_ancestor(each) for each in (StepLineage(20, lines={"a": 20}), left)]
            [True, False]
        """
        return other.step != self.step and self.lines.get(other.branch_name, -1) >= other.step


# A run can resume from an earlier step, so each manifest names its parent step and its branch (decisions/0136).
def make_step_lineage(
    step: int, token: str, resumed_from: StepLineage | None, existing: Iterable[StepLineage]
) -> StepLineage:
    """Return the lineage for the manifest of a new step.

    Args:
        step: The number of the new step.
        token: The id of the save.
        resumed_from: The step that the run continues from, or a deleted step that is saved again; `None`: a new run.
        existing: The lineages of all steps in the directory.

    Example:
        >>> there = [StepLineage(n, lines={"a": n}, order=n) for n in (1, 2, 3)]
        >>> [make_step_lineage(step, "b", there[step - 2], there).lines for step in (4, 2)]
        [{'a': 4}, {'a': 1, 'b': 2}]
    """
    known = list(existing)
    order = 1 + max((each.order for each in known), default=0)
    if resumed_from is None:
        return StepLineage(step, None, {token: step}, order)
    # If the branch of the parent has later steps already, the new step does not follow them, so it begins a new branch.
    is_saved_again = step == resumed_from.step
    has_later_steps = any(
        each.lines.get(resumed_from.branch_name, -1) + is_saved_again > resumed_from.step for each in known
    )
    lines = {**resumed_from.lines, (token if has_later_steps else resumed_from.branch_name): step}
    return StepLineage(step, resumed_from.parent if is_saved_again else resumed_from.step, lines, order)


# Later steps may belong to another run, so a manager loads and deletes only steps of its branch (decisions/0136).
class StepHistory:
    """Read and cache the lineages of the steps in a directory.

    Args:
        storage: The directory.

    Attributes:
        damaged: The steps with an unreadable manifest, as of the last `read_lineages`.
    """

    def __init__(self, storage: Storage):
        self._storage = storage
        self._known: dict[int, StepLineage] = {}
        self._distrusted: set[int] = set()
        self.damaged: list[int] = []

    def cache_step(self, saved: StepLineage) -> None:
        """Cache the lineage of a step that was just saved."""
        self._known[saved.step] = saved
        self._distrusted.discard(saved.step)

    def mark_step_as_damaged(self, step: int) -> None:
        """Make `read_lineages` add a step to `damaged`, even if its lineage is readable."""
        self.remove_cached_step(step)
        self._distrusted.add(step)

    def remove_cached_step(self, step: int) -> None:
        """Remove a step from the cache of lineages, because it is deleted or will be replaced. No file is deleted."""
        self._known.pop(step, None)

    def read_lineages(self) -> dict[int, StepLineage]:
        """Return a dict from step number to lineage. Set `damaged` to the steps with unreadable manifests."""
        existing = self._storage.list_steps()
        for step in existing:
            is_unknown = step not in self._known and step not in self._distrusted
            if is_unknown and (read := _read_lineage(self._storage, step)) is not None:
                self._known[step] = read
        self.damaged = [step for step in existing if step not in self._known]
        return {step: self._known[step] for step in existing if step in self._known}

    def find_last_saved_step(self) -> StepLineage | None:
        """Return the lineage of the most recently saved step, or `None` if there are no steps.

        A step with an unreadable manifest counts as the last one if its number is higher, so that loading it raises.
        """
        found = max(self.read_lineages().values(), key=lambda each: (each.order, each.step), default=None)
        damaged = [StepLineage(step, lines={"": step}) for step in self.damaged[-1:]]
        return max([*damaged, *filter(None, (found,))], key=lambda each: each.step, default=None)

    def list_step_and_ancestors(self, saved: StepLineage | None) -> list[StepLineage]:
        """Return the lineages of a step and its existing ancestors, in ascending order, or an empty list for `None`."""
        existing = self.read_lineages().values()
        return [e for e in existing if saved and (e.step == saved.step or saved.has_ancestor(e))]


def find_last_step_number(storage: Storage) -> int | None:
    """Return the number of the most recently saved step of a directory, or `None` if it has no steps."""
    found = StepHistory(storage).find_last_saved_step()
    return None if found is None else found.step


def convert_lineage_to_manifest_entries(lineage: StepLineage) -> dict[str, Any]:
    """Convert a lineage to entries of a manifest, from which `parse_lineage_from_manifest_entries` reads it."""
    return {"parent": lineage.parent, "lines": lineage.lines, "order": lineage.order}


def parse_lineage_from_manifest_entries(step: int, facts: Mapping[str, Any]) -> StepLineage:
    """Return the lineage of a step from the entries of the step's manifest."""
    return StepLineage(
        step,
        facts.get("parent"),
        facts.get("lines") or {"": step},
        facts.get("order", 0),
        facts.get("created") or "",
        decode_state(facts.get("metrics", {})),
    )


def _read_lineage(storage: Storage, step: int) -> StepLineage | None:
    """Return the lineage of a step, read from its manifest, or `None` if the manifest is unreadable or invalid."""
    try:
        size = storage.get_file_size(storage.get_folder_name(step), NAME) or 0
        found = None
        if size > _HEAD_BYTES:
            found = _read_manifest_entries_before_metadata(storage, step, _HEAD_BYTES, is_whole=False)
        if found is None:
            found = _read_manifest_entries_before_metadata(storage, step, size, is_whole=True)
        saved = parse_lineage_from_manifest_entries(step, found)
        is_right = all(type(number) is int for number in [*saved.lines.values(), saved.order])
        are_numbers = all(type(value) in (int, float) for value in saved.metrics.values())
        return saved if is_right and are_numbers else None
    except (CheckpointError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None  # do not raise, because the other steps are readable; opening this step raises


def _read_manifest_entries_before_metadata(
    storage: Storage, step: int, num_bytes: int, *, is_whole: bool
) -> Any:
    """Return a manifest's entries before `metadata`, or `None` if its first `num_bytes` bytes lack some of them."""
    check_size_limit(f"{storage.where}/{storage.get_folder_name(step)}/{NAME}", num_bytes)
    data = bytearray(num_bytes)
    count = storage.read_file_into(storage.get_folder_name(step), NAME, 0, memoryview(data))
    head, is_there, _ = bytes(data[:count]).partition(b',\n "metadata": ')
    if is_there:
        return json.loads(head + b"}")
    # Another program has reformatted the manifest, so `metadata` may be anywhere in it: parse the whole file.
    return json.loads(data) if is_whole else None
