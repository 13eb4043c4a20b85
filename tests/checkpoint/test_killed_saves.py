"""A save that is killed, interrupted or meets another one: the last good step stays, and no half step is seen."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from adapters.interrupts import Interrupter
from checkpoint.saves import is_good, names_in, save, values_of, writers

from layoutmap.checkpoint.storage import LocalStorage
from layoutmap.core.errors import CheckpointError

PROCESSES = ("core",)
pytestmark = pytest.mark.usefixtures("num_files")

FILES = ("checkpoint/storage.py", "checkpoint/step_writer.py", "checkpoint/writer.py")
OLD, NEW = values_of(0), values_of(1)


def in_a_process(work: Callable[[], Any]) -> int:
    """Start a process that does something and then ends; returns its number."""
    if process := os.fork():
        return process
    status = 1
    try:
        work()
        status = 0
    except CheckpointError:
        status = 2
    finally:
        os._exit(status)


def status_of(process: int) -> int:
    """How a process ended: its status, or a signal's number with a minus."""
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def save_killed_before_line(directory: Path, number: int) -> None:
    """Save step 2, and be killed before the line of this number."""

    def kill() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    Interrupter(FILES, interrupt=kill).interrupted(lambda: save(directory, 2, NEW), number)


def number_of_lines(directory: Path) -> int:
    """How many lines the save of a second step runs."""
    save(directory, 1, OLD)
    interrupter = Interrupter(FILES)
    interrupter.interrupted(lambda: save(directory, 2, NEW), sys.maxsize)
    return interrupter.lines


def check_killed(directory: Path, line: int) -> None:
    save(directory, 1, OLD)
    killed = in_a_process(lambda: save_killed_before_line(directory, line))

    assert -signal.SIGKILL == status_of(killed)
    steps = LocalStorage(directory).list_steps()
    assert steps in ([1], [1, 2])
    assert all(is_good(directory, step, {1: OLD, 2: NEW}[step]) for step in steps)
    save(directory, 3, NEW)
    assert [f"step-{step}" for step in [*steps, 3]] == names_in(directory)


def test_a_save_that_is_killed_leaves_the_last_step(tmp_path: Path) -> None:
    """Killed at any point, a save leaves the step before it and no half one; the next save deletes what is left."""
    lines = number_of_lines(tmp_path / "whole")
    for line in range(1, lines, max(1, lines // 20)):
        check_killed(tmp_path / str(line), line)


@pytest.mark.long
def test_a_save_that_is_killed_before_each_line_leaves_the_last_step(tmp_path: Path) -> None:
    """So it is before each line that a save runs."""
    for line in range(1, number_of_lines(tmp_path / "whole")):
        check_killed(tmp_path / str(line), line)


@pytest.mark.long
def test_saves_that_are_killed_at_any_time_leave_the_last_step(tmp_path: Path) -> None:
    """So it is after any time, with larger steps, again and again in one directory."""
    values = [values_of(seed, (512, 512)) for seed in range(60)]

    def go_on(first: int) -> None:
        for step in range(first, len(values)):
            save(tmp_path, step, values[step])

    last = -1
    for run in range(50):
        process = in_a_process(lambda first=last + 1: go_on(first))
        threading.Event().wait(0.003 * (1 + run % 17))
        os.kill(process, signal.SIGKILL)
        status_of(process)
        steps = LocalStorage(tmp_path).list_steps()
        last = max(steps, default=-1)
        assert list(range(last + 1)) == steps
        assert last < 0 or is_good(tmp_path, last, values[last])
        if last > 40:
            break
    save(tmp_path, 99, OLD)
    assert all(name.startswith("step-") for name in names_in(tmp_path))


def test_an_interrupt_before_any_line_leaves_nothing_half_written(tmp_path: Path) -> None:
    """Ctrl-C before any line of a save leaves the directory as it was, or the step complete."""
    save(tmp_path, 1, OLD)
    interrupter = Interrupter(FILES, ["__del__"])  # where Python ignores exceptions
    line, went = 0, set[bool]()
    while True:
        line += 1
        step = 100 + line
        was_interrupted = interrupter.interrupted(lambda step=step: save(tmp_path, step, NEW), line)
        is_there = step in LocalStorage(tmp_path).list_steps()
        went.add(is_there)
        assert sorted(["step-1", *[f"step-{step}"] * is_there]) == names_in(tmp_path)
        if is_there:
            assert is_good(tmp_path, step, NEW)
            LocalStorage(tmp_path).delete_step(step)
        if not was_interrupted:
            break
    assert {True, False} == went
    assert is_good(tmp_path, 1, OLD)


def test_what_a_living_save_writes_is_not_deleted(tmp_path: Path) -> None:
    """While one process writes a step, others save theirs, and what it writes stays."""
    (writer,) = writers(tmp_path, 1, OLD)
    status = status_of(in_a_process(lambda: save(tmp_path, 2, NEW)))
    save(tmp_path, 3, NEW)
    with writer:
        writer.write_step()

    assert 0 == status
    assert ["step-1", "step-2", "step-3"] == names_in(tmp_path)
    assert is_good(tmp_path, 1, OLD)


def test_of_processes_that_save_one_step_at_once_one_wins(tmp_path: Path) -> None:
    """However they meet, exactly one of the processes saves the step."""
    values = [values_of(seed) for seed in range(4)]
    for step in range(5):
        racing = [in_a_process(lambda own=own, step=step: save(tmp_path, step, own)) for own in values]
        won = [status_of(each) == 0 for each in racing]
        assert 1 == sum(won)
        assert is_good(tmp_path, step, values[won.index(True)])
    assert [f"step-{step}" for step in range(5)] == names_in(tmp_path)
