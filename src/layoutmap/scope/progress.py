"""Show the progress of long work on stderr: on one line of a terminal, or on lines of a log."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Literal, Self

from layoutmap.core.escaping import escape_text
from layoutmap.core.terminals import is_interactive
from layoutmap.core.variables import VariableSpec

_DELAY_SECONDS = 2.0
_UPDATE_SECONDS = 0.1
_LOG_SECONDS = 5.0  # between two log lines

Shown = bool | Literal["log"] | None
"""Whether to show progress.

`None`: on a terminal and in a notebook, if the work takes more than two seconds. `"log"`: so, too, and elsewhere a line
each few seconds.
"""


class ProgressLine:
    """A line that each update overwrites and the end clears.

    Args:
        enabled: Whether to show it.
    """

    def __init__(self, enabled: Shown = None):
        self._is_log = enabled == "log" and not is_interactive()
        self._enabled = self._is_log or (enabled if isinstance(enabled, bool) else is_interactive())
        self._between_seconds = _LOG_SECONDS if self._is_log else _UPDATE_SECONDS
        patience = 0 if enabled is True else _LOG_SECONDS if self._is_log else _DELAY_SECONDS
        self._next = time.monotonic() + patience
        self._width = 0  # the width of the current line in characters

    def __enter__(self) -> Self:
        return self

    def _is_due(self) -> bool:
        now = time.monotonic()
        if not self._enabled or now < self._next:
            return False
        self._next = now + self._between_seconds
        return True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._width:
            self._show("")

    def _show(self, line: str) -> None:
        """Overwrite the line, padded with spaces, because notebooks ignore terminal codes except carriage returns."""
        if self._is_log:
            print(line, file=sys.stderr, flush=True)
            return
        sys.stderr.write(f"\r{line.ljust(self._width)}\r{line}")
        sys.stderr.flush()
        self._width = len(line)


class Progress(ProgressLine):
    """Show the number of finished variables and the share of their bytes.

    Args:
        variables: The variables, by key.
        enabled: See `ProgressLine`.
        verb: What is done with them, as in `"saved"`; empty: they are materialized, which needs no word.
    """

    def __init__(self, variables: Mapping[str, VariableSpec], *, enabled: bool | None = None, verb: str = ""):
        super().__init__(enabled)
        self._variables = variables
        self._total_bytes = sum(variable.global_bytes for variable in self._variables.values()) or 1
        self._made = self._made_bytes = 0
        self._verb = f" {verb}" * bool(verb)

    def __call__(self, key: str) -> None:
        """Count a variable as finished."""
        variable = self._variables[key]
        self._made += 1
        self._made_bytes += variable.global_bytes
        if self._is_due():
            share = 100 * self._made_bytes // self._total_bytes
            counts = f"{self._made}/{len(self._variables)} variables{self._verb}, {share}%"
            self._show(f"layoutmap: {counts}  {escape_text(variable.path)}")


class ElapsedTime(ProgressLine):
    """Show the seconds that a task has taken."""

    def __init__(self, what: str, *, enabled: Shown = None):
        super().__init__(enabled)
        self._what, self._begin = what, time.monotonic()

    def __call__(self, done: str = "") -> None:
        """Show the elapsed time, and the progress in `done`."""
        if self._is_due():
            self._show(f"layoutmap: {self._what}, {time.monotonic() - self._begin:.0f} s{done}")
