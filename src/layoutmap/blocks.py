"""Index arithmetic on blocks of an array: cut, cover, put together.

A block's index is a tuple of slices, one for each axis, each with both ends and no step. Engines hand out their
shards with such indices, and everything that moves values between layouts, processes and files speaks in them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from layoutmap.errors import LayoutMapError

__all__ = ["Index", "assemble", "block_shape", "intersect", "whole_index", "with_ends"]

Index = tuple[slice, ...]
"""Where a block lies: one slice for each axis, with both ends."""


def whole_index(shape: Sequence[int]) -> Index:
    """The index of everything.

    Example:
        >>> whole_index((2, 3))
        (slice(0, 2, None), slice(0, 3, None))
    """
    return tuple(slice(0, n) for n in shape)


def with_ends(index: Sequence[slice], shape: Sequence[int]) -> Index:
    """An index with both ends of each slice written out.

    Example:
        >>> with_ends((slice(None), slice(1, None)), (2, 3))
        (slice(0, 2, None), slice(1, 3, None))
    """
    return tuple(slice(*part.indices(n)[:2]) for part, n in zip(index, shape, strict=True))


def block_shape(index: Index) -> tuple[int, ...]:
    """The shape of the block at an index."""
    return tuple(part.stop - part.start for part in index)


def intersect(a: Index, b: Index) -> Index | None:
    """What two blocks share, or `None`.

    Example:
        >>> intersect((slice(0, 4),), (slice(2, 6),))
        (slice(2, 4, None),)
    """
    both = tuple(slice(max(x.start, y.start), min(x.stop, y.stop)) for x, y in zip(a, b, strict=True))
    return both if all(part.start < part.stop for part in both) else None


def assemble(
    blocks: Iterable[tuple[Index, npt.NDArray[np.generic]]],
    shape: Sequence[int],
    dtype: npt.DTypeLike,
    index: Index | None = None,
) -> npt.NDArray[np.generic]:
    """The part of an array at an index, put together from blocks that may overlap it in any way.

    Args:
        blocks: Pairs of index and values.
        shape: The shape of the whole array.
        dtype: Its element type.
        index: The part that is wanted; `None` means all of it.

    Raises:
        LayoutMapError: The blocks leave a gap, or overlap each other.

    Example:
        >>> halves = [((slice(0, 2),), np.array([1, 2])), ((slice(2, 4),), np.array([3, 4]))]
        >>> assemble(halves, (4,), int, index=(slice(1, 3),))
        array([2, 3])
    """
    wanted = whole_index(shape) if index is None else index
    result = np.empty(block_shape(wanted), dtype)
    filled = 0
    for place, values in blocks:
        both = intersect(place, wanted) if wanted else ()
        if both is None:
            continue
        to = tuple(slice(b.start - w.start, b.stop - w.start) for b, w in zip(both, wanted, strict=True))
        source = tuple(slice(b.start - p.start, b.stop - p.start) for b, p in zip(both, place, strict=True))
        result[to] = values[source]
        filled += math.prod(block_shape(both))
    if filled != result.size:
        raise LayoutMapError(
            f"blocks cover {filled} elements of {result.size}",
            facts={"shape": tuple(shape)},
            why="they leave a gap, or overlap each other",
            mend="pass each block of the array exactly once",
        )
    return result
