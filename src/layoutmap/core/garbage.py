"""Pause Python's garbage collection while very many objects are created and all of them are kept."""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
# A plan creates many objects that stay in use, so the garbage collector would scan them in vain (decisions/0027).
def pause_garbage_collection() -> Generator[None]:
    """Pause the search for unreachable cycles, which scans all objects again as their number grows."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
