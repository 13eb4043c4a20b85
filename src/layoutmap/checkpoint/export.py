"""Write the weights of a source into a new folder in another library's format, completely or not at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Any

from layoutmap.checkpoint.foreign import load_export_writer
from layoutmap.checkpoint.name_tables import NameTable, read_name_table
from layoutmap.checkpoint.renamed_source import make_renamed_source
from layoutmap.checkpoint.source import Source
from layoutmap.checkpoint.storage import LocalStorage, make_random_token
from layoutmap.core.errors import CheckpointError
from layoutmap.core.folders import open_hidden_folder, sync_folder
from layoutmap.core.variables import Kind

MAX_FILE_BYTES = 5 << 30
"""The default maximum size of a file, as in Hugging Face's libraries."""


def export_source(
    source: Source,
    directory: str | os.PathLike[str],
    *,
    format: str = "safetensors",
    names: NameTable | str | os.PathLike[str] | Mapping[str, Any] | None = None,
    max_shard_bytes: int = MAX_FILE_BYTES,
    progress: Callable[[str], object] | None = None,
) -> str:
    """Write the weights and moving statistics of a source in a format of a different library.

    Values are read and written in blocks of at most 64 MiB, or one row of a tensor. When this returns, the folder is
    complete and flushed to disk. After an error, it does not exist.

    Args:
        source: The source of the values, such as a `StepSource`.
        directory: The folder to create. If it exists, it must be empty.
        format: The name of the format, a key of `layoutmap.checkpoint.foreign.WRITERS`.
        names: The table with the names of the variables in the files; see `load`. `None`: the names in the source.
        max_shard_bytes: The maximum size of a file in bytes. A file with one larger tensor may exceed it.
        progress: Called with the name of each tensor when it is written.

    Returns:
        The folder.

    Raises:
        CheckpointError: The folder exists and is not empty, values cannot be read or written, the table has no line for
            a variable, or the format does not exist or has no such element type.
        RuleError: The name table cannot be read.
    """
    if max_shard_bytes <= 0:
        raise CheckpointError(
            f"max_shard_bytes={max_shard_bytes!r} is too small",
            why="it is the maximum size of a file in bytes",
            fix="pass a larger size, such as 5 << 30",
        )
    write = load_export_writer(format)
    if names is not None:
        source = make_renamed_source(
            source, names if isinstance(names, NameTable) else read_name_table(names)
        )
    variables = [v for v in source.variables.values() if v.kind in (Kind.WEIGHT, Kind.STATE)]
    target = Path(os.path.abspath(os.path.expanduser(os.fspath(directory))))
    _check_target_folder(target, sum(each.global_bytes for each in variables))
    with _open_hidden_target_folder(target) as (storage, folder):
        write(storage, folder, source, variables, max_shard_bytes, progress or str)
    return str(target)


def _check_target_folder(target: Path, needed_bytes: int) -> None:
    """Raise if the target folder is not empty, or if its file system has less than `needed_bytes` of free space."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise CheckpointError(
            f"{target}: the folder exists already and is not empty",
            why="an export creates its folder in one step, and never overwrites files",
            fix="name a new folder; add other files, such as config.json, after the export",
        )
    free = LocalStorage(target).get_free_bytes()
    if free is not None and free < needed_bytes:
        raise CheckpointError(
            f"{target}: there is not enough disk space",
            facts={"needed": f"{needed_bytes:,} bytes", "free": f"{free:,} bytes"},
            why="the file system has less space left than the weights need",
            fix="free some space, or export elsewhere",
        )


@contextlib.contextmanager
def _open_hidden_target_folder(target: Path) -> Generator[tuple[LocalStorage, str]]:
    """Yield a storage and the name of a hidden folder in it, which is renamed to `target` after the block."""
    try:
        with open_hidden_folder(target, make_random_token()) as hidden:
            yield LocalStorage(target.parent), hidden.name
            sync_folder(hidden)
            os.rename(hidden, target)
            sync_folder(target.parent)
    except OSError as error:
        raise CheckpointError(
            f"{target}: the folder cannot be written",
            why=f"the system says: {error.strerror or error}",
            fix="name a folder that this user may write to; nothing was written",
        ) from error
