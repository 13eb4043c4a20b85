"""Find the line of the user's code at which a warning should point."""

from __future__ import annotations

import inspect
from collections.abc import Set


def find_user_stacklevel(inner: Set[str] = frozenset()) -> int:
    """Return the `stacklevel` with which a warning from the calling function points at the user's line.

    Args:
        inner: Packages inside of which this library works: their frames are passed by, too.
    """
    passed_by = {"layoutmap", "contextlib", *inner}
    frame, level = inspect.currentframe(), 0
    while frame and frame.f_globals.get("__name__", "").partition(".")[0] in passed_by:
        frame, level = frame.f_back, level + 1
    return level
