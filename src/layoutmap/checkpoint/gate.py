"""Checks that each file and each variable of a checkpoint passes before its values are used."""

from __future__ import annotations

import contextlib
import math
import os
import stat
from collections.abc import Generator, Iterable
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from layoutmap.core.errors import CheckpointError, brief
from layoutmap.core.variables import itemsize

if TYPE_CHECKING:
    from layoutmap.checkpoint.source import SavedVariable

MOST_SMALL_BYTES = 1 << 28  # metadata, indexes and manifests; a manifest of 500,000 chunks has 50 MB
_MOST_NAME = 4096
_MOST_AXES = 64  # numpy's limit
_LEAST_SPARSE_BYTES = 1 << 30
_FIX = "restore it from a copy, or save it again"


@contextlib.contextmanager
def foreign_errors_refused(where: str) -> Generator[None]:  # why: decisions/0194
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
            f"{where}: it cannot be read", why=f"{type(error).__name__}: {reason}", fix=_FIX
        ) from error


def check_regular(path: str, found: os.stat_result) -> None:
    """Raise unless a path is a regular file that has its bytes.

    Raises:
        CheckpointError: It is a directory, a pipe or a device, or nearly all of a large file is a hole.
    """
    if not stat.S_ISREG(found.st_mode):
        raise CheckpointError(
            f"{path}: it is not a regular file", why="only regular files hold values", fix=_FIX
        )
    if found.st_size > _LEAST_SPARSE_BYTES and found.st_blocks * 512 < found.st_size >> 8:
        raise CheckpointError(
            f"{path}: the file is sparse",
            facts={"bytes": f"{found.st_size:,}", "on the disk": f"{found.st_blocks * 512:,}"},
            why="nearly all of its bytes were never written",
            fix=_FIX,
        )


def check_small(path: str, num_bytes: int, most: int = MOST_SMALL_BYTES) -> None:
    """Raise if a file that is read whole is larger than such files become."""
    if num_bytes > most:
        raise CheckpointError(
            f"{path}: the file is too large",
            facts={"bytes": f"{num_bytes:,}"},
            why=f"files of this kind have at most {most:,} bytes",
            fix=_FIX,
        )


def check_inside(where: str, name: str) -> None:
    """Raise if a name of a file leads out of the folder of its checkpoint."""
    path = PurePosixPath(name)
    if not name or path.is_absolute() or ".." in path.parts or {*"\\\0"} & {*name}:
        raise CheckpointError(
            f"{where}: it names {brief(name)}",
            why="files of a checkpoint are in its folder",
            fix=_FIX,
        )


def check_variables(where: str, variables: Iterable[SavedVariable], most_bytes: int | None = None) -> None:
    """Raise if a variable has a name, a rank or a size that its files cannot have.

    Args:
        where: The checkpoint, for messages.
        variables: The variables.
        most_bytes: How many bytes one of them can have at most; `None`: the format has checked it.

    Raises:
        CheckpointError: One has.
    """
    for each in variables:
        why = ""
        if len(each.path) > _MOST_NAME:
            why = f"its name has {len(each.path):,} characters, and {_MOST_NAME:,} are the most"
        elif len(each.shape) > _MOST_AXES:
            why = f"it has {len(each.shape):,} axes, and {_MOST_AXES} are the most"
        else:
            size = math.ceil(math.prod(each.shape) * itemsize(each.dtype))
            most = 2**63 - 1 if most_bytes is None else most_bytes
            if size > most or math.prod(max(n, 1) for n in each.shape) >= 2**63:
                why = f"its shape {each.shape} needs {size:,} bytes, and its files can have {most:,}"
        if why:
            raise CheckpointError(f"{where}: {brief(each.path)} cannot be right", why=why, fix=_FIX)
