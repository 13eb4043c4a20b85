"""Where a warning is to point: the line of the user's code that led to it."""

from __future__ import annotations

import inspect
from collections.abc import Set


def level_of_user(inner: Set[str] = frozenset()) -> int:
    """The `stacklevel` at which a warning of the function that asks names the user's line.

    Args:
        inner: Packages inside of which this library works: their frames are passed by, too.
    """
    passed_by = {"layoutmap", "contextlib", *inner}
    frame, level = inspect.currentframe(), 0
    while frame and frame.f_globals.get("__name__", "").partition(".")[0] in passed_by:
        frame, level = frame.f_back, level + 1
    return level
