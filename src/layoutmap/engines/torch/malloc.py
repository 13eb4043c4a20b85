"""Return freed memory to the system while a model is created.

A model is made in pieces that come and go between shards that stay. The heap of glibc keeps what was freed between
them, and what is left between two shards is often too small for the next piece: the process would grow by more than it
holds.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable


def release_memory() -> None:
    """Return freed memory to the system, if the C library supports it."""
    trim = _find_malloc_trim()
    if trim is not None:
        trim(0)


@functools.cache
def _find_malloc_trim() -> Callable[[int], int] | None:
    try:
        return ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):  # another C library or system
        return None
