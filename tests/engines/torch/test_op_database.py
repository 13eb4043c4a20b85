"""Torch's own database of operators, on random layouts: each operator is right or fails, and never wrong.

`make test` tries another few entries each day; LAYOUTMAP_OPERATORS=17 tries those of another day. `make test-all` tries
all of them, on the same layouts.
"""

import json
import os
import re
from datetime import date
from pathlib import Path

import forked
import pytest

from layoutmap.engines.torch.dtensor_ops.proven import PROVEN, QUIET, REDUCTIONS

PROCESSES = ("torch",)
WORKER = Path(__file__).with_name("op_database_process.py")
TABLE = Path(__file__).parents[3] / "docs" / "torch-operators.md"
DAYS = 90  # until all entries were tried
PARTS = 15
SAMPLES, LAYOUTS = 1, 2


def run(folder, which):
    """What became of each try of some entries of the database, by their names."""
    arguments = [str(folder), which, str(SAMPLES), str(LAYOUTS)]
    (done,) = forked.wait_for_all([forked.start(WORKER, arguments)], seconds=900)
    assert 0 == done.returncode, done.stderr[-4000:]
    return dict(map(json.loads, (Path(folder) / "outcome.jsonl").read_text().splitlines()))


def wrong(found):
    """The tries whose numbers differ from plain tensors', without an error."""
    tries = {name: [each for each in tries if each[0].startswith("wrong")] for name, tries in found.items()}
    return {name: some for name, some in tries.items() if some}


def names_under(heading):
    """The operators that a part of the docs lists."""
    part = re.search(rf"^## {heading}$(.*?)(^## |\Z)", TABLE.read_text(), re.MULTILINE | re.DOTALL)
    assert part is not None
    return set(re.findall(r"`([a-z]\w*|_\w+)`", part[1]))


def test_the_docs_list_them():
    """The docs list what is computed on sharded tensors, and what is gathered without a warning."""
    assert PROVEN | set(REDUCTIONS) == names_under("Sharded")
    assert QUIET == names_under("Gathered without a warning")


def test_some_operators(tmp_path):
    """The operators of this day give what they give on plain tensors, on any layout, or an error."""
    day = int(os.environ.get("LAYOUTMAP_OPERATORS", date.today().toordinal())) % DAYS
    print(f"entries {day}::{DAYS} of the database; LAYOUTMAP_OPERATORS={day} tries them again")

    assert {} == wrong(run(tmp_path, f"{day}:{DAYS}"))


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", range(PARTS))
def test_all_operators(part, tmp_path):
    """All operators do."""
    assert {} == wrong(run(tmp_path, f"{part}:{PARTS}"))
