"""Each program of docs/xla-faults.md: wrong in XLA as the page says, and right with this package's correction."""

import re

import forked
import pytest
from cases import few

from layoutmap.testing.faults import FAULTS, XLA_FAULTS
from layoutmap.testing.schedule import Schedule

PROCESSES = ("jax",)
OF_XLA = {fault.title: fault for fault in FAULTS["jax"]()}
(SMALL,) = (title for title in OF_XLA if title.startswith("A result wanted over the dims of the sum"))
RIGHT = re.compile(r"(times|right:) 1(\.0*)?\n")
SECTIONS = re.compile(r"^## (.+?)\n(.+?)(?=^## |\Z)", re.DOTALL | re.MULTILINE)
PRINTED = {
    title: re.findall(r"^```text\n(.+?)^```", text, re.DOTALL | re.MULTILINE)
    for title, text in SECTIONS.findall(XLA_FAULTS.read_text("utf-8"))
}
"""What the page says that a section's program prints; nothing where the process ends."""


def test_all_sections_are_tried():
    """The page has no program that is not run."""
    assert len(OF_XLA) == XLA_FAULTS.read_text("utf-8").count("```python")


@pytest.mark.parametrize("title", few(OF_XLA, SMALL))
def test_xla_is_wrong(title):
    """The page says what happens without this package."""
    ended = forked.run(OF_XLA[title].uncorrected)

    assert not RIGHT.fullmatch(ended.stdout), f"no longer needed: {title}"
    assert ended.returncode == 0 if PRINTED[title] else ended.returncode < 0, ended.stderr
    assert ended.stdout.startswith(*PRINTED[title] or [""])


@pytest.mark.parametrize("title", few(OF_XLA, SMALL))
def test_it_is_right_here(title):
    """Once an array is in a layout of this package's, it computes what one device does."""
    ended = forked.run(OF_XLA[title].corrected)

    assert RIGHT.fullmatch(ended.stdout), ended.stdout + ended.stderr


@pytest.mark.long
def test_operands_that_one_mesh_dim_shards_along_different_axes():
    """The case of this seed, whose gradient of a kernel is such a product, trains as on one device."""
    tried = Schedule(
        ["keras-jax"], 20261125501, count=1, laws=["training agrees with one device"]
    ).run_cases()

    assert ["held"] == [each.outcome.what for each in tried]
