"""Decide from step numbers, times, and metrics whether a step is due and which steps to keep."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from layoutmap.core.arguments import as_int
from layoutmap.core.errors import CheckpointError, join_names

Metrics = Mapping[int, Mapping[str, float]]
"""The metrics of each step by its number."""


@dataclass(frozen=True, slots=True)
class Retention:
    """Rules for saving and for deleting steps.

    Args:
        keep_last: Number of the last steps to keep, 1 or more; `None`: all.
        best: The metric by which steps are compared; `None`: steps are not compared.
        best_mode: Whether best_mode selects the smallest or the largest value.
        keep_best: Number of the best steps to keep beside the last.
        keep_every: Keep all steps that are a multiple of it; `None`: keep none for its number.
        every_steps: A step is due when a multiple of it is reached; `None`: ignore the step number.
        every_minutes: A step is due this long after the last save; `None`: ignore the time.

    Raises:
        CheckpointError: An argument has an invalid value.
    """

    keep_last: int | None = 3
    best: str | None = None
    best_mode: Literal["min", "max"] = "min"
    keep_best: int = 1
    every_steps: int | None = None
    every_minutes: float | None = None
    keep_every: int | None = None

    def __post_init__(self) -> None:
        _check_count("keep_last", self.keep_last, "keep_last=None keeps all steps")
        _check_count("keep_best", self.keep_best, "best=None keeps none of the best")
        _check_count("keep_every", self.keep_every, "keep_every=None keeps none for its number")
        _check_count("every_steps", self.every_steps, "every_steps=None saves whenever save is called")
        minutes = self.every_minutes
        if minutes is not None and not 0 < minutes < math.inf:
            raise _make_error("every_minutes", minutes, "it is a time in minutes", "every_minutes=10")
        if self.best_mode not in ("min", "max"):
            raise _make_error(
                "best_mode",
                self.best_mode,
                "best_mode selects the smallest or the largest value",
                'best_mode="max"',
            )

    def is_due(self, step: int, seen: int | None, seconds: float) -> bool:
        """Return whether a step must be saved.

        Args:
            step: The step.
            seen: The step that was asked about before this one; `None`: none was.
            seconds: How long ago the last save was, or the beginning.

        Example:
            >>> Retention(every_steps=100).is_due(200, 199, 0), Retention(every_steps=100).is_due(205, 198, 0)
            (True, True)
            >>> Retention(every_steps=100, every_minutes=10).is_due(150, 149, 601)
            True
        """
        if self.every_steps is None and self.every_minutes is None:
            return True
        if self.every_minutes is not None and seconds >= 60 * self.every_minutes:
            return True
        if self.every_steps is None:
            return False
        if seen is None:
            return step > 0 and step % self.every_steps == 0
        return step // self.every_steps > seen // self.every_steps

    def rank_steps(self, metrics: Metrics) -> list[int]:
        """Sort the steps from best to worst, without those that lack a finite metric.

        Example:
            >>> Retention(best="loss").rank_steps({1: {"loss": 0.5}, 2: {"loss": 0.25}, 3: {}, 4: {"loss": -math.inf}})
            [2, 1]
        """
        name = self.best or ""
        known = {step: found[name] for step, found in metrics.items() if name in found}
        sign = 1 if self.best_mode == "min" else -1
        steps = [step for step, value in known.items() if math.isfinite(value)]
        return sorted(steps, key=lambda step: (sign * known[step], -step))

    def kept(self, metrics: Metrics, saved: int) -> set[int]:
        """Return the steps to keep.

        Args:
            metrics: The existing steps of those that the last one comes from.
            saved: The one that was saved last, which is always kept.

        Example:
            >>> sorted(Retention(2, best="loss").kept({1: {"loss": 0.1}, 2: {"loss": 0.3}, 3: {}, 4: {}}, 4))
            [1, 3, 4]
        """
        steps = sorted(metrics)
        last = steps if self.keep_last is None else steps[-self.keep_last :]
        every = [step for step in steps if self.keep_every is not None and step % self.keep_every == 0]
        return {saved, *last, *every, *self.rank_steps(metrics)[: self.keep_best]}


def check_metrics(metrics: Mapping[str, Any] | None, best: str | None) -> dict[str, float]:
    """Convert metrics to floats, or raise for a value that is not a number.

    Raises:
        CheckpointError: One is no number, or the one by which steps are compared is not among them.
    """
    found: dict[str, float] = {}
    for name, value in (metrics or {}).items():
        try:
            found[name] = float(value)
        except (TypeError, ValueError) as error:
            raise CheckpointError(
                f"metrics[{name!r}]: this is not a number",
                facts={"it says": str(error)},
                why="steps are compared by their metrics",
                fix="pass one number for each metric, as in metrics={'loss': 0.25}",
            ) from error
    if metrics is not None and best is not None and best not in found:
        raise CheckpointError(
            f"metrics: {best!r} is missing",
            facts={"metrics": join_names(list(found)) or "none"},
            why=f"best={best!r} is the metric by which this manager compares steps",
            fix="pass this metric, or set best= to one of these",
        )
    return found


def _check_count(name: str, value: Any, instead: str) -> None:
    if value is not None and (as_int(value) or 0) < 1:
        raise _make_error(name, value, "it is a whole number, 1 or more", f"{name}=3; {instead}")


def _make_error(name: str, value: object, why: str, example: str) -> CheckpointError:
    return CheckpointError(f"{name}={value!r} cannot be used", why=why, fix=f"pass one, as in {example}")
