"""Read uncompressed files inside of zip archives, such as those of torch and Keras, without extracting them."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping
from typing import Any, cast

from layoutmap.checkpoint.foreign.ranges import ByteRangeFile
from layoutmap.core.errors import CheckpointError


class FileWindow(io.RawIOBase):
    """Read a byte range of a file as if the range were a file of its own.

    Args:
        file: The file that contains the range.
        start: Offset of the range in bytes.
        num_bytes: Size of the range in bytes.
    """

    def __init__(self, file: ByteRangeFile, start: int, num_bytes: int):
        self.file, self.start, self.num_bytes = file, start, num_bytes
        self._position = 0

    def seekable(self) -> bool:
        """Return True, since `seek` works."""
        return True

    def readable(self) -> bool:
        """Return True, since bytes can be read."""
        return True

    def seek(self, offset: int, whence: int = 0, /) -> int:
        """Move the read position within the window, and return the new position."""
        self._position = offset + (0, self._position, self.num_bytes)[whence]
        return self._position

    def tell(self) -> int:
        """Return the read position in the window."""
        return self._position

    def readinto(self, buffer: Any, /) -> int:
        """Read into a buffer up to the end of the window, and return the byte count."""
        view = memoryview(buffer).cast("B")
        count = max(0, min(len(view), self.num_bytes - self._position))
        self.file.read_into(self.start + self._position, view[:count])
        self._position += count
        return count


def find_files_in_archive(window: FileWindow, where: str, fix: str) -> Mapping[str, FileWindow]:
    """Return a dict from file name to `FileWindow` for all files in an uncompressed zip archive.

    Args:
        window: The archive.
        where: The path of the archive, for messages.
        fix: The fix that the error of a refused archive names.

    Raises:
        CheckpointError: The archive cannot be read, or has compressed files, two files of one name, or files that share
            bytes. Otherwise a small archive could expand to any size.
    """

    def make_archive_error(why: str) -> CheckpointError:
        return CheckpointError(f"{where}: the archive cannot be read", why=why, fix=fix)

    files: dict[str, FileWindow] = {}
    try:
        with zipfile.ZipFile(cast("Any", window)) as archive:
            infos = sorted(archive.infolist(), key=lambda info: info.header_offset)
        for info, after in zip(infos, [*(i.header_offset for i in infos[1:]), window.num_bytes], strict=True):
            window.seek(info.header_offset)
            local = window.read(30) or b""
            start = (
                info.header_offset + 30 + sum(int.from_bytes(local[i : i + 2], "little") for i in (26, 28))
            )
            if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size:
                raise make_archive_error(f"{info.filename} is compressed, and could expand to any size")
            if info.filename in files or start + info.file_size > after:
                raise make_archive_error(f"{info.filename} appears twice, or shares bytes with another file")
            files[info.filename] = FileWindow(window.file, window.start + start, info.file_size)
    except (zipfile.BadZipFile, NotImplementedError, OSError, ValueError, EOFError, IndexError) as error:
        raise make_archive_error(f"{type(error).__name__}: {error}") from error
    return files
