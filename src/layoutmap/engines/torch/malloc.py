"""Return freed memory to the system while a model is created.

Temporary pieces are freed between shards that stay. The heap of glibc keeps the freed memory, and the gap between two
shards is often too small for the next piece, so the process would grow by more than the shards need.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable


def return_freed_memory_to_system() -> None:
    """Return freed memory to the operating system, if the C library can."""
    trim = _find_malloc_trim()
    if trim is not None:
        trim(0)


@functools.cache
def _find_malloc_trim() -> Callable[[int], int] | None:
    try:
        return ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):  # the C library of this system has no `malloc_trim`
        return None
