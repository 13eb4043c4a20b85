"""Order the elements of blocks for one pass, and map them to their positions in the blocks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from layoutmap.core.blocks import Index, compute_block_shape, intersect_blocks, make_relative_index
from layoutmap.engines.torch.deferred_init.readers import split_into_boxes
from layoutmap.engines.torch.deferred_init.runs import Run
from layoutmap.engines.torch.deferred_init.streams import split_into_pieces
from layoutmap.engines.torch.deferred_init.tiles import choose_tile, count_columns


class Slice(NamedTuple):
    """Values of a run that belong to one block.

    Args:
        block: The number of the block.
        target: The position in the block.
        offset: The offset of a piece in the run.
        shape: The shape of this piece.
        source: The position of the values in this piece.
    """

    block: int
    target: Index
    offset: int
    shape: tuple[int, ...]
    source: Index

    def put(self, values: torch.Tensor, blocks: Sequence[torch.Tensor]) -> None:
        """Copy the values into the block."""
        piece = values[self.offset : self.offset + math.prod(self.shape)].view(self.shape)
        blocks[self.block][self.target].copy_(piece[self.source])


def iterate_in_order(
    shape: Sequence[int], indices: Sequence[Index], piece: int
) -> Iterator[tuple[Run, list[Slice]]]:
    """Yield the runs of one pass over a tensor with their block slices. Skip runs that no block needs."""
    for start, stop in split_into_pieces(math.prod(shape), piece):
        parts: list[Slice] = []
        offset = 0
        for box in split_into_boxes(shape, start, stop):
            of_box = compute_block_shape(box)
            for number, index in enumerate(indices):
                both = intersect_blocks(box, index)
                if both is not None:
                    parts.append(
                        Slice(
                            number,
                            make_relative_index(both, index),
                            offset,
                            of_box,
                            make_relative_index(both, box),
                        )
                    )
            offset += math.prod(of_box)
        if parts:
            yield Run(start, stop - start), parts


def iterate_by_tiles(
    shape: Sequence[int], indices: Sequence[Index], piece: int
) -> Iterator[tuple[Run, list[Slice]]]:
    """Yield the runs of each block with their slices, in full tiles, without columns outside the block."""
    columns = count_columns(shape)
    # `along` is the first axis within a row.
    along = next(i for i in range(len(shape) + 1) if math.prod(shape[i:]) == columns)
    for number, index in enumerate(indices):
        for run, part in (
            _iterate_block(shape, index, along, piece) if math.prod(compute_block_shape(index)) else ()
        ):
            yield run, [part._replace(block=number)]


def _iterate_block(shape: Sequence[int], index: Index, along: int, piece: int) -> Iterator[tuple[Run, Slice]]:
    """Yield the runs of a block with their slices: bands of rows, and of columns if a row is one axis."""
    columns = math.prod(shape[along:])
    height, width = choose_tile(shape)
    across = max(width, piece // height // width * width)
    *outer, rows = index[:along] or (slice(0, 1),)
    for places in itertools.product(*(range(each.start, each.stop) for each in outer)):
        first = 0
        for place, n in zip((*places, 0), shape[:along], strict=bool(along)):
            first = first * n + place
        there = tuple(slice(p - i.start, p - i.start + 1) for p, i in zip(places, outer, strict=True))
        for left, right, row_shape, source, target in _iterate_row_parts(
            shape[along:], index[along:], across
        ):
            down = max(height, piece // (right - left) // height * height)
            for top, bottom in _split_range(rows.start, rows.stop, down):
                run = Run((first + top) * columns + left, right - left)
                if bottom - top > 1:
                    run = run._replace(rows=bottom - top, stride=columns)
                if along:
                    band = (*there, slice(top - rows.start, bottom - rows.start))
                    every = slice(0, bottom - top)
                    yield run, Slice(0, (*band, *target), 0, (bottom - top, *row_shape), (every, *source))
                else:
                    yield run, Slice(0, target, 0, row_shape, source)


def _iterate_row_parts(
    shape: Sequence[int], index: Index, size: int
) -> Iterator[tuple[int, int, tuple[int, ...], Index, Index]]:
    """Yield the parts of each row: start, stop, shape, index in the part, and index in the block."""
    if len(shape) == 1:
        for left, right in _split_range(index[0].start, index[0].stop, size):
            target = slice(left - index[0].start, right - index[0].start)
            yield left, right, (right - left,), (slice(0, right - left),), (target,)
        return
    target = tuple(slice(0, n) for n in compute_block_shape(index))
    yield 0, math.prod(shape), tuple(shape), index, target


def _split_range(start: int, stop: int, size: int) -> Iterator[tuple[int, int]]:
    """Split a range at multiples of a size."""
    while start < stop:
        end = min(stop, start - start % size + size)
        yield start, end
        start = end
