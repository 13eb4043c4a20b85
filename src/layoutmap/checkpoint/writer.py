"""Write the shards of one process, chunk by chunk, into safetensors files.

Each chunk is a tensor of its file, so that any reader of safetensors can read it. The name of a chunk is the path of
its variable, if it is all of it; else its place comes after, as in `d1.kernel[0:256,512:1024]`.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self

import numpy as np

from layoutmap.checkpoint.chunk_table import Chunk
from layoutmap.checkpoint.chunks import choose_chunk_bytes, choose_chunk_shape, split_shard
from layoutmap.checkpoint.dtypes import get_header_dtype, get_numpy_dtype
from layoutmap.checkpoint.manifest import DataFile, ProcessPart, compute_xxh3
from layoutmap.checkpoint.source import SavedVariable
from layoutmap.checkpoint.storage import Sink, Storage
from layoutmap.core.blocks import (
    Ends,
    Index,
    NumpyArray,
    compute_block_shape,
    get_slice_ends,
    make_full_index,
    make_relative_index,
)
from layoutmap.core.errors import CheckpointError

_BATCH_BYTES = 1 << 22  # adjacent chunks are written together up to this size
FILE_BYTES = 1 << 24
"""A process with more bytes than this writes several files."""
Shards = Iterator[tuple[Index, NumpyArray]]


@dataclass(frozen=True, slots=True)
class WriteTask:
    """A variable with the shards that this process writes.

    Args:
        variable: The variable.
        indices: The positions of the shards in the variable.
        shards: Yields the shards of this process, each once, including these. They may share an array's memory.
    """

    variable: SavedVariable
    indices: Sequence[Index]
    shards: Callable[[], Shards]


def count_bytes(todo: Sequence[WriteTask]) -> int:
    """Sum the bytes of all shards to write, without headers."""
    return sum(
        math.prod(compute_block_shape(index)) * get_numpy_dtype(each.variable.dtype).itemsize
        for each in todo
        for index in each.indices
    )


# The system lets one thread at a time write to a file, so use several files (decisions/0225).
def write_part(
    storage: Storage,
    folder: str,
    number: int,
    todo: Sequence[WriteTask],
    total_bytes: int,
    progress: Callable[[str], object] | None = None,
) -> ProcessPart:
    """Write the shards of this process, several files in parallel.

    Args:
        storage: Where to.
        folder: The folder of the step.
        number: The number of this process.
        todo: The shards.
        total_bytes: Size of all variables of the checkpoint, of all processes.
        progress: Called with the path of each variable when its values are taken.

    Raises:
        CheckpointError: It cannot be written.
    """
    num_files = max(1, min(storage.write_files, count_bytes(todo) // FILE_BYTES))
    planned, headers, sizes = _plan_files(todo, total_bytes, num_files)
    names = [name_data_file(number, k) for k in range(num_files)]
    with ExitStack() as stack:
        writers = [
            stack.enter_context(_FileWriter(storage.create(folder, name), header))
            for name, header in zip(names, headers, strict=True)
        ]
        for each in todo:
            shards = zip(_order_shards(each), planned[each.variable.path], strict=True)
            for (index, values), chunks in shards:
                for chunk in chunks:
                    writers[chunk.file].put(chunk, values[make_relative_index(chunk.index, index)])
            if progress is not None:
                progress(each.variable.path)
        for writer in writers:
            writer.finish()
    checksums = {key: checksum for writer in writers for key, checksum in writer.checksums.items()}
    files = [
        DataFile(name, len(header) + size, len(header), compute_xxh3(header))
        for name, size, header in zip(names, sizes, headers, strict=True)
    ]
    found = {
        path: [
            replace(chunk, start=len(headers[chunk.file]) + chunk.start, checksum=checksums[id(chunk)])
            for chunks in shards
            for chunk in chunks
        ]
        for path, shards in planned.items()
    }
    return ProcessPart(files, found)


class _FileWriter:
    """Write one file on a thread of its own, while the caller fetches the next values.

    Args:
        sink: The new file.
        header: Its first bytes.

    Attributes:
        checksums: The checksum of each chunk by its `id`, because an empty chunk has the same offset as the next.
    """

    def __init__(self, sink: Sink, header: bytes):
        self.checksums: dict[int, str] = {}
        self._sink = sink
        self._header = header
        self._batch: list[tuple[Chunk, NumpyArray]] = []
        self._num_bytes = 0
        self._buffer = np.empty(0, np.uint8)
        self._pool = ThreadPoolExecutor(1, "layoutmap-writer")
        self._pending: deque[Future[object]] = deque()
        self._is_open = False

    def put(self, chunk: Chunk, values: NumpyArray) -> None:
        """Queue the values of the next chunk. They must not change until the file is closed."""
        self._batch.append((chunk, values))
        self._num_bytes += values.nbytes
        if self._num_bytes >= _BATCH_BYTES:
            self._submit(self._write, self._batch, self._num_bytes)
            self._batch, self._num_bytes = [], 0

    def finish(self) -> None:
        """Write the remaining chunks, and close the file."""
        self._submit(self._write, self._batch, self._num_bytes)
        self._submit(self._close)

    def _submit(self, work: Callable[..., object], *args: object) -> None:
        self._wait(1)
        try:
            self._pending.append(self._pool.submit(work, *args))
        except RuntimeError:  # at interpreter shutdown, Python starts no more threads
            self._wait(0)
            work(*args)

    def _wait(self, num_pending: int) -> None:
        while len(self._pending) > num_pending:
            self._pending.popleft().result()

    def _write(self, batch: Sequence[tuple[Chunk, NumpyArray]], num_bytes: int) -> None:
        if self._header:
            self._sink.write(self._header)
            self._header = b""
        if self._buffer.size < num_bytes:
            self._buffer = np.empty(num_bytes, np.uint8)
        place = 0
        for chunk, values in batch:
            data = self._buffer[place : place + values.nbytes]
            data.view(values.dtype).reshape(values.shape)[...] = values
            self.checksums[id(chunk)] = compute_xxh3(data.data)
            place += values.nbytes
        self._sink.write(self._buffer[:place].data)

    def _close(self) -> None:
        self._is_open = False
        self._sink.__exit__(None, None, None)

    def __enter__(self) -> Self:
        self._sink.__enter__()
        self._is_open = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        try:
            if kind is None:
                self._wait(0)
        finally:
            # Wait for running writes, so that no thread writes to a closed file.
            self._pool.shutdown(cancel_futures=True)
            if self._is_open:
                self._sink.__exit__(kind, error, trace)


def name_data_file(number: int, k: int = 0) -> str:
    """Return the name of the k-th file that a process writes."""
    return f"data-{number:05d}{f'-{k:02d}' * bool(k)}.safetensors"


def name_chunk(path: str, index: Index, shape: Sequence[int]) -> str:
    """Return the name of a chunk in the header of a file.

    Example:
        >>> name_chunk("d1.kernel", (slice(0, 4),), (8,)), name_chunk("d1.kernel", (slice(0, 8),), (8,))
        ('d1.kernel[0:4]', 'd1.kernel')
    """
    if index == make_full_index(shape) and not path.endswith("]") and path != "__metadata__":
        return path
    return f"{path}[{','.join(f'{part.start}:{part.stop}' for part in index)}]"


def _plan_files(
    todo: Sequence[WriteTask], total_bytes: int, num_files: int
) -> tuple[dict[str, list[list[Chunk]]], list[bytes], list[int]]:
    """Assign chunks to files. Return the chunks of each shard, and each file's header and data size.

    Chunks have no checksum yet, and begin in the data of their file. Each chunk goes into the file with the fewest
    bytes so far, so that all files grow at the same time.
    """
    found: dict[str, list[list[Chunk]]] = {}
    rows: list[list[tuple[str, str, Sequence[int], int]]] = [[] for _ in range(num_files)]
    sizes = [0] * num_files
    for each in todo:
        variable, shards = each.variable, found.setdefault(each.variable.path, [])
        itemsize = get_numpy_dtype(variable.dtype, variable.path).itemsize
        dtype, count = get_header_dtype(variable.dtype, itemsize)
        most = choose_chunk_bytes(math.prod(variable.shape) * itemsize, total_bytes)
        for shard in each.indices:
            shape = choose_chunk_shape(compute_block_shape(shard), itemsize, most, variable.shape)
            shards.append([])
            for index in split_shard(shard, shape):
                file, size = sizes.index(min(sizes)), compute_block_shape(index)
                num_bytes = math.prod(size) * itemsize
                name = name_chunk(variable.path, index, variable.shape)
                rows[file].append((name, dtype, [*size] + [count] * (count > 1), num_bytes))
                shards[-1].append(Chunk(file, sizes[file], index, ""))
                sizes[file] += num_bytes
    return found, [encode_header("layoutmap", each) for each in rows], sizes


def encode_header(form: str, rows: Iterable[tuple[str, str, Sequence[int], int]]) -> bytes:
    """Encode the padded header of a safetensors file.

    Args:
        form: What it says under `format`.
        rows: For each tensor its name, its element type as the format calls it, its shape and its size in bytes.
    """
    entries: dict[str, Any] = {"__metadata__": {"format": form}}
    place = 0
    for name, dtype, shape, num_bytes in rows:
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [place, place + num_bytes]}
        place += num_bytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _order_shards(each: WriteTask) -> Iterator[tuple[Index, NumpyArray]]:
    """Yield the shards in the order of the task's indices."""
    dtype = get_numpy_dtype(each.variable.dtype)
    shards, early = each.shards(), dict[Ends, NumpyArray]()
    for index in each.indices:
        wanted = get_slice_ends(index)
        while wanted not in early:
            found = next(shards, None)
            if found is None:
                raise CheckpointError(
                    f"{each.variable.path}: this process lacks one of its shards",
                    facts={"index": str(index)},
                    why="by its layout, a device of this process stores the shard",
                    fix="this is a bug in layoutmap; please report it",
                )
            early[get_slice_ends(found[0])] = found[1]
        values = early.pop(wanted)
        if values.dtype != dtype or values.shape != compute_block_shape(index):
            raise CheckpointError(
                f"{each.variable.path}: a shard has another dtype or shape than its variable",
                facts={
                    "dtype": f"{values.dtype}, not {dtype}",
                    "shape": f"{values.shape}, not {compute_block_shape(index)}",
                },
                why="the engine returned an array that contradicts its description",
                fix="this is a bug in layoutmap; please report it",
            )
        yield index, values
