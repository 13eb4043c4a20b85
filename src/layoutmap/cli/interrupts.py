"""End the command line on Ctrl-C with one line and exit code 130.

Python raises `KeyboardInterrupt` at any line. While a framework is imported, C extensions would crash or replace it by
other errors. So the signal handler ends the process at once. Only blocks that must clean up get the exception
(decisions/0034).
"""

from __future__ import annotations

import os
import signal
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType

_INTERRUPTED = 130


class _InterruptHandler:
    """Handle SIGINT: raise `KeyboardInterrupt` in `allow_interrupts` blocks, and end the process elsewhere."""

    def __init__(self) -> None:
        self.num_interruptible = 0

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.num_interruptible and not _is_importing(frame):
            raise KeyboardInterrupt
        os.write(2, b"layoutmap: interrupted\n")
        os._exit(_INTERRUPTED)


def _is_importing(frame: FrameType | None) -> bool:
    """Return whether a frame or one of its callers is an import."""
    while frame and not frame.f_code.co_filename.startswith("<frozen importlib"):
        frame = frame.f_back
    return frame is not None


def install_interrupt_handler() -> None:
    """Install the handler for Ctrl-C, unless this process ignores the signal as background jobs do."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _InterruptHandler())


@contextmanager
def allow_interrupts() -> Generator[None]:
    """Raise `KeyboardInterrupt` on Ctrl-C inside the block, unless a module is being imported."""
    handler = signal.getsignal(signal.SIGINT)
    is_installed = isinstance(handler, _InterruptHandler)
    if is_installed:
        handler.num_interruptible += 1
    try:
        yield
    finally:
        if is_installed:
            handler.num_interruptible -= 1


def finish_command_without_interrupts(code: int) -> int:
    """Ignore Ctrl-C from now on, and return the exit code. If it is that of an interrupt, end the process at once."""
    if isinstance(signal.getsignal(signal.SIGINT), _InterruptHandler):
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if code == _INTERRUPTED:
            # Frameworks' exit handlers can crash after an interrupt, so end the process without them.
            os._exit(code)
    return code
