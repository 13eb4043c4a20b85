"""Processes of torch, each one device, train one model together, with the program's own loop."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from cases import few
from engines import several_processes

PROCESSES = ("torch",)

WORKER = Path(__file__).with_name("torch_training_process.py")


@pytest.mark.parametrize("number", few([2, 4], 2))
def test_processes_train_one_model(tmp_path, number):
    """Weights begin bit-equal, each process holds its shards alone, and steps, norms and saved states are right."""
    (port,) = several_processes.free_ports(1)
    results = several_processes.run(WORKER, tmp_path, [{}] * number, str(port), str(number))

    for told, _ in results:
        for what in told.values():
            assert what["first values"]
            assert what["random state"]
            assert what["planned"] == what["held"]
            assert what["losses"] < 1e-5
            assert what["norms"] < 1e-5
            assert what["weights"] < 1e-5
            assert what["gradients"]
            assert what["saved"]


@pytest.mark.long  # processes train one model in the test above
def test_the_example_runs_under_torchrun():
    """Started by torchrun in two processes, it trains, and only the first process prints."""
    example = Path(__file__).parents[2] / "examples" / "train_torch_llama.py"
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    run = subprocess.run(
        [*launcher, str(example), "--steps", "2"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", run.stdout)]

    assert 0 == run.returncode, run.stderr[-3000:]
    assert 1 == run.stdout.count("Plan: "), "by one process"
    assert losses[-1] < losses[0]
