"""Collapse repeated blocks and optimizer slots into the rows of a plan's table.

Thirty-two equal decoder blocks are one row for each variable of a block: `blocks.{0..31}.attn.query.kernel`. Slots with
the layouts of their weights are one row for each kind of slot: `optimizer.*.momentum`. The scalars that an optimizer
stores for each weight are also one row: `optimizer.*.step`.
"""

from __future__ import annotations

from dataclasses import dataclass

from layoutmap.core.paths import format_merged_paths, split_path_at_numbers
from layoutmap.core.variables import Assignment, Kind, has_several_models
from layoutmap.plan.table import PlanTable


@dataclass(frozen=True, slots=True)
class TableRow:
    """Variables shown as one row.

    Args:
        path: Their merged path, such as `blocks.{0..31}.kernel` or `optimizer.*.momentum`.
        assignments: The variables.
        matches_weights: Whether they are slots with the shapes and layouts of their weights.
    """

    path: str
    assignments: tuple[Assignment, ...]
    matches_weights: bool = False

    @property
    def example_assignment(self) -> Assignment:
        """The first assignment. The others have its dtype and, except for slots, its shape, layout, and rule."""
        return self.assignments[0]

    @property
    def global_bytes(self) -> int:
        """The size in bytes of all variables of the row, each unsharded."""
        return sum(a.variable.global_bytes for a in self.assignments)

    @property
    def shard_bytes(self) -> int:
        """Bytes of one device's shards, without variables that do not fit their layouts."""
        return sum(a.shard_bytes for a in self.assignments if a.fits)

    @property
    def rule_text(self) -> str:
        """The rule as text: its number, `as` and the parent, why there is none, or "" for an existing layout."""
        match, variable = self.example_assignment.match, self.example_assignment.variable
        if match is None and variable.axes is not None:
            return f"as {format_merged_paths([a.variable.parent or '' for a in self.assignments])}"
        if match is not None and match.has_existing_layout:
            return ""
        if match is None or (match.rule is None and variable.kind not in ("weight", "state", "later")):
            return f"({variable.kind})"
        return str(match.rule.number) if match.rule else "the rest" if match.has_rest_layout else "no rule"


def make_table_rows(plan: PlanTable) -> list[TableRow]:
    """Return the rows that show a plan, in the order of their first variables."""
    layouts = {(a.variable.model, a.variable.path): (a.variable.shape, a.layout) for a in plan.assignments}
    groups: dict[tuple[object, ...], list[Assignment]] = {}
    for a in plan.assignments:
        v = a.variable
        rule = a.match.rule.number if a.match and a.match.rule else None
        parent = layouts.get((v.model, v.parent or ""))
        matches_weights = v.kind is Kind.SLOT and parent == (v.shape, a.layout)
        is_number = v.kind is Kind.SLOT and parent is not None and v.shape == ()
        if matches_weights or is_number:
            key = (v.model, matches_weights, v.path.rpartition(f"{v.parent}.")[2], v.dtype, is_number)
        else:
            key = (
                v.model,
                matches_weights,
                split_path_at_numbers(v.path),
                v.shape,
                v.dtype,
                v.kind,
                a.layout,
                rule,
                a.global_init,
            )
        groups.setdefault(key, []).append(a)
    several = has_several_models([a.variable for a in plan.assignments])
    rows: list[TableRow] = []
    for (model, matches_weights, kind, *_), group in groups.items():
        paths = [a.variable.path for a in group]
        is_merged = matches_weights or (isinstance(kind, str) and len(group) > 1)
        path = f"optimizer.*.{kind}" if is_merged else format_merged_paths(paths)
        rows.append(
            TableRow(f"{model}: {path}" if several and model else path, tuple(group), bool(matches_weights))
        )
    return rows
