"""A run that is killed while it saves, deletes, or goes back leaves a directory from which the next one goes on."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import forked
import pytest

import layoutmap as lm
from layoutmap.checkpoint.lineage import History
from layoutmap.checkpoint.reader import Step
from layoutmap.checkpoint.storage import LocalStorage

PROCESSES = ("jax",)

WORKER = Path(__file__).with_name("killed_run_process.py")


def check_directory(directory: Path) -> None:
    """Each step is as it was saved, has the values of its own line, and the last one is that of the last save."""
    storage = LocalStorage(directory)
    there = History(storage).steps()
    assert storage.steps() == list(there)
    for each in there.values():
        found = Step(storage, each.step)
        assert [] == list(found.problems())
        assert {float(found.metadata)} == {*found.read("w").ravel().tolist()}
        before = [Step(storage, other.step).metadata for other in there.values() if each.comes_from(other)]
        assert sorted({*before}) == before
        assert all(value < found.metadata for value in before)
    if there:
        last = max(there.values(), key=lambda each: each.order)
        assert last.step == lm.describe(directory).step == lm.CheckpointManager(directory).history()[-1].step


def kill_runs(directory: Path, seeds: range) -> None:
    """Start run after run in one directory; end each after some time, most without notice."""
    directory.mkdir(exist_ok=True)
    for seed in seeds:
        rng = random.Random(seed)
        running = forked.start(WORKER, [str(directory), str(seed)])
        until = time.monotonic() + 60
        before = {*os.listdir(directory)}
        while {*os.listdir(directory)} == before and time.monotonic() < until:  # it imports and loads
            assert running.process.is_alive(), forked.wait_for_all([running])[0].stderr
            time.sleep(0.002)
        time.sleep(rng.random() * 0.4)
        number = rng.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGTERM))
        os.kill(running.process.pid, number)
        (ended,) = forked.wait_for_all([running])
        assert ended.returncode == (0 if number == signal.SIGTERM else -number), ended.stderr
        check_directory(directory)


def test_a_run_that_is_killed_leaves_what_the_next_one_goes_on_from(tmp_path: Path) -> None:
    """Two runs, each ended at some moment: nothing half written counts, and no line is mixed up with another."""
    kill_runs(tmp_path / "runs", range(2))


@pytest.mark.long
@pytest.mark.parametrize("first", range(10, 70, 10))
def test_runs_that_are_killed_again_and_again(tmp_path: Path, first: int) -> None:
    """So it is with sixty runs, ten in each directory."""
    kill_runs(tmp_path / "runs", range(first, first + 10))
