"""Weights written as Hugging Face's libraries write and read them: files of safetensors, and an index."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from layoutmap.checkpoint.dtypes import SAFETENSORS, numpy_dtype
from layoutmap.checkpoint.renamed import under_their_names
from layoutmap.checkpoint.renaming import read_names
from layoutmap.checkpoint.source import SavedVariable, Source
from layoutmap.checkpoint.storage import LocalStorage, new_token
from layoutmap.checkpoint.writer import header_bytes
from layoutmap.core.blocks import Index, full_index
from layoutmap.core.errors import CheckpointError
from layoutmap.core.folders import hidden_folder, sync_folder
from layoutmap.core.variables import Kind

MOST_BYTES = 5 << 30
"""How large a file becomes, unless one tensor is larger; as in Hugging Face's libraries."""

_BLOCK_BYTES = 1 << 26  # how much is in memory at once


def export_source(
    source: Source,
    directory: str | os.PathLike[str],
    *,
    names: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    max_shard_bytes: int = MOST_BYTES,
    progress: Callable[[str], object] | None = None,
) -> str:
    """Write the weights and moving statistics of a source as files of safetensors.

    Values are read and written in blocks of at most 64 MiB, or one row of a tensor. The folder exists when this
    returns, and durable: all of it, or, whatever happens on the way, none of it.

    Args:
        source: What values are read from, such as a `Step`.
        directory: The folder to make. If it exists, it is empty.
        names: What the variables are called in the files; see `load`. `None`: what they are called in the source.
        max_shard_bytes: How large a file becomes; one tensor is in one file. Of one file the name is
            `model.safetensors`, several are `model-00001-of-00002.safetensors` and so on, with an index.
        progress: Called with the name of each tensor when it is written.

    Returns:
        The folder.

    Raises:
        CheckpointError: The folder exists and is not empty, values cannot be read or written, the table has no line for
            a variable, or the format has no such element type.
        RuleError: The table of names cannot be read.
    """
    if max_shard_bytes <= 0:
        raise CheckpointError(
            f"max_shard_bytes={max_shard_bytes!r}: too small for a file",
            why="it is a size in bytes",
            fix="pass 5 << 30",
        )
    if names is not None:
        source = under_their_names(source, read_names(names))
    variables = [v for v in source.variables.values() if v.kind in (Kind.WEIGHT, Kind.STATE)]
    files = list(_files(variables, max_shard_bytes))
    target = Path(os.path.abspath(os.path.expanduser(os.fspath(directory))))
    _check_target(target, sum(map(_num_bytes, variables)))
    with _folder(target) as (storage, folder):
        weight_map: dict[str, str] = {}
        for number, content in enumerate(files, 1):
            name = "model.safetensors"
            if len(files) > 1:
                name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
            with storage.create(folder, name) as sink:
                rows = [(v.path, SAFETENSORS[v.dtype], v.shape, _num_bytes(v)) for v in content]
                sink.write(header_bytes("pt", rows)[0])  # a format that transformers asks for
                for variable in content:
                    for index in _blocks(variable):
                        values = np.ascontiguousarray(source.read(variable.path, index))
                        sink.write(values.reshape(-1).view(np.uint8).data)
                    weight_map[variable.path] = name
                    if progress is not None:
                        progress(variable.path)
        if len(files) > 1:
            total = sum(map(_num_bytes, variables))
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
            with storage.create(folder, "model.safetensors.index.json") as sink:
                sink.write(json.dumps(index, indent=2).encode())
    return str(target)


def _files(variables: Sequence[SavedVariable], most: int) -> Iterator[list[SavedVariable]]:
    """The variables of each file; large elements come first, so that all are where numpy can map them."""
    found: list[SavedVariable] = []
    size = 0
    for variable in variables:
        if variable.dtype not in SAFETENSORS:
            raise CheckpointError(
                f"{variable.path}: elements of type {variable.dtype} cannot be written",
                why=f"safetensors has {', '.join(SAFETENSORS)}",
                fix="convert it to one of these, or keep it in a checkpoint of layoutmap.save",
            )
        if found and size + _num_bytes(variable) > most:
            yield _aligned(found)
            found, size = [], 0
        found.append(variable)
        size += _num_bytes(variable)
    yield _aligned(found)


def _aligned(variables: list[SavedVariable]) -> list[SavedVariable]:
    return sorted(variables, key=lambda each: -numpy_dtype(each.dtype).itemsize)


def _blocks(variable: SavedVariable) -> Iterator[Index]:
    """The variable in blocks that follow each other in a file: rows of its first axis."""
    everything = full_index(variable.shape)
    if not variable.shape:
        yield everything
        return
    row = _num_bytes(variable) // max(1, variable.shape[0])
    step = max(1, _BLOCK_BYTES // max(1, row))
    for start in range(0, variable.shape[0], step):
        yield (slice(start, min(start + step, variable.shape[0])), *everything[1:])


def _num_bytes(variable: SavedVariable) -> int:
    return math.prod(variable.shape) * numpy_dtype(variable.dtype, variable.path).itemsize


def _check_target(target: Path, needed: int) -> None:
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise CheckpointError(
            f"{target}: it exists already",
            why="an export creates its folder in one step, and overwrites nothing",
            fix="name another folder; what else belongs in it, such as config.json, can be added then",
        )
    free = LocalStorage(target).free_bytes()
    if free is not None and free < needed:
        raise CheckpointError(
            f"{target}: there is not enough space for it",
            facts={"needed": f"{needed:,} bytes", "free": f"{free:,} bytes"},
            why="the file system has less space left than the weights need",
            fix="free some space, or export elsewhere",
        )


@contextlib.contextmanager
def _folder(target: Path) -> Generator[tuple[LocalStorage, str]]:
    """A hidden folder beside the target, which becomes the target when all is in it."""
    try:
        with hidden_folder(target, new_token()) as hidden:
            yield LocalStorage(target.parent), hidden.name
            sync_folder(hidden)
            os.rename(hidden, target)
            sync_folder(target.parent)
    except OSError as error:
        raise CheckpointError(
            f"{target}: it cannot be written",
            why=f"the system says: {error.strerror or error}",
            fix="name a folder that this user may write; nothing has been left there",
        ) from error
