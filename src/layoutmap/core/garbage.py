"""Pause Python's garbage collection while many long-lived objects are created."""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
# A plan creates many objects that stay in use, which the garbage collector would scan in vain (decisions/0027).
def pause_garbage_collection() -> Generator[None]:
    """Pause the garbage collector, which scans all objects again each time their number grows."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
