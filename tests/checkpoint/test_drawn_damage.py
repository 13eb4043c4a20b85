"""Whatever is done to a file of a step, a load gives the values that were saved, or is refused and changes nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoint.damaged import attack

PROCESSES = ("jax", "torch")
pytestmark = pytest.mark.one_backend


def test_a_damaged_step_is_refused_or_has_its_values(tmp_path: Path) -> None:
    """A model and its optimizer are as they were, `verify` finds each damage, and a manager takes the step before."""
    attack(tmp_path, range(12))


@pytest.mark.long
def test_no_damaged_step_is_loaded(tmp_path: Path) -> None:
    """So it is with a hundred and fifty others in each library."""
    attack(tmp_path, range(1000, 1150))
