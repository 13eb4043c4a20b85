"""Tests of hidden folders: whose are removed by the next save, and whose are kept."""

import subprocess
import sys

import pytest

from layoutmap.core.folders import open_hidden_folder

HOLD = """
import sys
from pathlib import Path
from layoutmap.core.folders import open_hidden_folder
with open_hidden_folder(Path(sys.argv[1]), sys.argv[2]):
    print("there", flush=True)
    sys.stdin.read()
"""


def holding(target, token):
    command = [sys.executable, "-c", HOLD, str(target), token]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert "there\n" == process.stdout.readline()
    return process


def test_only_folders_of_ended_processes_go(tmp_path):
    """That of one that lives and those of others' names stay, whatever is in them."""
    target = tmp_path / "model"
    living, dead = holding(target, "a" * 16), holding(target, "b" * 16)
    dead.kill()
    dead.communicate()
    others = {".model", ".model.old", ".models." + "c" * 16, ".model." + "c" * 15}
    for name in others:
        (tmp_path / name).mkdir()
    assert (tmp_path / f".model.{'b' * 16}").is_dir()

    with open_hidden_folder(target, "d" * 16) as hidden:
        assert {path.name for path in tmp_path.iterdir()} == others | {f".model.{'a' * 16}", hidden.name}
    living.communicate()

    assert {path.name for path in tmp_path.iterdir()} == others


def fill_in_part(target):
    with open_hidden_folder(target, "a" * 16) as hidden:
        (hidden / "file").touch()
        raise ValueError(hidden.name)


def test_what_raises_leaves_nothing(tmp_path):
    with pytest.raises(ValueError, match="model"):
        fill_in_part(tmp_path / "model")

    assert not list(tmp_path.iterdir())
