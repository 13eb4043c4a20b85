"""Format the content of a checkpoint as text, HTML for notebooks, and JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from layoutmap.checkpoint.manifest import Manifest
from layoutmap.checkpoint.source import SavedVariable, Source
from layoutmap.checkpoint.specs import make_variable_specs
from layoutmap.core.errors import format_aligned_rows, join_names
from layoutmap.core.escaping import escape_text
from layoutmap.core.layout import Layout
from layoutmap.core.mesh import Mesh
from layoutmap.core.text_table import format_bytes, format_html_pre, format_html_table, format_table
from layoutmap.core.variables import Assignment, Kind
from layoutmap.plan.table import PlanTable
from layoutmap.report.rows import TableRow, make_table_rows
from layoutmap.report.text import format_shape

COLUMNS = ("variable", "times", "shape", "dtype", "kind", "layout", "bytes")
_RIGHT_ALIGNED = {"times", "bytes"}
_DROPPABLE = ("kind", "times", "dtype", "shape")
_KIND_NAMES = {
    Kind.WEIGHT: "weights",
    Kind.STATE: "state",
    Kind.SLOT: "slots",
    Kind.RNG: "rng",
    Kind.METRIC: "metrics",
    Kind.LATER: "later",
}
_MAX_METADATA = 400  # maximum number of characters; the rest of the metadata is cut off


@dataclass(frozen=True, slots=True)
class CheckpointContents:
    """The facts and variables of a checkpoint that are shown, without values.

    Args:
        where: Its file or folder.
        facts: Texts such as the step and the metrics, by name, in the order in which they are shown.
        variables: Its variables, in order.
        table: The variables as a plan, with the layouts in which they were saved.
    """

    where: str
    facts: Mapping[str, str]
    variables: tuple[SavedVariable, ...]
    table: PlanTable


def read_checkpoint_contents(source: Source, variables: Iterable[SavedVariable]) -> CheckpointContents:
    """Return the variables and facts of a checkpoint. No values are read.

    Args:
        source: A step of a checkpoint, or files in the format of another library.
        variables: The variables to show.
    """
    manifest: Manifest | None = getattr(source, "manifest", None)
    facts = (
        _make_foreign_checkpoint_facts(source)
        if manifest is None
        else _list_manifest_facts(manifest, getattr(source, "steps", ()))
    )
    shown = tuple(variables)
    dims: Mapping[str, int] = (manifest.facts.get("mesh") if manifest else None) or {}
    mesh = Mesh(None, list(dims.items()))
    assignments = (
        Assignment(
            spec, Layout.replicated(mesh, len(v.shape)) if v.layout is None else Layout(v.layout, mesh)
        )
        for v, spec in zip(shown, make_variable_specs(shown), strict=True)
    )
    return CheckpointContents(source.where, facts, shown, PlanTable(mesh, tuple(assignments)))


def format_checkpoint_summary(contents: CheckpointContents) -> str:
    """Return the path, number of variables, and bytes of a checkpoint in one line."""
    count = len(contents.variables)
    return (
        f"{escape_text(contents.where)}: {count} variable{'' if count == 1 else 's'}, "
        f"{format_bytes(contents.table.global_bytes)}"
    )


def format_checkpoint_text(contents: CheckpointContents, width: int | None = None) -> str:
    """Return a checkpoint as text: its facts, a table of its variables (largest first), and bytes by kind."""
    facts = [(name, escape_text(text)) for name, text in contents.facts.items()]
    return "\n".join(
        [
            format_aligned_rows(f"Checkpoint {format_checkpoint_summary(contents)}", facts),
            "",
            *format_table(COLUMNS, _make_table_rows(contents), _RIGHT_ALIGNED, width=width, drop=_DROPPABLE),
            "",
            _format_bytes_by_kind(contents.table.assignments),
        ]
    )


def format_checkpoint_html(contents: CheckpointContents) -> str:
    """Return a checkpoint's facts and variables as HTML, without scripts."""
    facts = format_aligned_rows("", [(name, escape_text(text)) for name, text in contents.facts.items()])
    return format_html_table(
        f"Checkpoint {format_checkpoint_summary(contents)}", COLUMNS, _make_table_rows(contents)
    ) + format_html_pre(f"{facts.lstrip()}\n{_format_bytes_by_kind(contents.table.assignments)}")


def format_checkpoint_json(contents: CheckpointContents, head: Mapping[str, Any]) -> str:
    """Return a checkpoint's facts and variables as JSON, one variable per line.

    Args:
        contents: The checkpoint.
        head: Fields of the JSON object before `variables`, by name.
    """
    rows = [
        {"path": v.path, "shape": v.shape, "dtype": v.dtype, "kind": v.kind, "layout": v.layout}
        | {"bytes": a.variable.global_bytes, "aliases": v.aliases}
        for v, a in zip(contents.variables, contents.table.assignments, strict=True)
    ]
    lines = [f'"{name}": {json.dumps(value)}' for name, value in head.items()]
    variables = ",".join(f"\n  {json.dumps(row)}" for row in rows)
    return "{" + ",\n ".join([*lines, f'"variables": [{variables}\n ]']) + "}\n"


def _list_manifest_facts(manifest: Manifest, steps: Sequence[int]) -> dict[str, str]:
    known = manifest.facts
    mesh: Mapping[str, int] | None = known.get("mesh")
    metrics: Mapping[str, float] = known.get("metrics") or {}
    joined = {
        "step": str(manifest.step),
        "created": known.get("created"),
        "by": known.get("writer"),
        "model of": " on ".join(filter(None, (known.get("library"), known.get("engine")))),
        "mesh": mesh and ", ".join(f"{name}={number}" for name, number in mesh.items()),
        "plan": known.get("plan"),
        "files": f"{len(manifest.files)}, {format_bytes(sum(file.num_bytes for file in manifest.files))}",
        "metrics": ", ".join(f"{name} {value}" for name, value in metrics.items()),
        "states": join_names(list(manifest.states)),
        "metadata": "" if manifest.metadata is None else _shorten_metadata(manifest.metadata),
        "steps": join_names([str(each) for each in steps]) if len(steps) > 1 else "",
    }
    return {name: str(value) for name, value in joined.items() if value}


def _make_foreign_checkpoint_facts(source: Source) -> dict[str, str]:
    metadata = getattr(source, "metadata", None)
    return {"checksums": "none: a changed value is not found"} | (
        {"metadata": _shorten_metadata(metadata)} if metadata else {}
    )


def _shorten_metadata(metadata: Any) -> str:
    text = json.dumps(metadata, ensure_ascii=False, default=str)
    return text if len(text) <= _MAX_METADATA else f"{text[:_MAX_METADATA]}..."


def _make_table_rows(contents: CheckpointContents) -> list[tuple[str, ...]]:
    plain = {v.path for v in contents.variables if v.layout is None}
    rows = sorted(make_table_rows(contents.table), key=lambda row: -row.global_bytes)
    return [_make_row_cells(row, row.example_assignment.variable.path in plain) for row in rows]


def _make_row_cells(row: TableRow, has_no_layout: bool) -> tuple[str, ...]:
    a = row.example_assignment
    layout = "" if has_no_layout else "replicated" if a.layout.is_fully_replicated() else str(a.layout)
    return (
        row.path,
        str(len(row.assignments)) if len(row.assignments) > 1 else "",
        "as its weight" if row.matches_weights else format_shape(a.variable.shape),
        a.variable.dtype,
        str(a.variable.kind),
        "as its weight" if row.matches_weights and not has_no_layout else layout,
        format_bytes(row.global_bytes),
    )


def _format_bytes_by_kind(assignments: Iterable[Assignment]) -> str:
    found = dict.fromkeys(_KIND_NAMES.values(), 0)
    for a in assignments:
        found[_KIND_NAMES[a.variable.kind]] += a.variable.global_bytes
    parts = [f"{name} {format_bytes(num_bytes)}" for name, num_bytes in found.items() if num_bytes]
    return ", ".join(parts) + f"; {format_bytes(sum(found.values()))} in total"
