"""Who started a process, told from its environment, and what torchrun is told of its end."""

import json
import os
import subprocess
import sys

import pytest

from layoutmap.engines.launchers import Launcher, detect_launcher

SLURM = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "1", "SLURM_NTASKS": "4"}
TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, None),
        (SLURM, Launcher("SLURM", 1, 4)),
        (TORCHRUN, Launcher("torchrun", 3, 8)),
        (SLURM | TORCHRUN, Launcher("torchrun", 3, 8)),
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"}, None),  # in a job, and started by no srun
        ({"RANK": "one", "WORLD_SIZE": "8"}, None),
    ],
)
def test_the_launcher_is_known_by_its_variables(variables, expected, monkeypatch):
    """A step of SLURM, torchrun, which goes before it, or neither."""
    for name in SLURM | TORCHRUN:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)

    assert expected == detect_launcher()


REFUSED = """
import sys
import layoutmap as lm

try:
    lm.Mesh(None, "model=two")
except lm.MeshError as refused:
    if sys.argv[1] != "handled":
        raise {"refused": refused, "other": KeyError("up")}[sys.argv[1]] from None
"""


@pytest.mark.parametrize("end", ["refused", "handled", "other"])
def test_torchrun_is_told_of_an_error_of_the_library(end, tmp_path):
    """An error that ends the process is in torchrun's file; one that is handled, or is not the library's, is not."""
    file = tmp_path / "error.json"
    run = subprocess.run(
        [sys.executable, "-c", REFUSED, end],
        env={"TORCHELASTIC_ERROR_FILE": str(file), "PYTHONPATH": os.environ.get("PYTHONPATH", "")},
        capture_output=True,
        text=True,
    )

    assert (end == "handled") == (run.returncode == 0)
    assert (end == "refused") == file.exists()
    if end == "refused":
        written = json.loads(file.read_text())["message"]["message"]
        assert written.startswith("MeshError: ")
        assert "\n  fix " in written
        assert run.stderr.endswith(f"layoutmap.core.errors.{written}\n")


@pytest.mark.long
@pytest.mark.parametrize("joins", [True, False])
def test_the_last_lines_of_torchrun_are_the_error(joins, tmp_path):
    """Its summary repeats the error with its fix, also where torch's own hook names the rank."""
    program = tmp_path / "refused.py"
    join = "import torch.distributed as dist; dist.init_process_group('gloo')" if joins else ""
    program.write_text(f"import layoutmap as lm\n{join}\nlm.Mesh(None, 'model=two')\n")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
    run = subprocess.run([*launcher, str(program)], capture_output=True, text=True, timeout=200)
    summary = run.stderr[run.stderr.rindex("Root Cause") :]

    assert "traceback : MeshError: " in summary
    assert "\n    fix " in summary
