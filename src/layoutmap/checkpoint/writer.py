"""Write the shards of one process, chunk by chunk, into a safetensors file.

Each chunk is a tensor of that file, so that any reader of safetensors can read it. The name of a chunk is the path of
its variable, if it is all of it; else its place comes after, as in `d1.kernel[0:256,512:1024]`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

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

_BUFFER_BYTES = 1 << 20  # of neighbouring chunks that are written at once, where they are smaller than that
Shards = Iterator[tuple[Index, NumpyArray]]


@dataclass(frozen=True, slots=True)
class WriteTask:
    """A variable with the shards that this process writes.

    Args:
        variable: The variable.
        indices: Where the shards are in it.
        shards: Returns the shards of this process, these among them, each once; they may be in the memory of an array.
    """

    variable: SavedVariable
    indices: Sequence[Index]
    shards: Callable[[], Shards]


def count_bytes(todo: Sequence[WriteTask]) -> int:
    """Return the size in bytes of all shards to write, without headers."""
    return sum(
        math.prod(compute_block_shape(index)) * get_numpy_dtype(each.variable.dtype).itemsize
        for each in todo
        for index in each.indices
    )


def write_part(
    storage: Storage,
    folder: str,
    number: int,
    todo: Sequence[WriteTask],
    total_bytes: int,
    progress: Callable[[str], object] | None = None,
) -> ProcessPart:
    """Write the shards of this process.

    Args:
        storage: Where to.
        folder: The folder of the step.
        number: The number of this process.
        todo: The shards.
        total_bytes: Size of all variables of the checkpoint, of all processes.
        progress: Called with the path of each variable when it is written.

    Raises:
        CheckpointError: It cannot be written.
    """
    name = name_data_file(number)
    planned = {each.variable.path: list(_plan_chunks(each, total_bytes)) for each in todo}
    header, starts = _make_header(todo, planned)
    found: dict[str, list[Chunk]] = {}
    place = len(header)
    with storage.create(folder, name) as sink, _BufferedWriter(sink) as behind:
        behind.room(len(header))[...] = np.frombuffer(header, np.uint8)
        for each in todo:
            path = each.variable.path
            chunks = found.setdefault(path, [])
            for index, values in _order_shards(each):
                for chunk in planned[path][len(chunks) :]:
                    if not _is_inside(chunk, index):
                        break
                    part = values[make_relative_index(chunk, index)]
                    data = behind.room(part.nbytes)
                    data.view(part.dtype).reshape(part.shape)[...] = part
                    chunks.append(Chunk(0, place, chunk, compute_xxh3(data.data)))
                    place += part.nbytes
            assert len(chunks) == len(planned[path])
            if progress is not None:
                progress(path)
    assert place == len(header) + starts
    return ProcessPart([DataFile(name, place, len(header), compute_xxh3(header))], found)


class _BufferedWriter:
    """Writer that sends one buffer to the file while the other is filled.

    Args:
        sink: Where to.
    """

    def __init__(self, sink: Sink):
        self._sink = sink
        self._filled, self._written = (np.empty(_BUFFER_BYTES, np.uint8) for _ in range(2))
        self._num_bytes = 0
        self._pool = ThreadPoolExecutor(1, "layoutmap-writer")
        self._pending: Future[object] | None = None

    def room(self, num_bytes: int) -> npt.NDArray[np.uint8]:
        """Return memory for the next bytes of the file, to be filled before the next call."""
        if self._num_bytes + num_bytes > self._filled.size:
            self._flush()
            if num_bytes > self._filled.size:
                self._filled = np.empty(num_bytes, np.uint8)
        start, self._num_bytes = self._num_bytes, self._num_bytes + num_bytes
        return self._filled[start : self._num_bytes]

    def _flush(self) -> None:
        self._wait()
        data = self._filled[: self._num_bytes].data
        try:
            self._pending = self._pool.submit(self._sink.write, data)
        except RuntimeError:  # the program ends, and no thread can be started any more
            self._sink.write(data)
        self._filled, self._written = self._written, self._filled
        self._num_bytes = 0

    def _wait(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        try:
            if kind is None:
                self._flush()
                self._wait()
        finally:
            self._pool.shutdown()  # waits: nothing is written to a file that is closed


def name_data_file(number: int) -> str:
    """Return the name of the file that a process writes."""
    return f"data-{number:05d}.safetensors"


def name_chunk(path: str, index: Index, shape: Sequence[int]) -> str:
    """Return the name of a chunk in the header of a file.

    Example:
        >>> name_chunk("d1.kernel", (slice(0, 4),), (8,)), name_chunk("d1.kernel", (slice(0, 8),), (8,))
        ('d1.kernel[0:4]', 'd1.kernel')
    """
    if index == make_full_index(shape) and not path.endswith("]") and path != "__metadata__":
        return path
    return f"{path}[{','.join(f'{part.start}:{part.stop}' for part in index)}]"


def _plan_chunks(each: WriteTask, total_bytes: int) -> Iterator[Index]:
    variable = each.variable
    itemsize = get_numpy_dtype(variable.dtype, variable.path).itemsize
    most = choose_chunk_bytes(math.prod(variable.shape) * itemsize, total_bytes)
    for index in each.indices:
        yield from split_shard(
            index, choose_chunk_shape(compute_block_shape(index), itemsize, most, variable.shape)
        )


def _make_header(todo: Sequence[WriteTask], planned: Mapping[str, Sequence[Index]]) -> tuple[bytes, int]:
    rows: list[tuple[str, str, Sequence[int], int]] = []
    for each in todo:
        variable = each.variable
        itemsize = get_numpy_dtype(variable.dtype).itemsize
        dtype, count = get_header_dtype(variable.dtype, itemsize)
        for index in planned[variable.path]:
            shape = [*compute_block_shape(index)] + [count] * (count > 1)
            name = name_chunk(variable.path, index, variable.shape)
            rows.append((name, dtype, shape, math.prod(compute_block_shape(index)) * itemsize))
    return encode_header("layoutmap", rows)


def encode_header(form: str, rows: Iterable[tuple[str, str, Sequence[int], int]]) -> tuple[bytes, int]:
    """Return the padded header of a safetensors file, and the size of the data after it.

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
    return len(text).to_bytes(8, "little") + text, place


def _order_shards(each: WriteTask) -> Iterator[tuple[Index, NumpyArray]]:
    """Yield the shards in the order of the indices."""
    dtype = get_numpy_dtype(each.variable.dtype)
    shards, early = each.shards(), dict[Ends, NumpyArray]()
    for index in each.indices:
        wanted = get_slice_ends(index)
        while wanted not in early:
            found = next(shards, None)
            if found is None:
                raise CheckpointError(
                    f"{each.variable.path}: a shard of it is not in this process",
                    facts={"index": str(index)},
                    why="its layout says that a device of this process holds it",
                    fix="this is a fault of the library; please report it",
                )
            early[get_slice_ends(found[0])] = found[1]
        values = early.pop(wanted)
        if values.dtype != dtype or values.shape != compute_block_shape(index):
            raise CheckpointError(
                f"{each.variable.path}: a shard of it is not as its variable says",
                facts={
                    "dtype": f"{values.dtype}, not {dtype}",
                    "shape": f"{values.shape}, not {compute_block_shape(index)}",
                },
                why="the engine returned other values than it said",
                fix="this is a fault of the library; please report it",
            )
        yield index, values


def _is_inside(chunk: Index, index: Index) -> bool:
    return all(i.start <= c.start and c.stop <= i.stop for c, i in zip(chunk, index, strict=True))
