"""Torch's own database of operators, on random layouts: each operator is right or refused, and never wrong.

`make test` tries another few entries each day; LAYOUTMAP_OPERATORS=17 tries those of another day. All are tried by
`make test-all`, and by `python tests/engines/torch/test_op_database.py`, which writes the table of the docs.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from datetime import date
from pathlib import Path

import pytest

PROCESSES = ("torch",)
WORKER = Path(__file__).with_name("op_database_process.py")
TABLE = Path(__file__).parents[3] / "docs" / "torch-operators.md"
DAYS = 45  # until all entries were tried
PARTS = 15
SAMPLES, LAYOUTS = 1, 2


def run(folder, which):
    """What became of each try of some entries of the database, by their names."""
    arguments = [str(folder), which, str(SAMPLES), str(LAYOUTS)]
    done = subprocess.run([sys.executable, str(WORKER), *arguments], capture_output=True, text=True)
    assert 0 == done.returncode, done.stderr[-4000:]
    return dict(map(json.loads, (Path(folder) / "outcome.jsonl").read_text().splitlines()))


def neither_right_nor_refused(found):
    return {
        name: [(verdict, where) for verdict, where in tries if verdict.startswith(("wrong", "error"))]
        for name, tries in found.items()
        if any(verdict.startswith(("wrong", "error")) for verdict, _ in tries)
    }


def in_the_table(tries):
    """How an operator is computed, in the words of the docs."""
    kinds = Counter(verdict.partition(":")[0] for verdict, _ in tries)
    return ", ".join(kind for kind in ("sharded", "gathered", "refused") if kinds[kind]) or "not tried"


def rows(text):
    return dict(re.findall(r"^\| `([^`]+)` \| ([a-z, ]+?) *\|$", text, re.MULTILINE))


def test_some_operators(tmp_path):
    """The operators of this day give what they give on plain tensors, on any layout, or are refused."""
    day = int(os.environ.get("LAYOUTMAP_OPERATORS", date.today().toordinal())) % DAYS
    print(f"entries {day}::{DAYS} of the database; LAYOUTMAP_OPERATORS={day} tries them again")

    assert {} == neither_right_nor_refused(run(tmp_path, f"{day}:{DAYS}"))


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", range(PARTS))
def test_all_operators(part, tmp_path):
    """All operators do, and the docs say which are computed sharded."""
    found = run(tmp_path, f"{part}:{PARTS}")
    told = rows(TABLE.read_text())

    assert {} == neither_right_nor_refused(found)
    assert {name: in_the_table(tries) for name, tries in found.items()} == {
        name: told[name] for name in found
    }


def main():
    with tempfile.TemporaryDirectory() as folder:
        found = {k: v for part in range(PARTS) for k, v in run(folder, f"{part}:{PARTS}").items()}
    written = "".join(f"| `{name}` | {in_the_table(tries)} |\n" for name, tries in sorted(found.items()))
    head, _, _ = TABLE.read_text().partition("| --- | --- |\n")
    TABLE.write_text(f"{head}| --- | --- |\n{written}")


if __name__ == "__main__":
    main()
