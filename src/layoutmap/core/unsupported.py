"""Describe layers and weights that a backend cannot compute with, for a report before the first step.

An adapter knows its library's layers and what the backend's operations are short of; the plan reports it, with the fix.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Unsupported:
    """Describe a model feature that the backend cannot run, or runs with restrictions.

    Args:
        path: The layer's or the variable's path.
        what: The problem, without the path.
        why: The reason.
        fix: What to type instead.
        severity: `"error"`: it cannot run. `"warning"`: some of it cannot. `"note"`: it runs, at a price.
        if_sharded: The axes of a variable; it holds only if its layout shards one
            of them. `None`: it holds in any case.
        model: The name of the model that the path is in, as the plan has it.
    """

    path: str
    what: str
    why: str
    fix: str
    severity: Literal["error", "warning", "note"] = "error"
    if_sharded: tuple[int, ...] | None = None
    model: str = ""
