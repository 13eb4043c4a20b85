"""Each program of docs/xla-faults.md: wrong in XLA as the page says, and right with this package's correction."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from cases import few

from layoutmap.testing.schedule import Schedule

PROCESSES = ("jax",)
PAGE = Path(__file__).parents[2] / "docs" / "xla-faults.md"
SECTION = re.compile(
    r"^## (.+?)\n.*?^```python no-run[^\n]*\n(.+?)^```\n(?:\n```text\n(.+?)^```\n)?", re.DOTALL | re.MULTILINE
)
FAULTS = {title: (program, printed) for title, program, printed in SECTION.findall(PAGE.read_text("utf-8"))}
"""The sections' programs, and what they print; nothing where the process ends."""
IN_A_LAYOUT = """import numpy as np
import layoutmap as lm
mesh = lm.create_mesh("batch=2,model=2", device_type="cpu")
lm.dtensor.relayout(np.zeros(()), lm.Layout.replicated(mesh, 0))
"""
RIGHT = ("times 1.0\n", "right: 1.0\n")


def run(program):
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3"}
    return subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)


def test_all_sections_are_tried():
    """The page has no program that is not run."""
    assert len(FAULTS) == PAGE.read_text("utf-8").count("```python")


@pytest.mark.parametrize("title", few(FAULTS, next(iter(FAULTS))))
def test_xla_is_wrong(title):
    """The page says what happens without this package."""
    program, printed = FAULTS[title]
    plain = run(program)

    assert plain.stdout not in RIGHT, f"no longer needed: {title}"
    assert (printed, not printed) == (plain.stdout, plain.returncode < 0), plain.stderr[-3000:]


@pytest.mark.parametrize("title", few(FAULTS, next(iter(FAULTS))))
def test_it_is_right_here(title):
    """Once an array is in a layout of this package's, it computes what one device does."""
    program, _ = FAULTS[title]
    corrected = run(program.replace("import numpy as np\n", IN_A_LAYOUT))

    assert corrected.stdout in RIGHT, corrected.stdout + corrected.stderr[-3000:]


@pytest.mark.long
def test_operands_that_one_mesh_dim_shards_along_different_axes():
    """The case of this seed, whose gradient of a kernel is such a product, trains as on one device."""
    tried = Schedule(["keras-jax"], 20261125501, count=1, laws=["it trains as on one device"]).run()

    assert ["held"] == [each.outcome.what for each in tried]
