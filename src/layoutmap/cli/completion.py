"""Generate scripts with which shells complete the command line, from the parser with shtab.

The shell reads a script once, so that pressing tab starts no Python. Uses `ArgumentParser._actions`, as shtab itself
does; tested with Python 3.11 and shtab 1.13.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from layoutmap.core.errors import LayoutMapError

SHELLS = ("bash", "zsh", "fish")
INSTALL_HELP = """install it, in one of:
  bash    layoutmap completion bash > ~/.local/share/bash-completion/completions/layoutmap
  zsh     layoutmap completion zsh > ~/.zfunc/_layoutmap       with ~/.zfunc in fpath, before compinit
  fish    layoutmap completion fish > ~/.config/fish/completions/layoutmap.fish
or only for this shell:
  source <(layoutmap completion bash)
"""
OPTIMIZERS = "adadelta adafactor adagrad adam adamax adamw ftrl lion muon nadam rmsprop sgd"
"""The names of Keras optimizers that `compile` accepts."""


def make_completion_script(parser: argparse.ArgumentParser, shell: str) -> str:
    """Return the shell script that completes commands, options, choices, and files."""
    try:
        import shtab
    except ImportError as error:
        raise LayoutMapError(
            "completion needs shtab", why=str(error), fix='pip install "layoutmap[completion]"'
        ) from error
    for action in _iterate_parser_actions(parser):
        if action.type is Path or str(action.metavar).startswith("FILE"):
            action.complete = shtab.FILE
        elif action.metavar in ("DIRECTORY", "NEW"):
            action.complete = shtab.DIRECTORY
        elif "--optimizer" in action.option_strings:
            action.complete = shtab.cmd(f"echo {OPTIMIZERS}")
    return shtab.complete(parser, shell)


def _iterate_parser_actions(parser: argparse.ArgumentParser) -> Iterator[Any]:
    """Yield the actions of a parser and of its subcommands."""
    actions: list[Any] = parser._actions  # pyright: ignore[reportPrivateUsage]
    for action in actions:
        yield action
        if action.nargs == argparse.PARSER:  # the action contains the subcommands
            for inner in action.choices.values():
                yield from _iterate_parser_actions(inner)
