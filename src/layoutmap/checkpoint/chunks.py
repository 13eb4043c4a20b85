"""How a shard is divided into chunks: blocks that are written, checked and read as one.

A reader on another mesh needs blocks of a shard along any of its axes. What it reads beyond them is what its chunks
stick out, so chunks are small blocks, about as long along each axis, whose ends lie where halves of the shard end: a
mesh of twice as many devices in any of its dims finds its shards to consist of whole chunks.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from layoutmap.core.blocks import Index, block_shape

LEAST_BYTES = 1 << 18
MOST_BYTES = 1 << 23
_MOST_CHUNKS = 500_000  # of a checkpoint: a manifest of them has some 50 MB
_OF_A_SHARD = 64


def chunk_bytes(shard_bytes: int, total_bytes: int) -> int:
    """The size that the chunks of a shard should have.

    Args:
        shard_bytes: Size of the shard.
        total_bytes: Size of all variables of the checkpoint.
    """
    least = max(LEAST_BYTES, math.ceil(total_bytes / _MOST_CHUNKS))
    return max(least, min(MOST_BYTES, shard_bytes // _OF_A_SHARD))


def chunk_shape(shape: Sequence[int], itemsize: int, most_bytes: int) -> tuple[int, ...]:
    """The shape of the chunks of a shard; those at its ends may be smaller.

    Args:
        shape: The shard's shape.
        itemsize: Bytes of an element.
        most_bytes: The size that a chunk should not exceed; it has one element at least.

    Example:
        >>> chunk_shape((4096, 1024), 4, 1 << 18)
        (256, 256)
        >>> chunk_shape((3, 1365), 4, 1 << 18)
        (3, 1365)
    """
    found = list(shape)
    while math.prod(found) * itemsize > most_bytes and max(found) > 1:
        even = [n for n in found if n % 2 == 0]
        longest = max(even) if even and max(even) * 8 >= max(found) else max(found)
        axis = found.index(longest)
        found[axis] = -(-longest // 2)
    return tuple(found)


def chunks_of(index: Index, shape: Sequence[int]) -> Iterator[Index]:
    """The indices of the chunks of a shard, in row-major order.

    Args:
        index: Where the shard is in its variable.
        shape: The shape of a chunk.

    Example:
        >>> [chunk for (chunk,) in chunks_of((slice(4, 10),), (4,))]
        [slice(4, 8, None), slice(8, 10, None)]
    """
    if 0 in block_shape(index):
        yield index
        return
    axes = [
        [slice(start, min(start + size, part.stop)) for start in range(part.start, part.stop, size)]
        for part, size in zip(index, shape, strict=True)
    ]
    yield from itertools.product(*axes)
