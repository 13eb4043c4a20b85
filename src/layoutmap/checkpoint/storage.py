"""Store checkpoints in local folders, each step completely or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import shutil
import stat
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from layoutmap.core import folders
from layoutmap.core.errors import CheckpointError
from layoutmap.core.folders import remove_folder, sync_folder

MAX_STEP = 10**18 - 1
_STEP = re.compile(r"step-(0|[1-9][0-9]{0,17})")
_UNFINISHED = re.compile(r"\.step-[0-9]+\.[0-9a-f]{16}")


class FileSink(Protocol):
    """A new file that is written from start to end. It is durable once its `with` block ends without an error."""

    def write(self, data: memoryview | bytes, /) -> object:
        """Append all bytes."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...


class FileMaker(Protocol):
    """Create files in a folder. A `Storage` stores the files, and a link sends them to another process."""

    def create_file(self, folder: str, name: str) -> FileSink:
        """Open a new file for writing."""
        ...


class Storage(FileMaker, Protocol):
    """Store the steps of a checkpoint. A step exists once `commit_step` has returned."""

    where: str
    """The name of the checkpoint's folder in messages."""

    read_bytes: int
    """Number of bytes that should be read at once for the best speed."""

    write_files: int
    """Number of files that a process should write at the same time for the best speed."""

    has_page_cache: bool
    """Whether a second read of the same bytes takes less time than new memory."""

    def list_steps(self) -> list[int]:
        """Return the existing steps, in ascending order."""
        ...

    def get_folder_name(self, step: int) -> str:
        """Return the name of a step's folder."""
        ...

    def create_step_folder(self, step: int, token: str) -> str:
        """Create the folder for a new step, and return its name. Only one process calls it.

        Raises:
            CheckpointError: The step exists already, or nothing can be written.
        """
        ...

    def commit_step(self, step: int, token: str) -> None:
        """Turn the folder of `create_step_folder` into the step, which then exists.

        Raises:
            CheckpointError: Another program has saved the step meanwhile.
        """
        ...

    def discard_step(self, step: int, token: str) -> None:
        """Delete the folder of `create_step_folder`, if possible. Ignore errors."""
        ...

    def delete_step(self, step: int) -> None:
        """Delete a step, in an order in which an interrupt leaves no damaged step. Ignore a missing step."""
        ...

    def remove_file(self, folder: str, name: str) -> None:
        """Delete a file, if possible. Ignore errors."""
        ...

    def get_file_size(self, folder: str, name: str) -> int | None:
        """Return the size of a file in bytes, or `None` if it does not exist."""
        ...

    def read_file_into(self, folder: str, name: str, start: int, buffer: memoryview) -> int:
        """Read from offset `start` into `buffer`. Return the byte count, smaller than `buffer` only at the end."""
        ...

    def get_free_bytes(self) -> int | None:
        """Return the free space in bytes, or `None` if it is unknown."""
        ...


def make_random_token() -> str:
    """Return a random text that names a save or a stream."""
    return secrets.token_hex(8)


def parse_step_folder_name(name: str) -> int | None:
    """Return the step number in the name of a step's folder, or `None` if the folder's name is not of this form.

    Example:
        >>> parse_step_folder_name("step-1000"), parse_step_folder_name("step-07")
        (1000, None)
    """
    found = _STEP.fullmatch(name)
    return None if found is None else int(found[1])


class LocalStorage:
    """Store steps as folders such as `step-1000`. An unfinished step is `.step-1000.<token>`."""

    read_bytes = 1 << 20  # small, so that the bytes are still in the CPU cache when they are copied
    write_files = min(16, max(2, getattr(os, "process_cpu_count", os.cpu_count)() or 1))
    has_page_cache = True

    def __init__(self, directory: str | os.PathLike[str]):
        self._root = Path(os.path.abspath(os.path.expanduser(os.fspath(directory))))
        self.where = str(self._root)
        self._locks: dict[str, folders.FolderLock | None] = {}

    def list_steps(self) -> list[int]:
        """Return the existing steps, in ascending order."""
        try:
            names = os.listdir(self._root)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise _convert_os_error(self.where, "the folder cannot be listed", error) from error
        return sorted(number for name in names if (number := parse_step_folder_name(name)) is not None)

    def get_folder_name(self, step: int) -> str:
        """Return the name of a step's folder."""
        return f"step-{step}"

    def create_step_folder(self, step: int, token: str) -> str:
        """Create a hidden folder for a new step, lock it for the time of the save, and return its name."""
        self._check_posix_support()
        if os.path.lexists(self._root / self.get_folder_name(step)):
            raise make_step_exists_error(self.where, step)
        name = _make_hidden_folder_name(step, token)
        try:
            self._create_root_folder()
            folders.remove_unlocked_folders(self._root, _UNFINISHED)
            self._locks[name] = folders.create_locked_folder(self._root / name)
            return name
        except BaseException as error:
            self.discard_step(step, token)
            if isinstance(error, OSError):
                raise _convert_os_error(self.where, "checkpoints cannot be written there", error) from error
            raise

    def commit_step(self, step: int, token: str) -> None:
        """Flush all files to disk, then rename the hidden folder to that of the step."""
        name = _make_hidden_folder_name(step, token)
        try:
            sync_folder(self._root / name)
            os.rename(self._root / name, self._root / self.get_folder_name(step))
            sync_folder(self._root)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                raise make_step_exists_error(self.where, step) from error
            raise _convert_os_error(self.where, f"step {step} cannot be completed", error) from error
        finally:
            self._locks.pop(name, None)

    def discard_step(self, step: int, token: str) -> None:
        """Delete the unfinished step, if possible. Ignore errors."""
        name = _make_hidden_folder_name(step, token)
        remove_folder(self._root / name)
        self._locks.pop(name, None)

    def delete_step(self, step: int) -> None:
        """Rename the step to a hidden folder, so that it no longer exists, then delete the folder."""
        hidden = self._root / _make_hidden_folder_name(step, make_random_token())
        try:
            with contextlib.suppress(FileNotFoundError):  # another program may have deleted the step
                os.rename(self._root / self.get_folder_name(step), hidden)
                sync_folder(self._root)
        except OSError as error:
            raise _convert_os_error(self.where, f"step {step} cannot be deleted", error) from error
        remove_folder(hidden)

    def create_file(self, folder: str, name: str) -> FileSink:
        """Open a new file for writing."""
        return _LocalFileSink(self._root / folder / name)

    def remove_file(self, folder: str, name: str) -> None:
        """Delete a file, if possible. Ignore errors."""
        with contextlib.suppress(OSError):
            os.unlink(self._root / folder / name)

    def get_file_size(self, folder: str, name: str) -> int | None:
        """Return the size of a regular file in bytes, or `None` if it does not exist."""
        path = self._root / folder / name
        try:
            found = os.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise _convert_os_error(str(path), "the file cannot be read", error) from error
        return found.st_size if stat.S_ISREG(found.st_mode) else None

    def read_file_into(self, folder: str, name: str, start: int, buffer: memoryview) -> int:
        """Read bytes from offset `start` into `buffer`, and return their number."""
        self._check_posix_support()
        path, done = f"{self.where}/{folder}/{name}", 0
        try:
            # without O_NONBLOCK, opening a named pipe would wait for a writer
            file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
            try:
                while done < len(buffer) and (count := os.preadv(file, [buffer[done:]], start + done)):
                    done += count
            finally:
                os.close(file)
        except OSError as error:
            raise _convert_os_error(path, "the file cannot be read", error) from error
        return done

    def get_free_bytes(self) -> int | None:
        """Return the free space in bytes, or `None` if the system does not report it."""
        existing = next(path for path in (self._root, *self._root.parents) if path.exists())
        with contextlib.suppress(OSError):
            return shutil.disk_usage(existing).free
        return None

    def _check_posix_support(self) -> None:
        if folders.fcntl is None:
            raise CheckpointError(
                f"{self.where}: checkpoints cannot be written or read on this system",
                why="the system lacks POSIX locks, reads, and renames",
                fix="use Linux, macOS, or WSL, or save to an object store: s3://bucket/run",
            )

    def _create_root_folder(self) -> None:
        new = [path for path in (self._root, *self._root.parents) if not path.exists()]
        self._root.mkdir(parents=True, exist_ok=True)
        for path in new:
            sync_folder(path.parent)


def _make_hidden_folder_name(step: int, token: str) -> str:
    return f".step-{step}.{token}"


class _LocalFileSink:
    """Write a new local file, and flush it to disk at the end of the `with` block."""

    def __init__(self, path: Path):
        self._path = path
        self._file = -1

    def __enter__(self) -> Self:
        try:
            self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        except OSError as error:
            raise _convert_os_error(str(self._path), "the file cannot be written", error) from error
        return self

    def write(self, data: memoryview | bytes, /) -> None:
        remaining = memoryview(data).cast("B")
        try:
            while remaining:
                remaining = remaining[os.write(self._file, remaining) :]
        except OSError as error:
            raise _convert_os_error(str(self._path), "the file cannot be written", error) from error

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        try:
            if kind is None:
                os.fsync(self._file)
        except OSError as failure:
            raise _convert_os_error(str(self._path), "the file cannot be written", failure) from failure
        finally:
            os.close(self._file)


def make_step_exists_error(where: str, step: int) -> CheckpointError:
    """Return the error for a step that already exists."""
    return CheckpointError(
        f"{where}: step {step} exists already",
        why="a saved step is never overwritten",
        fix="save under another step number, or delete that step first",
    )


def _convert_os_error(where: str, what: str, error: OSError) -> CheckpointError:
    fixes = {
        errno.ENOSPC: "free some space, or save elsewhere; existing steps are unchanged",
        errno.EDQUOT: "free some space, or save elsewhere; existing steps are unchanged",
        errno.EACCES: "give this user access to the path, or name another directory",
        errno.EROFS: "name a directory that can be written",
        errno.ENOENT: "restore the missing file from a copy, or load another step",
        errno.ENOTDIR: "name a directory; a part of the path is a file",
        errno.EEXIST: "name another directory; this name belongs to something that is not a directory",
        errno.EFBIG: "raise the limit for the size of files (ulimit -f), or save elsewhere",
    }
    return CheckpointError(
        f"{where}: {what}",
        why=f"the system says: {error.strerror or error}",
        fix=fixes.get(error.errno or 0, "correct the cause that the system reports, and try again"),
    )
