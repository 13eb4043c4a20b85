"""Collapse repeated blocks and optimizer slots into the rows of a plan's table.

Thirty-two equal decoder blocks are one row for each variable of a block: `blocks.{0..31}.attn.query.kernel`. Slots that
are placed as their weights are one row for each kind of slot: `optimizer.*.momentum`. So are numbers that an optimizer
keeps for each weight: `optimizer.*.step`.
"""

from __future__ import annotations

from dataclasses import dataclass

from layoutmap.core.paths import merge_paths, split_at_numbers
from layoutmap.core.variables import Assignment, Kind, has_several_models
from layoutmap.plan.table import PlanTable


@dataclass(frozen=True, slots=True)
class Row:
    """Variables shown as one row.

    Args:
        path: Their merged path, such as `blocks.{0..31}.kernel` or `optimizer.*.momentum`.
        assignments: The variables.
        follows: Whether they are slots with the shapes and layouts of their weights.
    """

    path: str
    assignments: tuple[Assignment, ...]
    follows: bool = False

    @property
    def first(self) -> Assignment:
        """The first assignment. All assignments of the row have its shape, dtype, layout, and rule."""
        return self.assignments[0]

    @property
    def global_bytes(self) -> int:
        """Size in bytes of all of them."""
        return sum(a.variable.global_bytes for a in self.assignments)

    @property
    def shard_bytes(self) -> int:
        """Bytes of one device's shards, without variables that do not fit their layouts."""
        return sum(a.shard_bytes for a in self.assignments if a.fits)

    @property
    def rule(self) -> str:
        """The number of the winning rule, the parent variable, or the reason for having none."""
        match, variable = self.first.match, self.first.variable
        if match is None and variable.axes is not None:
            return f"as {merge_paths([a.variable.parent or '' for a in self.assignments])}"
        if match is not None and match.is_found:
            return ""
        if match is None or (match.rule is None and variable.kind not in ("weight", "state", "later")):
            return f"({variable.kind})"
        return str(match.rule.number) if match.rule else "the rest" if match.is_rest else "no rule"


def make_rows(plan: PlanTable) -> list[Row]:
    """Return the rows of a plan, in the order of their first variables."""
    layouts = {(a.variable.model, a.variable.path): (a.variable.shape, a.layout) for a in plan.assignments}
    groups: dict[tuple[object, ...], list[Assignment]] = {}
    for a in plan.assignments:
        v = a.variable
        rule = a.match.rule.number if a.match and a.match.rule else None
        parent = layouts.get((v.model, v.parent or ""))
        follows = v.kind is Kind.SLOT and parent == (v.shape, a.layout)
        is_number = v.kind is Kind.SLOT and parent is not None and v.shape == ()
        if follows or is_number:
            key = (v.model, follows, v.path.rpartition(f"{v.parent}.")[2], v.dtype, is_number)
        else:
            key = (
                v.model,
                follows,
                split_at_numbers(v.path),
                v.shape,
                v.dtype,
                v.kind,
                a.layout,
                rule,
                a.global_init,
            )
        groups.setdefault(key, []).append(a)
    several = has_several_models([a.variable for a in plan.assignments])
    rows: list[Row] = []
    for (model, follows, kind, *_), group in groups.items():
        paths = [a.variable.path for a in group]
        is_merged = follows or (isinstance(kind, str) and len(group) > 1)
        path = f"optimizer.*.{kind}" if is_merged else merge_paths(paths)
        rows.append(Row(f"{model}: {path}" if several and model else path, tuple(group), bool(follows)))
    return rows
