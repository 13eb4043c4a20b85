"""The job scripts of docs/how-to/clusters.md run, with stand-ins for the two commands of SLURM that they call."""

import os
import re
import subprocess
import sys
from pathlib import Path

import frameworks
import pytest

PROCESSES = ("jax", "torch")
PAGE = frameworks.ROOT / "docs" / "how-to" / "clusters.md"
HERE = os.environ.get("LAYOUTMAP_TEST_PROCESS") or "jax"

# As many processes as SLURM_NTASKS says, each with the variables that SLURM gives to a task of a step.
SRUN = """\
#!/bin/bash
for number in $(seq 0 $((SLURM_NTASKS - 1))); do
  SLURM_PROCID=$number SLURM_LOCALID=0 SLURM_NODEID=$number SLURM_STEP_NODELIST=$SLURM_JOB_NODELIST "$@" &
  tasks+=($!)
done
for task in "${tasks[@]}"; do wait "$task" || failed=1; done
exit ${failed:-0}
"""
SCONTROL = "#!/bin/bash\necho 127.0.0.1\necho 127.0.0.1\n"


@pytest.fixture
def job(tmp_path):
    """Runs a script of the page as a job of two hosts; returns what it prints, line by line."""
    commands = tmp_path / "commands"
    commands.mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (commands / name).write_text(text)
        (commands / name).chmod(0o755)
    for name, text in re.findall(
        r"^```\w+[^\n]*\n(?:#!/bin/bash\n)?# (\S+)\n(.*?)^```$", PAGE.read_text(), re.M | re.S
    ):
        (tmp_path / name).write_text(text)

    def run(script, **variables):
        number = os.getpid() % 4096  # JAX's port is 61440 and this
        path = os.pathsep.join([str(commands), str(Path(sys.executable).parent), os.environ["PATH"]])
        slurm = {
            "SLURM_JOB_ID": str(number),
            "SLURM_JOB_NODELIST": "127.0.0.1,127.0.0.2",
            "SLURM_NTASKS": "2",
            "SLURM_NNODES": "2",
            "PORT": str(57344 + number),
            "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
            "PATH": path,
        }
        done = subprocess.run(
            ["bash", script],
            cwd=tmp_path,
            env={**os.environ, **slurm, **variables},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert 0 == done.returncode, done.stderr
        said = [line for line in done.stdout.splitlines() if line.startswith("process ")]  # Gloo says more
        return sorted(said), done.stderr

    return run


if HERE == "jax":

    @pytest.mark.long
    def test_jax_finds_the_processes_of_slurm(job, tmp_path):
        """Two processes with four devices each train one model, and have one loss; what they save is there once."""
        import layoutmap as lm

        lines, _ = job("job_jax.sh")
        (loss,) = {line.partition(", loss ")[2] for line in lines}

        assert [f"process {n} of 2: 4 of 8 devices, loss {loss}" for n in (0, 1)] == lines
        assert "batch=4, model=2" in str(lm.describe(tmp_path / "runs" / "net"))

else:

    @pytest.mark.long
    def test_torchrun_joins_the_processes_of_slurm(job, tmp_path):
        """One process for each host trains one model, and all have one loss; what they save is there once."""
        import layoutmap as lm

        lines, _ = job("job_torch.sh")
        (loss,) = {line.partition(": loss ")[2] for line in lines}

        assert [f"process {n} of 2: loss {loss}" for n in (0, 1)] == lines
        assert "batch=1, model=2" in str(lm.describe(tmp_path / "runs" / "net"))

    @pytest.mark.long
    def test_a_step_of_slurm_without_ranks_is_warned_of(job, tmp_path):
        """Without RANK and WORLD_SIZE, each process would simulate devices of its own: it says so."""
        (tmp_path / "job.sh").write_text("srun python alone.py\n")
        (tmp_path / "alone.py").write_text(
            "import torch, layoutmap as lm\n"
            "mesh = lm.create_mesh('model=-1', engine='torch')\n"
            "lm.dtensor.relayout(torch.ones(8), lm.Layout(['model'], mesh))\n"
        )
        _, told = job("job.sh")

        assert 2 == told.count("8 devices are simulated in each of 2 processes")
        assert "torchrun" in told
