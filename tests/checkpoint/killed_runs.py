"""Runs in one directory that are ended at any moment, and what must be true of the directory after each."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import layoutmap as lm
from layoutmap.checkpoint.lineage import StepHistory
from layoutmap.checkpoint.reader import StepSource
from layoutmap.checkpoint.storage import LocalStorage
from layoutmap.testing.killed_saves import start_processes

WORKER = Path(__file__).with_name("killed_run_process.py")


def check_directory(directory: Path) -> None:
    """Each step is as it was saved, has the values of its own line, and the last one is that of the last save."""
    storage = LocalStorage(directory)
    there = StepHistory(storage).read_lineages()
    assert storage.list_steps() == list(there)
    for each in there.values():
        found = StepSource(storage, each.step)
        assert [] == list(found.iterate_damage())
        values = {float(value) for path in found.variables for value in {*found.read(path).ravel().tolist()}}
        assert {float(found.metadata)} == values
        before = [
            StepSource(storage, other.step).metadata for other in there.values() if each.has_ancestor(other)
        ]
        assert sorted({*before}) == before
        assert all(value < found.metadata for value in before)
    if there:
        last = max(there.values(), key=lambda each: each.order)
        assert last.step == lm.describe(directory).step == lm.CheckpointManager(directory).history()[-1].step


def kill_runs(directory: Path, seeds: Iterable[int], count: int = 1) -> Counter[str]:
    """Start run after run in one directory; end each after some time, most without notice.

    Args:
        directory: Where they save.
        seeds: One for each run.
        count: How many processes a run has. With several, all are ended, or one of them.

    Returns:
        How the runs were ended, and how often a step that was being written was left.
    """
    directory.mkdir(exist_ok=True)
    ended_by = Counter[str]()
    for seed in seeds:
        rng = random.Random(seed)
        command = [sys.executable, str(WORKER), os.environ["KERAS_BACKEND"], str(directory), str(seed)]
        running = start_processes(command, directory, count)
        time.sleep(rng.random() * 0.4)
        number = rng.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGTERM))
        told = rng.choice(([*range(count)], [rng.randrange(count)]))
        for each in told:
            running[each].send_signal(number)
        try:
            errors = [each.communicate(timeout=120)[1] for each in running]
        finally:
            for each in running:
                each.kill()
        for place, each in enumerate(running):
            said = f"seed {seed}, process {place}, {number.name} to {told}: {each.returncode} {errors[place][-3000:]}"
            if number == signal.SIGTERM:
                assert each.returncode == 0, said
            elif place in told:
                assert each.returncode == -signal.SIGKILL, said
            else:  # it says who has died, or its framework ends it
                assert each.returncode not in (0, -signal.SIGKILL), said
        ended_by[f"{number.name} to {'all' if len(told) == count else 'one of ' + str(count)}"] += 1
        ended_by["a step left half written"] += any(
            name.startswith(".step") for name in os.listdir(directory)
        )
        check_directory(directory)
    return ended_by
