"""Read and write the manifest of a step: its variables, chunks, and checksums. It is the last file written.

    {"checksum": "xxh3_64:5a1c...",
     "format": "layoutmap checkpoint", "version": 1,
     "step": 1000,
     ...
     "files": [
      {"name": "data-00000.safetensors", "bytes": 4711, "header_bytes": 208, "header": "9f3a..."}
     ],
     "variables": [
      {"path": "d1.kernel", "shape": [512, 512], "dtype": "float32", "layout": [null, "model"], "chunks": [
       [0, 208, [[0, 512], [0, 256]], "77aa..."], ...
      ]}
     ]}

A chunk is a list: the position of its file in `files`, its offset in the file, its start and stop on each axis of the
variable, and its checksum. That is the 64-bit XXH3 of its bytes as 16 hexadecimal digits. The checksum in the first
line is that of all bytes after this line.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import msgspec

from layoutmap.checkpoint.chunk_table import Chunk, build_chunk_tables, chunk_from_json, chunk_to_json
from layoutmap.checkpoint.manifest_form import parse_manifest_fields
from layoutmap.checkpoint.source import SavedVariable
from layoutmap.core.errors import CheckpointError, shorten_repr
from layoutmap.core.garbage import pause_garbage_collection
from layoutmap.core.variables import Kind

NAME = "manifest.json"
FORMAT = "layoutmap checkpoint"
VERSION = 1
_FIRST_LINE = '{{"checksum": "xxh3_64:{}",\n'
_FIRST_LENGTH = len(_FIRST_LINE.format("0" * 16))


@dataclass(frozen=True, slots=True)
class DataFile:
    """A file of chunks as listed in the manifest.

    Args:
        name: The name of the file, relative to the folder of the step.
        num_bytes: The size of the file in bytes.
        header_bytes: The size of the header at the start of the file in bytes.
        header: The checksum of the header.
    """

    name: str
    num_bytes: int
    header_bytes: int
    header: str


@dataclass(frozen=True, slots=True)
class ProcessPart:
    """The part of a step that one process wrote.

    Args:
        files: The files of this process. `Chunk.file` is a position in this list.
        chunks: The chunks of each variable, by path.
        states: The states that only this process has.
    """

    files: Sequence[DataFile]
    chunks: Mapping[str, Sequence[Chunk]]
    states: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
# The manifest is written last, so a step with a manifest has all its chunks (decisions/0086).
class Manifest:
    """The content of one step of a checkpoint.

    Args:
        step: The number of the step.
        facts: Further entries: `created`, `writer`, `library`, `engine`, `mesh`, `plan`, `id`.
        metadata: The user's metadata, encoded by `encode_state`.
        states: States by name, encoded by `encode_state`.
        files: The data files.
        variables: The variables, in order.
        chunks: The chunks of each variable, by path.
    """

    step: int
    facts: Mapping[str, Any]
    metadata: Any
    states: Mapping[str, Any]
    files: Sequence[DataFile]
    variables: Sequence[SavedVariable]
    chunks: Mapping[str, Sequence[Chunk]]


def compute_xxh3(data: Any) -> str:
    """Return the XXH3 checksum of bytes as hexadecimal text."""
    import xxhash  # imported here, because most programs never save

    return xxhash.xxh3_64_hexdigest(data)


def manifest_to_bytes(manifest: Manifest) -> bytes:
    """Serialize a manifest to the bytes of its file. Equal manifests give equal bytes."""
    head: dict[str, Any] = {"format": FORMAT, "version": VERSION, "step": manifest.step, **manifest.facts}
    head |= {"metadata": manifest.metadata, "states": manifest.states}
    lines = [f'"{name}": {_format_json(value)}' for name, value in head.items()]
    files = [_format_json(data_file_to_json(file)) for file in manifest.files]
    lines.append(f'"files": {_format_json_list(files)}')
    variables = [_format_variable(each, manifest.chunks[each.path]) for each in manifest.variables]
    lines.append(f'"variables": {_format_json_list(variables)}')
    text = (" " + ",\n ".join(lines) + "}\n").encode()
    return _FIRST_LINE.format(compute_xxh3(text)).encode() + text


def manifest_from_bytes(data: bytes, where: str) -> Manifest:
    """Parse the bytes of a manifest file, and check all its entries.

    Args:
        data: The bytes of the file.
        where: The file, for messages.

    Raises:
        CheckpointError: The checksum is wrong, the content is not that of a manifest, or its version is unknown.
    """
    body = data[_FIRST_LENGTH:]
    if data[:_FIRST_LENGTH] != _FIRST_LINE.format(compute_xxh3(body)).encode():
        raise CheckpointError(
            f"{where}: the manifest was damaged or changed",
            facts={"bytes": len(data)},
            why="the checksum in its first line does not match the rest",
            fix="restore the file from a copy, or load another step",
        )
    try:
        with pause_garbage_collection():  # the collector would rescan a million new lists
            found: Any = json.loads(data, parse_constant=_raise_nonfinite_number_error)
            is_known = (found["format"], found["version"]) == (FORMAT, VERSION)
            manifest = _build_manifest(found) if is_known else None
    except (
        *(ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError),
        msgspec.ValidationError,
    ) as error:
        raise CheckpointError(
            f"{where}: this is not a manifest of a checkpoint",
            why=f"its checksum is correct, but its content is invalid: {error!r}",
            fix="load another step; another program wrote this file",
        ) from error
    if manifest is None:
        raise CheckpointError(
            f"{where}: the format of the manifest is unknown",
            facts={"format": shorten_repr(found["format"]), "version": shorten_repr(found["version"])},
            why=f"this version of layoutmap reads {FORMAT!r} of version {VERSION}",
            fix="upgrade: pip install -U layoutmap",
        )
    return manifest


def _build_manifest(fields: Mapping[str, Any]) -> Manifest:
    """Build a manifest from its JSON, and check that its chunks are complete and inside their files.

    Raises:
        ValueError: An entry is invalid, although the checksum is right, as in a forged manifest.
    """
    form = parse_manifest_fields(fields)
    known = {"checksum", "format", "version", "step", "metadata", "states", "files", "variables"}
    files = tuple(DataFile(f.name, f.bytes, f.header_bytes, f.header) for f in form.files)
    variables = tuple(
        SavedVariable(v.path, v.shape, v.dtype, v.kind, v.aliases, v.layout) for v in form.variables
    )
    tables = build_chunk_tables(
        variables, [v.chunks for v in form.variables], [file.num_bytes for file in files]
    )
    facts = {name: value for name, value in fields.items() if name not in known}
    return Manifest(form.step, facts, form.metadata, form.states, files, variables, tables)


def process_part_to_bytes(part: ProcessPart) -> bytes:
    """Serialize the part of a step that one process wrote, so that process 0 can add it to the manifest."""
    chunks = {path: list(map(chunk_to_json, found)) for path, found in part.chunks.items()}
    return _format_json(
        {"files": list(map(data_file_to_json, part.files)), "chunks": chunks, "states": part.states}
    ).encode()


def process_part_from_bytes(data: bytes) -> ProcessPart:
    """Return the part of a step from the bytes that `process_part_to_bytes` returned for it."""
    found = json.loads(data)
    return ProcessPart(
        tuple(map(data_file_from_json, found["files"])),
        {path: tuple(map(chunk_from_json, chunks)) for path, chunks in found["chunks"].items()},
        found["states"],
    )


def data_file_to_json(file: DataFile) -> dict[str, Any]:
    """Convert a data file to its entry in the manifest."""
    return {
        "name": file.name,
        "bytes": file.num_bytes,
        "header_bytes": file.header_bytes,
        "header": file.header,
    }


def data_file_from_json(entry: Mapping[str, Any]) -> DataFile:
    """Convert an entry of `data_file_to_json` back to a data file."""
    return DataFile(entry["name"], entry["bytes"], entry["header_bytes"], entry["header"])


def _format_variable(variable: SavedVariable, chunks: Sequence[Chunk]) -> str:
    row: dict[str, Any] = {"path": variable.path, "shape": variable.shape, "dtype": variable.dtype}
    if variable.kind is not Kind.WEIGHT:
        row["kind"] = str(variable.kind)
    if variable.aliases:
        row["aliases"] = variable.aliases
    if variable.layout is not None:
        row["layout"] = variable.layout
    return f'{_format_json(row)[:-1]}, "chunks": {_format_json(list(map(chunk_to_json, chunks)))}}}'


def _raise_nonfinite_number_error(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number that JSON allows")


def _format_json_list(lines: Sequence[str]) -> str:
    return "[" + ",".join(f"\n  {line}" for line in lines) + ("\n ]" if lines else "]")


def _format_json(value: Any) -> str:
    return json.dumps(value, allow_nan=False)
