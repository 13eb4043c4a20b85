"""End the command line on Ctrl-C with one line and exit code 130.

Python raises `KeyboardInterrupt` at any line. Inside the import of a framework, C extensions crash or replace it by
errors of their own. So the signal's handler ends the process at once. Only blocks that must clean up ask for the
exception (decisions/0034).
"""

from __future__ import annotations

import os
import signal
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType

_INTERRUPTED = 130


class _Handler:
    """Handle SIGINT, and count the open `interruptible` blocks."""

    def __init__(self) -> None:
        self.num_interruptible = 0

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.num_interruptible and not _is_importing(frame):
            raise KeyboardInterrupt
        os.write(2, b"layoutmap: interrupted\n")
        os._exit(_INTERRUPTED)


def _is_importing(frame: FrameType | None) -> bool:
    while frame and not frame.f_code.co_filename.startswith("<frozen importlib"):
        frame = frame.f_back
    return frame is not None


def install_handler() -> None:
    """Install the handler, unless this process ignores the signal as background jobs do."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _Handler())


@contextmanager
def interruptible() -> Generator[None]:
    """Raise `KeyboardInterrupt` on Ctrl-C inside the block, unless a module is being imported."""
    handler = signal.getsignal(signal.SIGINT)
    asks = isinstance(handler, _Handler)
    if asks:
        handler.num_interruptible += 1
    try:
        yield
    finally:
        if asks:
            handler.num_interruptible -= 1


def finish(code: int) -> int:
    """Return the exit code of a finished command, and ignore later interrupts."""
    if isinstance(signal.getsignal(signal.SIGINT), _Handler):
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if code == _INTERRUPTED:
            # Frameworks' exit handlers can crash after an interrupt, so skip them.
            os._exit(code)
    return code
