"""The chunks of a variable as columns of numbers: a manifest may have half a million, and few of them are wanted."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, overload

import numpy as np

from layoutmap.core.blocks import (
    Index,
    NumpyArray,
    covered_once,
    ends_of,
    full_index,
    index_text,
    intersect,
    not_once,
)


@dataclass(frozen=True, slots=True)
class Chunk:
    """A block of a variable in a file.

    Args:
        file: The number of the file.
        start: The byte of the file at which it begins.
        index: Where it is in the variable.
        checksum: Its checksum.
    """

    file: int
    start: int
    index: Index
    checksum: str


class ChunkTable(Sequence[Chunk]):
    """The chunks of a variable, as a manifest has them.

    Args:
        rows: Each as `chunk_to_json` returns it.
        rank: The number of axes of the variable.
    """

    def __init__(self, rows: Sequence[Any], rank: int):
        self._rows, self._rank = rows, rank

    @cached_property
    def _columns(self) -> tuple[NumpyArray, NumpyArray, NumpyArray, NumpyArray, Sequence[str]]:
        """See `_columns_of`."""
        return _columns_of(self._rows, self._rank)

    def overlapping(self, index: Index) -> list[tuple[Chunk, Index]]:
        """Return the chunks that have something of a block, in order, and what: the chunk's own index if it is all."""
        if not len(self):
            return []
        _, _, begins, ends, _ = self._columns
        first, last = (np.array([part[i] for part in ends_of(index)], np.int64) for i in (0, 1))
        shared = (np.maximum(begins, first) < np.minimum(ends, last)).all(axis=1)
        is_inside = np.asarray(((first <= begins) & (ends <= last)).all(axis=1))
        chunks = [(self[int(row)], is_inside[row]) for row in np.flatnonzero(shared)]
        return [(c, c.index if inside else intersect(c.index, index) or ()) for c, inside in chunks]

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, row: int) -> Chunk: ...
    @overload
    def __getitem__(self, row: slice) -> list[Chunk]: ...
    def __getitem__(self, row: int | slice) -> Chunk | list[Chunk]:
        if isinstance(row, slice):
            return [self[i] for i in range(*row.indices(len(self)))]
        return chunk_from_json(self._rows[row])


class Chunked(NamedTuple):
    """A variable and the rows of its chunks, as a manifest has them.

    Attributes:
        path: The path of the variable.
        shape: Its shape.
        itemsize: Bytes of one element.
        rows: Each as `chunk_to_json` returns it.
    """

    path: str
    shape: tuple[int, ...]
    itemsize: int
    rows: Sequence[Any]


def check_chunks(variables: Iterable[Chunked], file_sizes: Sequence[int]) -> None:
    """Raise if a chunk is outside of its variable, or of its file, or an element is not in exactly one chunk.

    Args:
        variables: The variables. Those of one rank are checked together: to call numpy for each takes far longer.
        file_sizes: The sizes of the files in bytes.

    Raises:
        ValueError: One is; `TypeError` or `OverflowError`, where a row is none of a chunk.
    """
    by_rank: dict[int, list[Chunked]] = {}
    for each in variables:
        if math.prod(max(size, 1) for size in each.shape) * each.itemsize >= 2**63:
            raise ValueError(f"{each.path}: shape {each.shape}")
        by_rank.setdefault(len(each.shape), []).append(each)
    for rank, group in by_rank.items():
        rows = [row for each in group for row in each.rows]
        files, starts, begins, ends, _ = _columns_of(rows, rank)
        counts = [len(each.rows) for each in group]
        owners = np.repeat(np.arange(len(group)), counts)
        shapes = np.array([each.shape for each in group], np.int64).reshape(len(group), rank)
        right = ((begins >= 0) & (begins <= ends) & (ends <= shapes[owners])).all(axis=1)
        right &= (files >= 0) & (files < len(file_sizes))
        if right.all():
            num_bytes = (
                np.prod(ends - begins, axis=1) * np.array([e.itemsize for e in group], np.int64)[owners]
            )
            right = (starts >= 0) & (starts <= np.array(file_sizes, np.int64)[files] - num_bytes)
        if not right.all():
            row = int(np.argmin(right))
            raise ValueError(f"{group[int(owners[row])].path}: chunk {rows[row]}")
        for number in np.flatnonzero(~covered_once(begins, ends, counts, np.zeros_like(shapes), shapes)):
            (own,), wanted = np.nonzero(owners == number), full_index(group[number].shape)
            if (found := not_once(begins[own], ends[own], wanted)) is not None:
                cell, times = found
                raise ValueError(f"{group[number].path}: {times or 'no'} chunks have {index_text(cell)}")


def _columns_of(
    rows: Sequence[Any], rank: int
) -> tuple[NumpyArray, NumpyArray, NumpyArray, NumpyArray, Sequence[str]]:
    """The files of chunks, where they start in these, where they begin and end in their variables, and their checksums.

    Raises:
        ValueError: They are not rows of chunks.
    """
    files, starts, indices, checksums = zip(*rows, strict=True) if rows else ((), (), (), ())
    if not all(isinstance(each, str) for each in checksums):
        raise ValueError("a checksum of a chunk is not text")
    if any(len(index) != rank for index in indices):
        raise ValueError("a place of a chunk has not as many axes as its variable")
    ends = _integers(indices, (len(rows), rank, 2))
    return (
        _integers(files, (len(rows),)),
        _integers(starts, (len(rows),)),
        ends[..., 0],
        ends[..., 1],
        checksums,
    )


def _integers(values: Sequence[Any], shape: tuple[int, ...]) -> NumpyArray:
    """Whole numbers of JSON as an array of a shape."""
    found = np.array(values)
    # It may be text, fractions, numbers beyond it, or lists of lists.
    if found.size and (found.dtype != np.int64 or found.shape != shape):
        raise ValueError(f"{found.dtype}{list(found.shape)} where whole numbers belong")
    return found.reshape(shape).astype(np.int64, copy=False)


def chunk_to_json(chunk: Chunk) -> list[Any]:
    """A chunk as JSON has it."""
    return [chunk.file, chunk.start, [[part.start, part.stop] for part in chunk.index], chunk.checksum]


def chunk_from_json(found: Sequence[Any]) -> Chunk:
    """Read what `chunk_to_json` wrote."""
    file, start, index, checksum = found
    return Chunk(file, start, tuple(slice(begin, end) for begin, end in index), checksum)
