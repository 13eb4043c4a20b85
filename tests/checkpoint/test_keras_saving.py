"""Two processes of Keras save together, and go on from what they have saved."""

from __future__ import annotations

import json
from pathlib import Path

import forked
import pytest
from cases import xla_settings
from engines import several_processes

PROCESSES = ("jax", "tensorflow", "torch")

WORKER = Path(__file__).with_name("keras_saving_process.py")


@pytest.mark.one_backend
def test_two_processes_of_keras_go_on_where_they_have_saved(tmp_path: Path) -> None:
    """The losses after a load are those of the run that went on, bit for bit in the same layouts, in both processes."""
    port, other = several_processes.free_ports(2)
    flags = xla_settings(1)
    flags |= {"DTENSOR_JOBS": f"127.0.0.1:{port},127.0.0.1:{other}", "DTENSOR_JOB_NAME": "worker"}
    running = [
        forked.start(WORKER, [str(n), str(tmp_path), str(port)], flags | {"DTENSOR_CLIENT_ID": str(n)})
        for n in range(2)
    ]
    ended = forked.wait_for_all(running)
    assert [0, 0] == [each.returncode for each in ended], [each.stderr[-3000:] for each in ended]
    first, second = (json.loads((tmp_path / f"{number}.json").read_text()) for number in range(2))

    assert first == second
    assert first["on"] == first["same"]
    assert first["other"] == first["existing"]
    assert pytest.approx(first["on"], rel=1e-5) == first["other"]
    assert pytest.approx(first["on"], rel=1e-5) == first["plain"]
