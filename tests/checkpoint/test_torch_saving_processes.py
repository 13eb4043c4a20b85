"""Processes of torch save one model: where one asks for something else, fails or dies, all end with an error."""

import functools
import json
import signal
import tempfile
from pathlib import Path

import forked
import numpy as np
import pytest
import torch
from engines import several_processes

import layoutmap as lm
from layoutmap.checkpoint.reader import StepSource
from layoutmap.checkpoint.storage import LocalStorage

PROCESSES = ("torch",)

WORKER = Path(__file__).with_name("torch_saving_process.py")


@functools.cache
def told():
    """What each of two processes tells, and where they saved."""
    folder = Path(tempfile.mkdtemp())
    (port,) = several_processes.free_ports(1)
    return [each for each, _ in several_processes.run(WORKER, folder, [{}] * 2, str(port), "well")], folder


def first_lines(name):
    return [each[name].splitlines()[0] for each in told()[0]]


@pytest.mark.parametrize("name", ["directory", "step", "metadata"])
def test_processes_that_ask_for_different_things_are_refused(name):
    """Both are refused, before anything is written, and shown what each of them passed."""
    assert [f"{name}: the processes save with different arguments"] * 2 == first_lines(name)
    assert all("process 0" in each[name] and "process 1" in each[name] for each in told()[0])


def test_one_that_cannot_begin_fails_all():
    """An exception in one process, whatever it is, is an error in the other one that says what it was."""
    assert ["process 1 cannot save", "RuntimeError: the reader has gone away"] == first_lines("state")
    assert ["process 1 cannot save", "step=-2 is not a step number"] == first_lines("no step")
    there = f"{told()[1]}/steps: step 1 exists already"
    assert [there, "process 0 cannot save"] == first_lines("there")
    assert there in told()[0][1]["there"]


def test_one_that_cannot_write_fails_all():
    """If one process cannot write its part, both say so, soon; nothing is left of it."""
    lines = first_lines("disk")
    assert f"{told()[1]}/steps/step-2: process 1 could not write its part" == lines[0]
    assert lines[1].endswith("data-00001.safetensors: the file cannot be written")
    assert all("File too large" in each["disk"] for each in told()[0])
    assert all(each["seconds"] < 100 for each in told()[0]), (
        "not after the time that one waits for a dead process"
    )
    assert [["step-1"]] * 2 == [each["left"] for each in told()[0]]


def test_one_that_fails_on_its_thread_fails_all_in_the_next_call():
    """What fails in one process while they train is raised in both by the next save."""
    lines = first_lines("thread")
    assert f"{told()[1]}/steps/step-2: process 1 could not write its part" == lines[0]
    assert lines[1].endswith("data-00001.safetensors: the file cannot be written")


def test_a_step_below_the_last_one_is_refused_in_all():
    """The first looks for later steps once they have saved theirs, and says to the others what it found."""
    later = f"{told()[1]}/managed: step 4 cannot be saved, because later steps exist"
    assert [later, "process 0 cannot save"] == first_lines("back")
    assert later in told()[0][1]["back"]


def test_processes_decide_by_one_clock():
    """Whatever the clock of the other says, both save when the first is due; the steps have what was to be saved."""
    due = [False, True, False, True, False, True]
    assert [due, due] == [each["due"] for each in told()[0]]
    assert [[3, 5], [3, 5]] == [each["steps"] for each in told()[0]]
    torch.manual_seed(0)
    weight = torch.nn.Linear(64, 32).weight.detach()
    for step in (3, 5):
        expected = weight.clone()
        for _ in range(step):
            expected += 1
        assert np.array_equal(
            expected.numpy(), StepSource(LocalStorage(told()[1] / "managed"), step).read("weight")
        )


def test_a_step_is_deleted_when_all_have_saved_it():
    """The first process waits for the others, which would take a step that is gone for one that it could not write."""
    assert [("", True, [1, 2])] * 2 == [
        (each["deleted"], each["saved again"], each["in the end"]) for each in told()[0]
    ]


@pytest.mark.parametrize("dead", [1, 0])
def test_one_that_is_killed_does_not_hang_the_other(tmp_path, dead):
    """If a process is killed in a save, the other one fails after a while; the last step is good, the rest cleaned."""
    (port,) = several_processes.free_ports(1)
    running = [forked.start(WORKER, [str(i), str(tmp_path), str(port), str(dead)]) for i in range(2)]
    ended = forked.wait_for_all(running)
    living = 1 - dead

    assert -signal.SIGKILL == ended[dead].returncode, ended[dead].stderr
    assert 0 == ended[living].returncode, ended[living].stderr
    said = json.loads((tmp_path / f"{living}.json").read_text())["died"].splitlines()
    assert f"{tmp_path}/steps/step-2: other processes do not respond" == said[0]
    assert f"  processes  {dead}" == said[1]
    model = lm.load(torch.nn.Linear(64, 32), tmp_path / "steps")
    lm.save(model, tmp_path / "steps", step=2)
    assert ["step-1", "step-2"] == sorted(each.name for each in (tmp_path / "steps").iterdir())
