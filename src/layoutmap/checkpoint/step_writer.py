"""Write one step from one process or several, completely or not at all.

Each process writes its data files. Each process except 0 then lists their content in `part-<process>.json`. Process 0
reads these parts, writes the manifest, and commits the step. A process that fails writes `failed-<process>.json`.
Process 0 watches for these files and fails, too, and the others watch for the file of process 0. Processes communicate
only by files in the folder of the step, so that all of this can run on a thread, where no collective may run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from types import TracebackType
from typing import Any, NoReturn, Self

import numpy as np

from layoutmap.checkpoint.chunk_table import Chunk
from layoutmap.checkpoint.manifest import (
    NAME,
    DataFile,
    Manifest,
    ProcessPart,
    manifest_to_bytes,
    process_part_from_bytes,
    process_part_to_bytes,
)
from layoutmap.checkpoint.storage import Storage
from layoutmap.checkpoint.writer import WriteTask, make_data_file_name, write_process_part
from layoutmap.core.blocks import Ends, Index, NumpyArray, get_starts_and_stops
from layoutmap.core.errors import CheckpointError, join_names

PATIENCE_SECONDS = 600.0
"""Seconds to wait for another process while its data file does not grow."""
_GRACE_SECONDS = 10.0  # process 0 deletes a failed step after this time, so that others can read the reason
# minimum and maximum time between polls of other processes' files
_SHORTEST_SECONDS, _LONGEST_SECONDS = 0.005, 0.25
_HEAD_BYTES = 1024  # enough for the id at the start of a manifest


CopyBuffers = dict[tuple[str, Ends], NumpyArray]
"""The memory for the copy of each shard, by the path of its variable and the ends of its index."""


def check_space_and_create_step_folder(storage: Storage, step: int, token: str, total_bytes: int) -> str:
    """Check the free space, create the folder of a step, and return its name. Only one process calls this.

    Args:
        storage: The storage of the checkpoint.
        step: The number of the step.
        token: A random name of this save.
        total_bytes: Number of bytes that all processes write.

    Raises:
        CheckpointError: The step exists already, there is not enough space, or nothing can be written.
    """
    free = storage.get_free_bytes()
    if free is not None and free < total_bytes:
        raise CheckpointError(
            f"{storage.where}: there is not enough space for step {step}",
            facts={"needed": f"{total_bytes:,} bytes", "free": f"{free:,} bytes"},
            why="the file system has less free space than the model needs",
            fix="free some space, or save elsewhere; existing steps are unchanged",
        )
    return storage.create_step_folder(step, token)


# Collectives on a second thread can deadlock, so processes communicate through files (decisions/0079).
class StepWriter:
    """Write one process's part of a step. As a context manager, discard the unfinished step after an error.

    Args:
        storage: The storage of the checkpoint.
        folder: The folder that `check_space_and_create_step_folder` returned.
        manifest: The manifest, without files and chunks; the same in all processes.
        tasks: The shards that this process writes.
        total_bytes: Size of all variables, of all processes.
        process_index: The position of this process among those that write the step.
        num_processes: Number of processes that write the step.
        states: States that only this process has, encoded.
        patience_seconds: Seconds to wait for a process that does not respond; `None`: `PATIENCE_SECONDS`.
    """

    _is_over = True  # so that `__del__` does nothing if the constructor fails

    def __init__(
        self,
        storage: Storage,
        folder: str,
        manifest: Manifest,
        tasks: Sequence[WriteTask],
        *,
        total_bytes: int,
        process_index: int = 0,
        num_processes: int = 1,
        states: Mapping[str, Any] | None = None,
        patience_seconds: float | None = None,
    ):
        self.where = f"{storage.where}/{storage.get_folder_name(manifest.step)}"
        self._storage = storage
        self._folder = folder
        self._manifest = manifest
        self._token: str = manifest.facts["id"]
        self._tasks = tasks
        self._total_bytes = total_bytes
        self._process_index = process_index
        self._num_processes = num_processes
        self._states = states or {}
        patience = PATIENCE_SECONDS if patience_seconds is None else patience_seconds
        # Process 0 times out first, because only it can name the missing process.
        self._patience_seconds = patience * (2 if process_index else 1)
        self._watched: Collection[int] = (0,) if process_index else range(1, num_processes)
        self._silent: Collection[int] = ()
        self._failed: tuple[int, str] | None = None
        self._has_sent_part = False
        self._is_over = False

    @property
    def is_first_process(self) -> bool:
        """Whether this is process 0, which writes the manifest and commits the step."""
        return self._process_index == 0

    @property
    def is_only_process(self) -> bool:
        """Whether this is the only process that writes the step."""
        return self._num_processes == 1

    @property
    def step_manifest_entries(self) -> Mapping[str, Any]:
        """Return the entries of the manifest that describe the step itself, without its variables."""
        return self._manifest.facts

    def copy_values(self, buffers: CopyBuffers) -> None:
        """Copy the values to write, so that the model can change before they are written.

        Args:
            buffers: The memory for the copies. Pass that of the last save again, because new memory is slow at first.
        """
        self._tasks = [_copy_shards(task, buffers) for task in self._tasks]

    def write_step(self, progress: Callable[[str], object] | None = None) -> None:
        """Write this process's part, and wait until all processes have written theirs and the step exists.

        Args:
            progress: Called with the path of each variable when it is written.

        Raises:
            CheckpointError: The part cannot be written, or another process has failed or does not respond.
        """

        def report_progress(path: str) -> None:
            self._raise_failures_of_other_processes()
            if progress is not None:
                progress(path)

        part = write_process_part(
            self._storage, self._folder, self._process_index, self._tasks, self._total_bytes, report_progress
        )
        part = dataclasses.replace(part, states=self._states)
        if self.is_first_process:
            found = {0: part, **self._collect_parts_of_other_processes()}
            subfolder = self._folder.removeprefix(f"{self._storage.get_folder_name(self._manifest.step)}/")
            # On object stores, each save has a subfolder, which must be part of the file names in the manifest.
            subfolder = "" if subfolder == self._folder else f"{subfolder}/"
            parts = [found[process_index] for process_index in range(self._num_processes)]
            manifest = _add_parts_to_manifest(self._manifest, parts, subfolder)
            self._write_file(NAME, manifest_to_bytes(manifest))
            self._storage.commit_step(manifest.step, self._token)
        else:
            self._is_step_committed()  # raises if process 0 failed
            self._has_sent_part = True
            self._write_file(_get_part_file_name(self._process_index), process_part_to_bytes(part))
            self._wait_until(self._is_step_committed, lambda: [0])

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
            if not self.is_only_process:
                self._report_own_failure(error)
        finally:
            self._discard_unfinished_step()

    def __del__(self) -> None:
        if not self._is_over:  # an interrupt came before the `with` block, so nothing else discards the step
            self._discard_unfinished_step()

    def _discard_unfinished_step(self) -> None:
        if self.is_first_process:
            self._storage.discard_step(self._manifest.step, self._token)
        self._is_over = True

    # -- communication between processes

    def _collect_parts_of_other_processes(self) -> dict[int, ProcessPart]:
        found: dict[int, ProcessPart] = {}
        missing = list(range(1, self._num_processes))

        def has_read_all_parts() -> bool:
            for process_index in tuple(missing):
                data = self._try_read_complete_json(self._folder, _get_part_file_name(process_index))
                if data is not None:
                    found[process_index] = process_part_from_bytes(data)
                    missing.remove(process_index)
            return not missing

        self._wait_until(has_read_all_parts, lambda: missing)
        for process_index in found:
            self._storage.remove_file(self._folder, _get_part_file_name(process_index))
        return found

    def _is_step_committed(self) -> bool:
        is_gone = self._storage.get_file_size(self._folder, make_data_file_name(self._process_index)) is None
        step = self._storage.get_folder_name(self._manifest.step)
        if self._token.encode() in (self._try_read_file(step, NAME, _HEAD_BYTES) or b""):
            return True
        if is_gone:
            self._raise_process_failure(0, "read its output")
        return False

    def _wait_until(self, is_done: Callable[[], bool], list_missing: Callable[[], Sequence[int]]) -> None:
        known_sizes = list[int]()
        began = next_look = last = time.monotonic()
        while not is_done():
            self._raise_failures_of_other_processes()
            if (now := time.monotonic()) >= next_look:
                next_look = now + self._patience_seconds / 20
                sizes = [sum(self._get_data_file_sizes(n).values()) for n in range(self._num_processes)]
                if sizes != known_sizes:
                    known_sizes, last = sizes, now
                # If no launcher ends all processes when one dies, only this timeout ends them (decisions/0179).
                elif now - last > self._patience_seconds:
                    self._silent = tuple(list_missing())
                    raise CheckpointError(
                        f"{self.where}: other processes do not respond",
                        facts={
                            "processes": join_names(list(map(str, self._silent))),
                            "waited": f"{self._patience_seconds:g} seconds",
                        },
                        why="these processes have ended or hang, and a step needs the parts of all processes",
                        fix="read their last output, and start all processes again; existing steps are unchanged",
                    )
            # Poll after a twentieth of the time waited so far, which delays the save by at most 5 %.
            time.sleep(min(max(_SHORTEST_SECONDS, (time.monotonic() - began) / 20), _LONGEST_SECONDS))

    def _raise_failures_of_other_processes(self) -> None:
        for process_index in self._watched:
            if self._storage.get_file_size(self._folder, _get_failure_file_name(process_index)) is not None:
                data, until = None, time.monotonic() + 1
                # The other process may still be writing the file, so retry.
                while data is None and time.monotonic() < until:
                    data = self._try_read_complete_json(self._folder, _get_failure_file_name(process_index))
                    time.sleep(_SHORTEST_SECONDS)
                found: tuple[int, str] = (
                    tuple(json.loads(data)) if data else (process_index, "read its output")
                )
                self._raise_process_failure(*found)

    def _raise_process_failure(self, process_index: int, text: str) -> NoReturn:
        """Raise an error that names the failed process. Also record it, so that `_report_own_failure` reports it."""
        self._failed = process_index, text
        raise CheckpointError(
            f"{self.where}: process {process_index} could not write its part",
            facts={f"process {process_index}": text},
            why="a step needs the parts of all processes, so this step was discarded",
            fix=f"correct the error of process {process_index}, and save again",
        )

    def _report_own_failure(self, error: BaseException) -> None:
        """Write an error for the other processes. Process 0 then waits until they have read it."""
        # After this process has sent its part, process 0 may commit the step, so the files of this process must stay.
        if not self._has_sent_part:
            # delete data files before the error is written, because the disk may be full
            for name in self._get_data_file_sizes(self._process_index):
                self._storage.remove_file(self._folder, name)
        text = str(error) if isinstance(error, CheckpointError) else repr(error)
        try:
            self._write_file(
                _get_failure_file_name(self._process_index),
                json.dumps(self._failed or (self._process_index, text)).encode(),
            )
        except CheckpointError:
            return  # the folder is missing or read-only, and the other processes detect that themselves
        until = time.monotonic() + _GRACE_SECONDS
        waiting = [n for n in self._watched if self.is_first_process and n not in self._silent]
        while waiting and time.monotonic() < until:
            waiting = [
                n
                for n in waiting
                if self._storage.get_file_size(self._folder, _get_failure_file_name(n)) is None
            ]
            time.sleep(_SHORTEST_SECONDS)

    def _get_data_file_sizes(self, process_index: int) -> dict[str, int]:
        """Return the sizes of a process's data files in bytes, by name."""
        found: dict[str, int] = {}
        while (
            size := self._storage.get_file_size(
                self._folder, name := make_data_file_name(process_index, len(found))
            )
        ) is not None:
            found[name] = size
        return found

    def _write_file(self, name: str, data: bytes) -> None:
        with self._storage.create_file(self._folder, name) as sink:
            sink.write(data)

    def _try_read_file(self, folder: str, name: str, max_bytes: int | None = None) -> bytes | None:
        size = self._storage.get_file_size(folder, name)
        if size is None:
            return None
        data = bytearray(size if max_bytes is None else min(size, max_bytes))
        with contextlib.suppress(CheckpointError):  # another process may have deleted the file since
            return bytes(data[: self._storage.read_file_into(folder, name, 0, memoryview(data))])
        return None

    def _try_read_complete_json(self, folder: str, name: str) -> bytes | None:
        """Return the bytes of a JSON file that another process writes, or `None` while it is missing or incomplete."""
        data = self._try_read_file(folder, name)
        try:
            json.loads(data or b"")
        except ValueError:
            return None
        return data


def _get_part_file_name(process_index: int) -> str:
    return f"part-{process_index:05d}.json"


def _get_failure_file_name(process_index: int) -> str:
    return f"failed-{process_index:05d}.json"


def _copy_shards(task: WriteTask, buffers: CopyBuffers) -> WriteTask:
    """Copy the writable shards of a task into buffers, and return the task with the copies."""
    wanted = {get_starts_and_stops(index) for index in task.indices}
    shards: list[tuple[Index, NumpyArray]] = []
    for index, values in task.shards():
        if get_starts_and_stops(index) in wanted:
            if values.flags.writeable:
                key = task.variable.path, get_starts_and_stops(index)
                copy = buffers.get(key)
                if copy is None or (copy.shape, copy.dtype) != (values.shape, values.dtype):
                    copy = buffers[key] = np.empty_like(values)
                np.copyto(copy, values)
                values = copy
            shards.append((index, values))
    return dataclasses.replace(task, shards=lambda: iter(shards))


def _add_parts_to_manifest(manifest: Manifest, parts: Sequence[ProcessPart], subfolder: str) -> Manifest:
    files: list[DataFile] = []
    chunks: dict[str, list[Chunk]] = {each.path: [] for each in manifest.variables}
    for part in parts:
        for path, found in part.chunks.items():
            chunks[path] += (dataclasses.replace(chunk, file=chunk.file + len(files)) for chunk in found)
        files += (dataclasses.replace(file, name=subfolder + file.name) for file in part.files)
    states = dict(manifest.states)
    own = [part.states for part in parts]
    if any(own):
        states["processes"] = own[:1] if all(each == own[0] for each in own) else own
    return dataclasses.replace(manifest, states=states, files=files, chunks=chunks)
