"""Ctrl-C ends the command with one line and exit code 130, at whatever moment it comes."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

MODEL = """
import keras

def make():
    inputs = keras.Input((16,))
    return keras.Model(inputs, keras.layers.Dense(8, name="up")(inputs))
"""
RULES = "version: 1\nmesh: {dims: {batch: 2, model: 4}}\nrules:\n  up\\.kernel: [null, model]\n"
PLAN = {
    "format": "layoutmap plan",
    "version": 3,
    "mesh": {"dims": {"x": 2}},
    "variables": [{"path": "a", "shape": [4], "dtype": "float32", "layout": ["x"]}],
    "problems": [],
    "activations": [],
}
# What pip writes for a console script.
SCRIPT = "import sys\nfrom layoutmap.cli.command import run\nsys.exit(run())\n"
COMMANDS = {
    "plan": ("plan", "net:make", "--rules", "rules.yaml"),
    "lint": ("lint", "net:make", "--rules", "rules.yaml"),
    "explain": ("explain", "net:make", "up.kernel", "--rules", "rules.yaml"),
    "diff": ("diff", "plan.json", "plan.json"),
    "json": ("plan", "net:make", "--rules", "rules.yaml", "--json", "written.json"),
    "devices": ("devices", "--engine", "jax"),
    "checkpoint": ("checkpoint", "describe", "nothing"),
    "search": ("search", "net:make", "--on", "h100:8", "--inputs", "float32[8,16]", "--tries", "20"),
}
# Imported after the handler is installed; before, Python and `layoutmap` start
HEEDED = "layoutmap.cli.output"


def lines_of(err: str) -> list[str]:
    """What a command says, without how far a search is, which depends on the time."""
    return [
        line
        for line in err.splitlines()
        if not line.startswith("import time:") and " maps tried so far, " not in line
    ]


def interrupted(
    folder: Path, command: str, script: bool, seconds: float | None
) -> tuple[int, list[str], float]:
    """Run a command and send it Ctrl-C so many seconds after it can heed it; exit code, lines of stderr, seconds."""
    start = ["layoutmap"] if script else ["-m", "layoutmap"]
    with subprocess.Popen(
        [sys.executable, "-X", "importtime", *start, *COMMANDS[command]],
        cwd=folder,
        env={**os.environ, "KERAS_BACKEND": "jax", "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        assert process.stderr is not None
        head = []
        while HEEDED not in (line := process.stderr.readline()):
            assert line, head
            head.append(line)
        begun = time.monotonic()
        if seconds is not None:
            time.sleep(seconds)
            process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=120)
    return process.returncode, lines_of(err), time.monotonic() - begun


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("interrupts")
    (made / "net.py").write_text(MODEL)
    (made / "rules.yaml").write_text(RULES)
    (made / "plan.json").write_text(json.dumps(PLAN))
    (made / "layoutmap").write_text(SCRIPT)
    return made


def check(folder: Path, command: str, script: bool, moments: list[float]) -> None:
    code, plain, _ = interrupted(folder, command, script, None)
    for seconds in moments:
        told = interrupted(folder, command, script, seconds)[:2]
        if told[0] == code:  # it was done before
            assert (code, plain) == told
            continue
        assert 130 == told[0], (seconds, told)
        assert "layoutmap: interrupted" == told[1][-1]
        assert set(told[1][:-1]) <= set(plain), "nothing else is said, and no traceback"
    assert [] == [path.name for path in folder.iterdir() if path.name.startswith(".layoutmap-")]


def test_ctrl_c_while_the_library_is_imported_is_one_line(folder: Path):
    """By the console script and by `python -m`: 130 and one line."""
    for script in (False, True):
        check(folder, "diff", script, [0, 0.05])


def test_ctrl_c_while_a_framework_is_imported_is_one_line(folder: Path):
    """In the middle of what JAX and Keras import: 130 and one line, and no traceback."""
    check(folder, "plan", False, [0.7])


@pytest.mark.long
@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("script", [False, True], ids=["python -m layoutmap", "layoutmap"])
def test_ctrl_c_at_many_moments_is_one_line(folder: Path, command: str, script: bool):
    """At twenty drawn moments of each command."""
    whole = interrupted(folder, command, script, None)[2]
    chance = random.Random(f"{command} {script}")
    check(folder, command, script, [chance.uniform(0, whole) for _ in range(20)])
