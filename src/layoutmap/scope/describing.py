"""`describe`: what is in a checkpoint, without a model."""

from __future__ import annotations

import os

from layoutmap.checkpoint.reader import Step
from layoutmap.checkpoint.remote import storage_of


def describe(directory: str | os.PathLike[str], *, step: int | None = None) -> Step:
    """Open a step of a checkpoint; reads its manifest and no values.

    Args:
        directory: What it was saved to.
        step: The step; `None`: the last one.

    Returns:
        The step: its variables, metadata and steps beside it.

    Raises:
        CheckpointError: There is no such step, or its manifest is damaged.
    """
    return Step(storage_of(directory), step)
