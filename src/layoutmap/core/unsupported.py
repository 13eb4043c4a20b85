"""Describe layers and weights that a backend cannot compute with, for a report before the first step.

An adapter finds them, because it knows the layers of its library and the limits of the backend. The plan reports them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class UnsupportedFeature:
    """Describe a model feature that the backend cannot run, or runs with restrictions.

    Args:
        path: The layer's or the variable's path.
        what: The problem, without the path.
        why: The reason.
        fix: What to type instead.
        severity: `"error"`: it cannot run. `"warning"`: some uses of it cannot. `"note"`: it runs more slowly.
        if_sharded: The axes of the variable that cause the problem: it occurs only if one of them is sharded. `None`:
            it occurs with each layout.
        model: The name of the model with the layer or variable, as in the plan.
    """

    path: str
    what: str
    why: str
    fix: str
    severity: Literal["error", "warning", "note"] = "error"
    if_sharded: tuple[int, ...] | None = None
    model: str = ""
