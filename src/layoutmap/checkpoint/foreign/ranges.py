"""Read blocks of row-major arrays from files, using only the byte ranges that a block needs."""

from __future__ import annotations

import itertools
import math
import os
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from layoutmap.checkpoint.gate import MAX_SMALL_FILE_BYTES, check_regular_file, check_size_limit
from layoutmap.core.blocks import Index, NumpyArray, compute_block_shape
from layoutmap.core.errors import CheckpointError

# A disk reads whole blocks, so contiguous ranges shorter than this are read together with the gaps between them.
_SHORT_BYTES = 512
_SLAB_BYTES = 1 << 20


class ByteRangeFile:
    """Read byte ranges of a file.

    Args:
        path: The path of the file.

    Attributes:
        path: The path of the file.
        num_bytes: The size of the file when it was opened.
        bytes_read: Number of bytes read so far.

    Raises:
        CheckpointError: The file cannot be opened.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = os.fspath(path)
        try:
            # without O_NONBLOCK, opening a named pipe would wait for a writer
            self._file = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK)
        except OSError as error:
            raise _make_file_read_error(self.path, error) from error
        weakref.finalize(self, os.close, self._file)
        file_stat = os.fstat(self._file)
        check_regular_file(self.path, file_stat)
        self.num_bytes = file_stat.st_size
        self.bytes_read = 0

    def read_into(self, start: int, buffer: memoryview) -> None:
        """Fill a buffer with the bytes that begin at offset `start`.

        Raises:
            CheckpointError: The bytes cannot be read, or the file ends before the last of them.
        """
        done = 0
        while done < len(buffer):
            try:
                count = os.preadv(self._file, [buffer[done:]], start + done)
            except OSError as error:
                raise _make_file_read_error(self.path, error) from error
            if not count:
                raise CheckpointError(
                    f"{self.path}: the file is truncated",
                    facts={
                        "wanted": f"bytes {start} to {start + len(buffer)}",
                        "file": f"{start + done} bytes",
                    },
                    why="the header promises more bytes, or another program changed the file meanwhile",
                    fix="download or copy the file again",
                )
            done += count
        self.bytes_read += done

    def read_whole(self, max_bytes: int = MAX_SMALL_FILE_BYTES) -> bytes:
        """Return all bytes of a small file.

        Raises:
            CheckpointError: The file has more than `max_bytes` bytes, or cannot be read.
        """
        check_size_limit(self.path, self.num_bytes, max_bytes)
        return self.read(0, self.num_bytes)

    def read(self, start: int, num_bytes: int) -> bytes:
        """Return the bytes that begin at offset `start`."""
        data = bytearray(num_bytes)
        self.read_into(start, memoryview(data))
        return bytes(data)

    def read_block(self, start: int, dtype: np.dtype[Any], shape: Sequence[int], index: Index) -> NumpyArray:
        """Return the values of a block of a row-major array that is stored from offset `start` on.

        Args:
            start: The offset of the array in the file in bytes.
            dtype: The dtype of the array.
            shape: The shape of the array.
            index: The position of the block in the array.
        """
        result = np.empty(compute_block_shape(index), dtype)
        if not result.size:
            return result
        parts = [(part.start, part.stop) for part in index]
        # Find the last axis that the block does not cover fully. From there on, the block's elements are contiguous.
        axis = len(shape)
        while axis and (axis == len(shape) or parts[axis] == (0, shape[axis])):
            axis -= 1
        inner = math.prod(shape[axis + 1 :]) * dtype.itemsize
        begin, end = parts[axis] if parts else (0, 1)
        row = (shape[axis] if shape else 1) * inner
        strides = [math.prod(shape[i + 1 :]) * dtype.itemsize for i in range(axis)]
        if axis and (end - begin) * inner < _SHORT_BYTES:
            self._read_rows_with_gaps(result, start, parts, strides, (begin * inner, end * inner, row))
            return result
        runs = result.reshape(-1).view(np.uint8).reshape(-1, (end - begin) * inner)
        outer = itertools.product(*(range(*part) for part in parts[:axis]))
        for run, leading_index in zip(runs, outer, strict=True):
            offset = sum(i * stride for i, stride in zip(leading_index, strides, strict=True))
            self.read_into(start + offset + begin * inner, run.data)
        return result

    def _read_rows_with_gaps(
        self,
        result: NumpyArray,
        start: int,
        parts: Sequence[tuple[int, int]],
        strides: Sequence[int],
        row_range: tuple[int, int, int],
    ) -> None:
        """Fill `result` by reading several rows with the gaps between them at once, since many short reads are slow."""
        begin, end, row = row_range
        axis = len(strides) - 1
        first, last = parts[axis]
        runs = result.reshape(-1).view(np.uint8).reshape(-1, last - first, end - begin)
        rows = max(1, _SLAB_BYTES // row)
        outer = itertools.product(*(range(*part) for part in parts[:axis]))
        for filled, leading_index in zip(runs, outer, strict=True):
            offset = start + sum(i * stride for i, stride in zip(leading_index, strides[:axis], strict=True))
            for top in range(first, last, rows):
                count = min(rows, last - top)
                size = (count - 1) * row + end - begin
                slab = np.empty(count * row, np.uint8)
                self.read_into(offset + top * row + begin, slab[:size].data)
                filled[top - first : top - first + count] = slab.reshape(count, row)[:, : end - begin]


def _make_file_read_error(path: str, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"{path}: the file cannot be read",
        why=f"the system says: {error.strerror or error}",
        fix="check the path, and that this user may read it",
    )
