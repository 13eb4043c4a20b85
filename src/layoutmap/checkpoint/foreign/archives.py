"""Read uncompressed files in zip archives, such as those of torch and Keras, in place."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping
from typing import Any, cast

from layoutmap.checkpoint.foreign.ranges import ByteFile
from layoutmap.core.errors import CheckpointError


class Window(io.RawIOBase):
    """Read a byte range of a file as a file of its own.

    Args:
        file: The file.
        start: Offset of the range in bytes.
        num_bytes: Its size.
    """

    def __init__(self, file: ByteFile, start: int, num_bytes: int):
        self.file, self.start, self.num_bytes = file, start, num_bytes
        self._place = 0

    def seekable(self) -> bool:
        """Return True, since `seek` works."""
        return True

    def readable(self) -> bool:
        """Return True, since bytes can be read."""
        return True

    def seek(self, offset: int, whence: int = 0, /) -> int:
        """Move the read position within the window, and return it."""
        self._place = offset + (0, self._place, self.num_bytes)[whence]
        return self._place

    def tell(self) -> int:
        """Return the read position in the window."""
        return self._place

    def readinto(self, buffer: Any, /) -> int:
        """Read into a buffer up to the end of the window, and return the byte count."""
        view = memoryview(buffer).cast("B")
        count = max(0, min(len(view), self.num_bytes - self._place))
        self.file.read_into(self.start + self._place, view[:count])
        self._place += count
        return count


def list_stored_files(window: Window, where: str, fix: str) -> Mapping[str, Window]:
    """Map each file name in an archive to the bytes of the file.

    Args:
        window: The archive.
        where: Where it is, for messages.
        fix: What to do about an archive that is refused.

    Raises:
        CheckpointError: It cannot be read, or has compressed files, two of one name, or bytes that are in two of them:
            of few bytes they would make many.
    """

    def make_error(why: str) -> CheckpointError:
        return CheckpointError(f"{where}: the archive cannot be read", why=why, fix=fix)

    found: dict[str, Window] = {}
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
                raise make_error(f"{info.filename} is compressed, and could expand to any size")
            if info.filename in found or start + info.file_size > after:
                raise make_error(f"{info.filename} appears twice, or shares bytes with another file")
            found[info.filename] = Window(window.file, window.start + start, info.file_size)
    except (zipfile.BadZipFile, NotImplementedError, OSError, ValueError, EOFError, IndexError) as error:
        raise make_error(f"{type(error).__name__}: {error}") from error
    return found
