"""JAX's own cases of its operators, on random layouts: with what is corrected each is right or fails, and never wrong.

`make test` tries another few cases each day; LAYOUTMAP_OPERATORS=17 tries those of another day. `make test-all` tries
all of them, on the same layouts. The table of docs/xla-faults.md is written by
`PYTHONPATH=tests python tests/engines/test_jax_operators.py`.
"""

import functools
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path

import pytest
from cases import QUICK_XLA

PROCESSES = ("jax",)
WORKER = Path(__file__).with_name("jax_operators_process.py")
DAYS = 360  # until all cases were tried
PARTS = 12
LAYOUTS = 2
UNDEFINED = "reduce_gen_add"
"""Reductions that begin with a number that is no identity: JAX's documentation leaves the result undefined."""


def run(folder, which, how="corrected", layouts=LAYOUTS):
    """What became of each try of some cases, by case; one that ends the process is there as `ends the process`."""
    outcome = Path(folder) / "outcome.jsonl"
    outcome.touch()
    flags = f"--xla_force_host_platform_device_count=8 {QUICK_XLA}"
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3"}
    arguments = [sys.executable, str(WORKER), str(folder), which, str(layouts), how]
    while True:
        before = outcome.stat().st_size
        done = subprocess.run(arguments, env=environment, capture_output=True, text=True)
        if done.returncode >= 0:
            assert 0 == done.returncode, done.stderr[-4000:]
            break
        assert before < outcome.stat().st_size, done.stderr[-4000:]
    found, trying = {}, {}
    for name, what, how in map(json.loads, outcome.read_text().splitlines()):
        if what == "trying":
            trying[name] = how
        elif what == "done":
            found[name] = how
            trying.pop(name, None)
    return found | {name: [["ends the process", where]] for name, where in trying.items()}


def wrong(found):
    """The tries whose numbers differ from one device's, or that end the process."""
    tries = {
        name: [each for each in tries if each[0].startswith(("wrong", "ends"))]
        for name, tries in found.items()
        if UNDEFINED not in name
    }
    return {name: some for name, some in tries.items() if some}


def test_some_operators(tmp_path):
    """The cases of this day compute on any layout what they compute on one device, or fail."""
    day = int(os.environ.get("LAYOUTMAP_OPERATORS", date.today().toordinal())) % DAYS
    print(f"cases {day}::{DAYS} of JAX; LAYOUTMAP_OPERATORS={day} tries them again")

    assert {} == wrong(run(tmp_path, f"{day}:{DAYS}"))


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", range(PARTS))
def test_all_operators(part, tmp_path):
    """All cases do."""
    assert {} == wrong(run(tmp_path, f"{part}:{PARTS}"))


KINDS = ("right", "wrong", "ends the process", "error")


def table():
    """Print the table of the docs: a row for each operator that is not always right, and the sum of the others."""
    counts = {how: counted(how) for how in ("plain", "corrected")}
    heads = [f"{who}: {kind}" for who in ("XLA", "here") for kind in KINDS]
    print(f"| operator | tries | {' | '.join(heads)} |\n|---|{'--:|' * (1 + len(heads))}")
    rest = {how: Counter() for how in counts}
    for group in sorted(counts["plain"]):
        of_group = {how: counts[how][group] for how in counts}
        if {kind for each in of_group.values() for kind in each} > {"right"}:
            print_row(f"`{group}`", of_group)
        else:
            rest = {how: rest[how] + of_group[how] for how in counts}
    print_row("others", rest)


def counted(how):
    """How many tries of each operator ended in which way; those that were not right are told on stderr."""
    counts = defaultdict(Counter)
    with (
        tempfile.TemporaryDirectory() as first,
        tempfile.TemporaryDirectory() as second,
        ThreadPoolExecutor() as two,
    ):
        for found in two.map(functools.partial(run, how=how), (first, second), ("0:2", "1:2")):
            for name, tries in found.items():
                counts[name.partition(" ")[0]].update(each.partition(":")[0] for each, _ in tries)
                for each, where in tries:
                    if each != "right":
                        print(f"{how}: {name}: {each}: {where}", file=sys.stderr)
    return counts


def print_row(name, of_group):
    cells = [of_group["plain"].total(), *(of_group[how][kind] for how in of_group for kind in KINDS)]
    print(f"| {name} | {' | '.join(f'{cell:,}' if cell else '' for cell in cells)} |")


if __name__ == "__main__":
    table()
