"""The example of a program's own loop on torch, in processes of which each is one device."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PROCESSES = ("torch",)


@pytest.mark.long  # processes train one model in test_torch_fully_shard.py, and drawn ones in the laws
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
