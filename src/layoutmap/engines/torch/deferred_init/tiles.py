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

from layoutmap.engines.torch.deferred_init.readers import Reader
from layoutmap.engines.torch.deferred_init.runs import ApartError, Run
from layoutmap.engines.torch.deferred_init.streams import RandomFill

TILE = 256
_MIN_ROW_LENGTH = 64


def count_columns(shape: Sequence[int]) -> int:
    """Count the elements of a row, which spans the fewest last axes with a minimum length.

    Example:
        >>> count_columns((1000, 500)), count_columns((128, 64, 3, 3))
        (500, 576)
    """
    columns = 1
    for n in reversed(shape):
        if columns >= _MIN_ROW_LENGTH:
            break
        columns *= n
    return columns


def choose_tile(shape: Sequence[int]) -> tuple[int, int]:
    """Choose the rows and columns of a tile.

    Example:
        >>> choose_tile((1000, 500)), choose_tile((8, 50000))
        ((256, 256), (8, 8192))
    """
    height = max(1, min(TILE, math.prod(shape) // max(count_columns(shape), 1)))
    return height, TILE * TILE // height


class Tiled(Reader):
    """Read the values of one fill by tiles.

    Args:
        fill: The random operation.
        shape: The tensor's shape, in the order of memory.
        seed: The seed of the fill.
    """

    def __init__(self, fill: RandomFill, shape: Sequence[int], seed: int) -> None:
        super().__init__()
        self._fill = fill
        self._columns = max(count_columns(shape), 1)
        self._rows = math.prod(shape) // self._columns
        self._height, self._width = choose_tile(shape)
        self._seed = seed
        self._generator = torch.Generator("cpu")

    def _compute(self, run: Run) -> torch.Tensor:
        row, column = divmod(run.start, self._columns)
        if column + run.length <= self._columns and run.stride in (0, self._columns):
            return self._draw_part(row, row + run.rows, column, column + run.length).reshape(-1)
        if run.rows > 1:
            raise ApartError
        last = -(-run.stop // self._columns)
        rows = self._draw_part(row, last, 0, self._columns).reshape(-1)
        return rows[column : column + run.length]

    def _draw_part(self, top: int, bottom: int, left: int, right: int) -> torch.Tensor:
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
        height, width = min(self._height, self._rows - row), min(self._width, self._columns - column)
        key = f"{self._seed} {row} {column}".encode()
        self._generator.manual_seed(
            int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 1
        )
        return self._fill.draw_next(height * width, self._generator).view(height, width)
