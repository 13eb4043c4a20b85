"""Loops that people write around a model in layouts do what they do around a plain one, on models that nobody chose."""

import json
import os
import subprocess
import sys

import pytest
from testing import torch_loops
from testing.test_laws import DAY
from testing.torch_loops import LOOPS, differences

from layoutmap.testing.laws import ignore_warnings
from layoutmap.testing.subjects import make_cpu_environment, make_launcher_environments

PROCESSES = ("torch",)
OF_A_DAY = 2


def test_loops_of_this_day():
    """Two of them, others each day."""
    chosen = [LOOPS[(DAY * OF_A_DAY + number) % len(LOOPS)] for number in range(OF_A_DAY)]
    with ignore_warnings():
        assert [] == list(differences(DAY * 1000, chosen))


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("number", range(4))
def test_all_loops(number):
    """On each of four models."""
    with ignore_warnings():
        assert [] == list(differences(DAY * 1000 + 200 + number))


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("num_processes", [2, 4])
def test_all_loops_in_processes(num_processes):
    """In real ones, where fully_shard gathers; what that cannot do is refused by name."""
    seeds = map(str, range(DAY * 1000, DAY * 1000 + 4))
    command = [sys.executable, torch_loops.__file__, *seeds]
    environment = make_cpu_environment() | {
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "OMP_NUM_THREADS": "1",
    }
    started = [
        subprocess.Popen(
            command, env=environment | each, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for each in make_launcher_environments(num_processes)
    ]
    for process in started:
        out, err = process.communicate()
        assert process.returncode == 0, err[-3000:]
        assert [] == json.loads(out.splitlines()[-1])
