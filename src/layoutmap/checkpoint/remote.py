"""Store checkpoints in object stores through fsspec, such as `s3://bucket/folder` or `gs://bucket/folder`.

An object store cannot rename a folder, so a step exists when its manifest does: `step-1000/manifest.json`, which is
written last, and only if there is none. All else that a save writes is in a folder of its own within the step's, so
two saves of one step do not mix, and what a dead one has left is no part of any step:

    step-1000/manifest.json
    step-1000/5a1c90ab12cd34ef/data-00000.safetensors

Files of the manifest are named from its folder on. A step that is copied to a disk can be loaded from there, and one
that was saved on a disk can be copied here, its manifest last.
"""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, suppress
from types import TracebackType
from typing import Any, Self

from layoutmap.checkpoint.manifest import NAME
from layoutmap.checkpoint.storage import LocalStorage, Storage, make_exists_error, parse_step
from layoutmap.core.errors import CheckpointError

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_PART_BYTES = 1 << 26  # bytes of an upload part; S3 allows 10,000 parts, so files up to 640 GB
_HEAD_BYTES = 1024  # enough for the token of the save, which is at the start of a manifest
_FIX_BUCKET = "create the bucket, or correct its name in the URL, and save again"


def open_storage(directory: str | os.PathLike[str]) -> Storage:
    """Open the storage of a directory: an object store for a URL, else a local folder.

    Raises:
        CheckpointError: Nothing is installed that reaches the URL.
    """
    text = os.fspath(directory)
    found = _URL.match(text)
    if found is None:
        return LocalStorage(directory)
    return LocalStorage(text[found.end() :]) if found[1] == "file" else RemoteStorage(text)


# Object stores cannot rename, so each save writes under its own token, and the manifest selects one (decisions/0086).
class RemoteStorage:
    """Store steps in an object store.

    Args:
        url: The folder, as in `"s3://bucket/runs/7"`. Endpoints and credentials are those of fsspec's configuration and
            the environment.

    Raises:
        CheckpointError: The package for this kind of URL is not installed.
    """

    read_bytes = 1 << 23
    write_files = 1  # each open file buffers two parts in memory

    def __init__(self, url: str):
        self.where = url.rstrip("/")
        try:
            # Imported here, because few programs use remote storage, so others need not install fsspec.
            fsspec: Any = importlib.import_module("fsspec.core")
            found: tuple[Any, str] = fsspec.url_to_fs(self.where, use_listings_cache=False)
        except (ImportError, ValueError) as error:
            raise CheckpointError(
                f"{self.where}: this store cannot be accessed",
                why=f"fsspec, or its package for such a URL, is missing: {error}",
                fix="pip install fsspec, and s3fs for s3://, gcsfs for gs:// or adlfs for az://",
            ) from error
        self._files, self._root = found[0], found[1].rstrip("/")

    def steps(self) -> list[int]:
        """Return the steps that exist, in rising order."""
        with _translate_errors(self._files, self._root, "it cannot be listed"):
            try:
                names = [
                    os.path.basename(path.rstrip("/")) for path in self._files.ls(self._root, detail=False)
                ]
            except FileNotFoundError:
                return []
        numbers = sorted(number for name in names if (number := parse_step(name)) is not None)
        return [number for number in numbers if self.size(self.folder(number), NAME) is not None]

    def folder(self, step: int) -> str:
        """Return the name of a step's folder."""
        return f"step-{step}"

    def begin(self, step: int, token: str) -> str:
        """Return the folder name for a new step, without creating anything."""
        if self.size(self.folder(step), NAME) is not None:
            raise make_exists_error(self.where, step)
        return f"{self.folder(step)}/{token}"

    def commit(self, step: int, token: str) -> None:
        """Write the manifest, which makes the step exist, unless another save wrote it. Then delete leftovers."""
        folder = self.folder(step)
        path = self._join_path(folder, NAME)
        with _translate_errors(self._files, path, f"step {step} cannot be completed", _FIX_BUCKET):
            manifest = self._files.cat_file(self._join_path(f"{folder}/{token}", NAME))
            try:
                self._files.pipe_file(path, manifest, mode="create")
            except Exception:
                if self.size(folder, NAME) is None:
                    raise
        head = memoryview(bytearray(_HEAD_BYTES))
        if token.encode() not in bytes(head[: self.read_into(folder, NAME, 0, head)]):
            # If the manifest has this save's token, the write succeeded and only the store's answer was lost.
            raise make_exists_error(self.where, step)
        # The manifest is now final, so other files in the folder belong to saves that will fail.
        self.remove(f"{folder}/{token}", NAME)
        with suppress(Exception):
            for other in self._files.ls(self._join_path(folder), detail=False):
                if os.path.basename(other.rstrip("/")) not in (NAME, token):
                    self._files.rm(other, recursive=True)

    def abandon(self, step: int, token: str) -> None:
        """Try to delete the unfinished step, unless it may have been committed."""
        folder = self.folder(step)
        with suppress(Exception):
            head = memoryview(bytearray(_HEAD_BYTES))
            is_step = self.size(folder, NAME) is not None
            if not is_step or token.encode() not in bytes(head[: self.read_into(folder, NAME, 0, head)]):
                self._files.rm(self._join_path(f"{folder}/{token}"), recursive=True)

    def delete(self, step: int) -> None:
        """Delete the manifest, then the rest."""
        path = self._join_path(self.folder(step), NAME)
        with (
            _translate_errors(self._files, path, f"step {step} cannot be deleted"),
            suppress(FileNotFoundError),
        ):
            self._files.rm_file(path)
        with suppress(Exception):
            self._files.rm(self._join_path(self.folder(step)), recursive=True)

    def create(self, folder: str, name: str) -> _RemoteSink:
        """Open a new file for writing. The file exists once it is closed."""
        return _RemoteSink(self._files, self._join_path(folder, name))

    def remove(self, folder: str, name: str) -> None:
        """Try to delete a file."""
        with suppress(Exception):
            self._files.rm_file(self._join_path(folder, name))

    def size(self, folder: str, name: str) -> int | None:
        """Return the size of a file in bytes, or `None` if it does not exist."""
        path = self._join_path(folder, name)
        with _translate_errors(self._files, path, "the file cannot be read"):
            try:
                found = self._files.info(path)
            except (FileNotFoundError, NotADirectoryError):
                return None
        return found["size"] if found["type"] == "file" else None

    def read_into(self, folder: str, name: str, start: int, buffer: memoryview) -> int:
        """Read from `start` into `buffer`, and return the byte count."""
        path = self._join_path(folder, name)
        end = start + len(buffer)
        with _translate_errors(self._files, path, "the file cannot be read"):
            try:
                data = self._files.cat_file(path, start=start, end=end) if buffer else b""
            except FileNotFoundError:
                raise
            except Exception:  # some stores raise for a range beyond the end
                if (self.size(folder, name) or 0) > start:
                    raise
                data = b""
        buffer[: len(data)] = data
        return len(data)

    def free_bytes(self) -> None:
        """Return `None`, because an object store does not report its free space."""
        return

    def _join_path(self, *names: str) -> str:
        return "/".join((self._root, *names))


class _RemoteSink:
    """Write a new file in an object store."""

    def __init__(self, files: Any, path: str):
        self._files = files
        self._path = path
        self._file: Any = None

    def __enter__(self) -> Self:
        with self._translate_errors():
            self._file = self._files.open(self._path, "wb", block_size=_PART_BYTES)
        return self

    def write(self, data: memoryview | bytes, /) -> None:
        with self._translate_errors():
            self._file.write(data)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        if kind is None:
            with self._translate_errors():
                self._file.close()
            return
        with suppress(Exception):
            self._file.discard()
            # without this, fsspec would upload the file when it is garbage-collected
            self._file.closed = True
        with suppress(Exception):
            self._files.rm_file(self._path)

    def _translate_errors(self) -> AbstractContextManager[None]:
        return _translate_errors(self._files, self._path, "the file cannot be written", _FIX_BUCKET)


@contextmanager
def _translate_errors(
    files: Any, path: str, what: str, fix: str = "restore it from a copy, or load another step"
) -> Generator[None]:
    """Convert any error of the store to a `CheckpointError` that names the path."""
    try:
        yield
    except CheckpointError:
        raise
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{files.unstrip_protocol(path)}: {what}",
            why=f"the file or the bucket does not exist: {error}",
            fix=fix,
        ) from error
    except Exception as error:
        raise CheckpointError(
            f"{files.unstrip_protocol(path)}: {what}",
            why=f"the store says: {error!r}",
            fix="check the URL, the credentials, and the access rights to the bucket, and try again; "
            "existing steps are unchanged",
        ) from error
