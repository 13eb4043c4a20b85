"""Read blocks of variables from a step of a checkpoint, and verify their checksums."""

from __future__ import annotations

import math
import os
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import numpy as np

from layoutmap.checkpoint.chunk_table import ChunkOverlap, ChunkTable
from layoutmap.checkpoint.dtypes import get_numpy_dtype
from layoutmap.checkpoint.gate import check_size_limit
from layoutmap.checkpoint.lineage import find_last_step_number
from layoutmap.checkpoint.manifest import NAME, DataFile, Manifest, compute_xxh3, manifest_from_bytes
from layoutmap.checkpoint.source import SavedVariable, Source
from layoutmap.checkpoint.states import decode_state
from layoutmap.checkpoint.storage import Storage
from layoutmap.core.blocks import Ends, Index, NumpyArray, compute_block_shape, get_starts_and_stops
from layoutmap.core.errors import CheckpointError, join_names
from layoutmap.core.variables import get_itemsize

_MAX_CACHED_CHUNKS = 2  # number of partly read chunks to cache, because the next block often needs the rest
_THREADS = min(16, 2 * (os.cpu_count() or 1))
_ALIGNMENT = 64  # in bytes; align memory, because JAX and TensorFlow copy arrays that are not aligned
_CACHE_BYTES = 1 << 30  # default number of bytes that a load keeps between comparing and using values


class StepSource(Source):
    """Read one saved step of a checkpoint.

    Args:
        storage: The storage of the checkpoint.
        step: The number of the step; `None`: the last step.

    Attributes:
        where: The folder of the step.
        manifest: The manifest of the step.
        bytes_read: Number of bytes of values read so far.
        verifies: Whether reads verify the checksums of values.
        cache_bytes: Number of bytes that `verify_block` may still cache for the next `read`.

    Raises:
        CheckpointError: There is no such step, or its manifest is missing, damaged, or of an unknown version.
    """

    def __init__(self, storage: Storage, step: int | None = None):
        self._storage = storage
        number = _resolve_step_number(storage, step)
        self._folder = storage.get_folder_name(number)
        where = f"{storage.where}/{self._folder}"
        size = storage.get_file_size(self._folder, NAME)
        if size is None:
            raise CheckpointError(
                f"{where}: the manifest is missing",
                facts={"file": NAME},
                why="only the manifest maps variables to bytes in files",
                fix="restore it from a copy, or load another step",
            )
        check_size_limit(f"{where}/{NAME}", size)
        data = np.empty(size, np.uint8)
        storage.read_file_into(self._folder, NAME, 0, data.data)
        self.manifest: Manifest = manifest_from_bytes(data.tobytes(), f"{where}/{NAME}")
        super().__init__(where, {each.path: each for each in self.manifest.variables})
        self.bytes_read = self.cache_bytes = 0
        self.verifies = True
        self._checked: dict[tuple[str, Ends], NumpyArray] = {}
        self._kept: OrderedDict[tuple[Any, ...], NumpyArray] = OrderedDict()
        self._lock = threading.Lock()
        self._local = threading.local()
        self._pool = ThreadPoolExecutor(_THREADS, "layoutmap-read")

    def allow_cache(self, num_bytes: int | None, *, is_copied: bool) -> None:
        """Let `verify_block` cache values for the next `read`.

        Args:
            num_bytes: Number of bytes. `None`: 1 GiB, or nothing if a second read takes less time.
            is_copied: Whether the next `read` copies values into existing memory. Otherwise, the cache is its result.
        """
        if num_bytes is None:
            num_bytes = 0 if is_copied and self._storage.has_page_cache else _CACHE_BYTES
        self.cache_bytes = num_bytes

    @property
    def step(self) -> int:
        """Number of the step."""
        return self.manifest.step

    @property
    def steps(self) -> tuple[int, ...]:
        """All existing steps, in ascending order."""
        return tuple(self._storage.list_steps())

    @property
    def metadata(self) -> Any:
        """Metadata that the user saved with the step."""
        return decode_state(self.manifest.metadata)

    @property
    def metrics(self) -> Mapping[str, float]:
        """Metrics by which a `CheckpointManager` compares steps. Empty if none were saved."""
        return decode_state(self.manifest.facts.get("metrics", {}))

    @property
    def states(self) -> Mapping[str, Any]:
        """States saved besides the variables, by name."""
        return {name: decode_state(value) for name, value in self.manifest.states.items()}

    @property
    def global_bytes(self) -> int:
        """Size of all variables in bytes."""
        return sum(math.ceil(math.prod(v.shape) * get_itemsize(v.dtype)) for v in self.manifest.variables)

    def check_file_sizes(self) -> None:
        """Raise if a data file is missing or its size has changed. The content of files is not read.

        Raises:
            CheckpointError: A file is missing, or has another size than in the manifest.
        """
        for file in self.manifest.files:
            if (size := self._storage.get_file_size(self._folder, file.name)) != file.num_bytes:
                raise self._make_file_size_error(file, size)

    def _make_file_size_error(self, file: DataFile, size: int | None) -> CheckpointError:
        facts: dict[str, object] = {"bytes": size, "written": file.num_bytes}
        if size is None:
            number = self.manifest.files.index(file)
            paths = (p for p, chunks in self.manifest.chunks.items() if any(c.file == number for c in chunks))
            facts = {"variables": join_names(list(paths))}
        return CheckpointError(
            f"{self.where}/{file.name}: "
            + ("the file is missing" if size is None else "the size of the file has changed"),
            facts=facts,
            why="the manifest lists it" if size is None else "the manifest lists a different size",
            fix="restore it from a copy, or load another step",
        )

    def _read_block(self, variable: SavedVariable, index: Index) -> NumpyArray:
        checked = self._checked.pop((variable.path, get_starts_and_stops(index)), None)
        if checked is not None:
            return checked
        result = _allocate_aligned_array(
            compute_block_shape(index), get_numpy_dtype(variable.dtype, variable.path)
        )
        self._read_block_into(variable, index, result)
        return result

    def _read_block_into(self, variable: SavedVariable, index: Index, target: NumpyArray) -> None:
        checked = self._checked.pop((variable.path, get_starts_and_stops(index)), None)
        if checked is not None:
            target[...] = checked
            return
        self._read_chunks(variable, index, target)

    def _verify_block(self, variable: SavedVariable, index: Index) -> None:
        """Verify a block, and cache its values for the next `read` if they have at most `cache_bytes` bytes."""
        num_bytes = (
            math.prod(compute_block_shape(index)) * get_numpy_dtype(variable.dtype, variable.path).itemsize
        )
        if num_bytes <= self.cache_bytes:
            self._checked[variable.path, get_starts_and_stops(index)] = self._read_block(variable, index)
            self.cache_bytes -= num_bytes
            return
        self._read_chunks(variable, index, None)

    def iterate_damage(self, progress: Callable[[str], object] | None = None) -> Iterator[CheckpointError]:
        """Read all files, and yield an error for each missing or damaged file and for each damaged chunk.

        Args:
            progress: Called with the path of each variable when it has been read.
        """
        missing: set[int] = set()
        for number, file in enumerate(self.manifest.files):
            size = self._storage.get_file_size(self._folder, file.name)
            if size != file.num_bytes:
                yield self._make_file_size_error(file, size)
            if size is None:
                missing.add(number)
                continue
            header = np.zeros(file.header_bytes, np.uint8)
            self._storage.read_file_into(self._folder, file.name, 0, header.data)
            if compute_xxh3(header.data) != file.header:
                yield _make_damage_error(f"{self.where}/{file.name}", "file header", 0, file.header_bytes)
        for path in self.variables:
            try:
                self.verify_block(path)
            except CheckpointError:
                yield from self._iterate_chunk_damage(path, missing)
            if progress is not None:
                progress(path)

    def _iterate_chunk_damage(self, path: str, missing: Collection[int]) -> Iterator[CheckpointError]:
        """Yield an error for each damaged chunk of a variable. Skip chunks in missing files."""
        for chunk in self.manifest.chunks[path]:
            if chunk.file not in missing:
                try:
                    self.verify_block(path, chunk.index)
                except CheckpointError as error:
                    yield error

    def _read_chunks(self, variable: SavedVariable, index: Index, target: NumpyArray | None) -> None:
        """Read and verify the chunks that overlap a block, and copy the overlaps into `target` unless it is `None`.

        Chunks that are adjacent in a file are read at once as a group, and threads read several groups at a time.
        """
        dtype = get_numpy_dtype(variable.dtype, variable.path)
        chunks = self.manifest.chunks[variable.path]
        assert isinstance(chunks, ChunkTable)
        rest: list[ChunkOverlap] = []
        for overlap in chunks.iterate_chunk_overlaps(index, dtype.itemsize):
            if self._kept and (cached := self._kept.get(overlap[:5])) is not None:
                _copy_overlap(overlap, cached, target)
            else:
                rest.append(overlap)
        groups = list(_group_adjacent_chunks(rest, self._storage.read_bytes))
        remaining = iter(groups)

        def read_remaining_groups() -> None:
            while (group := next(remaining, None)) is not None:
                self._read_adjacent_chunks(variable.path, dtype, group, target)

        futures = [self._pool.submit(read_remaining_groups) for _ in range(min(_THREADS, len(groups)) - 1)]
        try:
            read_remaining_groups()
        finally:
            deque(remaining, 0)  # after an error, drop the remaining groups, so that other threads stop
            wait(futures)
        for each in futures:
            each.result()

    def _read_adjacent_chunks(
        self, path: str, dtype: np.dtype[Any], group: Sequence[ChunkOverlap], target: NumpyArray | None
    ) -> None:
        """Read adjacent chunks at once, verify them, and copy the requested values into `target` if it is an array."""
        start, file = group[0].start, self.manifest.files[group[0].file]
        scratch: NumpyArray | None = getattr(self._local, "scratch", None)
        if scratch is None or scratch.size < group[-1].end - start:
            scratch = self._local.scratch = np.empty(group[-1].end - start, np.uint8)
        data = scratch[: group[-1].end - start]
        count = self._storage.read_file_into(self._folder, file.name, start, data.data)
        # Lock only changes of shared state, so that threads verify and copy in parallel (decisions/0127).
        with self._lock:
            self.bytes_read += count
        for overlap in group:
            part = data[overlap.start - start : overlap.end - start]
            missing = max(0, min(part.size, overlap.end - start - count))
            if missing or (self.verifies and compute_xxh3(part) != overlap.checksum):
                raise _make_damage_error(
                    f"{self.where}/{file.name}", path, overlap.start, part.size, missing=missing
                )
            values = part.view(dtype).reshape(overlap.shape)
            if overlap.chunk_index is not None:
                cached = values.copy()
                with self._lock:
                    self._kept[overlap[:5]] = cached
                    while len(self._kept) > _MAX_CACHED_CHUNKS:
                        self._kept.popitem(last=False)
            _copy_overlap(overlap, values, target)

    def __repr__(self) -> str:
        return f"<Step {self.step} of {self.where}: {len(self.variables)} variables>"


def _allocate_aligned_array(shape: tuple[int, ...], dtype: np.dtype[Any]) -> NumpyArray:
    num_bytes = math.prod(shape) * dtype.itemsize
    memory = np.empty(num_bytes + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + num_bytes].view(dtype).reshape(shape)


def _copy_overlap(overlap: ChunkOverlap, values: NumpyArray, target: NumpyArray | None) -> None:
    if target is not None:
        target[overlap.block_index] = values if overlap.chunk_index is None else values[overlap.chunk_index]


def _group_adjacent_chunks(overlaps: Iterable[ChunkOverlap], max_bytes: int) -> Iterator[list[ChunkOverlap]]:
    """Yield groups of adjacent chunks of a file. A group has one chunk, or several of at most `max_bytes` bytes."""
    group: list[ChunkOverlap] = []
    for overlap in overlaps:
        if group and (
            (overlap.file, overlap.start) != (group[0].file, group[-1].end)
            or overlap.end - group[0].start > max_bytes
        ):
            yield group
            group = []
        group.append(overlap)
    if group:
        yield group


def _make_damage_error(where: str, what: str, start: int, size: int, *, missing: int = 0) -> CheckpointError:
    return CheckpointError(
        f"{what}: its values differ from the saved ones",
        facts={"file": where, "bytes": f"{start} to {start + size}", "missing bytes": missing or ""},
        why="the file ends before the last of them"
        if missing
        else "their checksum does not match: the file was damaged or changed",
        fix="restore the file from a copy, or load another step",
    )


def _resolve_step_number(storage: Storage, step: int | None) -> int:
    steps = storage.list_steps()
    if steps and step is None:
        return steps[0] if len(steps) == 1 else find_last_step_number(storage) or steps[-1]
    if step in steps:
        assert step is not None
        return step
    raise CheckpointError(
        f"{storage.where}: there is no {'checkpoint' if step is None else f'step {step}'}",
        facts={"steps": join_names([str(each) for each in steps]) or "none"},
        why="a step is a folder step-<number>, which exists once it is complete",
        fix="name the directory of a checkpoint" if not steps else "load one of these steps",
    )
