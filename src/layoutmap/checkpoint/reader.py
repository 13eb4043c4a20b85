"""A step of a checkpoint, opened: what is in it, and any block of any variable, checked while it is read."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from layoutmap.checkpoint.dtypes import numpy_dtype
from layoutmap.checkpoint.manifest import NAME, Chunk, DataFile, Manifest, checksum_of, manifest_from_bytes
from layoutmap.checkpoint.source import SavedVariable
from layoutmap.checkpoint.states import decode
from layoutmap.checkpoint.storage import Storage
from layoutmap.core.blocks import Index, NumpyArray, block_shape, full_index, intersect, with_ends, within
from layoutmap.core.errors import CheckpointError, listed
from layoutmap.core.variables import itemsize

_KEPT = 2  # chunks of which only a part was wanted; the next block often wants the rest


class Step:
    """One step of a checkpoint.

    Args:
        storage: Where the checkpoint is.
        step: The step; `None`: the last one.

    Attributes:
        where: The folder of the step.
        manifest: What is in it.
        bytes_read: How many bytes of values have been read so far.

    Raises:
        CheckpointError: There is no such step, or its manifest is not as it was written.
    """

    def __init__(self, storage: Storage, step: int | None = None):
        self._storage = storage
        number = _found_step(storage, step)
        self._folder = storage.folder(number)
        self.where = f"{storage.where}/{self._folder}"
        size = storage.size(self._folder, NAME)
        if size is None:
            raise CheckpointError(
                f"{self.where}: the manifest is missing",
                facts={"file": NAME},
                why="without it nothing says which bytes are which variable's",
                fix="restore it from a copy, or load another step",
            )
        data = np.empty(size, np.uint8)
        storage.read_into(self._folder, NAME, 0, data.data)
        self.manifest: Manifest = manifest_from_bytes(data.tobytes(), f"{self.where}/{NAME}")
        self._variables = {each.path: each for each in self.manifest.variables}
        self.bytes_read = 0
        self._kept: OrderedDict[tuple[int, int], NumpyArray] = OrderedDict()

    @property
    def step(self) -> int:
        """The number of the step."""
        return self.manifest.step

    @property
    def metadata(self) -> Any:
        """What the user has saved along."""
        return decode(self.manifest.metadata)

    @property
    def metrics(self) -> Mapping[str, float]:
        """The numbers by which a `CheckpointManager` compares steps; empty if none were saved."""
        return decode(self.manifest.facts.get("metrics", {}))

    @property
    def variables(self) -> Mapping[str, SavedVariable]:
        """The variables by path."""
        return self._variables

    @property
    def states(self) -> Mapping[str, Any]:
        """The states beside the variables, by name."""
        return {name: decode(value) for name, value in self.manifest.states.items()}

    @property
    def global_bytes(self) -> int:
        """Size of all variables."""
        return sum(math.ceil(math.prod(v.shape) * itemsize(v.dtype)) for v in self.manifest.variables)

    def check_files(self) -> None:
        """Raise if a file is missing or has another size than it was written with; reads none.

        Raises:
            CheckpointError: There is one.
        """
        for file in self.manifest.files:
            self._check_file(file)

    def _check_file(self, file: DataFile) -> None:
        size = self._storage.size(self._folder, file.name)
        if size != file.num_bytes:
            raise CheckpointError(
                f"{self.where}/{file.name}: "
                + ("the file is missing" if size is None else "the file has another size than was written"),
                facts={"bytes": size, "written": file.num_bytes},
                why="the manifest says what was written",
                fix="restore it from a copy, or load another step",
            )

    def read(self, path: str, index: Index | None = None) -> NumpyArray:
        """Return the values of a variable at an index (`None`: all).

        Raises:
            CheckpointError: There is no such variable, or bytes are missing or are not those that were written.
        """
        variable = self[path]
        wanted = full_index(variable.shape) if index is None else with_ends(index, variable.shape)
        dtype = numpy_dtype(variable.dtype, path)
        result = np.empty(block_shape(wanted), dtype)
        covered = 0
        for chunk, both in self._chunks_in(path, wanted):
            shape = block_shape(chunk.index)
            place = result[(*within(both, wanted), ...)]  # a view, of a scalar too
            if block_shape(both) == shape and place.flags.c_contiguous:
                self._read_chunk(path, chunk, place)
            else:
                place[...] = self._chunk(path, chunk, dtype)[within(both, chunk.index)]
            covered += place.size
        if covered != result.size:
            raise CheckpointError(
                f"{path}: values are missing",
                facts={"checkpoint": self.where, "index": str(wanted)},
                why="the chunks in the manifest do not cover them",
                fix="load another step",
            )
        return result

    def check(self, path: str, index: Index | None = None) -> None:
        """Raise what `read` would raise; keeps no value."""
        variable = self[path]
        wanted = full_index(variable.shape) if index is None else with_ends(index, variable.shape)
        for chunk, _ in self._chunks_in(path, wanted):
            self._read_chunk(
                path, chunk, np.empty(block_shape(chunk.index), numpy_dtype(variable.dtype, path))
            )

    def problems(self, progress: Callable[[str], object] | None = None) -> Iterator[CheckpointError]:
        """Read all, and yield what is not as it was written; of each variable the first such chunk.

        Args:
            progress: Called with the path of each variable when it has been read.
        """
        for file in self.manifest.files:
            try:
                self._check_file(file)
            except CheckpointError as error:
                yield error
                continue
            header = np.empty(file.header_bytes, np.uint8)
            self._storage.read_into(self._folder, file.name, 0, header.data)
            if checksum_of(header.data) != file.header:
                yield _damaged(f"{self.where}/{file.name}", "its header", 0, file.header_bytes)
        for path in self.variables:
            try:
                self.check(path)
            except CheckpointError as error:
                yield error
            if progress is not None:
                progress(path)

    def __getitem__(self, path: str) -> SavedVariable:
        """Return a variable.

        Raises:
            CheckpointError: There is none of that path.
        """
        if path not in self.variables:
            from layoutmap.rules.near_misses import nearest

            raise CheckpointError(
                f"{path}: the checkpoint has no such variable",
                facts={"checkpoint": self.where, "near misses": listed(nearest(path, self.variables))},
                why=f"it has {len(self.variables)} others",
                fix="use one of the paths that layoutmap.describe(directory) shows",
            )
        return self.variables[path]

    def _chunks_in(self, path: str, wanted: Index) -> Iterator[tuple[Chunk, Index]]:
        for chunk in self.manifest.chunks[path]:
            both = intersect(chunk.index, wanted)
            if both is not None:
                yield chunk, both

    def _chunk(self, path: str, chunk: Chunk, dtype: np.dtype[Any]) -> NumpyArray:
        key = chunk.file, chunk.start
        if key not in self._kept:
            values = np.empty(block_shape(chunk.index), dtype)
            self._read_chunk(path, chunk, values)
            self._kept[key] = values
            while len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        return self._kept[key]

    def _read_chunk(self, path: str, chunk: Chunk, values: NumpyArray) -> None:
        file = self.manifest.files[chunk.file]
        data = values.reshape(-1).view(np.uint8)
        count = self._storage.read_into(self._folder, file.name, chunk.start, data.data)
        self.bytes_read += count
        if count < data.size or checksum_of(data.data) != chunk.checksum:
            raise _damaged(
                f"{self.where}/{file.name}", path, chunk.start, data.size, missing=data.size - count
            )

    def __repr__(self) -> str:
        return f"<Step {self.step} of {self.where}: {len(self.variables)} variables>"


def _damaged(where: str, what: str, start: int, size: int, *, missing: int = 0) -> CheckpointError:
    return CheckpointError(
        f"{what}: its values are not those that were saved",
        facts={"file": where, "bytes": f"{start} to {start + size}", "missing bytes": missing or None},
        why="the file ends before them"
        if missing
        else "their checksum is another one: the file was damaged or changed",
        fix="restore the file from a copy, or load another step",
    )


def _found_step(storage: Storage, step: int | None) -> int:
    steps = storage.steps()
    if steps and step is None:
        return steps[-1]
    if step in steps:
        assert step is not None
        return step
    raise CheckpointError(
        f"{storage.where}: there is no {'checkpoint' if step is None else f'step {step}'}",
        facts={"steps": listed([str(each) for each in steps]) or "none"},
        why="a step is a folder step-<number>, which is there once it is complete",
        fix="name the directory that was saved to" if not steps else "load one of these",
    )
