"""Show the progress of long work on one line of stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Self

from layoutmap.core.escaping import escape_text
from layoutmap.core.variables import VariableSpec

_PATIENCE_SECONDS = 2.0
_BETWEEN_SECONDS = 0.1


class _Line:
    """Line that is overwritten with each update and cleared at the end.

    Args:
        enabled: Whether to show it; `None`: on a terminal and in a notebook, if the work takes more than two seconds.
    """

    def __init__(self, enabled: bool | None = None):
        self._enabled = _is_watched() if enabled is None else enabled
        self._next = time.monotonic() + (0 if enabled else _PATIENCE_SECONDS)
        self._width = 0  # of the line that is shown

    def __enter__(self) -> Self:
        return self

    def _is_due(self) -> bool:
        now = time.monotonic()
        if not self._enabled or now < self._next:
            return False
        self._next = now + _BETWEEN_SECONDS
        return True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._width:
            self._show("")

    def _show(self, line: str) -> None:
        """Overwrite the line, padded with spaces, since notebooks know carriage returns but no terminal codes."""
        sys.stderr.write(f"\r{line.ljust(self._width)}\r{line}")
        sys.stderr.flush()
        self._width = len(line)


class Progress(_Line):
    """Line with the number of finished variables and the share of their bytes.

    Args:
        variables: The variables, by key.
        enabled: See `_Line`.
        verb: What is done with them, as in `"saved"`; empty: they are materialized, which needs no word.
    """

    def __init__(self, variables: Mapping[str, VariableSpec], *, enabled: bool | None = None, verb: str = ""):
        super().__init__(enabled)
        self._variables = variables
        self._total_bytes = sum(variable.global_bytes for variable in self._variables.values()) or 1
        self._made = self._made_bytes = 0
        self._verb = f" {verb}" * bool(verb)

    def __call__(self, key: str) -> None:
        """Count the variable of a key as finished."""
        variable = self._variables[key]
        self._made += 1
        self._made_bytes += variable.global_bytes
        if self._is_due():
            share = 100 * self._made_bytes // self._total_bytes
            counts = f"{self._made}/{len(self._variables)} variables{self._verb}, {share}%"
            self._show(f"layoutmap: {counts}  {escape_text(variable.path)}")


class ElapsedTime(_Line):
    """Line with the seconds that a task has taken."""

    def __init__(self, what: str, *, enabled: bool | None = None):
        super().__init__(enabled)
        self._what, self._begin = what, time.monotonic()

    def __call__(self, done: str = "") -> None:
        """Show the elapsed time, and the progress in `done`."""
        if self._is_due():
            self._show(f"layoutmap: {self._what}, {time.monotonic() - self._begin:.0f} s{done}")


def _is_watched() -> bool:
    """Return whether stderr is a terminal or a Jupyter notebook."""
    return sys.stderr.isatty() or type(sys.stderr).__module__ == "ipykernel.iostream"
