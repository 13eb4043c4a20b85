"""The library opens no port and supervises no process: launchers end the others when one process dies."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import forked
import pytest
from cases import xla_settings
from engines import several_processes

PROCESSES = ("jax", "tensorflow", "torch")
pytestmark = [pytest.mark.every_case, pytest.mark.every_backend]
HERE = os.environ.get("LAYOUTMAP_TEST_PROCESS") or "jax"

WORKER = Path(__file__).with_name("launched_process.py")
KINDS = {"jax": ["keras", "jit_step"], "tensorflow": ["keras"], "torch": ["torch"]}[HERE]
COUNT = 3


def start(kind, what, count):
    """Start processes that know one another, each on its own."""
    ports = several_processes.free_ports(count)
    shared = {
        "jax": xla_settings(1),
        "tensorflow": {
            "DTENSOR_JOBS": ",".join(f"127.0.0.1:{port}" for port in ports),
            "DTENSOR_JOB_NAME": "worker",
        },
        "torch": {"OMP_NUM_THREADS": "1"},
    }[HERE]
    return [
        forked.start(
            WORKER,
            [kind, what, str(number), str(count), f"127.0.0.1:{ports[0]}"],
            shared | {"DTENSOR_CLIENT_ID": str(number)},
        )
        for number in range(count)
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_the_library_opens_no_port(kind):
    """No socket is bound while the engine of several processes starts, a model is built, and two steps run."""
    processes = forked.wait_for_all(start(kind, "listens", 2))

    assert [(0, "bound: []")] * 2 == [(each.returncode, each.stdout.strip()[-9:]) for each in processes], (
        "\n".join(each.stderr for each in processes)
    )


def end_by_heartbeats():
    """Kill the last of three processes that `jax.distributed` or TensorFlow's coordination service looks after."""
    began = time.monotonic()
    ended = forked.wait_for_all(start(KINDS[0], "killed", COUNT), 100)

    assert -signal.SIGKILL == ended[-1].returncode, ended[-1].stderr
    assert time.monotonic() - began < 90  # this test has ended nobody
    for each in ended[:-1]:
        assert 0 != each.returncode, each.stderr


def end_by_torchrun():
    """Kill the last of three processes of torchrun, which ends the others and names the one that was killed."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(COUNT)]
    command += ["--master-port", str(several_processes.free_ports(1)[0]), "--shutdown-timeout", "5"]
    ran = subprocess.run(
        [*command, str(WORKER), "torch", "killed", "0", str(COUNT)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )

    assert 1 == ran.returncode, ran.stderr
    assert "Signal 9 (SIGKILL) received" in ran.stderr, ran.stderr


@pytest.mark.long
def test_the_others_end_after_a_kill():
    """With each launcher, all processes have ended with a status within a minute or two, and none by this library."""
    (end_by_torchrun if HERE == "torch" else end_by_heartbeats)()
