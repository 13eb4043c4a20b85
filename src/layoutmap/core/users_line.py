"""Find the line of the user's code that a warning or an error should name."""

from __future__ import annotations

import inspect
import linecache
import traceback
from collections.abc import Set
from pathlib import PurePath


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


def find_line_of_error(error: BaseException, library_packages: Set[str] = frozenset()) -> str:
    """Return the innermost line outside of libraries that raised an error, or an empty text if none is known.

    Args:
        error: The error.
        library_packages: Top-level packages whose frames are skipped, besides this library's.
    """
    skipped = {"layoutmap", "contextlib", *library_packages}
    lines = [
        (frame.f_code.co_filename, number)
        for frame, number in traceback.walk_tb(error.__traceback__)
        if frame.f_globals.get("__name__", "").partition(".")[0] not in skipped
    ]
    if not lines:
        return ""
    path, number = lines[-1]
    return f"{PurePath(path).name}:{number}: {linecache.getline(path, number).strip()}".removesuffix(": ")
