"""Open a step of a checkpoint, and verify checksums while blocks of variables are read."""

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
from layoutmap.checkpoint.gate import check_small
from layoutmap.checkpoint.lineage import find_last_step
from layoutmap.checkpoint.manifest import NAME, DataFile, Manifest, compute_xxh3, manifest_from_bytes
from layoutmap.checkpoint.source import SavedVariable, Source
from layoutmap.checkpoint.states import decode_state
from layoutmap.checkpoint.storage import Storage
from layoutmap.core.blocks import Ends, Index, NumpyArray, compute_block_shape, get_slice_ends
from layoutmap.core.errors import CheckpointError, join_names
from layoutmap.core.variables import get_itemsize

_MAX_CACHED_CHUNKS = 2  # partly read chunks to cache, because the next block often needs the rest
_THREADS = min(16, 2 * (os.cpu_count() or 1))
_ALIGNMENT = 64  # in bytes; JAX and TensorFlow copy arrays that are not aligned


class StepSource(Source):
    """Read one saved step of a checkpoint.

    Args:
        storage: The storage of the checkpoint.
        step: The step; `None`: the last one.

    Attributes:
        where: The folder of the step.
        manifest: Its manifest.
        bytes_read: Number of bytes of values read so far.
        verifies: Whether reads verify the checksums of values.
        cache_bytes: Bytes that `check` may still cache for the next `read`.

    Raises:
        CheckpointError: There is no such step, or its manifest is not as it was written.
    """

    def __init__(self, storage: Storage, step: int | None = None):
        self._storage = storage
        number = _choose_step(storage, step)
        self._folder = storage.folder(number)
        where = f"{storage.where}/{self._folder}"
        size = storage.size(self._folder, NAME)
        if size is None:
            raise CheckpointError(
                f"{where}: the manifest is missing",
                facts={"file": NAME},
                why="only the manifest maps variables to bytes in files",
                fix="restore it from a copy, or load another step",
            )
        check_small(f"{where}/{NAME}", size)
        data = np.empty(size, np.uint8)
        storage.read_into(self._folder, NAME, 0, data.data)
        self.manifest: Manifest = manifest_from_bytes(data.tobytes(), f"{where}/{NAME}")
        super().__init__(where, {each.path: each for each in self.manifest.variables})
        self.bytes_read = self.cache_bytes = 0
        self.verifies = True
        self._checked: dict[tuple[str, Ends], NumpyArray] = {}
        self._kept: OrderedDict[tuple[Any, ...], NumpyArray] = OrderedDict()
        self._lock = threading.Lock()
        self._local = threading.local()
        self._pool = ThreadPoolExecutor(_THREADS, "layoutmap-read")

    @property
    def step(self) -> int:
        """Number of the step."""
        return self.manifest.step

    @property
    def steps(self) -> tuple[int, ...]:
        """All existing steps, in ascending order."""
        return tuple(self._storage.steps())

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
        """Size of all variables."""
        return sum(math.ceil(math.prod(v.shape) * get_itemsize(v.dtype)) for v in self.manifest.variables)

    def check_files(self) -> None:
        """Raise if a file is missing or its size changed, without reading files.

        Raises:
            CheckpointError: There is one.
        """
        for file in self.manifest.files:
            if (size := self._storage.size(self._folder, file.name)) != file.num_bytes:
                raise self._make_size_error(file, size)

    def _make_size_error(self, file: DataFile, size: int | None) -> CheckpointError:
        facts: dict[str, object] = {"bytes": size, "written": file.num_bytes}
        if size is None:
            number = self.manifest.files.index(file)
            inside = (
                p for p, chunks in self.manifest.chunks.items() if any(c.file == number for c in chunks)
            )
            facts = {"variables": join_names(list(inside))}
        return CheckpointError(
            f"{self.where}/{file.name}: "
            + ("the file is missing" if size is None else "the size of the file has changed"),
            facts=facts,
            why="the manifest lists another size",
            fix="restore it from a copy, or load another step",
        )

    def _read(self, variable: SavedVariable, wanted: Index) -> NumpyArray:
        checked = self._checked.pop((variable.path, get_slice_ends(wanted)), None)
        if checked is not None:
            return checked
        result = _allocate_aligned(
            compute_block_shape(wanted), get_numpy_dtype(variable.dtype, variable.path)
        )
        self._read_into(variable, wanted, result)
        return result

    def _read_into(self, variable: SavedVariable, wanted: Index, target: NumpyArray) -> None:
        checked = self._checked.pop((variable.path, get_slice_ends(wanted)), None)
        if checked is not None:
            target[...] = checked
            return
        self._read_chunks(variable, wanted, target)

    def _check(self, variable: SavedVariable, wanted: Index) -> None:
        """Verify a block, and cache its values for the next `read` while `cache_bytes` allows."""
        num_bytes = (
            math.prod(compute_block_shape(wanted)) * get_numpy_dtype(variable.dtype, variable.path).itemsize
        )
        if num_bytes <= self.cache_bytes:
            self._checked[variable.path, get_slice_ends(wanted)] = self._read(variable, wanted)
            self.cache_bytes -= num_bytes
            return
        self._read_chunks(variable, wanted, None)

    def problems(self, progress: Callable[[str], object] | None = None) -> Iterator[CheckpointError]:
        """Read all files, and yield an error for each damaged file or chunk.

        Args:
            progress: Called with the path of each variable when it has been read.
        """
        missing: set[int] = set()
        for number, file in enumerate(self.manifest.files):
            size = self._storage.size(self._folder, file.name)
            if size != file.num_bytes:
                yield self._make_size_error(file, size)
            if size is None:
                missing.add(number)
                continue
            header = np.zeros(file.header_bytes, np.uint8)
            self._storage.read_into(self._folder, file.name, 0, header.data)
            if compute_xxh3(header.data) != file.header:
                yield _make_damage_error(f"{self.where}/{file.name}", "its header", 0, file.header_bytes)
        for path in self.variables:
            try:
                self.check(path)
            except CheckpointError:
                yield from self._find_damaged_chunks(path, missing)
            if progress is not None:
                progress(path)

    def _find_damaged_chunks(self, path: str, missing: Collection[int]) -> Iterator[CheckpointError]:
        """Yield an error for each damaged chunk of a variable. Skip missing files."""
        for chunk in self.manifest.chunks[path]:
            if chunk.file not in missing:
                try:
                    self.check(path, chunk.index)
                except CheckpointError as error:
                    yield error

    def _read_chunks(self, variable: SavedVariable, wanted: Index, target: NumpyArray | None) -> None:
        """Read and verify the chunks that overlap a block, and copy them into an array if one is given.

        Neighbours in a file are read at once, and several such runs at the same time.
        """
        dtype = get_numpy_dtype(variable.dtype, variable.path)
        chunks = self.manifest.chunks[variable.path]
        assert isinstance(chunks, ChunkTable)
        rest: list[ChunkOverlap] = []
        for found in chunks.find_overlaps(wanted, dtype.itemsize):
            if self._kept and (kept := self._kept.get(found[:5])) is not None:
                _copy_overlap(found, kept, target)
            else:
                rest.append(found)
        runs = list(_group_adjacent(rest, self._storage.read_bytes))
        left = iter(runs)

        def read_runs() -> None:
            while (run := next(left, None)) is not None:
                self._read_run(variable.path, dtype, run, target)

        helping = [self._pool.submit(read_runs) for _ in range(min(_THREADS, len(runs)) - 1)]
        try:
            read_runs()
        finally:
            deque(left, 0)  # after an error, drop the remaining runs
            wait(helping)
        for each in helping:
            each.result()

    def _read_run(
        self, path: str, dtype: np.dtype[Any], run: Sequence[ChunkOverlap], target: NumpyArray | None
    ) -> None:
        """Read and verify adjacent chunks, in memory that the thread reuses for its next run."""
        start, file = run[0].start, self.manifest.files[run[0].file]
        scratch: NumpyArray | None = getattr(self._local, "scratch", None)
        if scratch is None or scratch.size < run[-1].end - start:
            scratch = self._local.scratch = np.empty(run[-1].end - start, np.uint8)
        data = scratch[: run[-1].end - start]
        count = self._storage.read_into(self._folder, file.name, start, data.data)
        # Threads verify and copy in parallel, so only shared state needs the lock (decisions/0127).
        with self._lock:
            self.bytes_read += count
        for found in run:
            part = data[found.start - start : found.end - start]
            missing = max(0, min(part.size, found.end - start - count))
            if missing or (self.verifies and compute_xxh3(part) != found.checksum):
                raise _make_damage_error(
                    f"{self.where}/{file.name}", path, found.start, part.size, missing=missing
                )
            values = part.view(dtype).reshape(found.shape)
            if found.part is not None:
                kept = values.copy()
                with self._lock:
                    self._kept[found[:5]] = kept
                    while len(self._kept) > _MAX_CACHED_CHUNKS:
                        self._kept.popitem(last=False)
            _copy_overlap(found, values, target)

    def __repr__(self) -> str:
        return f"<Step {self.step} of {self.where}: {len(self.variables)} variables>"


def _allocate_aligned(shape: tuple[int, ...], dtype: np.dtype[Any]) -> NumpyArray:
    num_bytes = math.prod(shape) * dtype.itemsize
    memory = np.empty(num_bytes + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + num_bytes].view(dtype).reshape(shape)


def _copy_overlap(found: ChunkOverlap, values: NumpyArray, target: NumpyArray | None) -> None:
    if target is not None:
        target[found.place] = values if found.part is None else values[found.part]


def _group_adjacent(found: Iterable[ChunkOverlap], most_bytes: int) -> Iterator[list[ChunkOverlap]]:
    """Group chunks that are adjacent in a file, up to a size."""
    run: list[ChunkOverlap] = []
    for each in found:
        if run and (
            (each.file, each.start) != (run[0].file, run[-1].end) or each.end - run[0].start > most_bytes
        ):
            yield run
            run = []
        run.append(each)
    if run:
        yield run


def _make_damage_error(where: str, what: str, start: int, size: int, *, missing: int = 0) -> CheckpointError:
    return CheckpointError(
        f"{what}: its values differ from the saved ones",
        facts={"file": where, "bytes": f"{start} to {start + size}", "missing bytes": missing or ""},
        why="the file ends before them"
        if missing
        else "their checksum does not match: the file was damaged or changed",
        fix="restore the file from a copy, or load another step",
    )


def _choose_step(storage: Storage, step: int | None) -> int:
    steps = storage.steps()
    if steps and step is None:
        return steps[0] if len(steps) == 1 else find_last_step(storage) or steps[-1]
    if step in steps:
        assert step is not None
        return step
    raise CheckpointError(
        f"{storage.where}: there is no {'checkpoint' if step is None else f'step {step}'}",
        facts={"steps": join_names([str(each) for each in steps]) or "none"},
        why="a step is a folder step-<number>, which exists once it is complete",
        fix="name the directory of a checkpoint" if not steps else "load one of these",
    )
