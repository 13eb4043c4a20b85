"""Divide shards into chunks, the blocks that are written, checked, and read at once.

A reader on another mesh needs blocks of a shard along any of its axes, and must read each chunk that overlaps a block
as a whole. To keep this overhead small, each axis of a variable is divided about as often as the others, and always
into halves. So chunks end where a mesh with twice as many devices in a dim divides the axis.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from layoutmap.core.blocks import Index, compute_block_shape

MIN_CHUNK_BYTES = 1 << 16
MAX_CHUNK_BYTES = 1 << 23
# Chunks of large checkpoints have at least this size, because smaller ones take longer in Python than on the disk.
_LARGE_MIN_BYTES = 1 << 20
_LARGE_NUM_CHUNKS = 512  # a checkpoint is large if it would have more chunks of the minimum size than this
_MAX_CHUNKS = 500_000  # limit for one checkpoint; its manifest then has about 50 MB
_MAX_VARIABLE_CHUNKS = 512  # limit for one variable: 8 chunks along each of three axes
_ODD_PENALTY = 16  # meshes rarely divide axes of odd size, so prefer to halve even axes, by this factor


def choose_max_chunk_bytes(variable_bytes: int, total_bytes: int) -> int:
    """Choose the maximum size of a variable's chunks in bytes.

    Args:
        variable_bytes: Size of the variable.
        total_bytes: Size of all variables of the checkpoint.
    """
    least = min(_LARGE_MIN_BYTES, total_bytes // _LARGE_NUM_CHUNKS)
    least = max(MIN_CHUNK_BYTES, least, math.ceil(total_bytes / _MAX_CHUNKS))
    return max(least, min(MAX_CHUNK_BYTES, variable_bytes // _MAX_VARIABLE_CHUNKS))


def choose_chunk_shape(
    shape: Sequence[int], itemsize: int, max_bytes: int, variable_shape: Sequence[int] | None = None
) -> tuple[int, ...]:
    """Choose the shape of a shard's chunks. The last chunks along an axis may be smaller.

    Args:
        shape: The shard's shape.
        itemsize: Bytes of an element.
        max_bytes: The maximum size of a chunk. A chunk has at least one element, even if that is larger.
        variable_shape: The shape of the shard's variable; `None`: the shard is the whole variable.

    Example:
        >>> choose_chunk_shape((4096, 1024), 4, 1 << 18)
        (512, 128)
        >>> choose_chunk_shape((512, 1024), 4, 1 << 18, (4096, 1024))
        (512, 128)
    """
    full_shape = shape if variable_shape is None else variable_shape
    found = list(shape)
    while math.prod(found) * itemsize > max_bytes and max(found) > 1:
        axis = min(
            (axis for axis, size in enumerate(found) if size > 1),
            key=lambda axis: (
                full_shape[axis] // found[axis] * (_ODD_PENALTY if found[axis] % 2 else 1),
                -found[axis],
            ),
        )
        found[axis] = -(-found[axis] // 2)
    return tuple(found)


def split_shard_into_chunks(index: Index, chunk_shape: Sequence[int]) -> Iterator[Index]:
    """Yield the index of each chunk of a shard, in row-major order.

    Args:
        index: The position of the shard in its variable.
        chunk_shape: The shape of a chunk.

    Example:
        >>> [chunk for (chunk,) in split_shard_into_chunks((slice(4, 10),), (4,))]
        [slice(4, 8, None), slice(8, 10, None)]
    """
    if 0 in compute_block_shape(index):
        yield index
        return
    axes = [
        [slice(start, min(start + size, part.stop)) for start in range(part.start, part.stop, size)]
        for part, size in zip(index, chunk_shape, strict=True)
    ]
    yield from itertools.product(*axes)
