"""Folders that are hidden until all is in them, and locked by the process that writes them."""

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
except ModuleNotFoundError:  # on Windows
    fcntl = None

_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)  # what file systems without locks say


@contextlib.contextmanager
def hidden_folder(target: Path, token: str) -> Generator[Path]:
    """A hidden folder beside one that it is to become or to fill, removed in the end; first those that were left go.

    Its name is that of `hidden_path`.
    """
    hidden = hidden_path(target, token)
    target.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(target.parent, re.compile(rf"\.{re.escape(target.name)}\.[0-9a-f]{{16}}"))
    try:
        lock = make_locked(hidden)
        yield hidden
        del lock
    finally:
        remove_folder(hidden)


def hidden_path(target: Path, token: str) -> Path:
    """The path of a hidden folder, by a token: 16 hexadecimal digits that no other save has."""
    return target.parent / f".{target.name}.{token}"


def make_locked(path: Path) -> Lock | None:
    """Make a folder, and return its lock; `None` on file systems without locks, where none removes what was left."""
    while True:
        path.mkdir(exist_ok=True)
        try:
            lock = Lock(path)
            if lock.is_of(path):
                return lock
        except FileNotFoundError:  # another save took it for a leftover before it was locked
            pass
        except OSError as error:
            if error.errno in _NO_LOCKS:
                return None
            raise


def remove_leftovers(root: Path, unfinished: re.Pattern[str]) -> None:
    """Delete the folders of such names whose process has ended: nobody holds their locks."""
    for name in os.listdir(root):
        if unfinished.fullmatch(name):
            with contextlib.suppress(OSError):
                lock = Lock(root / name, wait=False)
                remove_folder(root / name)
                del lock


class Lock:
    """A folder that is locked until this is garbage, or the process ends.

    Args:
        path: The folder.
        wait: Whether to wait for who has locked it.

    Raises:
        OSError: Somebody else has locked it, or the file system has no locks.
    """

    _file = -1

    def __init__(self, path: Path, *, wait: bool = True):
        self._file = os.open(path, os.O_RDONLY)
        assert fcntl is not None
        fcntl.flock(self._file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))

    def is_of(self, path: Path) -> bool:
        """Whether it is the folder that is at a path now."""
        return os.path.samestat(os.fstat(self._file), os.stat(path))

    def __del__(self) -> None:
        if self._file >= 0:
            os.close(self._file)


def remove_folder(path: Path) -> None:
    """Delete a folder, or a link to one, as far as that is possible."""
    with contextlib.suppress(OSError):
        if path.is_symlink():
            path.unlink()
    shutil.rmtree(path, ignore_errors=True)


def sync_folder(path: Path) -> None:
    """Have what is in a folder on the disk: the names, and not what is in the files."""
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
