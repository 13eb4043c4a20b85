"""Send weight files to another process over a pipe, a socket, or a shared folder, and wait for its answer.

Over a pipe, a stream is a sequence of records: `BEGIN` lists the variables, then each safetensors file is a `FILE`
with its name and several `DATA` with its bytes, then comes `END`. The receiver sends one `ANSWER`.

In a shared folder, a stream is a subfolder `weights` with the safetensors files and a file `stream` of two records,
`BEGIN` and `END`, of which `END` has the sizes and checksums of the files. It appears when it is complete. The receiver
renames it, so that each stream is received once, and puts the answer beside it.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import time
import zlib
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Any, cast

import msgspec

from layoutmap.checkpoint.foreign.ranges import ByteFile
from layoutmap.checkpoint.storage import FileMaker, LocalStorage, make_token
from layoutmap.checkpoint.stream_records import (
    MOST_DATA_BYTES,
    Begin,
    End,
    Record,
    check_answer,
    decode,
    make_answer,
    make_damage_error,
    make_record,
    parse_begin,
    read_record,
)
from layoutmap.core.errors import CheckpointError
from layoutmap.core.folders import open_hidden_folder, remove_folder

_MOST_HEADERS_BYTES = 1 << 28  # limit for the headers of all files of a stream
_FILE_NAME = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")
_POLL_SECONDS = 0.02


# A blocking write would not notice that the receiver refused or hangs, so `poll` waits on
# both directions (decisions/0246).
class PipeLink:
    """Exchange weight streams over a socket or a pair of pipes.

    Args:
        reader: File descriptor to read from.
        writer: File descriptor to write to.
        timeout_seconds: How long the other process may do nothing.
    """

    _where = "the other process"
    _token = ""

    def __init__(self, reader: int, writer: int, timeout_seconds: float):
        self._reader, self._writer = reader, writer
        self._timeout = timeout_seconds

    @contextlib.contextmanager
    def open_stream(self, begin: Begin) -> Generator[tuple[FileMaker, str]]:
        """Yield a storage and a folder for files, send the files, and then wait for the answer.

        Raises:
            CheckpointError: The receiver refuses the stream, has ended, or does not answer in time.
        """
        self._token, number = begin.token, 0

        def send(kind: Record, payload: bytes | memoryview) -> None:
            nonlocal number
            for data in make_record(kind, number, payload), payload:
                self._write(data, is_sending=True)
            number += 1

        with self._make_nonblocking():
            send(Record.BEGIN, msgspec.json.encode(begin))
            try:
                yield _RecordFiles(send), ""
            except Exception:
                with contextlib.suppress(CheckpointError):
                    send(Record.FAILED, b"")
                raise
            send(Record.END, b"")
            self._receive_answer()

    def receive_begin(self) -> Begin:
        """Read the first record of the next stream."""
        begin = parse_begin(read_record(self._read, 0, [Record.BEGIN], self._where)[1], self._where)
        self._token = begin.token
        return begin

    def receive_files(self, begin: Begin, spool: Path) -> Path:
        """Receive all files into a folder, verify their checksums, and return the folder.

        Args:
            begin: The first record.
            spool: An empty folder for files that are not in a folder yet.
        """
        free = LocalStorage(spool).free_bytes()
        if free is not None and free < begin.sent_bytes:
            raise CheckpointError(
                f"{spool}: there is not enough space for the weights",
                facts={"needed": f"{begin.sent_bytes:,} bytes", "free": f"{free:,} bytes"},
                why="all weights are stored before the model changes",
                fix="pass another folder as spool=",
            )
        left, number, kinds = begin.sent_bytes + _MOST_HEADERS_BYTES, 1, [Record.FILE]
        with contextlib.ExitStack() as stack:
            file: Any = None
            while (record := read_record(self._read, number, kinds, self._where))[0] != Record.END:
                kind, payload = record
                if kind == Record.FILE:
                    stack.close()
                    name = payload.decode(errors="replace")
                    if not _FILE_NAME.fullmatch(name) or (spool / name).exists():
                        raise make_damage_error(self._where, f"it sends a file {name!r:.100}")
                    file = stack.enter_context(open(spool / name, "xb"))
                    kinds = [Record.FILE, Record.DATA, Record.END]
                else:
                    left -= len(payload)
                    if left < 0:
                        raise make_damage_error(self._where, "it sends more bytes than it announced")
                    file.write(payload)
                number += 1
        return spool

    def answer(self, error: str = "") -> None:
        """Send the sender an empty error for success, or the error that prevented it."""
        payload = make_answer(self._token, error)
        with self._make_nonblocking():
            self._write(make_record(Record.ANSWER, 0, payload) + payload, is_sending=False)

    def _receive_answer(self) -> None:
        payload = read_record(self._read, 0, [Record.ANSWER], self._where)[1]
        check_answer(payload, self._token, self._where)

    def _read(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            self._wait({self._reader: select.POLLIN})
            with self._translate_errors():
                found = os.read(self._reader, min(size - len(data), MOST_DATA_BYTES))
                if not found:
                    raise BrokenPipeError(0, "end of the stream")
                data += found
        return bytes(data)

    def _write(self, data: bytes | memoryview, *, is_sending: bool) -> None:
        """Write all bytes. An answer that arrives while sending means that the receiver refused the stream."""
        left = memoryview(data).cast("B")
        while left:
            ends = {self._writer: select.POLLOUT}
            if is_sending:
                ends[self._reader] = ends.get(self._reader, 0) | select.POLLIN
            ready = self._wait(ends)
            if is_sending and ready.get(self._reader, 0) & ~select.POLLOUT:
                self._receive_answer()
                raise make_damage_error(self._where, "it answers before the end of the stream")
            with self._translate_errors():
                left = left[os.write(self._writer, left) :]

    def _wait(self, ends: Mapping[int, int]) -> dict[int, int]:
        """Wait for an event on one of these file descriptors, and return the events of each."""
        poll = select.poll()
        for descriptor, events in ends.items():
            poll.register(descriptor, events)
        if ready := poll.poll(self._timeout * 1000):
            return dict(ready)
        raise _make_timeout_error(self._where, self._timeout)

    @contextlib.contextmanager
    def _make_nonblocking(self) -> Generator[None]:
        """Set the descriptors to non-blocking, so that `_wait` notices a process that does not read."""
        before = os.get_blocking(self._writer)
        os.set_blocking(self._writer, False)
        try:
            yield
        finally:
            os.set_blocking(self._writer, before)

    @contextlib.contextmanager
    def _translate_errors(self) -> Generator[None]:
        try:
            with contextlib.suppress(BlockingIOError):
                yield
        except OSError as error:
            raise CheckpointError(
                f"{self._where} has ended, or closed the connection",
                why=f"the system says: {error.strerror or error}",
                fix="read the output of that process, and open a new connection before the next stream",
            ) from error


class FolderLink:
    """Exchange weight streams through a folder that both processes can access, one stream at a time.

    Args:
        folder: The folder.
        timeout_seconds: How long to wait for the other process.
    """

    _token = ""

    def __init__(self, folder: str, timeout_seconds: float):
        self._folder = Path(os.path.abspath(os.path.expanduser(folder)))
        self._where = str(self._folder)
        self._sent, self._received, self._answer = (
            self._folder / n for n in ("weights", "received", "answer")
        )
        self._timeout = timeout_seconds
        self._files: dict[str, tuple[int, int]] = {}

    @contextlib.contextmanager
    def open_stream(self, begin: Begin) -> Generator[tuple[FileMaker, str]]:
        """Write the files into a hidden folder, rename it, and wait for the answer."""
        with self._translate_errors(), open_hidden_folder(self._sent, begin.token) as hidden:
            storage = LocalStorage(self._folder)
            self._answer.unlink(missing_ok=True)
            yield storage, hidden.name
            end = End({each.name: _checksum_file(each) for each in hidden.iterdir()})
            with storage.create(hidden.name, "stream") as sink:
                for number, kind, value in (0, Record.BEGIN, begin), (1, Record.END, end):
                    payload = msgspec.json.encode(value)
                    sink.write(make_record(kind, number, payload) + payload)
            old = self._folder / f".{make_token()}"
            if self._try_rename(self._sent, old):  # an earlier stream that nobody received
                remove_folder(old)
            os.rename(hidden, self._sent)
        with self._translate_errors():
            self._wait(self._answer.exists)
            answer = self._answer.read_bytes()
            self._answer.unlink()
        check_answer(answer, begin.token, self._where)

    def receive_begin(self) -> Begin:
        """Wait for the next stream, and claim it."""
        with self._translate_errors():
            remove_folder(self._received)
            self._wait(lambda: self._try_rename(self._sent, self._received))
        file, place = ByteFile(self._received / "stream"), 0

        def read(size: int) -> bytes:
            nonlocal place
            place += size
            return file.read(place - size, size)

        begin = parse_begin(read_record(read, 0, [Record.BEGIN], self._where)[1], self._where)
        self._token = begin.token
        self._files = decode(read_record(read, 1, [Record.END], self._where)[1], End, self._where).files
        return begin

    def receive_files(self, begin: Begin, spool: Path) -> Path:
        """Verify the checksums of the files."""
        names = {each.name for each in self._received.iterdir()} - {"stream"}
        if names != self._files.keys() or not all(map(_FILE_NAME.fullmatch, names)):
            difference = ", ".join(sorted(names ^ self._files.keys()))
            raise make_damage_error(self._where, f"files are missing or unexpected: {difference:.200}")
        for name, expected in self._files.items():
            if _checksum_file(self._received / name) != expected:
                raise make_damage_error(self._where, f"the checksum or size of {name} is wrong")
        return self._received

    def answer(self, error: str = "") -> None:
        """Delete the stream, and write the answer."""
        with self._translate_errors():
            remove_folder(self._received)
            hidden = self._folder / ".answer"
            hidden.write_bytes(make_answer(self._token, error))
            os.replace(hidden, self._answer)

    def _try_rename(self, source: Path, target: Path) -> bool:
        """Rename a folder, and return whether it existed."""
        try:
            os.rename(source, target)
        except FileNotFoundError:
            return False
        return True

    def _wait(self, is_done: Callable[[], bool]) -> None:
        end = time.monotonic() + self._timeout
        while not is_done():
            if time.monotonic() > end:
                raise _make_timeout_error(self._where, self._timeout)
            time.sleep(_POLL_SECONDS)

    @contextlib.contextmanager
    def _translate_errors(self) -> Generator[None]:
        try:
            yield
        except OSError as error:
            raise CheckpointError(
                f"{self._where}: the folder cannot be read or written",
                why=f"the system says: {error.strerror or error}",
                fix="name a folder that both processes can read and write",
            ) from error


Link = PipeLink | FolderLink


class _RecordFiles(FileMaker):
    """Send files as records, one file after the other."""

    def __init__(self, send: Callable[[Record, bytes | memoryview], None]):
        self._send = send

    def create(self, folder: str, name: str) -> _RecordFiles:
        self._send(Record.FILE, name.encode())
        return self

    def __enter__(self) -> _RecordFiles:
        return self

    def write(self, data: memoryview | bytes, /) -> None:
        view = memoryview(data).cast("B")
        for start in range(0, len(view), MOST_DATA_BYTES):
            self._send(Record.DATA, view[start : start + MOST_DATA_BYTES])

    def __exit__(self, *_: object) -> None:
        pass


def open_link(end: object, timeout_seconds: float) -> Link:
    """Open the link for a folder, a socket, or a pair of pipes.

    Args:
        end: A path; an object that both reads and writes, such as a socket; or a pair of one to read from and one to
            write to. An object is a file descriptor, or has one.
        timeout_seconds: How long the other process may do nothing.

    Raises:
        CheckpointError: It is none of these.
    """
    if isinstance(end, str | os.PathLike):
        return FolderLink(os.fspath(cast("str | os.PathLike[str]", end)), timeout_seconds)
    pair = cast("tuple[Any, ...]", end if isinstance(end, tuple) else (end, end))
    with contextlib.suppress(OSError, AttributeError, TypeError, ValueError):
        reader, writer = pair
        # a TLS socket must encrypt, so its descriptor cannot be used directly
        if type(reader).__module__ != "ssl":
            if hasattr(writer, "flush"):
                writer.flush()
            found = [each if isinstance(each, int) else each.fileno() for each in pair]
            for each in found:
                os.fstat(each)
            return PipeLink(found[0], found[1], timeout_seconds)
    raise CheckpointError(
        f"{end!r:.100}: weights cannot be sent or received through it",
        why="it is neither a path nor an object with an open file descriptor",
        fix="pass a folder, a connected socket, or a pair of pipes: (reader, writer)",
    )


def _checksum_file(path: Path) -> tuple[int, int]:
    """Compute the size and the CRC-32 of a file."""
    file, checksum = ByteFile(path), 0
    for start in range(0, file.num_bytes, MOST_DATA_BYTES):
        checksum = zlib.crc32(file.read(start, min(MOST_DATA_BYTES, file.num_bytes - start)), checksum)
    return file.num_bytes, checksum


def _make_timeout_error(where: str, seconds: float) -> CheckpointError:
    return CheckpointError(
        f"{where}: there was no progress for {seconds:g} seconds",
        why="the process at the other end is not running, or has not reached the matching call",
        fix="read its output, or pass a larger timeout_seconds",
    )
