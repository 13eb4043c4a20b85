"""Compute checksums of arrays, so that processes can compare values without sending them."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

_MAX_ELEMENTS = 1 << 21
"""Maximum number of elements whose positions are computed at one time, to limit memory."""


def compute_checksum(*arrays: npt.NDArray[Any]) -> int:
    """Return the CRC-32 of the bytes of arrays in row-major order. Shapes and dtypes do not change it.

    It takes about a second for each GB, and copies an array that is not contiguous.

    Example:
        >>> compute_checksum(np.zeros(4, np.uint8)) == compute_checksum(np.zeros(1, np.float32))
        True
    """
    total = 0
    for array in arrays:
        total = zlib.crc32(np.ascontiguousarray(array).view(np.uint8).data, total)
    return total


def compute_position_checksum(
    values: npt.NDArray[Any],
    shape: Sequence[int],
    begins: Sequence[int],
    positions: npt.NDArray[Any] | None = None,
) -> int:
    """Return a 64-bit checksum of a block. The sum for all blocks of an array, modulo 2**64, is the array's checksum.

    It depends on the bits and positions of elements, so layouts can be compared without gathering. All NaN are equal.

    Args:
        values: The block.
        shape: Shape of the array.
        begins: The start of the block along each axis.
        positions: The position of each element in the array in row-major order; `None`: it follows from `begins`.

    Example:
        >>> whole, halves = np.arange(6.0).reshape(2, 3), [np.arange(3.0), np.arange(3.0, 6.0)]
        >>> parts = [compute_position_checksum(half[None], (2, 3), (n, 0)) for n, half in enumerate(halves)]
        >>> compute_position_checksum(whole, (2, 3), (0, 0)) == sum(parts) % 2**64
        True
    """
    # The positions take more memory than the values, so compute them for parts of a large block.
    if values.ndim and values.size > _MAX_ELEMENTS and len(values) > 1:
        half = len(values) // 2
        parts = (
            (values[:half], begins, None if positions is None else positions[:half]),
            (
                values[half:],
                (begins[0] + half, *begins[1:]),
                None if positions is None else positions[half:],
            ),
        )
        return sum(compute_position_checksum(part, shape, at, where) for part, at, where in parts) % 2**64
    if positions is None:
        found: Any = np.zeros((), np.int64)
        for axis, (size, begin) in enumerate(zip(values.shape, begins, strict=True)):
            found = found[..., None] + np.arange(begin, begin + size, dtype=np.int64) * math.prod(
                shape[axis + 1 :]
            )
        positions = found
    if (is_nan := values != values).any():
        values = np.where(is_nan, np.array(np.nan).astype(values.dtype), values)
    unit = min(values.itemsize, 8)
    raw = np.ascontiguousarray(values).reshape(-1).view(f"u{unit}")
    bits = raw.reshape(values.size, values.itemsize // unit).astype(np.uint64)
    weights = np.asarray(positions).reshape(-1, 1).astype(np.uint64) * np.uint64(bits.shape[1])
    weights = (weights + np.arange(1, bits.shape[1] + 1, dtype=np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
    weights ^= weights >> np.uint64(31)
    return int(((bits + np.uint64(1)) * (weights | np.uint64(1))).sum(dtype=np.uint64))
