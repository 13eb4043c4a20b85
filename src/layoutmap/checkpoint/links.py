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

from layoutmap.checkpoint.foreign.ranges import ByteRangeFile
from layoutmap.checkpoint.storage import FileMaker, LocalStorage, make_random_token
from layoutmap.checkpoint.stream_records import (
    MAX_DATA_BYTES,
    BeginRecord,
    EndRecord,
    RecordKind,
    check_receiver_accepted,
    decode_payload,
    encode_answer,
    encode_record_header,
    make_stream_error,
    parse_begin_record,
    read_record,
)
from layoutmap.core.errors import CheckpointError
from layoutmap.core.folders import open_hidden_folder, remove_folder

_MAX_HEADERS_BYTES = 1 << 28  # limit for the headers of all files of a stream together
_FILE_NAME = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")
_POLL_SECONDS = 0.02


# A blocking write would not notice a receiver that refuses or hangs, so `poll` waits on both ends (decisions/0246).
class PipeStreamLink:
    """Exchange weight streams over a socket or a pair of pipes.

    Args:
        reader: File descriptor to read from.
        writer: File descriptor to write to.
        timeout_seconds: How long to wait for the other process to read or write.
    """

    _where = "the other process"
    _token = ""

    def __init__(self, reader: int, writer: int, timeout_seconds: float):
        self._reader, self._writer = reader, writer
        self._timeout = timeout_seconds

    @contextlib.contextmanager
    def open_stream(self, begin: BeginRecord) -> Generator[tuple[FileMaker, str]]:
        """Yield a pair: a storage that sends each new file to the receiver, and an empty text as the folder's name.

        After the block, wait for the receiver's answer.

        Raises:
            CheckpointError: The receiver refuses the stream, has ended, or does not answer in time.
        """
        self._token, number = begin.token, 0

        def send_record(kind: RecordKind, payload: bytes | memoryview) -> None:
            nonlocal number
            for data in encode_record_header(kind, number, payload), payload:
                self._write_all_bytes(data, stop_at_answer=True)
            number += 1

        with self._make_writes_nonblocking_temporarily():
            send_record(RecordKind.BEGIN, msgspec.json.encode(begin))
            try:
                yield _RecordSender(send_record), ""
            except Exception:
                with contextlib.suppress(CheckpointError):
                    send_record(RecordKind.FAILED, b"")
                raise
            send_record(RecordKind.END, b"")
            self._receive_and_check_answer()

    def receive_begin_record(self) -> BeginRecord:
        """Read and return the first record of the next stream, which lists the stream's variables."""
        begin = parse_begin_record(
            read_record(self._read_bytes, 0, [RecordKind.BEGIN], self._where)[1], self._where
        )
        self._token = begin.token
        return begin

    def receive_files(self, begin: BeginRecord, spool: Path) -> Path:
        """Receive all files into a folder, verify the checksum of each record, and return the folder.

        Args:
            begin: The first record.
            spool: An empty folder for the files.
        """
        free = LocalStorage(spool).get_free_bytes()
        if free is not None and free < begin.sent_bytes:
            raise CheckpointError(
                f"{spool}: there is not enough space for the weights",
                facts={"needed": f"{begin.sent_bytes:,} bytes", "free": f"{free:,} bytes"},
                why="all weights are stored before the model changes",
                fix="pass a folder with more space as spool=",
            )
        remaining, number, kinds = begin.sent_bytes + _MAX_HEADERS_BYTES, 1, [RecordKind.FILE]
        with contextlib.ExitStack() as stack:
            file: Any = None
            while (record := read_record(self._read_bytes, number, kinds, self._where))[0] != RecordKind.END:
                kind, payload = record
                if kind == RecordKind.FILE:
                    stack.close()
                    name = payload.decode(errors="replace")
                    if not _FILE_NAME.fullmatch(name) or (spool / name).exists():
                        raise make_stream_error(
                            self._where, f"file name {name!r:.100} is invalid or repeated"
                        )
                    file = stack.enter_context(open(spool / name, "xb"))
                    kinds = [RecordKind.FILE, RecordKind.DATA, RecordKind.END]
                else:
                    remaining -= len(payload)
                    if remaining < 0:
                        raise make_stream_error(self._where, "the sender sends more bytes than it announced")
                    file.write(payload)
                number += 1
        return spool

    def send_answer(self, error: str = "") -> None:
        """Tell the sender that the weights were received, or with `error` why they were not."""
        payload = encode_answer(self._token, error)
        with self._make_writes_nonblocking_temporarily():
            self._write_all_bytes(
                encode_record_header(RecordKind.ANSWER, 0, payload) + payload, stop_at_answer=False
            )

    def _receive_and_check_answer(self) -> None:
        payload = read_record(self._read_bytes, 0, [RecordKind.ANSWER], self._where)[1]
        check_receiver_accepted(payload, self._token, self._where)

    def _read_bytes(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            self._wait_for_events({self._reader: select.POLLIN})
            with self._translate_os_errors():
                found = os.read(self._reader, min(size - len(data), MAX_DATA_BYTES))
                if not found:
                    raise BrokenPipeError(0, "end of the stream")
                data += found
        return bytes(data)

    def _write_all_bytes(self, data: bytes | memoryview, *, stop_at_answer: bool) -> None:
        """Write all bytes. With `stop_at_answer`, raise if an answer arrives earlier, because it is a refusal."""
        remaining = memoryview(data).cast("B")
        while remaining:
            events_by_descriptor = {self._writer: select.POLLOUT}
            if stop_at_answer:
                events_by_descriptor[self._reader] = events_by_descriptor.get(self._reader, 0) | select.POLLIN
            ready = self._wait_for_events(events_by_descriptor)
            if stop_at_answer and ready.get(self._reader, 0) & ~select.POLLOUT:
                self._receive_and_check_answer()
                raise make_stream_error(self._where, "the receiver answered before the end of the stream")
            with self._translate_os_errors():
                remaining = remaining[os.write(self._writer, remaining) :]

    def _wait_for_events(self, events_by_descriptor: Mapping[int, int]) -> dict[int, int]:
        """Wait for events. Return a dict from file descriptor to its events, or raise after the timeout."""
        poll = select.poll()
        for descriptor, events in events_by_descriptor.items():
            poll.register(descriptor, events)
        if ready := poll.poll(self._timeout * 1000):
            return dict(ready)
        raise _make_timeout_error(self._where, self._timeout)

    @contextlib.contextmanager
    def _make_writes_nonblocking_temporarily(self) -> Generator[None]:
        """Make writes non-blocking until the block ends, so that `_wait_for_events` notices a hanging receiver."""
        before = os.get_blocking(self._writer)
        os.set_blocking(self._writer, False)
        try:
            yield
        finally:
            os.set_blocking(self._writer, before)

    @contextlib.contextmanager
    def _translate_os_errors(self) -> Generator[None]:
        try:
            with contextlib.suppress(BlockingIOError):
                yield
        except OSError as error:
            raise CheckpointError(
                f"{self._where} has ended, or closed the connection",
                why=f"the system says: {error.strerror or error}",
                fix="read the output of that process, and open a new connection before the next stream",
            ) from error


class FolderStreamLink:
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
    def open_stream(self, begin: BeginRecord) -> Generator[tuple[FileMaker, str]]:
        """Yield a storage and a hidden folder's name. After the block, rename the folder, and await the answer."""
        with self._translate_os_errors(), open_hidden_folder(self._sent, begin.token) as hidden:
            storage = LocalStorage(self._folder)
            self._answer.unlink(missing_ok=True)
            yield storage, hidden.name
            end = EndRecord({each.name: _compute_size_and_checksum(each) for each in hidden.iterdir()})
            with storage.create_file(hidden.name, "stream") as sink:
                for number, kind, value in (0, RecordKind.BEGIN, begin), (1, RecordKind.END, end):
                    payload = msgspec.json.encode(value)
                    sink.write(encode_record_header(kind, number, payload) + payload)
            old = self._folder / f".{make_random_token()}"
            if self._try_rename_folder(self._sent, old):  # an earlier stream was never received, so remove it
                remove_folder(old)
            os.rename(hidden, self._sent)
        with self._translate_os_errors():
            self._wait_until(self._answer.exists)
            answer = self._answer.read_bytes()
            self._answer.unlink()
        check_receiver_accepted(answer, begin.token, self._where)

    def receive_begin_record(self) -> BeginRecord:
        """Wait for the next stream, rename its folder to claim it, and return the first record."""
        with self._translate_os_errors():
            remove_folder(self._received)
            self._wait_until(lambda: self._try_rename_folder(self._sent, self._received))
        file, position = ByteRangeFile(self._received / "stream"), 0

        def read_next_bytes(size: int) -> bytes:
            nonlocal position
            position += size
            return file.read(position - size, size)

        begin = parse_begin_record(
            read_record(read_next_bytes, 0, [RecordKind.BEGIN], self._where)[1], self._where
        )
        self._token = begin.token
        end = read_record(read_next_bytes, 1, [RecordKind.END], self._where)[1]
        self._files = decode_payload(end, EndRecord, self._where).files
        return begin

    def receive_files(self, begin: BeginRecord, spool: Path) -> Path:
        """Check the names, sizes, and checksums of the files that the sender wrote, and return their folder."""
        names = {each.name for each in self._received.iterdir()} - {"stream"}
        if names != self._files.keys() or not all(map(_FILE_NAME.fullmatch, names)):
            difference = ", ".join(sorted(names ^ self._files.keys()))
            raise make_stream_error(self._where, f"files are missing or unexpected: {difference:.200}")
        for name, expected in self._files.items():
            if _compute_size_and_checksum(self._received / name) != expected:
                raise make_stream_error(self._where, f"the checksum or size of {name} is wrong")
        return self._received

    def send_answer(self, error: str = "") -> None:
        """Delete the received files, and write the answer. With `error`, it says why the weights were refused."""
        with self._translate_os_errors():
            remove_folder(self._received)
            hidden = self._folder / ".answer"
            hidden.write_bytes(encode_answer(self._token, error))
            os.replace(hidden, self._answer)

    def _try_rename_folder(self, source: Path, target: Path) -> bool:
        """Rename a folder, and return whether it existed."""
        try:
            os.rename(source, target)
        except FileNotFoundError:
            return False
        return True

    def _wait_until(self, is_done: Callable[[], bool]) -> None:
        end = time.monotonic() + self._timeout
        while not is_done():
            if time.monotonic() > end:
                raise _make_timeout_error(self._where, self._timeout)
            time.sleep(_POLL_SECONDS)

    @contextlib.contextmanager
    def _translate_os_errors(self) -> Generator[None]:
        try:
            yield
        except OSError as error:
            raise CheckpointError(
                f"{self._where}: the folder cannot be read or written",
                why=f"the system says: {error.strerror or error}",
                fix="name a folder that both processes can read and write",
            ) from error


StreamLink = PipeStreamLink | FolderStreamLink


class _RecordSender(FileMaker):
    """Send files as records, one file after the other."""

    def __init__(self, send_record: Callable[[RecordKind, bytes | memoryview], None]):
        self._send = send_record

    def create_file(self, folder: str, name: str) -> _RecordSender:
        self._send(RecordKind.FILE, name.encode())
        return self

    def __enter__(self) -> _RecordSender:
        return self

    def write(self, data: memoryview | bytes, /) -> None:
        view = memoryview(data).cast("B")
        for start in range(0, len(view), MAX_DATA_BYTES):
            self._send(RecordKind.DATA, view[start : start + MAX_DATA_BYTES])

    def __exit__(self, *_: object) -> None:
        pass


def open_stream_link(connection: object, timeout_seconds: float) -> StreamLink:
    """Return the link for exchanging weight streams over a folder, a socket, or a pair of pipes.

    Args:
        connection: A path of a folder; a connected socket; or a pair of pipes: one to read from, and one to write to.
            A socket or pipe can also be given as its file descriptor.
        timeout_seconds: How long to wait for the other process.

    Raises:
        CheckpointError: The connection is none of these.
    """
    if isinstance(connection, str | os.PathLike):
        return FolderStreamLink(os.fspath(cast("str | os.PathLike[str]", connection)), timeout_seconds)
    pair = cast("tuple[Any, ...]", connection if isinstance(connection, tuple) else (connection, connection))
    with contextlib.suppress(OSError, AttributeError, TypeError, ValueError):
        reader, writer = pair
        # Refuse a TLS socket, because bytes that are written to its descriptor would not be encrypted.
        if type(reader).__module__ != "ssl":
            if hasattr(writer, "flush"):
                writer.flush()
            found = [each if isinstance(each, int) else each.fileno() for each in pair]
            for each in found:
                os.fstat(each)
            return PipeStreamLink(found[0], found[1], timeout_seconds)
    raise CheckpointError(
        f"{connection!r:.100}: weights cannot be sent or received through it",
        why="it is neither a path nor an open, unencrypted socket or pipe",
        fix="pass a folder, a connected socket, or a pair of pipes: (reader, writer)",
    )


def _compute_size_and_checksum(path: Path) -> tuple[int, int]:
    """Return a pair: the size of a file in bytes, and its CRC-32."""
    file, checksum = ByteRangeFile(path), 0
    for start in range(0, file.num_bytes, MAX_DATA_BYTES):
        checksum = zlib.crc32(file.read(start, min(MAX_DATA_BYTES, file.num_bytes - start)), checksum)
    return file.num_bytes, checksum


def _make_timeout_error(where: str, seconds: float) -> CheckpointError:
    return CheckpointError(
        f"{where}: there was no progress for {seconds:g} seconds",
        why="the process at the other end is not running, or has not reached the matching call",
        fix="read its output, or pass a larger timeout_seconds",
    )
