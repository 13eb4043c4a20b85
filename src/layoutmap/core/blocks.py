"""Index arithmetic on blocks of an array: split, cover, assemble.

A block's index is a tuple of slices, one for each axis, each with both ends and no step. Engines hand out their
shards with such indices, and everything that moves values between layouts, processes and files speaks in them.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from layoutmap.core.errors import LayoutMapError

NumpyArray = npt.NDArray[Any]
Index = tuple[slice, ...]
"""Where a block is: one slice for each axis, with both ends."""

Ends = tuple[tuple[int, int], ...]
"""An index as a value that has a hash."""


def full_index(shape: Sequence[int]) -> Index:
    """The index of everything.

    Example:
        >>> full_index((2, 3))
        (slice(0, 2, None), slice(0, 3, None))
    """
    return tuple(slice(0, operator.index(n)) for n in shape)


def with_ends(index: Sequence[slice], shape: Sequence[int]) -> Index:
    """An index with both ends of each slice written out.

    Raises:
        LayoutMapError: A slice has a step, or there is not one for each axis.

    Example:
        >>> with_ends((slice(None), slice(1, None)), (2, 3))
        (slice(0, 2, None), slice(1, 3, None))
    """
    why = ""
    if len(index) != len(shape):
        why = f"an array of {len(shape)} axes needs {len(shape)} slices, not {len(index)}"
    elif any(part.step not in (None, 1) for part in index):
        why = "a block is an unbroken run along each axis, without a step"
    if why:
        raise LayoutMapError(
            f"{tuple(index)} is no index of a block",
            facts={"shape": tuple(shape)},
            why=why,
            fix="give one slice for each axis, from where to where",
        )
    ends = (part.indices(operator.index(n))[:2] for part, n in zip(index, shape, strict=True))
    return tuple(slice(start, max(start, stop)) for start, stop in ends)


def block_shape(index: Index) -> tuple[int, ...]:
    """The shape of the block at an index."""
    return tuple(operator.index(part.stop) - operator.index(part.start) for part in index)


def ends_of(index: Index) -> Ends:
    """The ends of an index's slices, which can be the key of a dict."""
    return tuple((part.start, part.stop) for part in index)


def within(part: Index, index: Index) -> Index:
    """A part of a block, counted from where the block begins."""
    return tuple(slice(p.start - i.start, p.stop - i.start) for p, i in zip(part, index, strict=True))


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
    """The part of an array at an index, assembled from blocks that may overlap it in any way.

    Args:
        blocks: Pairs of index and values.
        shape: The global shape.
        dtype: Its element type.
        index: The part that is wanted; `None` means all of it.

    Raises:
        LayoutMapError: The blocks leave a gap, or overlap each other, or one has another shape than its index.

    Example:
        >>> halves = [((slice(0, 2),), np.array([1, 2])), ((slice(2, 4),), np.array([3, 4]))]
        >>> assemble(halves, (4,), int, index=(slice(1, 3),))
        array([2, 3])
    """
    wanted = full_index(shape) if index is None else index
    result = np.empty(block_shape(wanted), dtype)
    places: list[Index] = []
    for place, values in blocks:
        if len(place) != len(wanted) or block_shape(place) != values.shape:
            raise LayoutMapError(
                f"a block of shape {values.shape} does not fit its place {_text(place)}",
                facts={"shape": tuple(shape)},
                why=f"the place has the shape {block_shape(place)}",
                fix="pass each block with its index in the global array",
            )
        both = intersect(place, wanted)
        if both is None:
            continue
        result[within(both, wanted)] = values[within(both, place)]
        places.append(both)
    if result.size:
        _check_cover(places, wanted, tuple(shape))
    return result


def _check_cover(places: Sequence[Index], wanted: Index, shape: tuple[int, ...]) -> None:
    """Raise unless the blocks cover each element once.

    To add up their sizes is not enough: a gap and an overlap of one size make up for each other. So the array is
    split where any block begins or ends, and the blocks over each of these cells are counted; a grid of n blocks has n
    cells.
    """
    borders = [
        np.unique(
            [w.start, w.stop, *(end for place in places for end in (place[axis].start, place[axis].stop))]
        )
        for axis, w in enumerate(wanted)
    ]
    count = np.zeros([len(ends) - 1 for ends in borders], np.intp)
    for place in places:
        cells = (np.searchsorted(ends, (p.start, p.stop)) for ends, p in zip(borders, place, strict=True))
        count[tuple(slice(start, stop) for start, stop in cells)] += 1
    wrong = np.argwhere(count != 1)
    if len(wrong):
        times = int(count[tuple(wrong[0])])
        cell = tuple(slice(int(ends[i]), int(ends[i + 1])) for ends, i in zip(borders, wrong[0], strict=True))
        raise LayoutMapError(
            f"blocks leave a gap at {_text(cell)}"
            if not times
            else f"{times} blocks overlap at {_text(cell)}",
            facts={"shape": shape},
            why="each element of an array is in exactly one block",
            fix="pass each block of the array exactly once",
        )


def _text(index: Index) -> str:
    return f"[{', '.join(f'{part.start}:{part.stop}' for part in index)}]"
