"""Encode and check the records of a weight stream. Each record has a number and checksums.

A record is a header and a payload. The header has these fields:

    magic, kind, number of the record in the stream, length of the payload, CRC-32 of the payload, CRC-32 of the others
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Collection
from enum import IntEnum
from typing import Annotated, TypeVar

import msgspec

from layoutmap.checkpoint.dtypes import SAFETENSORS
from layoutmap.checkpoint.gate import MAX_SMALL_FILE_BYTES, translate_parser_errors
from layoutmap.checkpoint.source import SavedVariable, check_variable_limits
from layoutmap.checkpoint.storage import make_random_token
from layoutmap.core.errors import CheckpointError

VERSION = 1
MAX_DATA_BYTES = 1 << 22
_HEADER = struct.Struct("<4sBIII")
_SUM = struct.Struct("<I")
_MAGIC = b"lmw1"

T = TypeVar("T")
_Number = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_Token = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{16}$")]


class RecordKind(IntEnum):
    """The kinds of records in a weight stream."""

    BEGIN = 1
    FILE = 2
    DATA = 3
    END = 4
    FAILED = 5
    ANSWER = 6


class StreamedVariable(msgspec.Struct, forbid_unknown_fields=True):
    """The dtype, shape, and aliases of a variable in a stream."""

    dtype: str
    shape: tuple[_Number, ...]
    aliases: tuple[str, ...] = ()


class BeginRecord(msgspec.Struct, forbid_unknown_fields=True):
    """The first record of a stream, with its variables.

    Args:
        variables: The variables by name.
        unchanged: Checksums of the variables that are not sent, because the receiver already has their values.
        token: A random name of the stream.
        version: The version of the format.
    """

    variables: dict[str, StreamedVariable]
    unchanged: dict[str, str]
    token: _Token = msgspec.field(default_factory=make_random_token)
    version: int = VERSION

    def list_variables(self) -> list[SavedVariable]:
        """Return all variables of the stream as `SavedVariable`s."""
        return [SavedVariable(n, e.shape, e.dtype, aliases=e.aliases) for n, e in self.variables.items()]

    @property
    def sent_bytes(self) -> int:
        """Size in bytes of the variables that are sent, without the unchanged ones."""
        return sum(v.global_bytes for v in self.list_variables() if v.path not in self.unchanged)


class EndRecord(msgspec.Struct, forbid_unknown_fields=True):
    """The last record of a stream: the size and CRC-32 of each file."""

    files: dict[str, tuple[_Number, _Number]]


class _AnswerRecord(msgspec.Struct, forbid_unknown_fields=True):
    token: str
    error: str


def parse_begin_record(payload: bytes, where: str) -> BeginRecord:
    """Parse and check the first record of a stream."""
    begin = decode_payload(payload, BeginRecord, where)
    if begin.version != VERSION or not begin.unchanged.keys() <= begin.variables.keys():
        raise make_stream_error(
            where,
            f"the format of the stream has version {begin.version}, not {VERSION}"
            if begin.version != VERSION
            else "the first record names unchanged variables that are not in its list of variables",
        )
    if unknown := {each.dtype for each in begin.variables.values()} - SAFETENSORS.keys():
        raise make_stream_error(where, f"a variable has the unknown element type {min(unknown)!r:.50}")
    check_variable_limits(where, begin.list_variables())
    return begin


def encode_answer(token: str, error: str) -> bytes:
    """Encode the receiver's answer to a stream. An empty error means that the receiver's model has all values."""
    return msgspec.json.encode(_AnswerRecord(token, error))


def check_receiver_accepted(payload: bytes, token: str, where: str) -> None:
    """Raise if the receiver's answer is a refusal, or belongs to a different stream."""
    answer = decode_payload(payload, _AnswerRecord, where)
    if answer.token not in (token, ""):
        raise make_stream_error(where, "the answer belongs to a different stream")
    if answer.error:
        raise CheckpointError(
            f"{where}: the receiver refuses the weights",
            facts={"its error": answer.error},
            why="the receiver's model still has the old weights, unless the error says otherwise",
            fix="correct the receiver's error, and open a new connection",
        )


def encode_record_header(kind: RecordKind, number: int, payload: bytes | memoryview) -> bytes:
    """Return the encoded header of a record, to which the payload is appended."""
    header = _HEADER.pack(_MAGIC, kind, number, len(payload), zlib.crc32(payload))
    return header + _SUM.pack(zlib.crc32(header))


def read_record(
    read: Callable[[int], bytes], number: int, kinds: Collection[RecordKind], where: str
) -> tuple[RecordKind, bytes]:
    """Read the next record, and return its kind and payload.

    Args:
        read: Reads and returns the given number of bytes.
        number: The number that the record must have.
        kinds: The kinds that the record may have.
        where: The sender, for messages.

    Raises:
        CheckpointError: The record is damaged or too long, or has the wrong number or kind.
    """
    header, checksum = read(_HEADER.size), read(_SUM.size)
    magic, kind, actual, length, payload_checksum = _HEADER.unpack(header)
    if magic != _MAGIC or _SUM.pack(zlib.crc32(header)) != checksum:
        raise make_stream_error(where, "a record has no valid header")
    if kind == RecordKind.FAILED:
        raise make_stream_error(where, "the sender failed to read its values: read the sender's error")
    max_bytes = MAX_DATA_BYTES if kind in (RecordKind.FILE, RecordKind.DATA) else MAX_SMALL_FILE_BYTES
    if actual != number or kind not in kinds or length > max_bytes:
        found = RecordKind(kind).name if kind in {*RecordKind} else kind
        why = f"received record {actual} (kind {found}, {length:,} bytes), expected record {number} (kind "
        names = " or ".join(each.name for each in kinds)
        raise make_stream_error(where, f"{why}{names}, at most {max_bytes:,} bytes)")
    payload = read(length)
    if zlib.crc32(payload) != payload_checksum:
        raise make_stream_error(where, f"the checksum of record {number} is wrong")
    return RecordKind(kind), payload


def decode_payload(payload: bytes, payload_type: type[T], where: str) -> T:
    """Decode a JSON payload to a value of a type, or raise a `CheckpointError` if the payload does not fit the type."""
    with translate_parser_errors(where):
        return msgspec.json.decode(payload, type=payload_type)


def make_stream_error(where: str, why: str) -> CheckpointError:
    """Return the error for a damaged or incomplete stream."""
    return CheckpointError(
        f"{where}: the weights are damaged or incomplete",
        why=why,
        fix="send them again over a new connection",
    )
