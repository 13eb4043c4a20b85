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


def run_worker(folder, rank, *arguments, program=REFUSED):
    """What came of a worker of torchrun, and its error file."""
    file = folder / str(rank) / "error.json"
    file.parent.mkdir()
    variables = {"TORCHELASTIC_ERROR_FILE": str(file), "RANK": str(4 + rank), "LOCAL_RANK": str(rank)}
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env={"PYTHONPATH": os.environ.get("PYTHONPATH", ""), **variables},
        capture_output=True,
        text=True,
    ), file


@pytest.mark.parametrize("end", ["refused", "handled", "other"])
def test_torchrun_is_told_of_an_error_of_the_library(end, tmp_path):
    """An error that ends the process is in torchrun's file; one that is handled, or is not the library's, is not."""
    run, file = run_worker(tmp_path, 0, end)

    assert (end == "handled") == (run.returncode == 0)
    assert (end == "refused") == file.exists()
    if end == "refused":
        written = json.loads(file.read_text())["message"]["message"]
        assert written.startswith("MeshError: ")
        assert "\n  fix " in written
        assert run.stderr.endswith(f"layoutmap.core.errors.{written}\n")


def test_one_of_torchruns_workers_prints_the_traceback(tmp_path):
    """The first one on a machine; others with the same message print a line, others with another message all of it."""
    programs = (REFUSED, REFUSED, REFUSED.replace("model=two", "model=three"), REFUSED)
    runs = [run_worker(tmp_path, rank, "refused", program=each) for rank, each in enumerate(programs)]
    written = [json.loads(file.read_text())["message"] for _, file in runs]
    times = [int(each["extraInfo"]["timestamp"]) for each in written]
    first, *_ = messages = [each["message"] for each in written]
    line = f"{first.splitlines()[0]} (printed in full by process 4)"

    assert [True, False, True, False] == ["Traceback" in run.stderr for run, _ in runs]
    assert [line, line] == [runs[rank][0].stderr.rstrip("\n") for rank in (1, 3)]
    assert [line, first.replace("two", "three"), line] == messages[1:]
    assert times[0] < min(times[1], times[3])
    assert {1} == {run.returncode for run, _ in runs}


@pytest.mark.long
@pytest.mark.parametrize("joins", [True, False])
def test_the_last_lines_of_torchrun_are_the_error(joins, tmp_path):
    """After one traceback of a worker and one of torchrun, which torchrun raises in its own process, for any worker."""
    program = tmp_path / "refused.py"
    join = "import torch.distributed as dist; dist.init_process_group('gloo')" if joins else ""
    program.write_text(f"import layoutmap as lm\n{join}\nlm.Mesh(None, 'model=two')\n")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    run = subprocess.run([*launcher, str(program)], capture_output=True, text=True, timeout=200)
    summary = run.stderr[run.stderr.rindex("Root Cause") :]

    assert "traceback : MeshError: " in summary
    assert "\n    fix " in summary
    assert 2 == run.stderr.count("Traceback (most recent call last)")
    assert 2 == run.stderr.count("  fix ")
