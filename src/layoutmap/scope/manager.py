"""`CheckpointManager`: which steps of a run are saved and kept, and saves that run beside the training."""

from __future__ import annotations

import os
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any, Literal, Self

import numpy as np

from layoutmap.checkpoint.reader import Step
from layoutmap.checkpoint.remote import storage_of
from layoutmap.checkpoint.retention import Retention, check_metrics
from layoutmap.checkpoint.step_writer import Memory, StepWriter
from layoutmap.core.errors import CheckpointError, LayoutMapWarning, listed
from layoutmap.scope.loading import load
from layoutmap.scope.saving import begin_save, check_step, group_of


class CheckpointManager:
    """Saves the steps of a run when they are due, beside the training, and deletes those that are no longer needed.

    `save` returns once the values are copied; they are written on a thread. Arrays of JAX on CPU devices need no copy;
    the memory of other copies, as large as the shards of this process, is kept for the next save. At most one save is
    in flight: a second one waits for the first. If one fails, the next call raises what it raised. A program that ends
    waits for its last save. With several processes all make the same calls, and decide as the first does.

    A run that goes back, by `load(step=30)` of 50, does not save below the steps that it left: that is refused until
    these are deleted, or another directory is named.

    Args:
        directory: Where the steps of this run are kept, and of no other. All in it count, whoever saved them.
        keep_last: How many of the last steps are kept, 1 or more; `None`: all. The one that was saved last always is.
        best: The name of a metric; with it the best steps are kept, too.
        best_mode: `"min"` or `"max"`: which value of the metric is the best.
        keep_best: How many of the best steps are kept.
        every_steps: A step is due where a multiple of it is reached or passed.
        every_minutes: A step is due when the last save, or the beginning, was that long ago; the first process's clock
            decides, which costs a collective at each call. With neither of the two, every step is due; with both,
            a step is due if one of them says so.
        wait: Whether `save` returns only when the step is there.

    Raises:
        CheckpointError: One of these is no such number or name.

    Example:
        >>> import keras, layoutmap as lm, tempfile
        >>> layout_map = lm.LayoutMap(lm.create_mesh("model=4"), {r".*\\.kernel": (None, "model")})
        >>> model = layout_map.build(lambda: keras.Sequential([keras.Input((8,)), keras.layers.Dense(16, name="d1")]))
        >>> with lm.CheckpointManager(tempfile.mkdtemp(), keep_last=2, best="loss", every_steps=10) as manager:
        ...     if manager.steps:  # a run that was interrupted goes on
        ...         model = manager.load(model)
        ...     saved = [step for step in range(50) if manager.save(model, step, metrics={"loss": abs(step - 12)})]
        >>> saved, manager.steps
        ([10, 20, 30, 40], [10, 30, 40])
        >>> _ = manager.load(model, best=True)
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        keep_last: int | None = 3,
        best: str | None = None,
        best_mode: Literal["min", "max"] = "min",
        keep_best: int = 1,
        every_steps: int | None = None,
        every_minutes: float | None = None,
        wait: bool = False,
    ):
        self._retention = Retention(keep_last, best, best_mode, keep_best, every_steps, every_minutes)
        self._directory = directory
        self._storage = storage_of(directory)
        self._waits = wait
        self._flight: _Flight | None = None
        self._memory: Memory = {}
        self._failures: list[BaseException] = []  # of saves, that no call has raised yet
        self._metrics: dict[int, Mapping[str, float]] = {}
        self._seen: int | None = None
        self._last: int | None = None
        self._damaged: set[int] = set()
        self._saved_at = time.monotonic()
        self._group: Any = None
        weakref.finalize(self, _report, self._failures)

    @property
    def steps(self) -> list[int]:
        """The steps that are there, in rising order; one that is being written is not."""
        return self._storage.steps()

    def save(
        self,
        model: Any,
        step: int,
        *,
        optimizer: Any = None,
        data: Any = None,
        metadata: Any = None,
        metrics: Mapping[str, float] | None = None,
        force: bool = False,
    ) -> bool:
        """Save a step if it is due. When this returns, the model and the optimizer may change.

        Args:
            model: See `layoutmap.save`.
            step: The number of the step.
            optimizer: See `layoutmap.save`.
            data: See `layoutmap.save`.
            metadata: See `layoutmap.save`.
            metrics: Numbers by name, kept with the step. With `best`, that metric is to be among them; a step without
                metrics is none of the best. With several processes those of the first are kept.
            force: Whether to save it though it is not due.

        Returns:
            Whether it is saved: not if it is not due, or is the one that was saved or loaded last.

        Raises:
            CheckpointError: See `layoutmap.save`; or the save before this one has failed, or there are later steps.
        """
        number = check_step(step)
        if self._flight is not None and self._flight.has_failed and self._flight.is_alone:
            self.wait()
        is_due = force or self._is_due(model, number)
        self._seen = number
        if not is_due or number == self._last:
            return False
        found = check_metrics(metrics, self._retention.best)
        writer, _ = begin_save(
            model,
            self._directory,
            number,
            optimizer,
            data,
            metadata,
            metrics=found,
            after=self.wait,
            make_way=lambda: self._make_way(number),
        )
        self._metrics[number] = found
        with writer:
            if self._waits:
                self._write(writer, number)
            else:
                writer.copy(self._memory)
                self._flight = _Flight(lambda: self._write(writer, number), writer.is_alone, self._failures)
        self._last, self._saved_at = number, time.monotonic()
        self._damaged.discard(number)
        return True

    def load(
        self,
        model: Any,
        *,
        step: int | None = None,
        best: bool = False,
        damaged: Literal["error", "skip"] = "error",
        **options: Any,
    ) -> Any:
        """Load a model from one of the steps, once no save is in flight.

        Args:
            model: See `layoutmap.load`.
            step: The step; `None`: the last one.
            best: Whether to load the best step instead.
            damaged: What happens if that step is not as it was saved: `"error"`, or `"skip"`: with a warning the next
                one is taken, the step before it or the next best. Each process reads all of it first, to find out. A
                damaged step is replaced when a step of its number is saved.
            **options: What `layoutmap.load` takes: `layout_map`, `optimizer`, `data`, `missing`, ...

        Returns:
            What `layoutmap.load` returns.

        Raises:
            CheckpointError: See `layoutmap.load`; or no step has the metric, or a save has failed.
        """
        self.wait()
        wanted = [step] if step is not None else self._by_metric() if best else self.steps[::-1]
        number = wanted[0] if wanted else None
        if damaged == "skip":
            number = next(self._good(wanted), number)
        loaded = load(model, self._directory, step=number, **options)
        self._last = self._seen = number
        return loaded

    def wait(self) -> None:
        """Return when no save is in flight.

        Raises:
            CheckpointError: The last save has failed, and no call has said so yet.
        """
        if self._flight is not None:
            self._flight.join()
            self._flight = None
        if self._failures:
            self._last = None
            raise self._failures.pop()

    def close(self) -> None:
        """Do what `wait` does, and free the memory of copies; a `with` block does it in its end."""
        try:
            self.wait()
        finally:
            self._memory.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        try:
            self.close()
        except Exception as failure:
            if error is None:
                raise
            error.add_note(f"And the last save has failed: {failure}")

    def __repr__(self) -> str:
        return f"<CheckpointManager of {self._storage.where}: steps {self.steps}>"

    def _make_way(self, step: int) -> None:
        there = self.steps
        later = [f"step-{each}" for each in there if each > step and each not in self._damaged]
        if later:
            raise CheckpointError(
                f"{self._storage.where}: step {step} cannot be saved, since there are later steps",
                facts={} if self._last is None else {"last loaded or saved": self._last},
                why="the next run would go on from them, and this step and those after it would be deleted first",
                fix=f"save into another directory, or delete these folders first: {listed(later)}",
            )
        if step in self._damaged and step in there:
            self._storage.delete(step)

    def _is_due(self, model: Any, step: int) -> bool:
        seconds = 0.0
        if self._retention.every_minutes is not None:
            self._group = self._group or group_of(model)
            own = np.array([time.monotonic() - self._saved_at])
            seconds = float(self._group.gather(own)[0, 0] if self._group.several else own[0])
        return self._retention.is_due(step, self._seen, seconds)

    def _write(self, writer: StepWriter, step: int) -> None:
        with writer:
            writer.write()
        if writer.is_first:
            kept = self._retention.kept(self._all_metrics(), step)
            for old in self.steps:
                if old not in kept:
                    self._storage.delete(old)

    def _all_metrics(self) -> dict[int, Mapping[str, float]]:
        for step in self.steps:
            if step not in self._metrics:
                self._metrics[step] = {}
                if self._retention.best is not None:
                    try:
                        self._metrics[step] = Step(self._storage, step).metrics
                    except CheckpointError as error:
                        warnings.warn(str(error), LayoutMapWarning, stacklevel=2)
        return {step: self._metrics[step] for step in self.steps}

    def _by_metric(self) -> list[int]:
        if found := self._retention.ranking(self._all_metrics()):
            return found
        raise CheckpointError(
            f"{self._storage.where}: no step is known to be the best",
            facts={"best": self._retention.best, "steps": len(self.steps)},
            why="the metric of none of them was saved with it",
            fix="pass best= to the manager and metrics= to its save, or load a step by its number",
        )

    def _good(self, steps: list[int]) -> Iterator[int]:
        for step in steps:
            try:
                problem = next(Step(self._storage, step).problems(), None)
            except CheckpointError as error:
                problem = error
            if problem is None:
                yield step
                return
            self._damaged.add(step)
            warnings.warn(
                f"step {step} is not loaded, and will be replaced when a step of its number is saved\n{problem}",
                LayoutMapWarning,
                stacklevel=3,
            )


class _Flight:
    """A save on a thread of its own, for which a program that ends waits."""

    def __init__(self, work: Callable[[], object], is_alone: bool, failures: list[BaseException]):
        self.is_alone = is_alone
        self._work = work
        self._failures = failures
        self._thread = threading.Thread(target=self._run, name="layoutmap save")
        self._thread.start()

    @property
    def has_failed(self) -> bool:
        return bool(self._failures)

    def join(self) -> None:
        self._thread.join()

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            self._failures.append(error)


def _report(failures: list[BaseException]) -> None:
    """Say what no call has raised, when the program ends."""
    for failure in failures:
        sys.stderr.write(f"layoutmap: the last save has failed\n{failure}\n")
