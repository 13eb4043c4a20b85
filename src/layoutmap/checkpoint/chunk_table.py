"""The chunks of a variable as columns of numbers: a manifest may have half a million, and few of them are wanted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, overload

import numpy as np

from layoutmap.core.blocks import Index, NumpyArray, ends_of, full_index, index_text, not_once


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
        """Their files, where they start in these, where they begin and end in the variable, and their checksums.

        Raises:
            ValueError: They are not rows of chunks.
        """
        rows = self._rows
        files, starts, indices, checksums = zip(*rows, strict=True) if rows else ((), (), (), ())
        if not all(isinstance(each, str) for each in checksums):
            raise ValueError("a checksum of a chunk is not text")
        if any(len(index) != self._rank for index in indices):
            raise ValueError("a place of a chunk has not as many axes as its variable")
        ends = _integers(indices, (len(rows), self._rank, 2))
        places = _integers(files, (len(rows),)), _integers(starts, (len(rows),))
        return *places, ends[..., 0], ends[..., 1], checksums

    def check(self, path: str, shape: tuple[int, ...], itemsize: float, file_sizes: Sequence[int]) -> None:
        """Raise if a chunk is outside of its variable, or of its file, or an element is not in exactly one chunk.

        Args:
            path: The path of the variable.
            shape: Its shape.
            itemsize: Bytes of one element.
            file_sizes: The sizes of the files in bytes.

        Raises:
            ValueError: One is.
        """
        if len(self._rows) == 1 and _is_all(self._rows[0], shape, itemsize, file_sizes):
            return  # most of many variables have one chunk
        if math.prod(max(size, 1) for size in shape) * itemsize >= 2**63:
            raise ValueError(f"{path}: shape {shape}")
        files, starts, begins, ends, _ = self._columns
        right = ((begins >= 0) & (begins <= ends) & (ends <= np.array(shape, np.int64))).all(axis=1)
        right &= (files >= 0) & (files < len(file_sizes))
        if right.all():
            num_bytes = np.prod(ends - begins, axis=1) * itemsize
            right = (starts >= 0) & (starts <= np.array(file_sizes, np.int64)[files] - num_bytes)
        if not right.all():
            raise ValueError(f"{path}: chunk {chunk_to_json(self[int(np.argmin(right))])}")
        if (found := not_once(begins, ends, full_index(shape))) is not None:
            raise ValueError(f"{path}: {found[1] or 'no'} chunks have {index_text(found[0])}")

    def overlapping(self, index: Index) -> list[Chunk]:
        """Return the chunks that have something of a block, in order."""
        if not len(self):
            return []
        _, _, begins, ends, _ = self._columns
        first, last = (np.array([part[i] for part in ends_of(index)], np.int64) for i in (0, 1))
        shared = (np.maximum(begins, first) < np.minimum(ends, last)).all(axis=1)
        return [self[int(row)] for row in np.flatnonzero(shared)]

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


def _is_all(row: Any, shape: tuple[int, ...], itemsize: float, file_sizes: Sequence[int]) -> bool:
    """Whether a row is a chunk that is all of a variable, and inside of its file."""
    file, start, index, checksum = row
    numbers = [file, start, *(end for ends in index for end in ends)]
    return (
        all(type(number) is int for number in numbers)
        and isinstance(checksum, str)
        and 0 not in shape
        and index == [[0, size] for size in shape]
        and 0 <= file < len(file_sizes)
        and 0 <= start <= file_sizes[file] - math.prod(shape) * itemsize
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
