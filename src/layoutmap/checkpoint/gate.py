"""Check each file of a checkpoint before it is used."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Generator
from pathlib import PurePosixPath

from layoutmap.core.errors import CheckpointError, shorten_repr

MOST_SMALL_BYTES = 1 << 28  # limit for metadata, indexes, and manifests; 500,000 chunks take 50 MB
_LEAST_SPARSE_BYTES = 1 << 30
FIX = "restore it from a copy, or save it again"
"""Advice on a damaged file, if nothing better is known."""


@contextlib.contextmanager
# No list of parser errors is complete, so every error of a parser becomes a `CheckpointError` (decisions/0085).
def translate_parser_errors(where: str) -> Generator[None]:
    """Raise a `CheckpointError` in place of any error that a damaged file causes in a parser.

    Args:
        where: The file or variable, for the message.
    """
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        reason = str(error).splitlines()[0][:300] if str(error) else ""
        raise CheckpointError(
            f"{where}: it cannot be read", why=f"{type(error).__name__}: {reason}", fix=FIX
        ) from error


def check_regular(path: str, found: os.stat_result) -> None:
    """Raise unless a path is a regular file with all its bytes on the disk.

    Raises:
        CheckpointError: It is a directory, a pipe or a device, or nearly all of a large file is a hole.
    """
    if not stat.S_ISREG(found.st_mode):
        raise CheckpointError(
            f"{path}: it is not a regular file", why="only regular files hold values", fix=FIX
        )
    if found.st_size > _LEAST_SPARSE_BYTES and found.st_blocks * 512 < found.st_size >> 8:
        raise CheckpointError(
            f"{path}: the file is sparse",
            facts={"bytes": f"{found.st_size:,}", "on the disk": f"{found.st_blocks * 512:,}"},
            why="nearly all of its bytes were never written",
            fix=FIX,
        )


def check_small(path: str, num_bytes: int, most: int = MOST_SMALL_BYTES) -> None:
    """Raise if a file that is read as one is larger than such files can be."""
    if num_bytes > most:
        raise CheckpointError(
            f"{path}: the file is too large",
            facts={"bytes": f"{num_bytes:,}"},
            why=f"files of this kind have at most {most:,} bytes",
            fix=FIX,
        )


def check_inside(where: str, name: str) -> None:
    """Raise if a file name leads out of the folder of its checkpoint."""
    path = PurePosixPath(name)
    if not name or path.is_absolute() or ".." in path.parts or {*"\\\0"} & {*name}:
        raise CheckpointError(
            f"{where}: it names {shorten_repr(name)}",
            why="files of a checkpoint are in its folder",
            fix=FIX,
        )
