"""Find the line of the user's code at which a warning should point."""

from __future__ import annotations

import inspect
from collections.abc import Set


def find_user_stacklevel(library_packages: Set[str] = frozenset()) -> int:
    """Return the `stacklevel` that makes a `warnings.warn` point at the user's line.

    Args:
        library_packages: Top-level packages whose frames are skipped, besides this library's.
    """
    skipped = {"layoutmap", "contextlib", *library_packages}
    frame, level = inspect.currentframe(), 0
    while frame and frame.f_globals.get("__name__", "").partition(".")[0] in skipped:
        frame, level = frame.f_back, level + 1
    return level
