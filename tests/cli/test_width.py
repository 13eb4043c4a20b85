"""What the command line prints in a terminal is no wider than that; in a file or a pipe it is all there."""

import fcntl
import io
import os
import pty
import struct
import subprocess
import sys
import termios
from contextlib import redirect_stderr, redirect_stdout

import costs
import numpy as np
import pytest
from checkpoints import saved
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import layoutmap as lm
from layoutmap.cli.main import main
from layoutmap.core.text_table import format_table
from layoutmap.core.variables import VariableSpec
from layoutmap.scope.plan import make_plan
from layoutmap.testing import strategies

MESH = lm.Mesh(None, "batch=2,model=4")
QUIET = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
WIDTHS = st.integers(60, 160)


class Terminal(io.StringIO):
    """Stdout that says of itself that it is one; `test_a_terminal_that_is_80_columns_wide` has a real one."""

    def isatty(self):
        return True


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run a command in a terminal so many columns wide, or into a file: its code and what it prints."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments, columns=None):
        out = io.StringIO() if columns is None else Terminal()
        monkeypatch.setenv("COLUMNS", str(columns or 80))
        with redirect_stdout(out), redirect_stderr(io.StringIO()):
            code = main(list(arguments))
        return code, out.getvalue()

    return run


def widest(text):
    return max(map(len, text.split("\n")))


def squeezed(text):
    """A text without its spaces and line breaks."""
    return "".join(text.split())


def prose(text):
    """What a plan prints above its table, and below it as far as the problems go."""
    verdict, _, rest = text.partition("\n\nvariable ")
    return squeezed(verdict), squeezed(rest[rest.index("\nPlan: ") :].partition("\n\nper device: ")[0])


@given(strategies.plans(layers=True), strategies.plans(), WIDTHS)
@QUIET
def test_no_line_is_wider_than_the_terminal(run, drawn, other, columns):
    """Of any plan, by any command; a plan's verdict, problems and totals are kept; `--wide` is what a file has."""
    (*_, plan), (*_, before) = drawn, other
    for name, text in (("plan.json", plan.to_json()), ("before.json", before.to_json())):
        with open(name, "w") as file:
            file.write(text)
    commands = [["plan", "plan.json"], ["lint", "plan.json"], ["diff", "before.json", "plan.json"]]
    commands += [["explain", "plan.json", path] for path in list(plan)[:2]]
    for command in commands:
        options = ["--device-memory", "1KiB"] if command[0] == "plan" else []
        code, full = run(*command, *options, "--partial")
        narrow = run(*command, *options, "--partial", columns=columns)
        assert (code, True) == (narrow[0], widest(narrow[1]) <= columns), narrow[1]
        assert (code, full) == run(*command, *options, "--partial", "--wide", columns=columns)
        if command[0] == "plan":
            assert prose(full) == prose(narrow[1])
        elif command[0] != "diff":
            assert squeezed(full) == squeezed(narrow[1])


@pytest.mark.parametrize("columns", [60, 80, 100, 132, 200])
def test_the_cost_of_a_step_is_no_wider(run, columns):
    """The tables of what a step waits for and sends, and of two costs that are compared."""
    for name, plan in (
        ("plan.json", costs.plan()),
        ("after.json", costs.plan(rules={".*": (None, "model")})),
    ):
        with open(name, "w") as file:
            file.write(plan.to_json())
    for command in (["plan", "plan.json"], ["diff", "plan.json", "after.json"]):
        code, full = run(*command)
        assert (code, full) == run(*command, "--wide", columns=columns)
        assert columns >= widest(run(*command, columns=columns)[1])


def test_a_checkpoint_is_no_wider(run, tmp_path):
    """`checkpoint describe` has the columns that count most."""
    directory, path = str(tmp_path), "encoder.blocks.0.attention.query.kernel"
    saved(directory, {path: np.zeros((8, 4))}, {path: lm.Layout(("batch", "model"), MESH)})
    text = run("checkpoint", "describe", directory, columns=60)[1]

    assert 60 >= widest(text)
    assert "hidden: times, dtype, kind; shortened: variable; --wide" in text
    assert run("checkpoint", "describe", directory) == run(
        "checkpoint", "describe", directory, "--wide", columns=60
    )
    assert 60 >= widest(run("presets", columns=60)[1])


PLAN = make_plan(
    [
        *(VariableSpec(f"decoder.blocks.{i}.attention.query.kernel", (16, 64), "float32") for i in range(3)),
        VariableSpec("head.bias", (64,), "float32"),
    ],
    lm.LayoutMap(MESH, {r".*\.kernel": (None, "model"), "head": (None,)}),
)
AT_100 = """
variable                            shape    layout              shard       bytes  per device  rule
----------------------------------  -------  ------------------  -------  --------  ----------  ----
decoder.blo...tention.query.kernel  16 x 64  (unsharded, model)  16 x 16  12.0 KiB     3.0 KiB  1
head.bias                           64       replicated          64          256 B       256 B  2
hidden: times, dtype; shortened: variable; --wide shows all
"""
AT_60 = """
variable                      layout              per device
----------------------------  ------------------  ----------
decoder.b...ion.query.kernel  (unsharded, model)     3.0 KiB
head.bias                     replicated               256 B
hidden: times, shape, dtype, shard, bytes, rule; shortened:
  variable; --wide shows all
"""


def table(text):
    return text[text.index("\nvariable ") : text.index("\n\nrule 1")] + "\n"


def test_what_counts_least_is_hidden_first(run):
    """Columns in a fixed order; then what is left is shortened in its middle, and the line below says so."""
    with open("plan.json", "w") as file:
        file.write(PLAN.to_json())

    assert AT_100 == table(run("plan", "plan.json", columns=100)[1])
    assert AT_60 == table(run("plan", "plan.json", columns=60)[1])


def test_in_python_the_text_is_whole_and_a_width_can_be_had(run):
    """`print` shows all, in a terminal too, since a text may go to a file; `to_text` takes a width."""
    assert str(PLAN) == PLAN.to_text()
    assert "hidden: times, dtype; shortened: variable; to_text() shows all" in PLAN.to_text(100)


@given(
    st.lists(st.lists(st.text("ab .", max_size=90), min_size=4, max_size=4), max_size=4),
    st.integers(24, 200),
    st.sets(st.sampled_from("abcd")),
)
def test_a_table_of_anything_has_its_width(rows, width, drop):
    """However long its cells are; without a width nothing is lost."""
    lines = format_table("abcd", rows, width=width, drop=sorted(drop))
    full = format_table("abcd", rows)

    assert all(len(line) <= width for line in lines[: 2 + len(rows)])
    assert lines == full if widest("\n".join(full)) <= width else lines != full


def test_a_terminal_that_is_80_columns_wide(tmp_path):
    """A real one, of which the program asks the width."""
    (tmp_path / "plan.json").write_text(PLAN.to_json())
    ours, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    command = [sys.executable, "-m", "layoutmap.cli.main", "plan", str(tmp_path / "plan.json")]
    with os.fdopen(ours, "rb", buffering=0) as screen:
        assert 0 == subprocess.run(command, stdout=its, env=environment, timeout=240).returncode
        text = screen.read(1 << 16).decode().replace("\r\n", "\n")
        os.close(its)

    assert "--wide shows all" in text
    assert 80 >= widest(text)
