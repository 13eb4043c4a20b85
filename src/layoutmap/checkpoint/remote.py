"""Store checkpoints in object stores through fsspec, such as `s3://bucket/folder` or `gs://bucket/folder`.

An object store cannot rename a folder, so a step exists when its manifest does: `step-1000/manifest.json`, which is
written last, and only if there is none. A save writes its other files into its own subfolder of the step's folder, so
two saves of one step do not mix, and files of a killed save belong to no step:

    step-1000/manifest.json
    step-1000/5a1c90ab12cd34ef/data-00000.safetensors

The manifest lists its files relative to the step's folder. So a step that is copied to a disk can be loaded from there,
and a step that was saved on a disk can be copied to an object store, with its manifest last.
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
from layoutmap.checkpoint.storage import LocalStorage, Storage, make_step_exists_error, parse_step_folder_name
from layoutmap.core.errors import CheckpointError

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_PART_BYTES = 1 << 26  # bytes of an upload part; S3 allows 10,000 parts, so files up to 640 GB
_HEAD_BYTES = 1024  # enough for the token of the save, which is at the start of a manifest
_FIX_BUCKET = "create the bucket, or correct its name in the URL, and save again"


def open_storage(directory: str | os.PathLike[str]) -> Storage:
    """Return the storage of a directory: a `RemoteStorage` for a URL, a `LocalStorage` for a path or `file://` URL.

    Raises:
        CheckpointError: The package for this kind of URL is not installed.
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
    write_files = 1  # only one, because each open file buffers two parts in memory
    has_page_cache = False

    def __init__(self, url: str):
        self.where = url.rstrip("/")
        try:
            # Imported here, so that programs without remote storage need not install fsspec.
            fsspec: Any = importlib.import_module("fsspec.core")
            found: tuple[Any, str] = fsspec.url_to_fs(self.where, use_listings_cache=False)
        except (ImportError, ValueError) as error:
            raise CheckpointError(
                f"{self.where}: this store cannot be accessed",
                why=f"fsspec, or its package for such a URL, is missing: {error}",
                fix="pip install fsspec, and s3fs for s3://, gcsfs for gs:// or adlfs for az://",
            ) from error
        self._files, self._root = found[0], found[1].rstrip("/")

    def list_steps(self) -> list[int]:
        """Return the existing steps, in ascending order."""
        with _translate_store_errors(self._files, self._root, "the folder cannot be listed"):
            try:
                names = [
                    os.path.basename(path.rstrip("/")) for path in self._files.ls(self._root, detail=False)
                ]
            except FileNotFoundError:
                return []
        steps = sorted(step for name in names if (step := parse_step_folder_name(name)) is not None)
        return [step for step in steps if self.get_file_size(self.get_folder_name(step), NAME) is not None]

    def get_folder_name(self, step: int) -> str:
        """Return the name of a step's folder."""
        return f"step-{step}"

    def create_step_folder(self, step: int, token: str) -> str:
        """Return the name of the folder for a new step. Object stores need not create folders."""
        if self.get_file_size(self.get_folder_name(step), NAME) is not None:
            raise make_step_exists_error(self.where, step)
        return f"{self.get_folder_name(step)}/{token}"

    def commit_step(self, step: int, token: str) -> None:
        """Copy the manifest into the step's folder, or raise if the step exists.

        Then delete the files that other saves of this step left there.
        """
        folder = self.get_folder_name(step)
        path = self._join_path(folder, NAME)
        with _translate_store_errors(self._files, path, f"step {step} cannot be completed", _FIX_BUCKET):
            manifest = self._files.cat_file(self._join_path(f"{folder}/{token}", NAME))
            try:
                self._files.pipe_file(path, manifest, mode="create")
            except Exception:
                if self.get_file_size(folder, NAME) is None:
                    raise
        head = memoryview(bytearray(_HEAD_BYTES))
        if token.encode() not in bytes(head[: self.read_file_into(folder, NAME, 0, head)]):
            # The manifest does not have this save's token, so a different save has committed the step.
            raise make_step_exists_error(self.where, step)
        # The step is now final, so delete other files in its folder: they belong to saves that will fail.
        self.remove_file(f"{folder}/{token}", NAME)
        with suppress(Exception):
            for other in self._files.ls(self._join_path(folder), detail=False):
                if os.path.basename(other.rstrip("/")) not in (NAME, token):
                    self._files.rm(other, recursive=True)

    def discard_step(self, step: int, token: str) -> None:
        """Delete the files of the unfinished step, if possible and if the step is not committed. Ignore errors."""
        folder = self.get_folder_name(step)
        with suppress(Exception):
            head = memoryview(bytearray(_HEAD_BYTES))
            is_step = self.get_file_size(folder, NAME) is not None
            if not is_step or token.encode() not in bytes(head[: self.read_file_into(folder, NAME, 0, head)]):
                self._files.rm(self._join_path(f"{folder}/{token}"), recursive=True)

    def delete_step(self, step: int) -> None:
        """Delete the manifest, so that the step no longer exists, then the other files. Ignore a missing step."""
        path = self._join_path(self.get_folder_name(step), NAME)
        with (
            _translate_store_errors(self._files, path, f"step {step} cannot be deleted"),
            suppress(FileNotFoundError),
        ):
            self._files.rm_file(path)
        with suppress(Exception):
            self._files.rm(self._join_path(self.get_folder_name(step)), recursive=True)

    def create_file(self, folder: str, name: str) -> _RemoteFileSink:
        """Open a new file for writing. The file exists once it is closed."""
        return _RemoteFileSink(self._files, self._join_path(folder, name))

    def remove_file(self, folder: str, name: str) -> None:
        """Delete a file, if possible. Ignore errors."""
        with suppress(Exception):
            self._files.rm_file(self._join_path(folder, name))

    def get_file_size(self, folder: str, name: str) -> int | None:
        """Return the size of a file in bytes, or `None` if it does not exist."""
        path = self._join_path(folder, name)
        with _translate_store_errors(self._files, path, "the file cannot be read"):
            try:
                found = self._files.info(path)
            except (FileNotFoundError, NotADirectoryError):
                return None
        return found["size"] if found["type"] == "file" else None

    def read_file_into(self, folder: str, name: str, start: int, buffer: memoryview) -> int:
        """Read from offset `start` into `buffer`, and return the byte count, which is smaller only at the end."""
        path = self._join_path(folder, name)
        end = start + len(buffer)
        with _translate_store_errors(self._files, path, "the file cannot be read"):
            try:
                data = self._files.cat_file(path, start=start, end=end) if buffer else b""
            except FileNotFoundError:
                raise
            except Exception:  # some stores raise for a range beyond the end, where no bytes can be read
                if (self.get_file_size(folder, name) or 0) > start:
                    raise
                data = b""
        buffer[: len(data)] = data
        return len(data)

    def get_free_bytes(self) -> None:
        """Return `None`, because an object store does not report its free space."""
        return

    def _join_path(self, *names: str) -> str:
        return "/".join((self._root, *names))


class _RemoteFileSink:
    """Write a new file in an object store."""

    def __init__(self, files: Any, path: str):
        self._files = files
        self._path = path
        self._file: Any = None

    def __enter__(self) -> Self:
        with self._translate_store_errors():
            self._file = self._files.open(self._path, "wb", block_size=_PART_BYTES)
        return self

    def write(self, data: memoryview | bytes, /) -> None:
        with self._translate_store_errors():
            self._file.write(data)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        if kind is None:
            with self._translate_store_errors():
                self._file.close()
            return
        with suppress(Exception):
            self._file.discard()
            # fsspec would upload a file that is not closed when it is garbage-collected, so mark it as closed
            self._file.closed = True
        with suppress(Exception):
            self._files.rm_file(self._path)

    def _translate_store_errors(self) -> AbstractContextManager[None]:
        return _translate_store_errors(self._files, self._path, "the file cannot be written", _FIX_BUCKET)


@contextmanager
def _translate_store_errors(
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
