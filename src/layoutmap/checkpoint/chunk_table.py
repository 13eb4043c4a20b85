"""Store the chunks of each variable as numpy columns, so that lookups are fast with half a million chunks."""

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
    find_coverage_fault,
    format_index,
    make_full_index,
    stack_starts_and_stops,
)
from layoutmap.core.variables import get_itemsize


@dataclass(frozen=True, slots=True)
class Chunk:
    """A block of a variable that is stored in a file.

    Args:
        file: The position of the file in the manifest's list of files.
        start: The chunk's offset in the file in bytes.
        index: The chunk's position in the variable.
        checksum: The checksum of the chunk's bytes.
    """

    file: int
    start: int
    index: Index
    checksum: str


class ChunkColumns(NamedTuple):
    """The chunks of all variables with the same number of axes, as arrays with one row per chunk."""

    files: NumpyArray
    starts: NumpyArray
    begins: NumpyArray
    ends: NumpyArray
    checksums: Sequence[str]


class ChunkOverlap(NamedTuple):
    """The part of a chunk that a requested block contains.

    Attributes:
        file: The position of the chunk's file in the manifest's list of files.
        start: The offset of the chunk in the file in bytes.
        end: The offset of the end of the chunk.
        shape: The shape of the chunk.
        checksum: The checksum of the chunk.
        block_index: The position of the shared part in the block.
        chunk_index: The position of the shared part in the chunk; `None`: it is the whole chunk.
    """

    file: int
    start: int
    end: int
    shape: tuple[int, ...]
    checksum: str
    block_index: Index
    chunk_index: Index | None


class ChunkTable(Sequence[Chunk]):
    """Look up the chunks of one variable in columns that all variables with the same number of axes share.

    Args:
        columns: The chunks of all variables with as many axes as this one.
        rows: The rows of `columns` that are chunks of this variable.
    """

    def __init__(self, columns: ChunkColumns, rows: range):
        self._columns, self._rows = columns, rows

    def iterate_chunk_overlaps(self, index: Index, itemsize: int) -> Iterator[ChunkOverlap]:
        """Yield a `ChunkOverlap` for each chunk that overlaps a block, in the order of the files and offsets."""
        rows = slice(self._rows.start, self._rows.stop)
        columns, (first,), (last,) = self._columns, *stack_starts_and_stops([index], len(index))
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
            block = tuple(map(slice, low, high))
            yield ChunkOverlap(file, start, stop, tuple(shape), columns.checksums[int(row)], block, part)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, row: Any) -> Any:
        files, starts, begins, ends, checksums = self._columns
        at = self._rows[operator.index(row)]
        index = tuple(map(slice, begins[at].tolist(), ends[at].tolist()))
        return Chunk(int(files[at]), int(starts[at]), index, checksums[at])


def build_chunk_tables(
    variables: Sequence[SavedVariable], chunk_rows: Sequence[Sequence[Any]], file_sizes: Sequence[int]
) -> dict[str, ChunkTable]:
    """Build the chunk table of each variable, and check that its chunks cover each element exactly once.

    Args:
        variables: The variables. Variables of the same rank are checked together, because numpy calls are slow.
        chunk_rows: For each variable, its chunks as rows of `chunk_to_json`.
        file_sizes: The sizes of the files in bytes.

    Raises:
        ValueError: Chunks overlap, leave a gap, or are outside of their variable or file. For values that cannot be
            those of a chunk, the error can also be a `TypeError` or an `OverflowError`.
    """
    by_rank: dict[int, list[tuple[SavedVariable, Sequence[Any]]]] = {}
    tables: dict[str, ChunkTable] = {}
    for variable, rows in zip(variables, chunk_rows, strict=True):
        if math.prod(max(size, 1) for size in variable.shape) * _round_up_itemsize(variable) >= 2**63:
            raise ValueError(f"{variable.path}: its shape {variable.shape} has too many elements")
        by_rank.setdefault(len(variable.shape), []).append((variable, rows))
    for rank, pairs in by_rank.items():
        group = [variable for variable, _ in pairs]
        rows = [row for _, own in pairs for row in own]
        columns = _convert_chunk_rows_to_columns(rows, rank)
        files, starts, begins, ends, _ = columns
        counts = [len(own) for _, own in pairs]
        owners = np.repeat(np.arange(len(group)), counts)
        shapes = np.array([each.shape for each in group], np.int64).reshape(len(group), rank)
        right = ((begins >= 0) & (begins <= ends) & (ends <= shapes[owners])).all(axis=1)
        right &= (files >= 0) & (files < len(file_sizes))
        if right.all():
            num_bytes = (
                np.prod(ends - begins, axis=1) * np.array([*map(_round_up_itemsize, group)], np.int64)[owners]
            )
            right = (starts >= 0) & (starts <= np.array(file_sizes, np.int64)[files] - num_bytes)
        if not right.all():
            row = int(np.argmin(right))
            raise ValueError(f"{group[int(owners[row])].path}: chunk {rows[row]} exceeds the array or file")
        for number in np.flatnonzero(~are_covered_once(begins, ends, counts, np.zeros_like(shapes), shapes)):
            (own,), wanted = np.nonzero(owners == number), make_full_index(group[number].shape)
            if (found := find_coverage_fault(begins[own], ends[own], wanted)) is not None:
                cell, times = found
                raise ValueError(f"{group[number].path}: {times or 'no'} chunks contain {format_index(cell)}")
        borders = itertools.pairwise(itertools.accumulate(counts, initial=0))
        tables |= {
            each.path: ChunkTable(columns, range(*pair)) for each, pair in zip(group, borders, strict=True)
        }
    return tables


def _round_up_itemsize(variable: SavedVariable) -> int:
    """Return the bytes of an element of a variable, rounded up to an integer for types such as int4."""
    return math.ceil(get_itemsize(variable.dtype))


def _convert_chunk_rows_to_columns(rows: Sequence[Any], rank: int) -> ChunkColumns:
    """Convert rows from `chunk_to_json` to columns. All rows are chunks of variables with `rank` axes.

    Raises:
        ValueError: A row does not describe a chunk of such a variable.
    """
    files, starts, indices, checksums = zip(*rows, strict=True) if rows else ((), (), (), ())
    if not {*map(type, checksums)} <= {str}:
        raise ValueError("the checksum of a chunk is not text")
    if not {*map(len, indices)} <= {rank}:
        raise ValueError("a chunk and its variable have different numbers of axes")
    number, ends = len(rows), _convert_to_int64_array(indices, (len(rows), rank, 2))
    files, starts = _convert_to_int64_array(files, (number,)), _convert_to_int64_array(starts, (number,))
    return ChunkColumns(files, starts, ends[..., 0], ends[..., 1], checksums)


def _convert_to_int64_array(values: Sequence[Any], shape: tuple[int, ...]) -> NumpyArray:
    """Convert integers in nested lists to an int64 array. Raise a `ValueError` for other values or shapes."""
    found = np.array(values)
    # For text, fractions, or numbers over 64 bits in a damaged file, numpy chooses a different dtype, so check it.
    if found.size and (found.dtype != np.int64 or found.shape != shape):
        raise ValueError(
            f"the integers in chunk rows are {found.dtype}{list(found.shape)}, and must be int64{list(shape)}"
        )
    return found.reshape(shape).astype(np.int64, copy=False)


def chunk_to_json(chunk: Chunk) -> list[Any]:
    """Convert a chunk to its row in a manifest, a list of JSON values."""
    return [chunk.file, chunk.start, [[part.start, part.stop] for part in chunk.index], chunk.checksum]


def chunk_from_json(row: Sequence[Any]) -> Chunk:
    """Convert a row of `chunk_to_json` back to a chunk."""
    file, start, index, checksum = row
    return Chunk(file, start, tuple(slice(begin, end) for begin, end in index), checksum)
