"""A pause of Python's search for garbage, where very many objects are made and all of them are kept."""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def garbage_kept() -> Generator[None]:  # why: decisions/0027
    """Pause the search for cycles that nobody holds, which looks at all objects again each time there are more."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
