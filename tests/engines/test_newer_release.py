"""A release of a framework newer than those that were tested, here the installed one with another version."""

import os
import subprocess
import sys

import frameworks
import pytest

PROCESSES = ("jax", "tensorflow", "torch")
RUNNING = os.environ.get("LAYOUTMAP_TEST_PROCESS") or "jax"

PLANNED_TWICE = """
import warnings
import {package}
{package}.__version__ = "99.0.0"
{change}
import layoutmap as lm
from layoutmap.engines import get_engine

with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for _ in range(2):
        try:
            get_engine("{package}").check_layout(lm.Layout(["x"], lm.Mesh(None, "x=2")))
        except lm.EngineError as error:
            print(error)
for each in caught:
    if isinstance(each.message, lm.LayoutMapWarning):
        print(each.message)
"""
GONE = {
    "jax": "import jax.sharding; del jax.sharding.NamedSharding",
    "tensorflow": "del tensorflow.Tensor",
    "torch": "from torch.distributed.tensor import DTensor; del DTensor._op_dispatcher",
}


def printed(change):
    program = PLANNED_TWICE.format(package=RUNNING, change=change)
    run = subprocess.run(
        [sys.executable, "-c", program], cwd=frameworks.ROOT, capture_output=True, text=True, check=True
    )
    return [line for line in run.stdout.splitlines() if not line.startswith(" ")]


@pytest.mark.long
def test_a_newer_release_warns_once_and_works():
    """The engine is there; the first use warns, the second does not."""
    assert [f"{RUNNING} 99.0.0 is not a release that layoutmap was tested with"] == printed("")


@pytest.mark.long
def test_a_newer_release_without_a_needed_name_is_refused():
    """Each use raises the error, and nothing warns."""
    assert [f"{RUNNING} 99.0.0 is not supported"] * 2 == printed(GONE[RUNNING])
