"""A KeyboardInterrupt before any line, for tests that open a scope again and again, each interrupted further on."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import forked


class Interrupter:
    """Interrupts a function before the n-th line that it runs in some files.

    Python looks for signals when a Python function begins, after a call and where a loop turns, so not between the end
    of a block and the release of its lock, which is C. There a trace function would interrupt, and a signal never does.

    Args:
        files: The ends of the files' names.
        reading: The names of functions in them that change nothing, and run many lines.
        interrupt: What happens before that line; `None`: KeyboardInterrupt.

    Attributes:
        lines: How many lines the last function ran.
    """

    def __init__(
        self,
        files: Iterable[str],
        reading: Iterable[str] = (),
        interrupt: Callable[[], object] | None = None,
    ):
        self._files = tuple(files)
        self._reading = frozenset(reading)
        self._interrupt = interrupt or _raise
        self._left = 0
        self.lines = 0

    def interrupted(self, function: Callable[[], Any], at: int) -> bool:
        """Whether a function was interrupted before the line of this number; else it has fewer lines."""
        self._left, self.lines = at, 0
        before = sys.gettrace()
        sys.settrace(self._call)
        try:
            function()
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
        return self._left <= 0  # it may have come where Python ignores exceptions, in a finalizer

    def _call(self, frame: Any, event: str, arg: Any) -> Any:
        code = frame.f_code
        is_read = code.co_filename.endswith(self._files) and code.co_name not in self._reading
        return self._line if is_read else None

    def _line(self, frame: Any, event: str, arg: Any) -> Any:
        if event == "line" and not self._is_lock(frame):
            self._left -= 1
            self.lines += 1
            if not self._left:
                self._interrupt()
        return self._line

    def _is_lock(self, frame: Any) -> bool:
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        return "with" in line and "lock:" in line


def _raise() -> None:
    raise KeyboardInterrupt


def run_alone(file: str, *arguments: int) -> None:
    """Run a file in a process of its own: what an interrupt leaves in a framework's C++ is not for other tests."""
    (ended,) = forked.wait_for_all([forked.start(Path(file), [*map(str, arguments)])])
    assert 0 == ended.returncode, ended.stderr
