"""Ctrl-C on the command line: one line and exit code 130, whenever it comes.

Python raises `KeyboardInterrupt` wherever the program happens to be. Inside the import of a framework that is in the
middle of its C extensions, some of which crash or hide it behind an error of their own. So the command ends at once
instead, from the signal's handler. Only what has something to keep or to clean up asks for the exception: see
docs/decisions/0034.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType

_INTERRUPTED = 130


class _Handler:
    """Signal handler of the command line; it counts the open blocks of `raised`."""

    def __init__(self) -> None:
        self.asking = 0

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.asking and not _imports(frame):
            raise KeyboardInterrupt
        os.write(2, b"layoutmap: interrupted\n")
        os._exit(_INTERRUPTED)


def _imports(frame: FrameType | None) -> bool:
    while frame and not frame.f_code.co_filename.startswith("<frozen importlib"):
        frame = frame.f_back
    return frame is not None


def install_handler() -> None:
    """Install the handler, unless this process ignores the signal as background jobs do."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _Handler())


@contextmanager
def raised() -> Generator[None]:
    """While open, Ctrl-C is a `KeyboardInterrupt`, as without this library, unless a module is being imported."""
    handler = signal.getsignal(signal.SIGINT)
    asks = isinstance(handler, _Handler)
    if asks:
        handler.asking += 1
    try:
        yield
    finally:
        if asks:
            handler.asking -= 1


def ended(code: int) -> int:
    """Return the exit code of a command that has finished; an interrupt no longer changes it."""
    if isinstance(signal.getsignal(signal.SIGINT), _Handler):
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if code == _INTERRUPTED:
            # The handlers that frameworks run at the end of a process can crash after an interrupt.
            os._exit(code)
    return code
