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
        kind: The kind of the plan's problem.
    """

    path: str
    what: str
    why: str
    fix: str
    severity: Literal["error", "warning", "note"] = "error"
    if_sharded: tuple[int, ...] | None = None
    model: str = ""
    kind: str = "unsupported"


UNKNOWN_ORDER_KIND = "unknown order"
"""The kind of the problem that the call that records the order of calls failed. Its `why` begins with the error."""


def make_failed_call_note(model: object, error: Exception) -> UnsupportedFeature:
    """Return the note that a call of a model with the user's inputs failed, so the order of calls is unknown."""
    first_line = next(iter(str(error).strip().splitlines()), "").removesuffix(".")
    return UnsupportedFeature(
        type(model).__name__,
        "its call with inputs= (--inputs) failed, so the order of calls is unknown",
        f"{type(error).__name__}: {first_line}".removesuffix(": "),
        "pass inputs= that its call accepts; a call that reads values cannot run on shapes, so then check the rules of "
        "kernels in unknown order",
        "note",
        kind=UNKNOWN_ORDER_KIND,
    )
