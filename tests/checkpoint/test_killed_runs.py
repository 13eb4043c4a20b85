"""A run that is killed while it saves, deletes, or goes back leaves a directory from which the next one goes on."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoint.killed_runs import kill_runs

PROCESSES = ("jax", "torch")
pytestmark = pytest.mark.one_backend


@pytest.mark.parametrize("count", [1, 2])
def test_a_run_that_is_killed_leaves_what_the_next_one_goes_on_from(tmp_path: Path, count: int) -> None:
    """Two runs, each ended at some moment: nothing half written counts, and no line is mixed up with another."""
    kill_runs(tmp_path / "runs", range(2), count)


@pytest.mark.long
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("first", [10, 20])
def test_runs_that_are_killed_again_and_again(tmp_path: Path, first: int, count: int) -> None:
    """So it is with ten runs in each directory; `tools/attacks.py` ends hundreds."""
    kill_runs(tmp_path / "runs", range(first, first + 10), count)
