"""Create folders that stay hidden until they are complete, and lock them for the process that writes them."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
from collections.abc import Generator
from pathlib import Path

try:
    import fcntl
except ModuleNotFoundError:  # Windows has no `fcntl`
    fcntl = None

_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)  # errors of file systems that do not support locks


@contextlib.contextmanager
def open_hidden_folder(target: Path, token: str) -> Generator[Path]:
    """Create a hidden folder next to `target`, yield its path (see `make_hidden_path`), and delete it after the block.

    Folders that interrupted saves to the same target have left are deleted first.
    """
    hidden = make_hidden_path(target, token)
    target.parent.mkdir(parents=True, exist_ok=True)
    remove_unlocked_folders(target.parent, re.compile(rf"\.{re.escape(target.name)}\.[0-9a-f]{{16}}"))
    try:
        lock = create_locked_folder(hidden)
        yield hidden
        del lock
    finally:
        remove_folder(hidden)


def make_hidden_path(target: Path, token: str) -> Path:
    """Return the path of a hidden folder next to `target`. Its name ends in the token, which is unique to one save."""
    return target.parent / f".{target.name}.{token}"


def create_locked_folder(path: Path) -> FolderLock | None:
    """Create a folder and return its lock. Return None if the file system has no locks."""
    while True:
        path.mkdir(exist_ok=True)
        try:
            lock = FolderLock(path)
            if lock.is_locked_at(path):
                return lock
        except FileNotFoundError:  # another process removed the folder, so create it again
            pass
        except OSError as error:
            if error.errno in _NO_LOCKS:
                return None
            raise


def remove_unlocked_folders(root: Path, name_pattern: re.Pattern[str]) -> None:
    """Delete folders in `root` with names that match a pattern, except those that a running process has locked."""
    for name in os.listdir(root):
        if name_pattern.fullmatch(name):
            with contextlib.suppress(OSError):
                lock = FolderLock(root / name, wait=False)
                remove_folder(root / name)
                del lock


class FolderLock:
    """Exclusive lock of a folder for this process, until this object is deleted or the process ends.

    Args:
        path: The folder.
        wait: Whether to wait for another process to release the lock.

    Raises:
        OSError: Another process holds the lock, or the file system has no locks.
    """

    _file = -1

    def __init__(self, path: Path, *, wait: bool = True):
        self._file = os.open(path, os.O_RDONLY)
        assert fcntl is not None
        fcntl.flock(self._file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))

    def is_locked_at(self, path: Path) -> bool:
        """Return whether the folder at a path is the locked one, and not a new one of the same name."""
        return os.path.samestat(os.fstat(self._file), os.stat(path))

    def __del__(self) -> None:
        if self._file >= 0:
            os.close(self._file)


def remove_folder(path: Path) -> None:
    """Delete a folder, or a link to one, and ignore errors."""
    with contextlib.suppress(OSError):
        if path.is_symlink():
            path.unlink()
    shutil.rmtree(path, ignore_errors=True)


def sync_folder(path: Path) -> None:
    """Flush a folder's directory entries to disk with `fsync`. The content of its files is not flushed."""
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
