"""The verdict on a plan: whether it passes, and why, in one line. Terminal, page, JSON and exit code share it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from layoutmap.core.text_table import size
from layoutmap.plan.memory import memory_of
from layoutmap.plan.table import PlanTable


@dataclass(frozen=True, slots=True)
class Verdict:
    """What there is to say first of a plan.

    Args:
        mood: `"well"`: nothing is wrong. `"doubt"`: there are warnings, or variables are missing. `"bad"`: the model
            cannot be built so, or does not fit, or a warning counts as an error.
        fits: Whether a device has the memory; `None`: nobody said how much it has, or variables are missing.
        needed_bytes: What a device holds: at the peak of a step if the plan has its cost, or else weights, gradients,
            slots and state.
        text: All of it in a line.
    """

    mood: Literal["well", "doubt", "bad"]
    fits: bool | None
    needed_bytes: int
    text: str

    @property
    def passes(self) -> bool:
        """Whether the exit code is 0."""
        return self.mood != "bad"

    def __str__(self) -> str:
        return self.text


def verdict_of(plan: PlanTable) -> Verdict:
    """The verdict on a plan; pure."""
    cost, has = plan.cost, plan.memory_limit
    needed = cost.step.peak_bytes if cost else memory_of(plan).total
    fits = None if has is None or plan.incomplete else needed <= has
    is_bad = plan.errors or fits is False or (plan.strict and plan.warnings)
    parts = [_memory_text(plan, needed, fits), *_problems_text(plan)]
    if plan.errors:
        parts.reverse()
    text = "; ".join(filter(None, parts))
    mood = "bad" if is_bad else "doubt" if plan.warnings else "well"
    return Verdict(mood, fits, needed, text[0].upper() + text[1:])


def _memory_text(plan: PlanTable, needed: int, fits: bool | None) -> str:
    has = plan.memory_limit
    if plan.incomplete:
        return f"incomplete: {plan.incomplete.what}"
    if fits is None or has is None:
        return f"{size(needed)} per device" + (
            ", at the peak of a step" if plan.cost else ", before activations"
        )
    sizes = f"{'fits' if fits else 'does not fit'}: {size(needed)} of {size(has)} per device"
    if plan.cost:
        return f"{sizes}, at the peak of a step"
    return (
        f"{sizes}, and {size(has - needed)} are left for activations"
        if fits
        else f"{sizes}, before activations"
    )


def _problems_text(plan: PlanTable) -> list[str]:
    errors, warnings = len(plan.errors), len(plan.warnings)
    if not errors and not warnings:
        return ["no problems"]
    texts = [f"{errors} error{'' if errors == 1 else 's'}: the model cannot be built so"] if errors else []
    if warnings:
        counted = ", which count as errors" if plan.strict and not errors else ""
        texts.append(f"{warnings} warning{'' if warnings == 1 else 's'}{counted}")
    return ["; ".join(texts)]
