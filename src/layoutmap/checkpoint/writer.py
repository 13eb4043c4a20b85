"""Write the shards of one process, chunk by chunk, into safetensors files.

Each chunk is a tensor of its file, so that any reader of safetensors can read it. The name of a chunk is the path of
its variable, with the index of the chunk unless it is the whole variable: `d1.kernel[0:256,512:1024]`.
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
from layoutmap.checkpoint.chunks import choose_chunk_shape, choose_max_chunk_bytes, split_shard_into_chunks
from layoutmap.checkpoint.dtypes import get_numpy_dtype, get_safetensors_dtype_and_values_per_element
from layoutmap.checkpoint.manifest import DataFile, ProcessPart, compute_xxh3
from layoutmap.checkpoint.source import SavedVariable
from layoutmap.checkpoint.storage import FileSink, Storage
from layoutmap.core.blocks import (
    Ends,
    Index,
    NumpyArray,
    compute_block_shape,
    get_starts_and_stops,
    make_full_index,
    make_relative_index,
)
from layoutmap.core.errors import CheckpointError

_BATCH_BYTES = 1 << 22  # adjacent chunks are written together up to this size
FILE_BYTES = 1 << 24
"""A process with more bytes than this writes several files."""
ShardIterator = Iterator[tuple[Index, NumpyArray]]


@dataclass(frozen=True, slots=True)
class WriteTask:
    """A variable with the shards that this process writes.

    Args:
        variable: The variable.
        indices: The positions in the variable of the shards to write.
        shards: Yields all shards of this process, including these, each once. They may share an array's memory.
    """

    variable: SavedVariable
    indices: Sequence[Index]
    shards: Callable[[], ShardIterator]


def count_task_bytes(tasks: Sequence[WriteTask]) -> int:
    """Return the number of bytes of all shards that the tasks write, without file headers."""
    return sum(
        math.prod(compute_block_shape(index)) * get_numpy_dtype(task.variable.dtype).itemsize
        for task in tasks
        for index in task.indices
    )


# The operating system lets only one thread at a time write to a file, so write several files (decisions/0225).
def write_process_part(
    storage: Storage,
    folder: str,
    process_index: int,
    tasks: Sequence[WriteTask],
    total_bytes: int,
    progress: Callable[[str], object] | None = None,
) -> ProcessPart:
    """Write this process's shards, several files in parallel, and return a `ProcessPart` that lists files and chunks.

    Args:
        storage: The storage of the checkpoint.
        folder: The folder of the step.
        process_index: The position of this process among those that write the step.
        tasks: The shards to write.
        total_bytes: Size of all variables of the checkpoint, of all processes.
        progress: Called with the path of each variable when its values are queued for writing.

    Raises:
        CheckpointError: A file cannot be written.
    """
    num_files = max(1, min(storage.write_files, count_task_bytes(tasks) // FILE_BYTES))
    planned, headers, sizes = _assign_chunks_to_files(tasks, total_bytes, num_files)
    names = [make_data_file_name(process_index, file_index) for file_index in range(num_files)]
    with ExitStack() as stack:
        writers = [
            stack.enter_context(_FileWriter(storage.create_file(folder, name), header))
            for name, header in zip(names, headers, strict=True)
        ]
        for task in tasks:
            shards = zip(_iterate_shards_to_write(task), planned[task.variable.path], strict=True)
            for (index, values), chunks in shards:
                for chunk in chunks:
                    writers[chunk.file].queue_chunk(chunk, values[make_relative_index(chunk.index, index)])
            if progress is not None:
                progress(task.variable.path)
        for writer in writers:
            writer.queue_rest_and_close()
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
    """Write one file on its own thread, while the caller fetches the next values.

    Args:
        sink: The new file.
        header: The first bytes of the file.

    Attributes:
        checksums: The checksum of each chunk by its `id`, because an empty chunk has the same offset as the next.
    """

    def __init__(self, sink: FileSink, header: bytes):
        self.checksums: dict[int, str] = {}
        self._sink = sink
        self._header = header
        self._batch: list[tuple[Chunk, NumpyArray]] = []
        self._num_bytes = 0
        self._buffer = np.empty(0, np.uint8)
        self._pool = ThreadPoolExecutor(1, "layoutmap-writer")
        self._pending: deque[Future[object]] = deque()
        self._is_open = False

    def queue_chunk(self, chunk: Chunk, values: NumpyArray) -> None:
        """Queue the values of the next chunk. They must not change until the file is closed."""
        self._batch.append((chunk, values))
        self._num_bytes += values.nbytes
        if self._num_bytes >= _BATCH_BYTES:
            self._submit_to_writer_thread(self._write_batch, self._batch, self._num_bytes)
            self._batch, self._num_bytes = [], 0

    def queue_rest_and_close(self) -> None:
        """Queue the remaining chunks and the closing of the file. The end of the `with` block waits for them."""
        self._submit_to_writer_thread(self._write_batch, self._batch, self._num_bytes)
        self._submit_to_writer_thread(self._close_file)

    def _submit_to_writer_thread(self, function: Callable[..., object], *args: object) -> None:
        self._wait_for_pending_writes(1)
        try:
            self._pending.append(self._pool.submit(function, *args))
        except RuntimeError:  # at interpreter shutdown, threads cannot start, so write on this thread
            self._wait_for_pending_writes(0)
            function(*args)

    def _wait_for_pending_writes(self, num_pending: int) -> None:
        while len(self._pending) > num_pending:
            self._pending.popleft().result()

    def _write_batch(self, batch: Sequence[tuple[Chunk, NumpyArray]], num_bytes: int) -> None:
        if self._header:
            self._sink.write(self._header)
            self._header = b""
        if self._buffer.size < num_bytes:
            self._buffer = np.empty(num_bytes, np.uint8)
        offset = 0
        for chunk, values in batch:
            data = self._buffer[offset : offset + values.nbytes]
            data.view(values.dtype).reshape(values.shape)[...] = values
            self.checksums[id(chunk)] = compute_xxh3(data.data)
            offset += values.nbytes
        self._sink.write(self._buffer[:offset].data)

    def _close_file(self) -> None:
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
                self._wait_for_pending_writes(0)
        finally:
            # Wait for running writes, so that no thread writes to a closed file.
            self._pool.shutdown(cancel_futures=True)
            if self._is_open:
                self._sink.__exit__(kind, error, trace)


def make_data_file_name(process_index: int, file_index: int = 0) -> str:
    """Return the name of one of the data files of a process."""
    return f"data-{process_index:05d}{f'-{file_index:02d}' * bool(file_index)}.safetensors"


def make_chunk_name(path: str, index: Index, shape: Sequence[int]) -> str:
    """Return the name of a chunk in the header of a file: the variable's path, with the chunk's index if it is a part.

    Example:
        >>> [make_chunk_name("d1.kernel", (slice(0, stop),), (8,)) for stop in (4, 8)]
        ['d1.kernel[0:4]', 'd1.kernel']
    """
    if index == make_full_index(shape) and not path.endswith("]") and path != "__metadata__":
        return path
    return f"{path}[{','.join(f'{part.start}:{part.stop}' for part in index)}]"


def _assign_chunks_to_files(
    tasks: Sequence[WriteTask], total_bytes: int, num_files: int
) -> tuple[dict[str, list[list[Chunk]]], list[bytes], list[int]]:
    """Return three values: a dict from path to each shard's chunks, each file's header, and each file's size.

    Chunks have no checksum yet, and their offsets count from the end of the header. Each chunk goes into the file with
    the fewest bytes so far, so that all files grow at the same time.
    """
    planned_chunks: dict[str, list[list[Chunk]]] = {}
    rows: list[list[tuple[str, str, Sequence[int], int]]] = [[] for _ in range(num_files)]
    sizes = [0] * num_files
    for task in tasks:
        variable, shards = task.variable, planned_chunks.setdefault(task.variable.path, [])
        itemsize = get_numpy_dtype(variable.dtype, variable.path).itemsize
        dtype, count = get_safetensors_dtype_and_values_per_element(variable.dtype, itemsize)
        max_chunk_bytes = choose_max_chunk_bytes(math.prod(variable.shape) * itemsize, total_bytes)
        for shard in task.indices:
            shape = choose_chunk_shape(compute_block_shape(shard), itemsize, max_chunk_bytes, variable.shape)
            shards.append([])
            for index in split_shard_into_chunks(shard, shape):
                file, size = sizes.index(min(sizes)), compute_block_shape(index)
                num_bytes = math.prod(size) * itemsize
                name = make_chunk_name(variable.path, index, variable.shape)
                rows[file].append((name, dtype, [*size] + [count] * (count > 1), num_bytes))
                shards[-1].append(Chunk(file, sizes[file], index, ""))
                sizes[file] += num_bytes
    return planned_chunks, [encode_safetensors_header("layoutmap", task) for task in rows], sizes


def encode_safetensors_header(
    format_name: str, tensors: Iterable[tuple[str, str, Sequence[int], int]]
) -> bytes:
    """Return the encoded and padded header of a safetensors file.

    Args:
        format_name: The value of `format` in the metadata of the header.
        tensors: For each tensor its name, the code of its dtype, its shape, and its size in bytes.
    """
    entries: dict[str, Any] = {"__metadata__": {"format": format_name}}
    offset = 0
    for name, dtype, shape, num_bytes in tensors:
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + num_bytes]}
        offset += num_bytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _iterate_shards_to_write(task: WriteTask) -> Iterator[tuple[Index, NumpyArray]]:
    """Yield the index and values of each shard that a task writes, in the order of `task.indices`."""
    dtype = get_numpy_dtype(task.variable.dtype)
    shards, early = task.shards(), dict[Ends, NumpyArray]()
    for index in task.indices:
        wanted = get_starts_and_stops(index)
        while wanted not in early:
            found = next(shards, None)
            if found is None:
                raise CheckpointError(
                    f"{task.variable.path}: this process lacks one of its shards",
                    facts={"index": str(index)},
                    why="by its layout, a device of this process stores the shard",
                    fix="this is a bug in layoutmap; please report it",
                )
            early[get_starts_and_stops(found[0])] = found[1]
        values = early.pop(wanted)
        if values.dtype != dtype or values.shape != compute_block_shape(index):
            raise CheckpointError(
                f"{task.variable.path}: the dtype or shape of a shard is wrong",
                facts={
                    "dtype": f"{values.dtype}, not {dtype}",
                    "shape": f"{values.shape}, not {compute_block_shape(index)}",
                },
                why="the engine returned an array that contradicts its description",
                fix="this is a bug in layoutmap; please report it",
            )
        yield index, values
