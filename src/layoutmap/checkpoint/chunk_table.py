"""Store the chunks of each variable as columns, so that lookups are fast with half a million chunks."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from layoutmap.checkpoint.source import SavedVariable
from layoutmap.core.blocks import (
    Index,
    NumpyArray,
    are_covered_once,
    find_coverage_error,
    format_index,
    make_full_index,
    stack_slice_ends,
)
from layoutmap.core.variables import get_itemsize


@dataclass(frozen=True, slots=True)
class Chunk:
    """A block of a variable that is stored in a file.

    Args:
        file: The number of the file.
        start: Its offset in the file in bytes.
        index: Its position in the variable.
        checksum: Its checksum.
    """

    file: int
    start: int
    index: Index
    checksum: str


class Columns(NamedTuple):
    """Store the chunks of all variables of one rank as columns, with one row per chunk."""

    files: NumpyArray
    starts: NumpyArray
    begins: NumpyArray
    ends: NumpyArray
    checksums: Sequence[str]


class ChunkOverlap(NamedTuple):
    """The part of a chunk that a requested block contains.

    Attributes:
        file: The number of the chunk's file.
        start: The byte of the file at which it begins.
        end: That at which it ends.
        shape: The shape of the chunk.
        checksum: Its checksum.
        place: The position of the part in the block.
        part: The position of the part in the chunk; `None`: the whole chunk.
    """

    file: int
    start: int
    end: int
    shape: tuple[int, ...]
    checksum: str
    place: Index
    part: Index | None


class ChunkTable(Sequence[Chunk]):
    """Look up the chunks of one variable, which are stored as columns.

    Args:
        columns: The chunks of all variables of this rank.
        rows: The rows of this variable.
    """

    def __init__(self, columns: Columns, rows: range):
        self._columns, self._rows = columns, rows

    def find_overlaps(self, index: Index, itemsize: int) -> Iterator[ChunkOverlap]:
        """Yield the parts of chunks that overlap a block, in the order of their offsets in the files."""
        rows = slice(self._rows.start, self._rows.stop)
        columns, (first,), (last,) = self._columns, *stack_slice_ends([index], len(index))
        begins, ends = columns.begins[rows], columns.ends[rows]
        lows, highs = np.maximum(begins, first), np.minimum(ends, last)
        found = np.flatnonzero((lows < highs).all(axis=1))
        found = found[np.lexsort((columns.starts[rows][found], columns.files[rows][found]))]
        begins, ends, lows, highs = (each[found] for each in (begins, ends, lows, highs))
        found += rows.start
        starts, shapes, is_all = columns.starts[found], ends - begins, (lows == begins) & (highs == ends)
        stops = starts + np.prod(shapes, axis=1) * itemsize
        pairs = (lows - first, highs - first, lows - begins, highs - begins)
        wanted = (found, columns.files[found], starts, stops, shapes, *pairs, is_all.all(axis=1))
        for row, file, start, stop, shape, low, high, inner, outer, is_whole in zip(
            *(each.tolist() for each in wanted), strict=True
        ):
            part = None if is_whole else tuple(map(slice, inner, outer))
            place = tuple(map(slice, low, high))
            yield ChunkOverlap(file, start, stop, tuple(shape), columns.checksums[int(row)], place, part)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, row: Any) -> Any:
        files, starts, begins, ends, checksums = self._columns
        at = self._rows[operator.index(row)]
        index = tuple(map(slice, begins[at].tolist(), ends[at].tolist()))
        return Chunk(int(files[at]), int(starts[at]), index, checksums[at])


def build_chunk_tables(
    variables: Sequence[SavedVariable], rows_of: Sequence[Sequence[Any]], file_sizes: Sequence[int]
) -> dict[str, ChunkTable]:
    """Build the chunk table of each variable, and check that its chunks cover each element exactly once.

    Args:
        variables: The variables. Those of one rank are checked together: to call numpy for each takes far longer.
        rows_of: The rows of the chunks of each, as `chunk_to_json` returns them.
        file_sizes: The sizes of the files in bytes.

    Raises:
        ValueError: They are not; `TypeError` or `OverflowError`, where a row is none of a chunk.
    """
    by_rank: dict[int, list[tuple[SavedVariable, Sequence[Any]]]] = {}
    tables: dict[str, ChunkTable] = {}
    for variable, rows in zip(variables, rows_of, strict=True):
        if math.prod(max(size, 1) for size in variable.shape) * _round_itemsize(variable) >= 2**63:
            raise ValueError(f"{variable.path}: shape {variable.shape}")
        by_rank.setdefault(len(variable.shape), []).append((variable, rows))
    for rank, pairs in by_rank.items():
        group = [variable for variable, _ in pairs]
        rows = [row for _, own in pairs for row in own]
        columns = _make_columns(rows, rank)
        files, starts, begins, ends, _ = columns
        counts = [len(own) for _, own in pairs]
        owners = np.repeat(np.arange(len(group)), counts)
        shapes = np.array([each.shape for each in group], np.int64).reshape(len(group), rank)
        right = ((begins >= 0) & (begins <= ends) & (ends <= shapes[owners])).all(axis=1)
        right &= (files >= 0) & (files < len(file_sizes))
        if right.all():
            num_bytes = (
                np.prod(ends - begins, axis=1) * np.array([*map(_round_itemsize, group)], np.int64)[owners]
            )
            right = (starts >= 0) & (starts <= np.array(file_sizes, np.int64)[files] - num_bytes)
        if not right.all():
            row = int(np.argmin(right))
            raise ValueError(f"{group[int(owners[row])].path}: chunk {rows[row]}")
        for number in np.flatnonzero(~are_covered_once(begins, ends, counts, np.zeros_like(shapes), shapes)):
            (own,), wanted = np.nonzero(owners == number), make_full_index(group[number].shape)
            if (found := find_coverage_error(begins[own], ends[own], wanted)) is not None:
                cell, times = found
                raise ValueError(f"{group[number].path}: {times or 'no'} chunks have {format_index(cell)}")
        borders = itertools.pairwise(itertools.accumulate(counts, initial=0))
        tables |= {
            each.path: ChunkTable(columns, range(*pair)) for each, pair in zip(group, borders, strict=True)
        }
    return tables


def _round_itemsize(variable: SavedVariable) -> int:
    """Return the bytes of an element, rounded up."""
    return math.ceil(get_itemsize(variable.dtype))


def _make_columns(rows: Sequence[Any], rank: int) -> Columns:
    """Convert JSON rows of `chunk_to_json` to columns.

    Raises:
        ValueError: They are not rows of chunks.
    """
    files, starts, indices, checksums = zip(*rows, strict=True) if rows else ((), (), (), ())
    if not {*map(type, checksums)} <= {str}:
        raise ValueError("a checksum of a chunk is not text")
    if not {*map(len, indices)} <= {rank}:
        raise ValueError("a chunk has another number of axes than its variable")
    number, ends = len(rows), _convert_integers(indices, (len(rows), rank, 2))
    files, starts = _convert_integers(files, (number,)), _convert_integers(starts, (number,))
    return Columns(files, starts, ends[..., 0], ends[..., 1], checksums)


def _convert_integers(values: Sequence[Any], shape: tuple[int, ...]) -> NumpyArray:
    """Convert whole numbers from JSON to an array of a given shape."""
    found = np.array(values)
    # A damaged file may contain text, fractions, numbers over 64 bits, or nested lists instead.
    if found.size and (found.dtype != np.int64 or found.shape != shape):
        raise ValueError(f"{found.dtype}{list(found.shape)} instead of whole numbers")
    return found.reshape(shape).astype(np.int64, copy=False)


def chunk_to_json(chunk: Chunk) -> list[Any]:
    """Convert a chunk to JSON values."""
    return [chunk.file, chunk.start, [[part.start, part.stop] for part in chunk.index], chunk.checksum]


def chunk_from_json(found: Sequence[Any]) -> Chunk:
    """Read the result of `chunk_to_json`."""
    file, start, index, checksum = found
    return Chunk(file, start, tuple(slice(begin, end) for begin, end in index), checksum)
