"""A plan as torch's own calls and as transformers' own plan: these, executed, give its layouts, or it is refused."""

import json
from datetime import date
from pathlib import Path

import forked
import pytest

PROCESSES = ("torch",)

WORKER = Path(__file__).with_name("handed_back_torch_process.py")


def tried(first, count):
    ended = forked.run(WORKER, [str(first), str(count)])
    assert 0 == ended.returncode, f"seeds from {first}: {ended.stdout}{ended.stderr[-4000:]}"
    return json.loads(ended.stdout)


@pytest.mark.timeout(300)
def test_plans_of_drawn_models_go_to_torch_and_to_transformers():
    """On eight ranks, with both libraries' own functions: layouts are equal, or the error names a variable."""
    found = tried(int(date.today().strftime("%Y%m%d")), 12)

    assert found["forms"].keys() >= {"styles", "distributed", "entries"}
    assert found["named"]
    assert 24 == sum(found["told"].values())
    assert found["told"]["laid_out_by_torch"]


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", range(3))
def test_many_plans_go_to_torch_and_to_transformers(part):
    """Most of 300 have a form in torch, and each kind of it is seen."""
    found = tried(1000 + part * 100, 100)

    assert found["named"]
    assert found["told"]["laid_out_by_torch"] > 50
    assert found["forms"].keys() == {"styles", "distributed", "shared", "entries"}
