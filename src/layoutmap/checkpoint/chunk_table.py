"""The chunks of a variable as columns of numbers: a manifest may have half a million, and few of them are wanted."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, overload

import numpy as np

from layoutmap.core.blocks import (
    Index,
    NumpyArray,
    covered_once,
    ends_of,
    full_index,
    index_text,
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


class Columns(NamedTuple):
    """Chunks of variables of one rank, one row each.

    Attributes:
        files: The numbers of their files.
        starts: The bytes of these at which they begin.
        begins: Where they begin in their variables, a column for each axis.
        ends: Where they end there.
        checksums: Their checksums.
    """

    files: NumpyArray
    starts: NumpyArray
    begins: NumpyArray
    ends: NumpyArray
    checksums: Sequence[str]


class Shared(NamedTuple):
    """The part of a chunk that is in a block, too.

    Attributes:
        file: The number of the chunk's file.
        start: The byte of the file at which it begins.
        shape: The shape of the chunk.
        checksum: Its checksum.
        size: The number of its elements.
        place: Where the part is in the block.
        part: Where it is in the chunk; `None`: it is all of it.
    """

    file: int
    start: int
    shape: tuple[int, ...]
    checksum: str
    size: int
    place: Index
    part: Index | None


class ChunkTable(Sequence[Chunk]):
    """The chunks of a variable.

    Args:
        columns: Chunks, with those of others.
        rows: Which of them are the variable's.
    """

    def __init__(self, columns: Columns, rows: range):
        self._columns, self._rows = columns, rows

    def overlapping(self, index: Index) -> Iterator[Shared]:
        """Yield what chunks have of a block, in the order in which it is in the files."""
        rows = slice(self._rows.start, self._rows.stop)
        begins, ends = self._columns.begins[rows], self._columns.ends[rows]
        first, last = (np.array([part[i] for part in ends_of(index)], np.int64) for i in (0, 1))
        lows, highs = np.maximum(begins, first), np.minimum(ends, last)
        found = np.flatnonzero((lows < highs).all(axis=1))
        files, starts = self._columns.files[rows], self._columns.starts[rows]
        found = found[np.lexsort((starts[found], files[found]))]
        begins, ends, lows, highs = (each[found] for each in (begins, ends, lows, highs))
        shapes, is_all = ends - begins, ((lows == begins) & (highs == ends)).all(axis=1)
        pairs = (lows - first, highs - first, lows - begins, highs - begins)
        columns = (files[found], starts[found], shapes, np.prod(shapes, axis=1), *pairs, is_all)
        for row, file, start, shape, size, low, high, inner, outer, whole in zip(
            found.tolist(), *(each.tolist() for each in columns), strict=True
        ):
            place, checksum = tuple(map(slice, low, high)), self._columns.checksums[self._rows[int(row)]]
            part = None if whole else tuple(map(slice, inner, outer))
            yield Shared(file, start, tuple(shape), checksum, size, place, part)

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, row: int) -> Chunk: ...
    @overload
    def __getitem__(self, row: slice) -> list[Chunk]: ...
    def __getitem__(self, row: int | slice) -> Chunk | list[Chunk]:
        if isinstance(row, slice):
            return [self[i] for i in range(*row.indices(len(self)))]
        files, starts, begins, ends, checksums = self._columns
        at = self._rows[row]
        index = tuple(map(slice, begins[at].tolist(), ends[at].tolist()))
        return Chunk(int(files[at]), int(starts[at]), index, checksums[at])


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


def checked_chunks(variables: Iterable[Chunked], file_sizes: Sequence[int]) -> dict[str, ChunkTable]:
    """The chunks of variables by path: each is in its variable and in its file, and each element in exactly one.

    Args:
        variables: The variables. Those of one rank are checked together: to call numpy for each takes far longer.
        file_sizes: The sizes of the files in bytes.

    Raises:
        ValueError: They are not; `TypeError` or `OverflowError`, where a row is none of a chunk.
    """
    by_rank: dict[int, list[Chunked]] = {}
    tables: dict[str, ChunkTable] = {}
    for each in variables:
        if math.prod(max(size, 1) for size in each.shape) * each.itemsize >= 2**63:
            raise ValueError(f"{each.path}: shape {each.shape}")
        by_rank.setdefault(len(each.shape), []).append(each)
    for rank, group in by_rank.items():
        rows = [row for each in group for row in each.rows]
        columns = _columns_of(rows, rank)
        files, starts, begins, ends, _ = columns
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
        borders = itertools.pairwise(itertools.accumulate(counts, initial=0))
        tables |= {
            each.path: ChunkTable(columns, range(*pair)) for each, pair in zip(group, borders, strict=True)
        }
    return tables


def _columns_of(rows: Sequence[Any], rank: int) -> Columns:
    """The columns of rows as `chunk_to_json` returns them.

    Raises:
        ValueError: They are not rows of chunks.
    """
    files, starts, indices, checksums = zip(*rows, strict=True) if rows else ((), (), (), ())
    if not {*map(type, checksums)} <= {str}:
        raise ValueError("a checksum of a chunk is not text")
    if not {*map(len, indices)} <= {rank}:
        raise ValueError("a place of a chunk has not as many axes as its variable")
    ends = _integers(indices, (len(rows), rank, 2))
    return Columns(
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
