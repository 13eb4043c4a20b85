"""Declare the fields of a manifest. All fields are checked before use, because the checksum can be forged."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from layoutmap.checkpoint.source import Specs
from layoutmap.checkpoint.states import decode_state
from layoutmap.core.layout import Layout
from layoutmap.core.mesh import Mesh
from layoutmap.core.variables import Kind

_Number = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class _DataFileFields(msgspec.Struct):
    name: str
    bytes: _Number
    header_bytes: _Number
    header: str


class _VariableFields(msgspec.Struct):
    path: str
    shape: tuple[_Number, ...]
    dtype: str
    chunks: list[Any]  # up to a million rows; `build_chunk_tables` checks them with numpy, which is faster
    kind: Kind = Kind.WEIGHT
    aliases: tuple[str, ...] = ()
    layout: Specs | None = None


class _RandomStateFields(msgspec.Struct):
    random: dict[str, Any] = {}


class _StatesFields(msgspec.Struct):
    settings: dict[str, Any] = {}
    processes: list[_RandomStateFields] = []


# msgspec checks the types and bounds of all fields while it converts, so no other code checks them (decisions/0190).
class ManifestFields(msgspec.Struct):
    """Declare the fields of a manifest with their types. Unknown fields are allowed."""

    step: _Number
    metadata: Any
    states: dict[str, Any]
    files: tuple[_DataFileFields, ...]
    variables: tuple[_VariableFields, ...]
    created: str | None = None
    writer: str | None = None
    library: str | None = None
    engine: str | None = None
    plan: str | None = None
    id: str | None = None
    parent: _Number | None = None
    order: _Number = 0
    lines: Annotated[dict[str, _Number], msgspec.Meta(min_length=1)] | msgspec.UnsetType = msgspec.UNSET
    mesh: dict[str, Any] | None = None
    metrics: Any = msgspec.UNSET


def parse_manifest_fields(data: Any) -> ManifestFields:
    """Convert the JSON of a manifest to its fields, and check all of them.

    Raises:
        msgspec.ValidationError: A value has the wrong type.
        ValueError: A file name, path, layout, or state is invalid.
    """
    form = msgspec.convert(data, ManifestFields)
    for file in form.files:
        if not _is_inside_step_folder(file.name):
            raise ValueError(f"file {file.name!r:.200} is outside of the step's folder")
        if file.header_bytes > file.bytes:
            raise ValueError(f"file {file.name!r:.200} is smaller than its header")
    decode_state(form.metadata)
    msgspec.convert({name: decode_state(value) for name, value in form.states.items()}, _StatesFields)
    if form.metrics is not msgspec.UNSET:
        msgspec.convert(decode_state(form.metrics), dict[str, bool | int | float])
    mesh = Mesh(None, list((form.mesh or {}).items()))
    paths: set[str] = set()
    layouts: set[Specs] = set()
    for each in form.variables:
        if each.path in paths:
            raise ValueError(f"two variables have the path {each.path!r:.200}")
        paths.add(each.path)
        if each.layout is not None and len(each.layout) != len(each.shape):
            raise ValueError(f"{each.path}: layout {each.layout!r:.200} and shape have different lengths")
        if each.layout is not None and each.layout not in layouts:
            Layout(each.layout, mesh)  # raises if the specs do not fit the mesh
            layouts.add(each.layout)
    return form


def _is_inside_step_folder(name: str) -> bool:
    """Return whether a file name, which is relative to the step's folder, leads to a place inside this folder."""
    parts = name.split("/")
    return (
        not any(part in ("", ".", "..") for part in parts) and not {*"\\\0"} & {*name} and bool(name.encode())
    )
