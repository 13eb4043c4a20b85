"""A number that stands for the bits of arrays, where processes compare what they hold without sending it."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import numpy.typing as npt


def checksum(*arrays: npt.NDArray[Any]) -> int:
    """The CRC-32 of the bytes of some arrays, in row-major order; shapes and types have no part in it.

    About a second for each GB, and a copy of an array that is not contiguous.

    Example:
        >>> checksum(np.zeros(4, np.uint8)) == checksum(np.zeros(1, np.float32))
        True
    """
    total = 0
    for array in arrays:
        total = zlib.crc32(np.ascontiguousarray(array).view(np.uint8).data, total)
    return total
