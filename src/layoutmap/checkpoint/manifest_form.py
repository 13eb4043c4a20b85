"""Declare the fields of a manifest. All fields are checked before any is used.

A changed manifest can have the right checksum.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from layoutmap.checkpoint.source import Specs
from layoutmap.checkpoint.states import decode_state
from layoutmap.core.layout import Layout
from layoutmap.core.mesh import Mesh
from layoutmap.core.variables import Kind

_Number = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class _File(msgspec.Struct):
    name: str
    bytes: _Number
    header_bytes: _Number
    header: str


class _Variable(msgspec.Struct):
    path: str
    shape: tuple[_Number, ...]
    dtype: str
    chunks: list[Any]  # up to a million rows, which numpy checks faster
    kind: Kind = Kind.WEIGHT
    aliases: tuple[str, ...] = ()
    layout: Specs | None = None


class _Random(msgspec.Struct):
    random: dict[str, Any] = {}


class _States(msgspec.Struct):
    settings: dict[str, Any] = {}
    processes: list[_Random] = []


# The msgspec struct checks types and bounds while decoding, so other code need not (decisions/0190).
class ManifestForm(msgspec.Struct):
    """Declare the fields of a manifest with their types. Unknown fields are allowed."""

    step: _Number
    metadata: Any
    states: dict[str, Any]
    files: tuple[_File, ...]
    variables: tuple[_Variable, ...]
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


def read_form(found: Any) -> ManifestForm:
    """Check the JSON of a manifest, and return its fields.

    Raises:
        msgspec.ValidationError: A value has another type.
        ValueError: A value cannot be used as what it stands for.
    """
    form = msgspec.convert(found, ManifestForm)
    for file in form.files:
        if not _is_inside(file.name) or file.header_bytes > file.bytes:
            raise ValueError(f"file {file.name!r:.200}: {file.header_bytes} of {file.bytes} bytes")
    decode_state(form.metadata)
    msgspec.convert({name: decode_state(value) for name, value in form.states.items()}, _States)
    if form.metrics is not msgspec.UNSET:
        msgspec.convert(decode_state(form.metrics), dict[str, bool | int | float])
    mesh = Mesh(None, list((form.mesh or {}).items()))
    paths: set[str] = set()
    layouts: set[Specs] = set()
    for each in form.variables:
        if each.path in paths:
            raise ValueError(f"path {each.path!r:.200} appears twice")
        paths.add(each.path)
        if each.layout is not None and len(each.layout) != len(each.shape):
            raise ValueError(f"{each.path}: layout {each.layout!r:.200}")
        if each.layout is not None and each.layout not in layouts:
            Layout(each.layout, mesh)  # raises if the specs do not fit the mesh
            layouts.add(each.layout)
    return form


def _is_inside(name: str) -> bool:
    """Return whether a file name stays inside the folder of the step."""
    parts = name.split("/")
    return (
        not any(part in ("", ".", "..") for part in parts) and not {*"\\\0"} & {*name} and bool(name.encode())
    )
