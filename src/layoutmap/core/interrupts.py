"""Delay Ctrl-C and SIGTERM until a group of changes is complete."""

from __future__ import annotations

import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def delay_interrupts() -> Generator[None]:
    """Postpone the handlers of Ctrl-C and SIGTERM to the end of the block.

    Python runs signal handlers only in the main thread, so this does nothing in other threads.

    Example:
        >>> with delay_interrupts():
        ...     pass
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[tuple[int, Any]] = []
    handlers: dict[int, Any] = {}

    def record_signal(number: int, frame: Any) -> None:
        received.append((number, frame))

    try:
        for number in _SIGNALS:
            # Only handlers that are Python functions can raise inside the `with` block, so delay only these.
            if callable(handler := signal.getsignal(number)):
                handlers[number] = handler
                signal.signal(number, record_signal)
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for number, frame in received:
            handlers[number](number, frame)
