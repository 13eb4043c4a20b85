"""Record SIGTERM from a scheduler, so that the next `CheckpointManager.save` saves a last step."""

from __future__ import annotations

import signal
import threading
import time
import weakref
from typing import Any

from layoutmap.core.errors import CheckpointError


# SIGTERM announces that the machine will stop, so record it, and let all processes save the
# same step (decisions/0079).
class Preemption:
    """Record SIGTERM instead of ending the program. An earlier handler is still called."""

    def __init__(self, seconds: float):
        if not 0 < seconds < float("inf"):
            raise CheckpointError(
                f"preemption_seconds={seconds!r} cannot be used",
                why="it is the time from SIGTERM until the machine stops",
                fix="pass your scheduler's grace period, as in preemption_seconds=30",
            )
        if threading.current_thread() is not threading.main_thread():
            raise CheckpointError(
                "preemption_seconds: SIGTERM can be recorded only in the main thread",
                why="Python handles signals only in its main thread",
                fix="create the manager in the main thread",
            )
        self.total_seconds = seconds
        noted = list[float]()
        self._noted = noted
        before: Any = signal.getsignal(signal.SIGTERM)

        def record_signal(number: int, frame: object) -> None:
            noted.append(time.monotonic())
            if callable(before):
                before(number, frame)

        signal.signal(signal.SIGTERM, record_signal)
        self._close = weakref.finalize(self, _restore_handler, record_signal, before)
        self._close.atexit = False

    @property
    def seconds(self) -> float:
        """Seconds since SIGTERM, or a negative number before it."""
        return time.monotonic() - self._noted[0] if self._noted else -1.0

    def close(self) -> None:
        """Restore the earlier handler of SIGTERM."""
        self._close()


def _restore_handler(own: Any, before: Any) -> None:
    is_own = signal.getsignal(signal.SIGTERM) is own
    if is_own and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)
