"""Encode and check the records of a weight stream. Each record has a number and checksums.

A record is a header and a payload. The header has:

    magic, kind, number in the stream, length of the payload, CRC-32 of the payload, CRC-32 of the header before it
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Collection
from enum import IntEnum
from typing import Annotated, TypeVar

import msgspec

from layoutmap.checkpoint.dtypes import SAFETENSORS
from layoutmap.checkpoint.gate import MOST_SMALL_BYTES, translate_parser_errors
from layoutmap.checkpoint.source import SavedVariable, check_variables
from layoutmap.checkpoint.storage import make_token
from layoutmap.core.errors import CheckpointError

VERSION = 1
MOST_DATA_BYTES = 1 << 22
_HEADER = struct.Struct("<4sBIII")
_SUM = struct.Struct("<I")
_MAGIC = b"lmw1"

T = TypeVar("T")
_Number = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_Token = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{16}$")]


class Record(IntEnum):
    """The kinds of records."""

    BEGIN = 1
    FILE = 2
    DATA = 3
    END = 4
    FAILED = 5
    ANSWER = 6


class StreamedVariable(msgspec.Struct, forbid_unknown_fields=True):
    """Describe a variable of a stream: its dtype, shape, and aliases."""

    dtype: str
    shape: tuple[_Number, ...]
    aliases: tuple[str, ...] = ()


class Begin(msgspec.Struct, forbid_unknown_fields=True):
    """The first record of a stream, with its variables.

    Args:
        variables: The variables by name.
        unchanged: Checksums of the variables that are not sent, because the receiver already has them.
        token: A random name of the stream.
        version: The version of the format.
    """

    variables: dict[str, StreamedVariable]
    unchanged: dict[str, str]
    token: _Token = msgspec.field(default_factory=make_token)
    version: int = VERSION

    def list_variables(self) -> list[SavedVariable]:
        """Return the variables in the form of a source."""
        return [SavedVariable(n, e.shape, e.dtype, aliases=e.aliases) for n, e in self.variables.items()]

    @property
    def sent_bytes(self) -> int:
        """Size of the variables that are sent."""
        return sum(v.global_bytes for v in self.list_variables() if v.path not in self.unchanged)


class End(msgspec.Struct, forbid_unknown_fields=True):
    """The last record of a stream: the size and CRC-32 of each file."""

    files: dict[str, tuple[_Number, _Number]]


class _Answer(msgspec.Struct, forbid_unknown_fields=True):
    token: str
    error: str


def parse_begin(payload: bytes, where: str) -> Begin:
    """Parse and check the first record of a stream."""
    begin = decode(payload, Begin, where)
    if begin.version != VERSION or not begin.unchanged.keys() <= begin.variables.keys():
        raise make_damage_error(
            where, f"it has version {begin.version}, or lists unchanged names that are not variables"
        )
    if unknown := {each.dtype for each in begin.variables.values()} - SAFETENSORS.keys():
        raise make_damage_error(where, f"it has an element type {min(unknown)!r:.50}")
    check_variables(where, begin.list_variables())
    return begin


def make_answer(token: str, error: str) -> bytes:
    """Encode an answer. An empty error means that the model has all values."""
    return msgspec.json.encode(_Answer(token, error))


def check_answer(payload: bytes, token: str, where: str) -> None:
    """Raise if an answer is a refusal or belongs to another stream."""
    answer = decode(payload, _Answer, where)
    if answer.token not in (token, ""):
        raise make_damage_error(where, "the answer belongs to another stream")
    if answer.error:
        raise CheckpointError(
            f"{where}: the receiver refuses the weights",
            facts={"it says": answer.error},
            why="its model still has the old weights, unless its error says otherwise",
            fix="correct the receiver's error, and open a new connection",
        )


def make_record(kind: Record, number: int, payload: bytes | memoryview) -> bytes:
    """Encode the header of a record."""
    header = _HEADER.pack(_MAGIC, kind, number, len(payload), zlib.crc32(payload))
    return header + _SUM.pack(zlib.crc32(header))


def read_record(
    read: Callable[[int], bytes], number: int, kinds: Collection[Record], where: str
) -> tuple[Record, bytes]:
    """Read the next record, and return its kind and payload.

    Args:
        read: Returns the next bytes, of a given number.
        number: The number that the record must have.
        kinds: The kinds that it can have.
        where: The sender, for messages.

    Raises:
        CheckpointError: It is damaged, too long, or another record.
    """
    header, checksum = read(_HEADER.size), read(_SUM.size)
    magic, kind, found, length, payload_checksum = _HEADER.unpack(header)
    if magic != _MAGIC or _SUM.pack(zlib.crc32(header)) != checksum:
        raise make_damage_error(where, "a record has no valid header")
    if kind == Record.FAILED:
        raise make_damage_error(where, "the sender failed to read its values: read its error")
    most = MOST_DATA_BYTES if kind in (Record.FILE, Record.DATA) else MOST_SMALL_BYTES
    if found != number or kind not in kinds or length > most:
        why = f"record {found} of kind {kind} with {length:,} bytes is in place of record {number}"
        raise make_damage_error(where, why)
    payload = read(length)
    if zlib.crc32(payload) != payload_checksum:
        raise make_damage_error(where, f"the checksum of record {number} is wrong")
    return Record(kind), payload


def decode(payload: bytes, kind: type[T], where: str) -> T:
    """Decode a JSON payload to a type."""
    with translate_parser_errors(where):
        return msgspec.json.decode(payload, type=kind)


def make_damage_error(where: str, why: str) -> CheckpointError:
    """Return the error for a damaged or incomplete stream."""
    return CheckpointError(
        f"{where}: the weights are damaged or incomplete",
        why=why,
        fix="send them again over a new connection",
    )
