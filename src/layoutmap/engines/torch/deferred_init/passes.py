"""In which order the elements of some blocks are read, and where in the blocks they go."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from layoutmap.core.blocks import Index, block_shape, intersect, within
from layoutmap.engines.torch.deferred_init.readers import boxes
from layoutmap.engines.torch.deferred_init.runs import Run
from layoutmap.engines.torch.deferred_init.streams import pieces
from layoutmap.engines.torch.deferred_init.tiles import columns_of, tile_of


class Slice(NamedTuple):
    """Some of the values of a run that go to one block.

    Args:
        block: The number of the block.
        target: Where in the block they go.
        offset: Where in the run they begin.
        shape: The shape of a piece of the run, from there on.
        source: Which of that piece they are.
    """

    block: int
    target: Index
    offset: int
    shape: tuple[int, ...]
    source: Index

    def put(self, values: torch.Tensor, blocks: Sequence[torch.Tensor]) -> None:
        """Copy them."""
        piece = values[self.offset : self.offset + math.prod(self.shape)].view(self.shape)
        blocks[self.block][self.target].copy_(piece[self.source])


def in_order(shape: Sequence[int], indices: Sequence[Index], piece: int) -> Iterator[tuple[Run, list[Slice]]]:
    """One pass over a tensor, in pieces; those of which no block has anything are left out."""
    for start, stop in pieces(math.prod(shape), piece):
        parts: list[Slice] = []
        offset = 0
        for box in boxes(shape, start, stop):
            of_box = block_shape(box)
            for number, index in enumerate(indices):
                both = intersect(box, index)
                if both is not None:
                    parts.append(Slice(number, within(both, index), offset, of_box, within(both, box)))
            offset += math.prod(of_box)
        if parts:
            yield Run(start, stop - start), parts


def by_tiles(shape: Sequence[int], indices: Sequence[Index], piece: int) -> Iterator[tuple[Run, list[Slice]]]:
    """Each block for itself, by full tiles where it has them; no more is read than what it has of each row."""
    columns = columns_of(shape)
    # The first axis of a row.
    along = next(i for i in range(len(shape) + 1) if math.prod(shape[i:]) == columns)
    for number, index in enumerate(indices):
        for run, part in _of_block(shape, index, along, piece) if math.prod(block_shape(index)) else ():
            yield run, [part._replace(block=number)]


def _of_block(shape: Sequence[int], index: Index, along: int, piece: int) -> Iterator[tuple[Run, Slice]]:
    """The reads of a block, and where each goes: bands of rows, and of columns too where they are one axis."""
    columns = math.prod(shape[along:])
    height, width = tile_of(shape)
    across = max(width, piece // height // width * width)
    *outer, rows = index[:along] or (slice(0, 1),)
    for places in itertools.product(*(range(each.start, each.stop) for each in outer)):
        first = 0
        for place, n in zip((*places, 0), shape[:along], strict=bool(along)):
            first = first * n + place
        there = tuple(slice(p - i.start, p - i.start + 1) for p, i in zip(places, outer, strict=True))
        for left, right, row_shape, source, target in _row_parts(shape[along:], index[along:], across):
            down = max(height, piece // (right - left) // height * height)
            for top, bottom in _bands(rows.start, rows.stop, down):
                run = Run((first + top) * columns + left, right - left)
                if bottom - top > 1:
                    run = run._replace(rows=bottom - top, stride=columns)
                if along:
                    band = (*there, slice(top - rows.start, bottom - rows.start))
                    every = slice(0, bottom - top)
                    yield run, Slice(0, (*band, *target), 0, (bottom - top, *row_shape), (every, *source))
                else:
                    yield run, Slice(0, target, 0, row_shape, source)


def _row_parts(
    shape: Sequence[int], index: Index, size: int
) -> Iterator[tuple[int, int, tuple[int, ...], Index, Index]]:
    """The reads of each row: from where to where, in which shape, which of that, and where in the block it goes."""
    if len(shape) == 1:
        for left, right in _bands(index[0].start, index[0].stop, size):
            target = slice(left - index[0].start, right - index[0].start)
            yield left, right, (right - left,), (slice(0, right - left),), (target,)
        return
    target = tuple(slice(0, n) for n in block_shape(index))
    yield 0, math.prod(shape), tuple(shape), index, target


def _bands(start: int, stop: int, size: int) -> Iterator[tuple[int, int]]:
    """A range, split at multiples of a size."""
    while start < stop:
        end = min(stop, start - start % size + size)
        yield start, end
        start = end
