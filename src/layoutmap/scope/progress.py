"""Show the progress of long work on stderr: on one line of a terminal, or on lines of a log."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Literal, Self

from layoutmap.core.escaping import escape_text
from layoutmap.core.terminals import is_stderr_interactive
from layoutmap.core.variables import VariableSpec

_DELAY_SECONDS = 2.0
_UPDATE_SECONDS = 0.1
_LOG_SECONDS = 5.0  # time between two log lines

ProgressMode = bool | Literal["log"] | None
"""Whether to show progress.

`None`: on a terminal and in a notebook, if the work takes more than two seconds. `"log"`: as with `None`, and elsewhere
a new line every few seconds.
"""


class ProgressLine:
    """Show a line of progress that each update overwrites, and clear it at the end of the `with` block.

    Args:
        enabled: Whether to show the line.
    """

    def __init__(self, enabled: ProgressMode = None):
        self._is_log = enabled == "log" and not is_stderr_interactive()
        self._enabled = self._is_log or (enabled if isinstance(enabled, bool) else is_stderr_interactive())
        self._between_seconds = _LOG_SECONDS if self._is_log else _UPDATE_SECONDS
        delay = 0 if enabled is True else _LOG_SECONDS if self._is_log else _DELAY_SECONDS
        self._next = time.monotonic() + delay
        self._width = 0  # the width of the current line in characters

    def __enter__(self) -> Self:
        return self

    def _is_update_due(self) -> bool:
        now = time.monotonic()
        if not self._enabled or now < self._next:
            return False
        self._next = now + self._between_seconds
        return True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._width:
            self._show_line("")

    def _show_line(self, text: str) -> None:
        """Overwrite the line by a text, padded with spaces, since notebooks ignore terminal codes except `\\r`."""
        if self._is_log:
            print(text, file=sys.stderr, flush=True)
            return
        sys.stderr.write(f"\r{text.ljust(self._width)}\r{text}")
        sys.stderr.flush()
        self._width = len(text)


class Progress(ProgressLine):
    """Show the number of finished variables and the share of their bytes.

    Args:
        variables: The variables, by key.
        enabled: See `ProgressLine`.
        verb: A participle that says what happens to variables, as in `"saved"`. Empty: the text has no verb.
    """

    def __init__(self, variables: Mapping[str, VariableSpec], *, enabled: bool | None = None, verb: str = ""):
        super().__init__(enabled)
        self._variables = variables
        self._total_bytes = sum(variable.global_bytes for variable in self._variables.values()) or 1
        self._num_finished = self._finished_bytes = 0
        self._verb = f" {verb}" * bool(verb)

    def __call__(self, key: str) -> None:
        """Count the variable with this key as finished, and update the line."""
        variable = self._variables[key]
        self._num_finished += 1
        self._finished_bytes += variable.global_bytes
        if self._is_update_due():
            share = 100 * self._finished_bytes // self._total_bytes
            counts = f"{self._num_finished}/{len(self._variables)} variables{self._verb}, {share}%"
            self._show_line(f"layoutmap: {counts}  {escape_text(variable.path)}")


class ElapsedTime(ProgressLine):
    """Show the seconds that a task has taken so far."""

    def __init__(self, task: str, *, enabled: ProgressMode = None):
        super().__init__(enabled)
        self._what, self._begin = task, time.monotonic()

    def __call__(self, progress: str = "") -> None:
        """Update the line with the elapsed seconds, followed by the text `progress`."""
        if self._is_update_due():
            self._show_line(f"layoutmap: {self._what}, {time.monotonic() - self._begin:.0f} s{progress}")
