"""What DTensors compute wrongly without this package: a test that fails says which correction is no longer needed."""

import itertools
import json
import re
from pathlib import Path

import forked
import pytest
import torch

from layoutmap.engines.tested import is_older_than
from layoutmap.testing.faults import FAULTS

PROCESSES = ("torch",)
ROOT = Path(__file__).parents[3]
TABLE = ROOT / "docs" / "torch-operators.md"
SOURCE = ROOT / "src" / "layoutmap" / "engines" / "torch"
# Modules that correct nothing by themselves; `sums` is about when, not what, and `linear` and `softmax` save time.
MACHINERY = {
    "__init__",
    "conversions",
    "dispatch",
    "experts",
    "linear",
    "local_values",
    "masks",
    "mode",
    "proven",
    "shards",
    "softmax",
    "sums",
    "unwrap_python",
}
# why: decisions/0057; what -> the module of engines.torch, torch's issue or "none found", the version last seen on, and
# the one from which on torch is right, if there is one, and whether the correction is kept then for another reason.
CORRECTIONS = {
    name.capitalize(): others
    for name, *others in re.findall(
        r"^\| (.+?) \| `([\w.]+)` \| .+ \| (?:\[pytorch/pytorch)?(#\d+|none found).* \| (2\.\d+\.\d+) "
        r"\| (?:(2\.\d+)(, kept: .+)? )?\|$",
        TABLE.read_text(),
        re.MULTILINE,
    )
}
PROBES = {fault.title: fault for fault in FAULTS["torch"]()}

ONE_AFTER_THE_OTHER = """
import contextlib, io, json, sys, traceback

printed = {}
for name, program in json.loads(sys.argv[1]).items():
    scope = {"__name__": "__main__"}
    with contextlib.redirect_stdout(io.StringIO()) as out:
        try:
            exec(program, scope)
        except Exception:
            traceback.print_exc(file=out)
    printed[name] = out.getvalue()
    scope["block"].close()  # to the end of the program
print(json.dumps(printed))
"""


def is_right(program):
    """Whether a program prints that DTensor computes what plain tensors do; not if it fails, or does not end."""
    return forked.run(program).stdout == "right: 1.0\n"


def test_the_setup_runs_without_corrections():
    """A program that fails in the lines that all share would look like one of torch's faults."""
    lines = zip(*(fault.uncorrected.splitlines() for fault in PROBES.values()), strict=False)
    setup = [line for line, *_ in itertools.takewhile(lambda same: len({*same}) == 1, lines)]
    assert "ALONE = True" in setup
    assert is_right("\n".join([*setup, 'print("right:", 1.0)']))


@pytest.mark.parametrize("name", PROBES)
def test_a_correction_is_needed(name):
    """DTensor does wrongly what a correction says, on each version of torch before the one that is right."""
    module, issue, _, release, _ = CORRECTIONS[name]
    is_wrong = not release or is_older_than("torch", release)
    assert is_wrong != is_right(PROBES[name].uncorrected), (
        f"{name} (in {module}, issue of pytorch/pytorch: {issue}): torch {torch.__version__} is to be "
        + ("wrong, and is right: no longer needed from it on" if is_wrong else "right, and is wrong")
        + "; correct docs/torch-operators.md, and `is_older_than` there"
    )


def test_each_correction_is_right():
    """With this package each program is right, also after the others: what it tries can come out so."""
    programs = {name: fault.corrected for name, fault in PROBES.items()}
    ended = forked.run(ONE_AFTER_THE_OTHER, [json.dumps(programs)])

    assert 0 == ended.returncode, ended.stderr[-4000:]
    assert dict.fromkeys(PROBES, "right: 1.0\n") == json.loads(ended.stdout)


def test_each_correction_has_a_probe():
    """The probes are those of the corrections, and each module that corrects something says what and has a probe."""
    modules = {path.stem for path in (SOURCE / "dtensor_ops").glob("*.py")} - MACHINERY
    named = {module for module, *_ in CORRECTIONS.values()}

    assert set(CORRECTIONS) == set(PROBES)
    installed_before = sorted(
        release for _, _, _, release, is_kept in CORRECTIONS.values() if release and not is_kept
    )
    asked = [
        found
        for path in SOURCE.rglob("*.py")
        for found in re.findall(r'is_older_than\("torch", "([\d.]+)"\)', path.read_text())
    ]
    assert installed_before == sorted(asked)
    assert {f"dtensor_ops.{module}" for module in modules} <= named
    assert [] == [module for module in named if not (SOURCE / f"{module.replace('.', '/')}.py").exists()]
