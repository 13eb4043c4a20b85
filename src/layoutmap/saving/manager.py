"""Manage the steps of a run: save due steps in the background, and delete steps that are no longer needed."""

from __future__ import annotations

import os
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any, Literal, Self, get_args

import numpy as np

from layoutmap.checkpoint.lineage import (
    StepHistory,
    StepLineage,
    make_step_lineage,
    parse_lineage_from_manifest_entries,
)
from layoutmap.checkpoint.reader import StepSource
from layoutmap.checkpoint.remote import open_storage
from layoutmap.checkpoint.retention import RetentionRules, validate_metrics
from layoutmap.checkpoint.step_writer import CopyBuffers, StepWriter
from layoutmap.core.errors import CheckpointError, LayoutMapWarning, join_names
from layoutmap.core.users_line import find_user_stacklevel
from layoutmap.saving.load import load
from layoutmap.saving.preemption import PreemptionSignal
from layoutmap.saving.save_plan import find_model_processes, plan_save, validate_step_number
from layoutmap.scope.process_group import MeshProcesses

Later = Literal["refuse", "keep", "delete"]


class CheckpointManager:
    """Save due steps of a run in the background, and delete steps that are no longer needed.

    `save` copies the values and returns, and a thread writes them. Arrays of JAX on CPU devices need no copy. Other
    copies use as much memory as the shards of this process, which the next save uses again. Only one save runs at a
    time: a second one waits for the first. If a save fails, the next call raises its error. A program that ends waits
    for its last save. With several processes, all make the same calls, and the first one decides which steps are due
    and which are deleted.

    Each step records its parent: the step that was saved or loaded before it. A manager follows one branch of steps:
    `load` takes the last step of the branch, and only steps of the branch are deleted. If a run goes back, as with
    `load(step=30)` of 50, its argument `later` decides about the later steps.

    Args:
        directory: Folder or fsspec URL with the steps of this run only. Steps that other programs saved there count,
            too.
        keep_last: Number of the last steps to keep, 1 or more; `None`: all. The step saved last is always kept.
        best: Name of a metric. The steps with its best values are also kept.
        best_mode: `"min"` if low values of the metric are better, `"max"` if high ones are.
        keep_best: Number of the best steps to keep.
        keep_every: Keep all steps whose number is a multiple of it, as in `keep_every=10_000`.
        every_steps: A step is due when the run reaches or passes a multiple of it.
        every_minutes: A step is due this many minutes after the last save, or after the start. The clock of the first
            process decides, at the cost of one collective per call. With both options, a step is due if either says so.
            With neither, every step is due.
        wait: Whether `save` waits until the step is written.
        patience_seconds: Time that a process waits in a save for another one that writes nothing; `None`: ten minutes.
            Launchers such as torchrun end all processes when one dies, which also ends this wait.
        preemption_seconds: Time between SIGTERM, which schedulers send before they take the machine away, and the end
            of the machine. The next call of `save` then saves its step even if it is not due, waits until it is
            written, and sets `is_preempted` in all processes, even if only one received the signal. The program must
            end then. It costs one collective per call of `save`. `None`: SIGTERM ends the program.

    Raises:
        CheckpointError: An argument has an invalid value.

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
        keep_every: int | None = None,
        every_steps: int | None = None,
        every_minutes: float | None = None,
        wait: bool = False,
        patience_seconds: float | None = None,
        preemption_seconds: float | None = None,
    ):
        self._retention = RetentionRules(
            keep_last, best, best_mode, keep_best, every_steps, every_minutes, keep_every
        )
        self._directory = directory
        self._storage = open_storage(directory)
        self._waits_for_save = wait
        self._flight: _BackgroundSave | None = None  # the save that a thread is writing
        self._memory: CopyBuffers = {}
        self._failures: list[BaseException] = []  # errors of background saves that no call has raised yet
        self._history = StepHistory(self._storage)
        self._last_seen_step: int | None = None
        self._position: StepLineage | None = None  # the step that was last saved or loaded
        self._before: StepLineage | None = (
            None  # the value of `_position` to restore if the running save fails
        )
        self._is_deleted = False  # whether the step in `_position` was deleted, so that it may be saved again
        self._keeps_later = False  # whether steps after the loaded one stay as a separate branch (see `load`)
        self._damaged: set[int] = set()
        self._saved_at = time.monotonic()
        self._group: MeshProcesses | None = None
        self._patience_seconds = patience_seconds
        self._preemption = None if preemption_seconds is None else PreemptionSignal(preemption_seconds)
        self._is_preempted = False
        weakref.finalize(self, _print_failures, self._failures)

    @property
    def steps(self) -> list[int]:
        """The existing steps in ascending order, without one that is being written."""
        return self._storage.list_steps()

    @property
    def is_preempted(self) -> bool:
        """Whether the scheduler is about to stop the machine, so that the program must end now."""
        return self._is_preempted

    def history(self) -> list[StepLineage]:
        """Wait for the save in flight. Return the last saved or loaded step and its existing ancestors, oldest first.

        Each has `step`, `parent`, `created`, and `metrics`. Before the first `load` or `save`, they are the branch of
        the step that was saved last.
        """
        self.wait()
        return self._history.list_step_and_ancestors(self._position or self._history.find_last_saved_step())

    # Training may change values while a thread writes them, so first copy arrays in writable memory (decisions/0080).
    def save(
        self,
        model: object,
        step: int,
        *,
        optimizer: object = None,
        data: object = None,
        metadata: object = None,
        metrics: Mapping[str, float] | None = None,
        force: bool = False,
    ) -> bool:
        """Save a step if it is due. The model and the optimizer may change as soon as this returns.

        Args:
            model: See `layoutmap.save`.
            step: Number of the step.
            optimizer: See `layoutmap.save`.
            data: See `layoutmap.save`.
            metadata: See `layoutmap.save`.
            metrics: Numbers by name, stored with the step. Those of the first process are stored. If the manager has
                `best`, include that metric. A step without metrics is not among the best.
            force: Whether to save a step that is not due.

        Returns:
            Whether the step is saved. It is not if it is not due, or if it was saved or loaded last.

        Raises:
            CheckpointError: See `layoutmap.save`. Or the previous save failed, or later steps exist and `load` was not
                told what to do with them.
        """
        number = validate_step_number(step)
        if self._flight is not None and self._flight.has_failed and self._flight.is_alone:
            self.wait()
        is_save_due = self._is_save_due(model, number) or force
        self._last_seen_step = number
        is_there = self._position is not None and number == self._position.step and not self._is_deleted
        if not is_save_due or is_there:
            if self._is_preempted:
                self.wait()
            return False
        found = validate_metrics(metrics, self._retention.best)
        plan = plan_save(
            model, self._directory, number, optimizer=optimizer, data=data, metadata=metadata, metrics=found
        )
        self._group = plan.group
        # Wait in all processes together: if the previous save failed in one of them, all raise.
        self._group.run_in_all_processes(self.wait, "save")
        writer = plan.begin_step(
            lambda token: self._check_later_steps_and_make_lineage(number, token),
            patience_seconds=self._patience_seconds,
        )
        saved = parse_lineage_from_manifest_entries(number, writer.step_manifest_entries)
        with writer:
            if self._waits_for_save or self._is_preempted:
                self._write_step(writer, saved)
            else:
                writer.copy_values(self._memory)
                self._flight = _BackgroundSave(
                    lambda: self._write_step(writer, saved), writer.is_only_process, self._failures
                )
        self._before, self._position, self._is_deleted = self._position, saved, False
        self._saved_at = time.monotonic()
        self._damaged.discard(number)
        return True

    def load(
        self,
        model: Any,
        *,
        step: int | None = None,
        best: bool = False,
        damaged: Literal["error", "skip"] = "error",
        later: Later = "refuse",
        **options: Any,
    ) -> Any:
        """Wait for the save in flight, and load a model from one of the steps.

        Args:
            model: See `layoutmap.load`.
            step: Number of the step; `None`: the last one of this manager's branch, or at first the step saved last.
            best: Whether to load the best step of the branch instead.
            damaged: What to do if the step is damaged: `"error"`, or `"skip"` to warn and take the step before it or
                the next best one. With `"skip"`, each process first reads the whole step. A damaged step is replaced
                when a step with its number is saved.
            later: What to do with later steps that come from this one if the run continues from it. `"refuse"`: the
                next save before them raises an error that names them. `"keep"`: they stay, as a separate branch, until
                a step with their number is saved. `"delete"`: they are deleted after the load.
            **options: Other arguments of `layoutmap.load`: `layout_map`, `optimizer`, `data`, `missing`, ...

        Returns:
            The result of `layoutmap.load`.

        Raises:
            CheckpointError: See `layoutmap.load`. Or no step has the metric, or a save failed.
        """
        if later not in get_args(Later):
            raise CheckpointError(
                f"later={later!r}: this value is not allowed",
                why=f"later must be one of {', '.join(map(repr, get_args(Later)))}",
                fix='leave later out, or pass later="keep"',
            )
        self.wait()
        wanted = (
            [step]
            if step is not None
            else self._list_best_steps()
            if best
            else self._list_steps_of_this_run()
        )
        number = wanted[0] if wanted else None
        if damaged == "skip":
            found = self._find_undamaged_step(wanted)
            if found is None and step is None and not best:
                # The search marks damaged manifests. Without these, the run may be on another branch, so search that.
                found = self._find_undamaged_step(
                    [n for n in self._list_steps_of_this_run() if n not in wanted]
                )
            number = number if found is None else found
        loaded = load(model, self._directory, step=number, **options)
        assert number is not None
        self._group = find_model_processes(loaded if options.get("optimizer") is None else loaded[0])
        self._position = self._history.read_lineages().get(number) or StepLineage(number, lines={"": number})
        self._last_seen_step, self._keeps_later, self._is_deleted = number, later == "keep", False
        if later == "delete":
            later_steps = self._find_descendants(self._history.read_lineages().values())
            self._delete_steps([each.step for each in later_steps])
        return loaded

    def delete(self, step: int) -> None:
        """Wait for the save in flight, and delete a step. Process 0 deletes the step's folder.

        Raises:
            CheckpointError: The step does not exist or cannot be deleted.
        """
        if self._group is None:
            self.wait()
        else:  # wait in all processes together, so that all of them list the same steps below
            self._group.run_in_all_processes(self.wait, "save")
        number = validate_step_number(step)
        if number not in self.steps and not (self._group and self._group.has_other_processes):
            raise CheckpointError(
                f"{self._storage.where}: there is no step {number} to delete",
                facts={"steps": join_names(list(map(str, self.steps))) or "none"},
                why=f"the folder step-{number} does not exist",
                fix="delete one of the existing steps",
            )
        self._delete_steps([number])
        self._is_deleted |= self._position is not None and number == self._position.step

    def wait(self) -> None:
        """Wait until no save is in flight.

        Raises:
            CheckpointError: The last save failed, and no call has raised its error yet.
        """
        if self._flight is not None:
            self._flight.join()
            self._flight = None
        if self._failures:
            self._position = self._before
            raise self._failures.pop()

    def close(self) -> None:
        """Wait for the save in flight, and free the copies. A `with` block calls this at its end."""
        try:
            self.wait()
        finally:
            self._memory.clear()
            if self._preemption is not None:
                self._preemption.close()

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

    def _check_later_steps_and_make_lineage(self, step: int, token: str) -> StepLineage:
        """Return a new step's lineage. Raise or warn if later steps exist. Delete a step with the same number."""
        position = self._position
        last = position or self._history.find_last_saved_step()
        existing = self._history.read_lineages()
        if later := self._find_steps_that_block_save(step, existing.values()):
            load = (
                'load the step with later="delete" or later="keep"'
                if position
                else "load the last step first"
            )
            raise CheckpointError(
                f"{self._storage.where}: step {step} cannot be saved, because later steps exist",
                facts={} if position is None else {"last loaded or saved": position.step},
                why="a restart would resume from the later steps, and `load` was not told to keep or delete them",
                fix=f"{load}; or save into another directory, or delete these folders first: "
                f"{join_names([f'step-{each}' for each in later])}",
            )
        left = [
            each.step for each in self._find_descendants(existing.values()) if each.step not in self._damaged
        ]
        if left and not self._keeps_later:
            warnings.warn(
                LayoutMapWarning(
                    f"step {step} continues step {position.step if position else None}, although later steps exist",
                    facts={"steps": join_names(list(map(str, left)))},
                    why="the later steps stay as a separate branch, from which this run deletes nothing",
                    fix='load the step with later="delete" or later="keep"; use one directory per run',
                ),
                stacklevel=find_user_stacklevel(),
            )
        # Delete a step with the same number on a different branch, because it would prevent the save.
        if (step in existing and position is not None) or step in self._damaged:
            self._storage.delete_step(step)
            self._history.remove_cached_step(step)
        return make_step_lineage(step, token, last, existing.values())

    def _find_steps_that_block_save(self, step: int, existing: Iterable[StepLineage]) -> list[int]:
        """Return the numbers of the steps that forbid saving a new step: later ones that were not kept on purpose."""
        position, left = self._position, self._find_descendants(existing)
        found = {n for n in self._history.damaged if n > step}
        for each in existing:
            is_own = position is None or each.step == position.step or position.has_ancestor(each)
            if each.step > step and (is_own or (each in left and not self._keeps_later)):
                found.add(each.step)
        return sorted(found - self._damaged)

    def _find_descendants(self, existing: Iterable[StepLineage]) -> list[StepLineage]:
        """Return the existing steps that descend from the last saved or loaded step."""
        position = self._position
        return [each for each in existing if position and each.has_ancestor(position)]

    def _delete_steps(self, steps: list[int]) -> None:
        """Delete steps in the first process, while the other processes wait."""

        def delete_folders() -> list[str]:
            for step in steps:
                self._storage.delete_step(step)
            return []

        if self._group is None:
            delete_folders()
        else:
            self._group.run_in_first_process(delete_folders)
        for step in steps:
            self._history.remove_cached_step(step)

    def _is_save_due(self, model: object, step: int) -> bool:
        """Return whether a step is due or is the last one before preemption. The result is equal in all processes."""
        if self._is_preempted:
            return False
        own = np.array([time.monotonic() - self._saved_at, -1.0])
        if self._preemption is not None:
            own[1] = self._preemption.seconds_since_signal
        if self._preemption is not None or self._retention.every_minutes is not None:
            self._group = self._group or find_model_processes(model)
            rows = self._group.gather_from_processes(own) if self._group.has_other_processes else own[None]
            own = np.array([rows[0, 0], rows[:, 1].max()])
        if self._preemption is not None and own[1] >= 0:
            self._is_preempted = True
            # Save the step unless the time after which the machine stops has already passed.
            return bool(own[1] < self._preemption.total_seconds)
        return self._retention.is_save_due(step, self._last_seen_step, float(own[0]))

    def _write_step(self, writer: StepWriter, saved: StepLineage) -> None:
        """Write a step. In the first process, then delete the steps that the retention options do not keep."""
        with writer:
            writer.write_step()
        if writer.is_first_process:
            self._history.cache_step(saved)
            metrics = self._collect_metrics_by_step(saved)
            for old in metrics.keys() - self._retention.choose_kept_steps(metrics, saved.step):
                self._storage.delete_step(old)
                self._history.remove_cached_step(old)

    def _collect_metrics_by_step(self, last: StepLineage | None) -> dict[int, Mapping[str, float]]:
        """Return a dict from step number to metrics for a step, its ancestors, and earlier damaged steps."""
        found = {each.step: each.metrics for each in self._history.list_step_and_ancestors(last)}
        found |= {n: {} for n in self._history.damaged if last is not None and n <= last.step}
        return dict(sorted(found.items()))

    def _list_steps_of_this_run(self) -> list[int]:
        """Return the steps of this run that can be loaded, latest first."""
        last = self._position or self._history.find_last_saved_step()
        found = [*self._collect_metrics_by_step(last)]
        # If the manifest of the last step is damaged, its branch is unknown, so add that of the last undamaged step.
        if last is not None and last.step in self._history.damaged:
            undamaged = self._history.read_lineages().values()
            found += self._collect_metrics_by_step(max(undamaged, key=_get_save_order, default=None))
        return sorted({*found}, reverse=True)

    def _list_best_steps(self) -> list[int]:
        """Return the steps that were saved with the metric `best`, best first. Raise if there are none."""
        metrics = self._collect_metrics_by_step(self._position or self._history.find_last_saved_step())
        if found := self._retention.rank_steps_by_metric(metrics):
            return found
        raise CheckpointError(
            f"{self._storage.where}: there is no best step",
            facts={"best": self._retention.best, "steps": len(metrics)},
            why="no step was saved with this metric",
            fix="pass best= to the manager and metrics= to its save, or load a step by its number",
        )

    def _find_undamaged_step(self, steps: list[int]) -> int | None:
        """Return the first undamaged step, or None. Warn of each damaged step before it."""
        for step in steps:
            try:
                problem = next(StepSource(self._storage, step).iterate_damage(), None)
            except CheckpointError as error:
                problem = error
                self._history.mark_step_as_damaged(step)
            if problem is None:
                return step
            self._damaged.add(step)
            warnings.warn(
                f"step {step} is damaged: it is not loaded, and is replaced when step {step} is saved again\n{problem}",
                LayoutMapWarning,
                stacklevel=3,
            )
        return None


def _get_save_order(saved: StepLineage) -> tuple[int, int]:
    return saved.order, saved.step


class _BackgroundSave:
    """Run a save on a thread of its own, which Python joins at exit."""

    def __init__(self, work: Callable[[], object], is_alone: bool, failures: list[BaseException]):
        self.is_alone = is_alone
        self._work = work
        self._failures = failures
        self._thread = threading.Thread(target=self._run_save, name="layoutmap save")
        self._thread.start()

    @property
    def has_failed(self) -> bool:
        return bool(self._failures)

    def join(self) -> None:
        self._thread.join()

    def _run_save(self) -> None:
        try:
            self._work()
        except BaseException as error:
            self._failures.append(error)


def _print_failures(failures: list[BaseException]) -> None:
    """Print, at exit, the errors of background saves that no call has raised."""
    for failure in failures:
        sys.stderr.write(f"layoutmap: the last save has failed\n{failure}\n")
