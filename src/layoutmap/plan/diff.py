"""Compare two plans: added, removed, and changed variables, and layer outputs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from layoutmap.core.errors import format_count
from layoutmap.core.escaping import escape_text
from layoutmap.core.match import Match
from layoutmap.core.paths import format_merged_paths, split_path_at_numbers
from layoutmap.core.text_table import format_bytes, format_html_table, format_table
from layoutmap.core.variables import Assignment, Kind, VariableSpec, format_variable_names
from layoutmap.plan.carried_cost import load_cost_package
from layoutmap.plan.completeness import find_unbuilt_layers_problem
from layoutmap.plan.table import PlanTable

COST_COLUMNS = ("of a step", "before", "after")


@dataclass(frozen=True, slots=True)
class PlanChange:
    """One difference between two plans.

    Args:
        path: The path of the variable or layer; `""` for the mesh. If the plans have several models, the name of the
            model precedes the path of a variable: `teacher: d1.kernel`.
        what: The kind of difference: `"added"`, `"removed"`, `"shape"`, `"dtype"`, `"kind"`, `"memory"`, `"layout"`,
            `"mesh"`, `"output"` (the layout of a layer's output), or `"held"` (where an array without a layout is).
        before: The value in the first plan; empty if it lacks the variable or layer.
        after: The value in the second plan; empty if it lacks the variable or layer.
        weight: The path of the weight, if an optimizer's slot changes in the same way as its weight; else empty.
    """

    path: str
    what: str
    before: str
    after: str
    weight: str = ""

    @property
    def text(self) -> str:
        """The values before and after with an arrow between them, or the only value."""
        return " -> ".join(filter(None, (self.before, self.after)))


@dataclass(frozen=True, slots=True, repr=False)
class PlanDiff:
    """Store the differences of two plans. A `PlanDiff` without differences is false in a condition.

    Rules and device names are not compared. The cost of a step is shown, but is no difference, because it follows from
    the layouts.

    Args:
        before: The first plan.
        after: The second plan.
        changes: The differences of the mesh, then of variables, then of layer outputs and of arrays without a layout.
    """

    before: PlanTable
    after: PlanTable
    changes: tuple[PlanChange, ...]

    def __iter__(self) -> Iterator[PlanChange]:
        return iter(self.changes)

    def __len__(self) -> int:
        return len(self.changes)

    def __repr__(self) -> str:
        return f"<PlanDiff: {self._summary}>"

    def to_text(self, width: int | None = None) -> str:
        """Return the text that `print` shows. For `width`, see `Plan.to_text`."""
        rows = [tuple(map(escape_text, row)) for row in self._rows]
        widths = [max((len(row[i]) for row in rows), default=0) for i in range(2)]
        lines = [f"{path:<{widths[0]}}  {what:<{widths[1]}}  {how}" for path, what, how in rows]
        costs = format_table(COST_COLUMNS, self.costs, COST_COLUMNS[1:], width=width) if self.costs else []
        parts = (lines, costs, [self._summary])
        return "\n\n".join("\n".join(part) for part in parts if part)

    __str__ = to_text

    def _repr_html_(self) -> str:
        costs = format_html_table("A step", COST_COLUMNS, self.costs) if self.costs else ""
        return format_html_table(f"Plan: {self._summary}", ("variable", "changed", "how"), self._rows) + costs

    @property
    def costs(self) -> list[tuple[str, str, str]]:
        """A row for each value of a step's cost that differs: its name, and its text in the first and second plan."""
        before, after = self.before.cost, self.after.cost
        if before is None or after is None:
            return []
        format_costs = load_cost_package().format_costs_by_name
        old, new = format_costs(before), format_costs(after)
        rows = [(what, old.get(what, "-"), new.get(what, "-")) for what in dict.fromkeys((*old, *new))]
        return [row for row in rows if row[1] != row[2]]

    @property
    def _summary(self) -> str:
        sizes = f"; per device {format_bytes(self.before.device_bytes)} -> {format_bytes(self.after.device_bytes)}"
        if self.before.host_bytes or self.after.host_bytes:
            host = (format_bytes(plan.host_bytes) for plan in (self.before, self.after))
            sizes += f", in host memory {' -> '.join(host)}"
        lacking = [
            f"; the plan {name} is incomplete: {missing.what}"
            for name, plan in (("before", self.before), ("after", self.after))
            if (missing := find_unbuilt_layers_problem(plan))
        ]
        known = " among the variables that are known" if lacking else ""
        return (format_count(len(self), "change") + sizes if self else "no change" + known) + "".join(lacking)

    @property
    def _rows(self) -> list[tuple[str, str, str]]:
        """The cells of a row for each merged change: path, kind of change, and both values."""
        return [(change.path or "the mesh", change.what, change.text) for _, change in self.grouped_changes]

    @property
    def grouped_changes(self) -> list[tuple[int, PlanChange]]:
        """Pairs of a number and a change that stands for this number of equal changes of repeated blocks or slots."""
        groups: dict[object, list[PlanChange]] = {}
        for change in self.changes:
            slot = change.path.rpartition(f"{change.weight}.")[2] if change.weight else ""
            key = (
                (slot, change.what)
                if slot
                else (split_path_at_numbers(change.path), change.what, change.before, change.after)
            )
            groups.setdefault(key, []).append(change)
        return [(len(group), _merge_equal_changes(group)) for group in groups.values()]


def _merge_equal_changes(group: list[PlanChange]) -> PlanChange:
    """Return one change that stands for a group of changes, with a merged path."""
    first = group[0]
    if first.weight:
        slot = first.path.rpartition(f"{first.weight}.")[2]
        others = len({(change.before, change.after) for change in group}) - 1
        more = f", and {format_count(others, 'other')}" if others else ""
        return PlanChange(f"optimizer.*.{slot}", first.what, "", f"as its weight: {first.text}{more}", "*")
    return replace(first, path=format_merged_paths([change.path for change in group]))


def diff_plans(before: PlanTable, after: PlanTable) -> PlanDiff:
    """Return the differences between two plans."""
    changes: list[PlanChange] = []
    if before.mesh.mesh_dims != after.mesh.mesh_dims:
        changes.append(PlanChange("", "mesh", str(before.mesh), str(after.mesh)))
    changes += _link_slot_changes_to_weights(
        [*_iterate_variable_changes(_index_assignments_by_path(before), _index_assignments_by_path(after))]
    )
    changes += _iterate_output_changes(before.activations, after.activations)
    changes += _iterate_unplaced_array_changes(before, after)
    return PlanDiff(before, after, tuple(changes))


def _index_assignments_by_path(plan: PlanTable) -> dict[tuple[str, str], Assignment]:
    """Return a dict from the model and path of each variable of a plan to its assignment."""
    return {a.variable.key: a for a in plan.assignments}


def _iterate_variable_changes(
    before: dict[tuple[str, str], Assignment], after: dict[tuple[str, str], Assignment]
) -> Iterator[tuple[VariableSpec, PlanChange]]:
    """Yield each variable that is added, removed, or changed, with its change."""
    variables = [a.variable for a in {**before, **after}.values()]
    names = dict(zip((v.key for v in variables), format_variable_names(variables), strict=True))
    for key, old in before.items():
        new = after.get(key)
        if new is None:
            yield old.variable, PlanChange(names[key], "removed", _format_assignment(old), "")
            continue
        was, now = old.variable, new.variable
        for what, a, b in (
            ("shape", was.shape, now.shape),
            ("dtype", was.dtype, now.dtype),
            ("kind", was.kind, now.kind),
            ("memory", old.layout.host_memory or "device", new.layout.host_memory or "device"),
            # A different mesh is one change and not one per variable, so compare only the specs of the layouts.
            ("layout", old.layout.sharding_specs, new.layout.sharding_specs),
        ):
            if a != b:
                texts = (str(old.layout), str(new.layout)) if what == "layout" else (str(a), str(b))
                yield now, PlanChange(names[key], what, *texts)
    for key, new in after.items():
        if key not in before:
            yield new.variable, PlanChange(names[key], "added", "", _format_assignment(new))


def _link_slot_changes_to_weights(changes: list[tuple[VariableSpec, PlanChange]]) -> Iterator[PlanChange]:
    """Yield the changes. If a slot changes in the same way as its weight, set the field `weight` of its change."""
    of_weights = {(v.model, v.path, c.what, c.before, c.after) for v, c in changes}
    for v, c in changes:
        follows = v.kind is Kind.SLOT and (v.model, v.parent, c.what, c.before, c.after) in of_weights
        yield replace(c, weight=v.parent or "") if follows else c


def _format_assignment(assignment: Assignment) -> str:
    """Return a variable's dtype, shape, and layout as text."""
    variable = assignment.variable
    return f"{variable.dtype}{list(variable.shape)} {assignment.layout}"


def _iterate_output_changes(before: Iterable[Match], after: Iterable[Match]) -> Iterator[PlanChange]:
    """Yield the changes of the layouts of layer outputs."""
    old, new = ({match.path: str(match.layout) for match in matches} for matches in (before, after))
    for path in dict.fromkeys((*old, *new)):
        if old.get(path) != new.get(path):
            yield PlanChange(path, "output", old.get(path, ""), new.get(path, ""))


def _iterate_unplaced_array_changes(before: PlanTable, after: PlanTable) -> Iterator[PlanChange]:
    """Yield the changes of arrays that have no layout on the mesh of a plan, such as arrays on one device."""
    old, new = (
        {
            p.subject: dict(p.facts).get("layout", p.what.removeprefix(f"{p.subject}: "))
            for p in plan.problems
            if p.kind in ("no layout", "another mesh") and p.severity == "warning"
        }
        for plan in (before, after)
    )
    for path in dict.fromkeys((*old, *new)):
        if old.get(path) != new.get(path):
            yield PlanChange(path, "held", old.get(path, ""), new.get(path, ""))
