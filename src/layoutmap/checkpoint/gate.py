"""Check that a file is regular, complete, and small enough before it is read."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Generator
from pathlib import PurePosixPath

from layoutmap.core.errors import CheckpointError, shorten_repr

# Limit in bytes for a file that is read as a whole: metadata, index, or manifest (of 500,000 chunks: 50 MB).
MAX_SMALL_FILE_BYTES = 1 << 28
_MIN_SPARSE_FILE_BYTES = 1 << 30
FIX = "restore it from a copy, or save it again"
"""The default advice for a damaged file."""


@contextlib.contextmanager
# Parsers raise undocumented errors, so every error becomes a `CheckpointError` (decisions/0085).
def translate_parser_errors(where: str) -> Generator[None]:
    """Convert any error that a parser raises in the block, as for a damaged file, to a `CheckpointError`.

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


def check_regular_file(path: str, file_stat: os.stat_result) -> None:
    """Raise if a file is not a regular file, or if it is large and almost entirely unwritten (sparse).

    Raises:
        CheckpointError: The path is a directory, a pipe, or a device, or the file is sparse.
    """
    if not stat.S_ISREG(file_stat.st_mode):
        raise CheckpointError(
            f"{path}: it is not a regular file", why="only regular files hold values", fix=FIX
        )
    if file_stat.st_size > _MIN_SPARSE_FILE_BYTES and file_stat.st_blocks * 512 < file_stat.st_size >> 8:
        raise CheckpointError(
            f"{path}: the file is sparse",
            facts={"bytes": f"{file_stat.st_size:,}", "on the disk": f"{file_stat.st_blocks * 512:,}"},
            why="most of its bytes were never written",
            fix=FIX,
        )


def check_size_limit(path: str, num_bytes: int, max_bytes: int = MAX_SMALL_FILE_BYTES) -> None:
    """Raise if a file that is read as a whole has more than `max_bytes` bytes."""
    if num_bytes > max_bytes:
        raise CheckpointError(
            f"{path}: the file is too large",
            facts={"bytes": f"{num_bytes:,}"},
            why=f"files of this kind have at most {max_bytes:,} bytes",
            fix=FIX,
        )


def check_name_inside_folder(where: str, name: str) -> None:
    """Raise if the file name in a checkpoint's metadata points outside the checkpoint's folder."""
    path = PurePosixPath(name)
    if not name or path.is_absolute() or ".." in path.parts or {*"\\\0"} & {*name}:
        raise CheckpointError(
            f"{where}: it refers to the invalid file name {shorten_repr(name)}",
            why="the name of a file must be a relative path inside the folder of the checkpoint",
            fix=FIX,
        )
