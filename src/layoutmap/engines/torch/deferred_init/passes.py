"""Order the elements of blocks for one pass, and map them to their positions in the blocks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from layoutmap.core.blocks import Index, compute_block_shape, intersect_blocks, make_relative_index
from layoutmap.engines.torch.deferred_init.readers import split_range_into_blocks
from layoutmap.engines.torch.deferred_init.spans import ElementSpan
from layoutmap.engines.torch.deferred_init.streams import split_range_into_pieces
from layoutmap.engines.torch.deferred_init.tiles import choose_tile_shape, count_row_elements


class BlockSlice(NamedTuple):
    """The part of a span's values that belongs to one block.

    Args:
        block: The index of the block.
        target: The position in the block.
        offset: The offset of a piece in the span's values.
        shape: The shape of this piece.
        source: The position of the values in this piece.
    """

    block: int
    target: Index
    offset: int
    shape: tuple[int, ...]
    source: Index

    def copy_to_block(self, values: torch.Tensor, blocks: Sequence[torch.Tensor]) -> None:
        """Copy this part of a span's values to its position in the block."""
        piece = values[self.offset : self.offset + math.prod(self.shape)].view(self.shape)
        blocks[self.block][self.target].copy_(piece[self.source])


def iterate_spans_in_order(
    shape: Sequence[int], indices: Sequence[Index], piece_numel: int
) -> Iterator[tuple[ElementSpan, list[BlockSlice]]]:
    """Yield the spans of a tensor in order, each with its `BlockSlice`s. Spans that no block needs are skipped."""
    for start, stop in split_range_into_pieces(math.prod(shape), piece_numel):
        parts: list[BlockSlice] = []
        offset = 0
        for box in split_range_into_blocks(shape, start, stop):
            of_box = compute_block_shape(box)
            for number, index in enumerate(indices):
                both = intersect_blocks(box, index)
                if both is not None:
                    parts.append(
                        BlockSlice(
                            number,
                            make_relative_index(both, index),
                            offset,
                            of_box,
                            make_relative_index(both, box),
                        )
                    )
            offset += math.prod(of_box)
        if parts:
            yield ElementSpan(start, stop - start), parts


def iterate_spans_by_tiles(
    shape: Sequence[int], indices: Sequence[Index], piece_numel: int
) -> Iterator[tuple[ElementSpan, list[BlockSlice]]]:
    """Yield the spans of each block, each with its `BlockSlice`. Spans consist of whole tiles where possible."""
    columns = count_row_elements(shape)
    # The tensor is drawn as a matrix. The axes from `row_axis` on are a row, and the axes before it number the rows.
    row_axis = next(i for i in range(len(shape) + 1) if math.prod(shape[i:]) == columns)
    for block, index in enumerate(indices):
        if math.prod(compute_block_shape(index)):
            for span, part in _iterate_block_spans(shape, index, row_axis, piece_numel):
                yield span, [part._replace(block=block)]


def _iterate_block_spans(
    shape: Sequence[int], index: Index, row_axis: int, piece_numel: int
) -> Iterator[tuple[ElementSpan, BlockSlice]]:
    """Yield the spans of one block, each with its `BlockSlice`.

    A span is a band of rows. If a row is one axis, the band is also cut into ranges of columns.
    """
    columns = math.prod(shape[row_axis:])
    height, width = choose_tile_shape(shape)
    across = max(width, piece_numel // height // width * width)
    *outer, rows = index[:row_axis] or (slice(0, 1),)
    for places in itertools.product(*(range(each.start, each.stop) for each in outer)):
        first = 0
        for place, n in zip((*places, 0), shape[:row_axis], strict=bool(row_axis)):
            first = first * n + place
        there = tuple(slice(p - i.start, p - i.start + 1) for p, i in zip(places, outer, strict=True))
        row_parts = _iterate_row_parts(shape[row_axis:], index[row_axis:], across)
        for left, right, row_shape, source, target in row_parts:
            down = max(height, piece_numel // (right - left) // height * height)
            for top, bottom in _split_range_at_multiples(rows.start, rows.stop, down):
                span = ElementSpan((first + top) * columns + left, right - left)
                if bottom - top > 1:
                    span = span._replace(rows=bottom - top, stride=columns)
                if row_axis:
                    band = (*there, slice(top - rows.start, bottom - rows.start))
                    every = slice(0, bottom - top)
                    part = BlockSlice(0, (*band, *target), 0, (bottom - top, *row_shape), (every, *source))
                    yield span, part
                else:
                    yield span, BlockSlice(0, target, 0, row_shape, source)


def _iterate_row_parts(
    shape: Sequence[int], index: Index, size: int
) -> Iterator[tuple[int, int, tuple[int, ...], Index, Index]]:
    """Yield each part of a row as a tuple: start, stop, shape, index in the part, index in the block."""
    if len(shape) == 1:
        for left, right in _split_range_at_multiples(index[0].start, index[0].stop, size):
            target = slice(left - index[0].start, right - index[0].start)
            yield left, right, (right - left,), (slice(0, right - left),), (target,)
        return
    target = tuple(slice(0, n) for n in compute_block_shape(index))
    yield 0, math.prod(shape), tuple(shape), index, target


def _split_range_at_multiples(start: int, stop: int, size: int) -> Iterator[tuple[int, int]]:
    """Split a range at multiples of `size`, and yield the start and stop of each part."""
    while start < stop:
        end = min(stop, start - start % size + size)
        yield start, end
        start = end
