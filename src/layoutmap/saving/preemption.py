"""Record SIGTERM from a scheduler, so that the next `CheckpointManager.save` saves a last step."""

from __future__ import annotations

import signal
import threading
import time
import weakref
from typing import Any

from layoutmap.core.errors import CheckpointError


# SIGTERM announces that the machine will stop. Processes get it at different times, so only record the signal, and let
# all processes save the same step later (decisions/0079).
class PreemptionSignal:
    """Record SIGTERM instead of ending the program. A handler that was installed before is still called."""

    def __init__(self, seconds: float):
        if not 0 < seconds < float("inf"):
            raise CheckpointError(
                f"preemption_seconds={seconds!r} cannot be used",
                why="the time from SIGTERM until the machine stops must be positive and finite",
                fix="pass your scheduler's grace period, as in preemption_seconds=30",
            )
        if threading.current_thread() is not threading.main_thread():
            raise CheckpointError(
                "preemption_seconds: SIGTERM can be recorded only in the main thread",
                why="Python handles signals only in its main thread",
                fix="create the manager in the main thread",
            )
        self.total_seconds = seconds
        signal_times = list[float]()
        self._signal_times = signal_times
        earlier_handler: Any = signal.getsignal(signal.SIGTERM)

        def record_signal(number: int, frame: object) -> None:
            signal_times.append(time.monotonic())
            if callable(earlier_handler):
                earlier_handler(number, frame)

        signal.signal(signal.SIGTERM, record_signal)
        self._close = weakref.finalize(self, _restore_earlier_handler, record_signal, earlier_handler)
        self._close.atexit = False

    @property
    def seconds_since_signal(self) -> float:
        """Seconds since SIGTERM, or a negative number before it."""
        return time.monotonic() - self._signal_times[0] if self._signal_times else -1.0

    def close(self) -> None:
        """Restore the handler of SIGTERM that was installed before this object was created."""
        self._close()


def _restore_earlier_handler(handler: Any, earlier_handler: Any) -> None:
    """Restore the earlier handler of SIGTERM, unless the program has replaced `handler` since."""
    is_installed = signal.getsignal(signal.SIGTERM) is handler
    if is_installed and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_DFL if earlier_handler is None else earlier_handler)
