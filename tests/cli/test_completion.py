"""Completion of the command line: what a shell offers is what the parser takes."""

import shlex
import subprocess
import sys

import pytest

from layoutmap.cli.completion import SHELLS
from layoutmap.cli.main import main

# As readline does it: calls the function that `complete` has registered, with the words of a line.
PRESS_TAB = r"""
source <({python} -m layoutmap.cli.main completion bash) || exit 1
press() {{
  COMP_WORDS=("$@") COMP_CWORD=$(($# - 1)) COMP_LINE="$*" COMP_POINT=${{#COMP_LINE}} COMPREPLY=()
  "$(complete -p layoutmap | sed 's/.*-F \([^ ]*\).*/\1/')" layoutmap "${{@: -1}}" "${{@: -2:1}}"
  echo "${{COMPREPLY[@]}}"
}}
"""
OFFERED = {
    "layoutmap ": "checkpoint completion devices diff explain guard inspect lint plan presets schema search selftest "
    "suggest",
    "layoutmap pl": "plan",
    "layoutmap plan m:f --ba": "--backend --batch-dim",
    "layoutmap plan m:f --backend ": "jax tensorflow torch",
    "layoutmap explain m:f d1 --library ": "jax keras torch",
    "layoutmap devices --engine t": "tensorflow torch",
    "layoutmap plan m:f --optimizer adam": "adam adamax adamw",
    "layoutmap plan m:f --rules ru": "rules.yaml",
    "layoutmap plan m:f --json ": "plan.json rules.yaml saved",
    "layoutmap diff pl": "plan.json",
    "layoutmap diff plan.json ru": "rules.yaml",
    "layoutmap checkpoint ": "describe history verify relayout export convert",
    "layoutmap checkpoint describe ": "saved",
    "layoutmap checkpoint relayout saved new --rules ru": "rules.yaml",
    "layoutmap completion z": "zsh",
}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "plan.json").touch()
    (tmp_path / "rules.yaml").touch()
    (tmp_path / "saved").mkdir()
    return tmp_path


def test_what_bash_offers(folder):
    """Commands, options, their choices and files."""
    presses = [f"press {' '.join(map(shlex.quote, line.split(' ')))}" for line in OFFERED]
    script = "\n".join([PRESS_TAB.format(python=sys.executable), *presses])
    ran = subprocess.run(["bash", "-c", script], cwd=folder, capture_output=True, text=True, timeout=240)

    assert (0, "") == (ran.returncode, ran.stderr)
    found = [sorted(line.split()) for line in ran.stdout.splitlines()]
    assert [sorted(offered.split()) for offered in OFFERED.values()] == found


@pytest.mark.parametrize("shell", SHELLS)
def test_every_shell_has_a_script(shell, capsys):
    """It names the command and its options."""
    assert 0 == main(["completion", shell])
    said = capsys.readouterr().out
    assert "layoutmap" in said
    assert "optimizer" in said


def test_without_the_library_it_says_what_to_install(monkeypatch, capsys):
    """One line to type, and exit code 2."""
    monkeypatch.setitem(sys.modules, "shtab", None)

    assert 2 == main(["completion", "bash"])
    assert (
        """\
layoutmap: completion needs shtab
  why   import of shtab halted; None in sys.modules
  fix   pip install "layoutmap[completion]"
"""
        == capsys.readouterr().err
    )


def test_help_says_how_to_install_it(capsys):
    """A line for each shell."""
    with pytest.raises(SystemExit):
        main(["completion", "--help"])
    said = capsys.readouterr().out

    for shell in SHELLS:
        assert f"  {shell}  " in said
        assert f"layoutmap completion {shell} > ~/" in said
