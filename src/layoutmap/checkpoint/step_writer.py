"""Write one step from one process or several, completely or not at all.

Each process writes its data file. Each but the first then says what is in it, in `part-<number>.json`; the first reads
these, writes the manifest and commits. A process that fails says so in `failed-<number>.json`: the first sees it and
fails too, and the others look at the first. All of it goes by files in the folder of the step, so that a thread can do
it, on which no collective may run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import numpy as np

from layoutmap.checkpoint.chunk_table import Chunk
from layoutmap.checkpoint.manifest import (
    NAME,
    DataFile,
    Manifest,
    ProcessPart,
    manifest_to_bytes,
    part_from_bytes,
    part_to_bytes,
)
from layoutmap.checkpoint.storage import Storage
from layoutmap.checkpoint.writer import WriteTask, name_data_file, write_part
from layoutmap.core.blocks import Ends, Index, NumpyArray, get_slice_ends
from layoutmap.core.errors import CheckpointError, join_names

PATIENCE_SECONDS = 600.0
"""Seconds to wait for another process while its data file does not grow."""
_GRACE_SECONDS = 10.0  # after a failure, process 0 waits this long so that the others can read the reason
# minimum and maximum time between polls of other processes' files
_SHORTEST_SECONDS, _LONGEST_SECONDS = 0.005, 0.25
_HEAD_BYTES = 1024  # enough for the id at the start of a manifest


Memory = dict[tuple[str, Ends], NumpyArray]
"""The memory for the copy of each shard, by variable and index."""


def begin_step(storage: Storage, step: int, token: str, total_bytes: int) -> str:
    """Check the free space, create the folder of a step, and return its name. Only one process calls this.

    Args:
        storage: Where to.
        step: The step.
        token: A name that no other save has.
        total_bytes: Number of bytes that all processes write.

    Raises:
        CheckpointError: The step exists already, there is not enough space, or nothing can be written.
    """
    free = storage.free_bytes()
    if free is not None and free < total_bytes:
        raise CheckpointError(
            f"{storage.where}: there is not enough space for step {step}",
            facts={"needed": f"{total_bytes:,} bytes", "free": f"{free:,} bytes"},
            why="the file system has less free space than the model needs",
            fix="free some space, or save elsewhere; existing steps are unchanged",
        )
    return storage.begin(step, token)


# Collectives on a second thread can deadlock, so processes communicate through files (decisions/0079).
class StepWriter:
    """Write one process's part of a step. As a context manager, abandon the step on an error.

    Args:
        storage: Where to.
        folder: The folder that `begin_step` returned.
        manifest: The manifest, without files and chunks; the same in all processes.
        todo: The shards that this process writes.
        total_bytes: Size of all variables, of all processes.
        number: The number of this process.
        count: Number of processes.
        states: States of this process alone, encoded.
        patience_seconds: How long to wait for a process that does not respond; `None`: `PATIENCE_SECONDS`.
    """

    _is_over = True  # `close` does nothing until the constructor has finished

    def __init__(
        self,
        storage: Storage,
        folder: str,
        manifest: Manifest,
        todo: Sequence[WriteTask],
        *,
        total_bytes: int,
        number: int = 0,
        count: int = 1,
        states: Mapping[str, Any] | None = None,
        patience_seconds: float | None = None,
    ):
        self.where = f"{storage.where}/{storage.folder(manifest.step)}"
        self._storage = storage
        self._folder = folder
        self._manifest = manifest
        self._token: str = manifest.facts["id"]
        self._todo = todo
        self._total_bytes = total_bytes
        self._number = number
        self._count = count
        self._states = states or {}
        patience = PATIENCE_SECONDS if patience_seconds is None else patience_seconds
        # Process 0 times out first, because only it can name the missing process.
        self._patience_seconds = patience * (2 if number else 1)
        self._watched: Collection[int] = (0,) if number else range(1, count)
        self._silent: Collection[int] = ()
        self._failed: tuple[int, str] | None = None
        self._has_promised = False
        self._is_over = False

    @property
    def is_first(self) -> bool:
        """Whether this process commits the step."""
        return self._number == 0

    @property
    def is_alone(self) -> bool:
        """Whether this is the only process."""
        return self._count == 1

    @property
    def facts(self) -> Mapping[str, Any]:
        """Return the entries of the manifest that describe the step itself, without its variables."""
        return self._manifest.facts

    def copy(self, memory: Memory) -> None:
        """Copy the values, so that the model can change before they are written.

        Args:
            memory: What the copies are in; that of the save before is used again, since new memory is slow to write to.
        """
        self._todo = [_copy_shards(each, memory) for each in self._todo]

    def write(self, progress: Callable[[str], object] | None = None) -> None:
        """Write this process's part, and return when the step exists.

        Args:
            progress: Called with the path of each variable when it is written.

        Raises:
            CheckpointError: It cannot be written, or another process has failed or does not respond.
        """

        def report_written(path: str) -> None:
            self._raise_reported_failures()
            if progress is not None:
                progress(path)

        part = write_part(
            self._storage, self._folder, self._number, self._todo, self._total_bytes, report_written
        )
        part = dataclasses.replace(part, states=self._states)
        if self.is_first:
            found = {0: part, **self._collect_parts()}
            within = self._folder.removeprefix(f"{self._storage.folder(self._manifest.step)}/")
            # Object stores write each save into a subfolder named by its token, so file names include the subfolder.
            within = "" if within == self._folder else f"{within}/"
            parts = [found[number] for number in range(self._count)]
            manifest = _join_parts(self._manifest, parts, within)
            self._write_file(NAME, manifest_to_bytes(manifest))
            self._storage.commit(manifest.step, self._token)
        else:
            self._is_committed()  # raises if process 0 failed
            self._has_promised = True
            self._write_file(_name_part(self._number), part_to_bytes(part))
            self._wait_until(self._is_committed, lambda: [0])

    def __enter__(self) -> Self:
        self._is_over = False
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        if error is None:
            self._is_over = True
            return
        try:
            if not self.is_alone:
                self._report_failure(error)
        finally:
            self._abandon()

    def __del__(self) -> None:
        if not self._is_over:  # an interrupt came before the `with` block
            self._abandon()

    def _abandon(self) -> None:
        if self.is_first:
            self._storage.abandon(self._manifest.step, self._token)
        self._is_over = True

    # -- communication between processes

    def _collect_parts(self) -> dict[int, ProcessPart]:
        found: dict[int, ProcessPart] = {}
        missing = list(range(1, self._count))

        def has_all_parts() -> bool:
            for number in tuple(missing):
                data = self._read_json(self._folder, _name_part(number))
                if data is not None:
                    found[number] = part_from_bytes(data)
                    missing.remove(number)
            return not missing

        self._wait_until(has_all_parts, lambda: missing)
        for number in found:
            self._storage.remove(self._folder, _name_part(number))
        return found

    def _is_committed(self) -> bool:
        is_gone = self._storage.size(self._folder, name_data_file(self._number)) is None
        step = self._storage.folder(self._manifest.step)
        if self._token.encode() in (self._read_head(step, NAME, _HEAD_BYTES) or b""):
            return True
        if is_gone:
            raise self._make_failure_error(0, "read the error of process 0")
        return False

    def _wait_until(self, reached: Callable[[], bool], missing: Callable[[], Sequence[int]]) -> None:
        signs = list[int]()
        began = look = last = time.monotonic()
        while not reached():
            self._raise_reported_failures()
            if (now := time.monotonic()) >= look:
                look = now + self._patience_seconds / 20
                seen = [sum(self._find_data_files(n).values()) for n in range(self._count)]
                if seen != signs:
                    signs, last = seen, now
                # A launcher kills all processes when one dies; this timeout is for programs without a launcher (0179).
                elif now - last > self._patience_seconds:
                    self._silent = tuple(missing())
                    raise CheckpointError(
                        f"{self.where}: other processes do not respond",
                        facts={
                            "processes": join_names(list(map(str, self._silent))),
                            "waited": f"{self._patience_seconds:g} seconds",
                        },
                        why="they have ended or hang, and a step needs the parts of all processes",
                        fix="read their last output, and start all processes again; existing steps are unchanged",
                    )
            # Poll after a twentieth of the time waited so far, which delays the save by at most 5 %.
            time.sleep(min(max(_SHORTEST_SECONDS, (time.monotonic() - began) / 20), _LONGEST_SECONDS))

    def _raise_reported_failures(self) -> None:
        for number in self._watched:
            if self._storage.size(self._folder, _name_failure(number)) is not None:
                data, until = None, time.monotonic() + 1
                # The other process may still be writing the file, so retry.
                while data is None and time.monotonic() < until:
                    data = self._read_json(self._folder, _name_failure(number))
                    time.sleep(_SHORTEST_SECONDS)
                found: tuple[int, str] = (
                    tuple(json.loads(data)) if data else (number, "read the error of process 0")
                )
                raise self._make_failure_error(*found)

    def _make_failure_error(self, number: int, text: str) -> CheckpointError:
        self._failed = number, text
        return CheckpointError(
            f"{self.where}: process {number} could not write its part",
            facts={f"process {number}": text},
            why="a step needs the parts of all processes, so this step was discarded",
            fix=f"correct the error of process {number}, and save again",
        )

    def _report_failure(self, error: BaseException) -> None:
        if not self._has_promised:  # after the promise, process 0 may already commit the step
            # delete data files first, to free space on a full disk
            for name in self._find_data_files(self._number):
                self._storage.remove(self._folder, name)
        text = str(error) if isinstance(error, CheckpointError) else repr(error)
        try:
            self._write_file(
                _name_failure(self._number), json.dumps(self._failed or (self._number, text)).encode()
            )
        except CheckpointError:
            return  # the folder is gone or read-only, and the other processes detect that themselves
        until = time.monotonic() + _GRACE_SECONDS
        waiting = [n for n in self._watched if self.is_first and n not in self._silent]
        while waiting and time.monotonic() < until:
            waiting = [n for n in waiting if self._storage.size(self._folder, _name_failure(n)) is None]
            time.sleep(_SHORTEST_SECONDS)

    def _find_data_files(self, number: int) -> dict[str, int]:
        """Return the names and the sizes of the data files of a process."""
        found: dict[str, int] = {}
        while (
            size := self._storage.size(self._folder, name := name_data_file(number, len(found)))
        ) is not None:
            found[name] = size
        return found

    def _write_file(self, name: str, data: bytes) -> None:
        with self._storage.create(self._folder, name) as sink:
            sink.write(data)

    def _read_head(self, folder: str, name: str, most_bytes: int | None = None) -> bytes | None:
        size = self._storage.size(folder, name)
        if size is None:
            return None
        data = bytearray(size if most_bytes is None else min(size, most_bytes))
        with contextlib.suppress(CheckpointError):  # another process may have deleted the file
            return bytes(data[: self._storage.read_into(folder, name, 0, memoryview(data))])
        return None

    def _read_json(self, folder: str, name: str) -> bytes | None:
        """Read JSON that another process writes, or return `None` while it is incomplete."""
        data = self._read_head(folder, name)
        try:
            json.loads(data or b"")
        except ValueError:
            return None
        return data


def _name_part(number: int) -> str:
    return f"part-{number:05d}.json"


def _name_failure(number: int) -> str:
    return f"failed-{number:05d}.json"


def _copy_shards(each: WriteTask, memory: Memory) -> WriteTask:
    """Copy writable shards into reused memory, and return the task with the copies."""
    wanted = {get_slice_ends(index) for index in each.indices}
    shards: list[tuple[Index, NumpyArray]] = []
    for index, values in each.shards():
        if get_slice_ends(index) in wanted:
            if values.flags.writeable:
                key = each.variable.path, get_slice_ends(index)
                copy = memory.get(key)
                if copy is None or (copy.shape, copy.dtype) != (values.shape, values.dtype):
                    copy = memory[key] = np.empty_like(values)
                np.copyto(copy, values)
                values = copy
            shards.append((index, values))
    return dataclasses.replace(each, shards=lambda: iter(shards))


def _join_parts(manifest: Manifest, parts: Sequence[ProcessPart], within: str) -> Manifest:
    files: list[DataFile] = []
    chunks: dict[str, list[Chunk]] = {each.path: [] for each in manifest.variables}
    for part in parts:
        for path, found in part.chunks.items():
            chunks[path] += (dataclasses.replace(chunk, file=chunk.file + len(files)) for chunk in found)
        files += (dataclasses.replace(file, name=within + file.name) for file in part.files)
    states = dict(manifest.states)
    own = [part.states for part in parts]
    if any(own):
        states["processes"] = own[:1] if all(each == own[0] for each in own) else own
    return dataclasses.replace(manifest, states=states, files=files, chunks=chunks)
