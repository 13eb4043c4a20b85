"""A save ends soon after another process was killed; a last step is saved before a machine is taken away."""

import json
import os
import signal
import time
from pathlib import Path

import forked
import pytest
import torch
from engines import several_processes

import layoutmap as lm

PROCESSES = ("torch",)

WORKER = Path(__file__).with_name("torch_ending_process.py")


def started(folder, *arguments):
    (port,) = several_processes.free_ports(1)
    return [forked.start(WORKER, [str(i), str(folder), str(port), *arguments]) for i in range(2)]


@pytest.mark.parametrize("dead", [1, pytest.param(0, marks=pytest.mark.long)])
def test_a_save_beside_the_training_ends_when_a_process_is_killed(tmp_path, dead):
    """It ends after `patience_seconds`: the next call names who is missing, and the last step is there."""
    ended = forked.wait_for_all(started(tmp_path, "killed", str(dead)))
    living = 1 - dead

    assert [-signal.SIGKILL, 0] == [ended[dead].returncode, ended[living].returncode], ended[living].stderr
    told = json.loads((tmp_path / f"{living}.json").read_text())
    said = told["said"].splitlines()
    assert f"{tmp_path}/steps/step-2: other processes do not respond" == said[0]
    assert f"  processes  {dead}" == said[1]
    assert told["seconds"] < 100
    assert [1] == lm.CheckpointManager(tmp_path / "steps").steps


@pytest.mark.parametrize(
    ("saves", "told"),
    [(1, [0, 1]), pytest.param(0, [1], marks=pytest.mark.long)],
    ids=["in a save", "one alone"],
)
def test_processes_that_are_told_to_end_save_a_last_step(tmp_path, saves, told):
    """SIGTERM, to all or to one, lets the save in flight end; in both the same step is the last, with its values."""
    running = started(tmp_path, "preempted", str(saves))
    until = time.monotonic() + 120
    while not all((tmp_path / f"ready-{i}").exists() for i in range(2)) and time.monotonic() < until:
        time.sleep(0.05)
    for number in told:
        os.kill(running[number].process.pid, signal.SIGTERM)
    ended = forked.wait_for_all(running)

    assert [0, 0] == [each.returncode for each in ended], [each.stderr for each in ended]
    found = [json.loads((tmp_path / f"{i}.json").read_text()) for i in range(2)]
    last = found[0]["step"]
    assert [[0, last] if saves else [last]] * 2 == [each["steps"] for each in found]
    assert found[0] == found[1]
    assert found[0]["ends"]
    model = lm.load(torch.nn.Linear(64, 32), tmp_path / "steps")
    assert {float(last)} == set(model.bias.tolist())
