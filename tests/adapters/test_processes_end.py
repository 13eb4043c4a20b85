"""Of processes that train together one ends: the other says so and ends too, if it needs it still."""

import os
import signal
from pathlib import Path

import forked
import pytest
from cases import xla_settings
from engines import several_processes

PROCESSES = ("jax", "torch")
pytestmark = [pytest.mark.every_case, pytest.mark.every_backend]
HERE = os.environ.get("LAYOUTMAP_TEST_PROCESS") or "jax"

WORKER = Path(__file__).with_name("ended_process.py")
CASES = {
    "jax": ["keras killed", "keras exits", "jit_step killed", "jit_step raises", "jit_step staggered"],
    "torch": ["torch killed", "torch raises", "torch staggered"],
}[HERE]


@pytest.fixture(scope="module")
def ended():
    """What came of the two processes of each case; those that are there after 90 seconds are killed."""
    environment = xla_settings(1) if HERE == "jax" else {"OMP_NUM_THREADS": "1"}
    started = []
    for case, port in zip(CASES, several_processes.free_ports(len(CASES)), strict=True):
        arguments = [*case.split(), "{}", f"127.0.0.1:{port}"]
        started += [
            forked.start(WORKER, [each.format(number) for each in arguments], environment)
            for number in range(2)
        ]
    both = iter(forked.wait_for_all(started, 90))
    return {case: (next(both), next(both)) for case in CASES}


@pytest.mark.parametrize("case", [case for case in CASES if "staggered" not in case])
def test_a_process_that_ends_in_training_ends_the_others(ended, case):
    """Killed, exited or failed: the other one names it, and ends by itself, with a status."""
    first, second = ended[case]

    told = first.returncode > 0, "process 1 of this program has ended\n" in first.stderr
    assert (True, True) == told, first.stderr
    assert ("killed" in case) == (second.returncode == -signal.SIGKILL)


@pytest.mark.parametrize("case", [case for case in CASES if "staggered" in case])
def test_a_process_that_has_done_its_work_ends_alone(ended, case):
    """The other one goes on for as long as it likes, and nothing is said."""
    for each in ended[case]:
        told = each.returncode, "to the end\n" in each.stdout, "layoutmap" in each.stderr
        assert (0, True, False) == told, each.stderr
