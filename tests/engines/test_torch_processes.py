"""Processes of torch, each one device, make arrays together."""

from pathlib import Path

import pytest
from cases import few
from engines import several_processes

PROCESSES = ("torch",)

WORKER = Path(__file__).with_name("torch_process.py")


@pytest.mark.parametrize("number", few([2, 4, 8], 2))
def test_processes_hold_one_array(tmp_path, number):
    """On several processes, values are those of one process, each element is held once, wrong draws are noticed."""
    (port,) = several_processes.free_ports(1)
    results = several_processes.run(WORKER, tmp_path, [{}] * number, str(port), str(number))

    several_processes.check(results, devices_each=1)
    for told, _ in results:
        assert ["the processes create different variables"] * 2 == [
            text.splitlines()[0] for text in told["other_numbers"]
        ]
        assert "the random state: the processes have different values" == told["other_states"].splitlines()[0]
        assert list(range(8)) == told["moved"]
