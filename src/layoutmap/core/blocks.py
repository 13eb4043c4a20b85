"""Split, intersect, and assemble blocks of an array by their indices.

A block's index is a tuple of slices, one for each axis, each with both ends and no step. Engines hand out their
shards with such indices, and all code that moves values between layouts, processes, and files uses them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from layoutmap.core.errors import LayoutMapError
from layoutmap.core.layout import Layout

NumpyArray = npt.NDArray[Any]
Index = tuple[slice, ...]
"""The position of a block: one slice with a start and a stop for each axis."""

BlockReader = Callable[[Index], NumpyArray]
"""A function that returns the values at an index."""

Ends = tuple[tuple[int, int], ...]
"""The start and stop of each axis: an index that can be a dict key."""


def make_full_index(shape: Sequence[int]) -> Index:
    """Return the index of a whole array, with the start and stop of each axis.

    Example:
        >>> make_full_index((2, 3))
        (slice(0, 2, None), slice(0, 3, None))
    """
    return tuple(slice(0, operator.index(n)) for n in shape)


def group_devices_by_shard(
    layout: Layout, shape: Sequence[int], devices: Iterable[int]
) -> dict[Ends, tuple[Index, list[int]]]:
    """Return a dict from the ends of each distinct shard to its index and the devices that store it.

    Args:
        layout: The tensor's layout.
        shape: Its global shape.
        devices: Positions of the devices in mesh order.

    Raises:
        LayoutError: The rank differs.
        MeshError: There is no such device.

    Example:
        >>> from layoutmap.core.mesh import Mesh
        >>> layout = Layout(["y"], Mesh(None, "x=2,y=2"))
        >>> list(group_devices_by_shard(layout, (6,), range(4)).values())
        [((slice(0, 3, None),), [0, 2]), ((slice(3, 6, None),), [1, 3])]
    """
    found: dict[Ends, tuple[Index, list[int]]] = {}
    for device in devices:
        index = layout.shard_slices(shape, device)
        found.setdefault(get_starts_and_stops(index), (index, []))[1].append(device)
    return found


def normalize_index(index: Sequence[slice], shape: Sequence[int]) -> Index:
    """Return an equal index in which each slice has a start and a stop, both counted from 0.

    Raises:
        LayoutMapError: A slice has a step, or an axis has no slice.

    Example:
        >>> normalize_index((slice(None), slice(1, None)), (2, 3))
        (slice(0, 2, None), slice(1, 3, None))
    """
    why = ""
    if len(index) != len(shape):
        why = f"an array of {len(shape)} axes needs {len(shape)} slices, not {len(index)}"
    elif any(part.step not in (None, 1) for part in index):
        why = "a block is contiguous along each axis, so its slices have no step"
    if why:
        raise LayoutMapError(
            f"{tuple(index)} is not the index of a block",
            facts={"shape": tuple(shape)},
            why=why,
            fix="give one slice with a start and a stop for each axis",
        )
    ends = (part.indices(operator.index(n))[:2] for part, n in zip(index, shape, strict=True))
    return tuple(slice(start, max(start, stop)) for start, stop in ends)


def split_numpy_index(index: Any, shape: Sequence[int]) -> tuple[Index, tuple[Any, ...]]:
    """Return the index of the smallest block that contains a numpy index, and the numpy index relative to the block.

    Args:
        index: Integers, slices and `...`, alone or as a tuple.
        shape: The shape of the array.

    Raises:
        LayoutMapError: The index has other parts, has too many parts, or is outside the shape.

    Example:
        >>> split_numpy_index((-1, slice(1, 8, 3)), (4, 8))
        ((slice(3, 4, None), slice(1, 8, None)), (0, slice(None, None, 3), Ellipsis))
    """
    parts: list[Any] = [*index] if isinstance(index, tuple) else [index]
    dots = [n for n, part in enumerate(parts) if part is Ellipsis]
    rest = [slice(None)] * (len(shape) - len(parts) + len(dots))
    at = dots[0] if dots else len(parts)
    parts[at : at + 1] = rest
    try:
        if len(dots) > 1 or len(parts) != len(shape):
            raise IndexError("an index needs one part for each axis, and at most one `...`")
        pairs = [_split_axis_index(part, operator.index(n)) for part, n in zip(parts, shape, strict=True)]
    except (TypeError, IndexError, ValueError):
        raise LayoutMapError(
            f"{index!r} is not an index of this variable",
            facts={"shape": tuple(shape)},
            why="an index has an integer or a slice for each axis, within the shape, or `...` for the axes between",
            fix="write it as in numpy.s_[0], numpy.s_[0:4, ..., ::2]",
        ) from None
    return tuple(block for block, _ in pairs), (*(inner for _, inner in pairs), ...)


def _split_axis_index(part: Any, size: int) -> tuple[slice, Any]:
    """Return the smallest contiguous slice of an axis with all selected elements, and their index in this slice."""
    if isinstance(part, (bool, np.bool_)):  # numpy treats a bool as a mask, so refuse it
        raise TypeError
    if not isinstance(part, slice):
        at = range(size)[operator.index(part)]
        return slice(at, at + 1), 0
    taken = range(size)[part]
    begin, end = sorted((taken[0], taken[-1])) if taken else (0, -1)
    return slice(begin, end + 1), slice(None, None, taken.step)


def compute_block_shape(index: Index) -> tuple[int, ...]:
    """Return the shape of the block at an index."""
    return tuple(operator.index(part.stop) - operator.index(part.start) for part in index)


def get_starts_and_stops(index: Index) -> Ends:
    """Return an index as a tuple of (start, stop) tuples, because slices cannot be dict keys before Python 3.12."""
    return tuple((part.start, part.stop) for part in index)


def stack_starts_and_stops(indices: Sequence[Index], rank: int) -> tuple[NumpyArray, NumpyArray]:
    """Return the starts and stops of blocks as two arrays, with a row per block and a column per axis."""
    ends = np.array([get_starts_and_stops(index) for index in indices], np.int64).reshape(
        len(indices), rank, 2
    )
    return ends[..., 0], ends[..., 1]


def make_relative_index(inner: Index, outer: Index) -> Index:
    """Return the index of an inner block relative to the start of the outer block that contains it."""
    return tuple(slice(p.start - i.start, p.stop - i.start) for p, i in zip(inner, outer, strict=True))


def intersect_blocks(a: Index, b: Index) -> Index | None:
    """Return the intersection of two blocks, or None if they do not overlap.

    Example:
        >>> intersect_blocks((slice(0, 4),), (slice(2, 6),))
        (slice(2, 4, None),)
    """
    both = tuple(slice(max(x.start, y.start), min(x.stop, y.stop)) for x, y in zip(a, b, strict=True))
    return both if all(part.start < part.stop for part in both) else None


def assemble_blocks(
    blocks: Iterable[tuple[Index, npt.NDArray[np.generic]]],
    shape: Sequence[int],
    dtype: npt.DTypeLike,
    index: Index | None = None,
) -> npt.NDArray[np.generic]:
    """Return an array, or the part of an array at an index, assembled from blocks that together contain its elements.

    Args:
        blocks: Pairs of index and values.
        shape: The global shape.
        dtype: Its element type.
        index: The part to return; `None`: the whole array.

    Raises:
        LayoutMapError: The blocks leave a gap or overlap, or a block and its index have different shapes.

    Example:
        >>> halves = [((slice(0, 2),), np.array([1, 2])), ((slice(2, 4),), np.array([3, 4]))]
        >>> assemble_blocks(halves, (4,), int, index=(slice(1, 3),))
        array([2, 3])
    """
    wanted = make_full_index(shape) if index is None else index
    result = np.empty(compute_block_shape(wanted), dtype)
    filled: list[Index] = []
    for block, values in blocks:
        if len(block) != len(wanted) or compute_block_shape(block) != values.shape:
            raise LayoutMapError(
                f"a block of shape {values.shape} does not fit its index {format_index(block)}",
                facts={"shape": tuple(shape)},
                why=f"the index has the shape {compute_block_shape(block)}",
                fix="pass each block with its index in the global array",
            )
        both = intersect_blocks(block, wanted)
        if both is None:
            continue
        result[make_relative_index(both, wanted)] = values[make_relative_index(both, block)]
        filled.append(both)
    if (found := find_coverage_fault(*stack_starts_and_stops(filled, len(wanted)), wanted)) is not None:
        cell, times = found
        raise LayoutMapError(
            f"{times} blocks overlap at {format_index(cell)}"
            if times
            else f"blocks leave a gap at {format_index(cell)}",
            facts={"shape": tuple(shape)},
            why="each element of an array is in exactly one block",
            fix="pass each block of the array exactly once",
        )
    return result


_PRIME, _NUM_SUMS = (1 << 31) - 1, 3


def find_coverage_fault(begins: NumpyArray, ends: NumpyArray, outer: Index) -> tuple[Index, int] | None:
    """Return a part of a block that none or several of the other blocks contain, and their number, or None.

    Args:
        begins: Starts of the other blocks, as `stack_starts_and_stops` returns them.
        ends: Stops of the other blocks.
        outer: The block to cover.

    Returns:
        The part and the number of blocks that cover it, or `None` if each element is in exactly one block.

    Example:
        >>> find_coverage_fault(np.array([[0], [2], [2]]), np.array([[2], [4], [4]]), (slice(0, 6),))
        ((slice(2, 4, None),), 2)
    """
    begins, ends = _clip_to_block(begins, ends, outer)
    if _is_covered_once(begins, ends, outer):
        return None
    for axis, part in enumerate(outer):
        inner = np.unique([begins[:, axis], ends[:, axis]])
        inner = inner[(part.start < inner) & (inner < part.stop)]
        if len(inner):
            at = int(inner[len(inner) // 2])
            halves = (slice(part.start, at), slice(at, part.stop))
            found = (
                find_coverage_fault(begins, ends, (*outer[:axis], half, *outer[axis + 1 :]))
                for half in halves
            )
            return next(each for each in found if each is not None)
    return outer, len(begins)


def _clip_to_block(begins: NumpyArray, ends: NumpyArray, outer: Index) -> tuple[NumpyArray, NumpyArray]:
    """Return the starts and stops of blocks after cutting them to the block `outer`, without empty blocks."""
    begins = np.maximum(begins, np.array([part.start for part in outer], np.int64))
    ends = np.minimum(ends, np.array([part.stop for part in outer], np.int64))
    some = (begins < ends).all(axis=1)
    return begins[some], ends[some]


def _is_covered_once(begins: NumpyArray, ends: NumpyArray, outer: Index) -> bool:
    """Return whether inner blocks cover each element of the block `outer` exactly once."""
    first, last = stack_starts_and_stops([outer], len(outer))
    return bool(are_covered_once(begins, ends, [len(begins)], first, last)[0])


def are_covered_once(
    begins: NumpyArray,
    ends: NumpyArray,
    counts: Sequence[int],
    outer_begins: NumpyArray,
    outer_ends: NumpyArray,
) -> NumpyArray:
    """Return an array that says for each outer block whether its inner blocks cover each of its elements exactly once.

    Sums of sizes do not show it, because a gap and an overlap of one size cancel out. So each element counts as the
    product of random numbers for its row, its column, ... in a finite field, and the sums of inner and outer blocks are
    compared, three times. If the coverage is wrong, they are equal with a probability of 10^-25. A table of all
    elements could need more memory than there is.

    Args:
        begins: Starts of the inner blocks, ordered by outer block: a row per block, a column per axis.
        ends: Stops of the inner blocks.
        counts: Number of inner blocks of each outer block.
        outer_begins: Starts of the outer blocks.
        outer_ends: Stops of the outer blocks.
    """
    random, num_blocks = np.random.default_rng(), len(begins) + len(outer_begins)
    products = np.ones((num_blocks, _NUM_SUMS), np.int64)
    for axis in range(outer_begins.shape[1]):
        positions = (begins[:, axis], outer_begins[:, axis], ends[:, axis], outer_ends[:, axis])
        distinct, which = np.unique(np.concatenate(positions), return_inverse=True)
        numbers = random.integers(_PRIME, size=(len(distinct), _NUM_SUMS))[which]
        # Reduce modulo the prime after each factor, so that no product exceeds 64 bits.
        products = products * ((numbers[num_blocks:] - numbers[:num_blocks]) % _PRIME) % _PRIME
    sums = np.cumsum(np.concatenate([np.zeros((1, _NUM_SUMS), np.int64), products[: len(begins)]]), axis=0)
    borders = np.cumsum([0, *counts])
    differences = sums[borders[1:]] - sums[borders[:-1]] - products[len(begins) :]
    return (differences % _PRIME == 0).all(axis=1)


def format_index(index: Index) -> str:
    """Return an index as text for messages, such as `[0:4, 2:8]`.

    Example:
        >>> format_index((slice(2, 4), slice(0, 3)))
        '[2:4, 0:3]'
    """
    return f"[{', '.join(f'{part.start}:{part.stop}' for part in index)}]"
