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
class RetentionRules:
    """Rules for saving and for deleting steps.

    Args:
        keep_last: Number of the last steps to keep, 1 or more; `None`: all.
        best: The metric by which steps are compared; `None`: steps are not compared.
        best_mode: Whether the smallest or the largest value of the metric is best.
        keep_best: Number of the best steps to keep beside the last.
        keep_every: Keep each step whose number is a multiple of this; `None`: keep no step for its number.
        every_steps: A step is due when training reaches a multiple of this; `None`: ignore the step number.
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
        _check_positive_int("keep_last", self.keep_last, "keep_last=None keeps all steps")
        _check_positive_int("keep_best", self.keep_best, "best=None keeps no step for its metric")
        _check_positive_int("keep_every", self.keep_every, "keep_every=None keeps no step for its number")
        _check_positive_int("every_steps", self.every_steps, "every_steps=None saves whenever save is called")
        minutes = self.every_minutes
        if minutes is not None and not 0 < minutes < math.inf:
            raise _make_argument_error(
                "every_minutes", minutes, "it must be a positive number of minutes", "every_minutes=10"
            )
        if self.best_mode not in ("min", "max"):
            raise _make_argument_error(
                "best_mode",
                self.best_mode,
                "best_mode selects the smallest or the largest value",
                'best_mode="max"',
            )

    def is_save_due(self, step: int, previous_step: int | None, seconds_since_save: float) -> bool:
        """Return whether a step must be saved.

        Args:
            step: The number of the step.
            previous_step: The step of the previous call; `None`: this is the first call.
            seconds_since_save: Seconds since the last save, or since the start of training.

        Example:
            >>> retention = RetentionRules(every_steps=100)
            >>> retention.is_save_due(200, 199, 0), retention.is_save_due(205, 198, 0)
            (True, True)
            >>> RetentionRules(every_steps=100, every_minutes=10).is_save_due(150, 149, 601)
            True
        """
        if self.every_steps is None and self.every_minutes is None:
            return True
        if self.every_minutes is not None and seconds_since_save >= 60 * self.every_minutes:
            return True
        if self.every_steps is None:
            return False
        if previous_step is None:
            return step > 0 and step % self.every_steps == 0
        return step // self.every_steps > previous_step // self.every_steps

    def rank_steps_by_metric(self, metrics: Metrics) -> list[int]:
        """Return the steps from best to worst, without steps that lack a finite value of the metric.

        Example:
            >>> metrics = {1: {"loss": 0.5}, 2: {"loss": 0.25}, 3: {}, 4: {"loss": -math.inf}}
            >>> RetentionRules(best="loss").rank_steps_by_metric(metrics)
            [2, 1]
        """
        name = self.best or ""
        known = {step: found[name] for step, found in metrics.items() if name in found}
        sign = 1 if self.best_mode == "min" else -1
        steps = [step for step, value in known.items() if math.isfinite(value)]
        return sorted(steps, key=lambda step: (sign * known[step], -step))

    def choose_kept_steps(self, metrics: Metrics, last_saved: int) -> set[int]:
        """Return the steps to keep: the last saved one, and those that match one of the rules for keeping steps.

        Args:
            metrics: The metrics of the step that was saved last and of its existing ancestors.
            last_saved: The step that was saved last, which is always kept.

        Example:
            >>> metrics = {1: {"loss": 0.1}, 2: {"loss": 0.3}, 3: {}, 4: {}}
            >>> sorted(RetentionRules(2, best="loss").choose_kept_steps(metrics, 4))
            [1, 3, 4]
        """
        steps = sorted(metrics)
        last = steps if self.keep_last is None else steps[-self.keep_last :]
        every = [step for step in steps if self.keep_every is not None and step % self.keep_every == 0]
        return {last_saved, *last, *every, *self.rank_steps_by_metric(metrics)[: self.keep_best]}


def validate_metrics(metrics: Mapping[str, Any] | None, best: str | None) -> dict[str, float]:
    """Return metrics as floats. Raise if a value is not a number, or if the metric `best` is missing.

    Raises:
        CheckpointError: A value is not a number, or the metric by which steps are compared is missing.
    """
    found: dict[str, float] = {}
    for name, value in (metrics or {}).items():
        try:
            found[name] = float(value)
        except (TypeError, ValueError) as error:
            raise CheckpointError(
                f"metrics[{name!r}] is not a number",
                facts={"error": str(error)},
                why="steps are compared by their metrics",
                fix="pass one number for each metric, as in metrics={'loss': 0.25}",
            ) from error
    if metrics is not None and best is not None and best not in found:
        raise CheckpointError(
            f"metrics: {best!r} is missing",
            facts={"metrics": join_names(list(found)) or "none"},
            why=f"best={best!r} is the metric by which this manager compares steps",
            fix="pass this metric, or set best= to one of these metrics",
        )
    return found


def _check_positive_int(name: str, value: Any, alternative: str) -> None:
    if value is not None and (as_int(value) or 0) < 1:
        raise _make_argument_error(
            name, value, "it must be an integer of 1 or more", f"{name}=3; {alternative}"
        )


def _make_argument_error(name: str, value: object, why: str, example: str) -> CheckpointError:
    return CheckpointError(f"{name}={value!r} cannot be used", why=why, fix=f"write for example {example}")
