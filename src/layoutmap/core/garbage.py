"""Pause Python's garbage collection while many long-lived objects are created."""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
# A plan creates many objects that stay in use, so scanning them for garbage costs time in vain (decisions/0027).
def pause_garbage_collection() -> Generator[None]:
    """Disable Python's garbage collector until the block ends, because it would scan all new objects repeatedly."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
