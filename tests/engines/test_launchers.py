"""Who started a process, told from its environment."""

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
