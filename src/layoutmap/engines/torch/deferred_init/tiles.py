"""Draw random numbers by tiles. Each tile has its own generator, so a shard draws only its own tiles.

The numbers are the same on every mesh, but not those that torch draws in one stream. A tile is 256 elements along the
last axes and 256 along the others, or more along the last if there are fewer of the others. The seed of each is a hash
of the tensor's number, which was drawn from the generator of the program, and of the tile's place.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import torch

from layoutmap.engines.torch.deferred_init.readers import ElementReader
from layoutmap.engines.torch.deferred_init.spans import ElementSpan, UnreadableSpanError
from layoutmap.engines.torch.deferred_init.streams import RandomFill

TILE = 256
_MIN_ROW_LENGTH = 64


def count_row_elements(shape: Sequence[int]) -> int:
    """Return the number of elements in a row of the matrix that is drawn by tiles.

    A row spans as few of the last axes as have at least `_MIN_ROW_LENGTH` elements together, or all axes.

    Example:
        >>> count_row_elements((1000, 500)), count_row_elements((128, 64, 3, 3))
        (500, 576)
    """
    columns = 1
    for n in reversed(shape):
        if columns >= _MIN_ROW_LENGTH:
            break
        columns *= n
    return columns


def choose_tile_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Return the number of rows and of columns in a tile, which is drawn by a generator of its own.

    Example:
        >>> choose_tile_shape((1000, 500)), choose_tile_shape((8, 50000))
        ((256, 256), (8, 8192))
    """
    height = max(1, min(TILE, math.prod(shape) // max(count_row_elements(shape), 1)))
    return height, TILE * TILE // height


class TiledRandomReader(ElementReader):
    """Read the values of one random fill, which is drawn tile by tile.

    `shape` is the tensor's shape, in the order of memory.
    """

    def __init__(self, fill: RandomFill, shape: Sequence[int], seed: int) -> None:
        super().__init__()
        self._fill = fill
        self._columns = max(count_row_elements(shape), 1)
        self._rows = math.prod(shape) // self._columns
        self._height, self._width = choose_tile_shape(shape)
        self._seed = seed
        self._generator = torch.Generator("cpu")

    def _compute_elements(self, span: ElementSpan) -> torch.Tensor:
        row, column = divmod(span.start, self._columns)
        if column + span.length <= self._columns and span.stride in (0, self._columns):
            return self._draw_rows_and_columns(row, row + span.rows, column, column + span.length).reshape(-1)
        if span.rows > 1:
            raise UnreadableSpanError
        last = -(-span.stop // self._columns)
        rows = self._draw_rows_and_columns(row, last, 0, self._columns).reshape(-1)
        return rows[column : column + span.length]

    def _draw_rows_and_columns(self, top: int, bottom: int, left: int, right: int) -> torch.Tensor:
        """Return the values of some rows and columns, from all tiles that overlap them."""
        made = torch.empty(bottom - top, right - left, dtype=self._fill.dtype, device="cpu")
        for row in range(top - top % self._height, bottom, self._height):
            for column in range(left - left % self._width, right, self._width):
                rows = slice(max(top, row), min(bottom, row + self._height))
                columns = slice(max(left, column), min(right, column + self._width))
                tile = self._draw_tile(row, column)[
                    rows.start - row : rows.stop - row, columns.start - column : columns.stop - column
                ]
                made[rows.start - top : rows.stop - top, columns.start - left : columns.stop - left] = tile
        return made

    def _draw_tile(self, row: int, column: int) -> torch.Tensor:
        """Return the values of the tile that starts at a row and column. Its seed depends on that position."""
        height, width = min(self._height, self._rows - row), min(self._width, self._columns - column)
        key = f"{self._seed} {row} {column}".encode()
        self._generator.manual_seed(
            int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 1
        )
        return self._fill.draw_next_values(height * width, self._generator).view(height, width)
