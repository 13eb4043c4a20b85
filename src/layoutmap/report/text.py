"""A plan as a table for the terminal.

Names are escaped here, each where it is put into a line: afterwards a newline of a path is one of the table.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from layoutmap.core.escaping import escaped
from layoutmap.core.match import Match, Rule
from layoutmap.core.paths import merge_paths, path_shape
from layoutmap.core.variables import full_names, has_several_models
from layoutmap.plan.diff import PlanDiff
from layoutmap.plan.lint import Findings
from layoutmap.plan.memory import Memory
from layoutmap.plan.table import Plan, group_problems
from layoutmap.report.rows import Row, could_shard_rows, plan_rows, size

__all__ = [
    "ACTIVATION_COLUMNS",
    "COLUMNS",
    "activation_cells",
    "diff_cells",
    "diff_line",
    "diff_text",
    "findings_line",
    "findings_text",
    "memory_text",
    "plan_line",
    "plan_text",
    "row_cells",
    "shape_text",
    "warning_text",
]

COLUMNS = ("variable", "times", "shape", "dtype", "layout", "shard", "bytes", "per device", "rule")
ACTIVATION_COLUMNS = ("layer's output", "times", "layout", "rule")
_RIGHT = {"times", "bytes", "per device"}
_MOST_CUTS = 10
_MOST_RULES = 40


def plan_line(plan: Plan) -> str:
    """A plan in one line."""
    count = len(plan)
    faults = [
        f"{len(found)} {name}{'' if len(found) == 1 else 's'}"
        for name, found in (("error", plan.errors), ("warning", plan.warnings))
        if found
    ]
    return (
        f"{count} variable{'' if count == 1 else 's'} on {escaped(str(plan.mesh))}, {size(plan.global_bytes)}, "
        f"{size(plan.device_bytes)} per device; {', '.join(faults) or 'no problems'}"
    )


def plan_text(plan: Plan) -> str:
    """A plan as a table, its totals, and its problems in full."""
    lines = _table(COLUMNS, map(row_cells, plan_rows(plan)))
    rules = _rules_that_won(plan)
    if rules:
        lines += ["", *(escaped(str(rule)) for rule in rules[:_MOST_RULES])]
    if len(rules) > _MOST_RULES:
        lines.append(f"... and {len(rules) - _MOST_RULES} more rules")
    if plan.activations:
        lines += ["", *_table(ACTIVATION_COLUMNS, activation_cells(plan))]
    lines += ["", f"Plan: {plan_line(plan)}"]
    whole = plan.largest_global_init
    if whole:
        names = zip(full_names([a.variable for a in plan.assignments]), plan.assignments, strict=True)
        path = escaped(next(name for name, a in names if a is whole))
        lines.append(f"largest variable drawn whole: {path}, {size(whole.variable.global_bytes)}")
    for problem in group_problems(plan.errors):
        lines += ["", f"error: {problem}"]
    grouped = group_problems(plan.warnings)
    no_rule = [p for p in grouped if p.kind == "no rule"]
    if no_rule:
        count = sum(p.kind == "no rule" for p in plan.problems)
        lines += ["", f"warning: no rule matches these {count}, so every device holds them whole;"]
        lines[-1] += " a rule for each says that this is meant"
        subjects = [escaped(f"{p.model}: {p.subject}" if p.model else p.subject) for p in no_rule]
        width = max(map(len, subjects))
        lines += [f"  {s:<{width}}  {escaped(p.fix)}" for s, p in zip(subjects, no_rule, strict=True)]
    for problem in grouped:
        if problem.kind != "no rule":
            lines += ["", f"warning: {problem}"]
    taken = [
        f"note: {escaped(p.what)}"
        for p in group_problems(plan.problems)
        if p.severity == "note" and p.kind == "uneven"
    ]
    return "\n".join([*lines, *([""] if taken else []), *taken])


def _rules_that_won(plan: Plan) -> list[Rule]:
    """The rules that decide on a variable, in their order."""
    won = {a.match.rule.number: a.match.rule for a in plan.assignments if a.match and a.match.rule}
    return [won[number] for number in sorted(won)]


def memory_text(memory: Memory) -> str:
    """What a device holds, in a line, and the variables that could be cut, repeated blocks in one line each."""
    parts = {name: getattr(memory, name) for name in ("weights", "gradients", "slots", "state")}
    told = ", ".join(f"{name} {size(nbytes)}" for name, nbytes in parts.items() if nbytes)
    lines = [f"per device: {told or 'nothing'}; {size(memory.total)} in all"]
    rows = [
        (row.path, size(row.saved_bytes), f"axis {row.axis} over {row.dim}")
        for row in could_shard_rows(memory)
    ]
    if rows:
        lines += ["", *_table(("whole on every device", "bytes", "could save it"), rows[:_MOST_CUTS])]
    return "\n".join(
        [*lines, *([f"... and {len(rows) - _MOST_CUTS} more"] if len(rows) > _MOST_CUTS else [])]
    )


def diff_line(diff: PlanDiff) -> str:
    """What differs between two plans, in one line."""
    if not diff:
        return "no change"
    count = f"{len(diff)} change{'' if len(diff) == 1 else 's'}"
    return f"{count}; per device {size(diff.before.device_bytes)} -> {size(diff.after.device_bytes)}"


def diff_cells(diff: PlanDiff) -> list[tuple[str, str, str]]:
    """What differs between two plans: what has changed, in which respect, and how; repeated blocks in one row."""
    return [
        (each.path or "the mesh", each.what, " -> ".join(text for text in (each.before, each.after) if text))
        for _, each in diff.grouped
    ]


def diff_text(diff: PlanDiff) -> str:
    """What differs between two plans, a line for each change, and what it does to a device."""
    rows = [tuple(map(escaped, row)) for row in diff_cells(diff)]
    widths = [max((len(row[i]) for row in rows), default=0) for i in range(2)]
    lines = [f"{path:<{widths[0]}}  {what:<{widths[1]}}  {how}" for path, what, how in rows]
    return "\n".join([*lines, *([""] if lines else []), diff_line(diff)])


def findings_line(findings: Findings) -> str:
    """What lint has found, in one line."""
    count = len(group_problems(findings.problems))
    told = f"{count} finding{'' if count == 1 else 's'}" if count else "nothing found"
    batch = findings.batch_dim
    return f"{told}; {'the batch is cut over ' + escaped(batch) if batch else 'which dim cuts the batch is not known'}"


def findings_text(findings: Findings) -> str:
    """What lint has found, each with its evidence and the fix."""
    lines = [f"{escaped(problem.kind)}: {problem}\n" for problem in group_problems(findings.problems)]
    return "\n".join([*lines, f"Lint: {findings_line(findings)}"])


def warning_text(plan: Plan) -> str:
    """What a scope warns of by itself; empty if there is nothing.

    That is every rule that does not do what it says, and every variable without a rule that has two axes or more:
    biases and scales are small and mostly meant to be whole, and stand in the plan.
    """
    several = has_several_models(a.variable for a in plan.assignments)
    ranks = {(several * a.variable.model, a.variable.path): len(a.variable.shape) for a in plan.assignments}
    worth = [p for p in plan.warnings if p.kind != "no rule" or ranks[p.model, p.subject] > 1]
    if not worth:
        return ""
    lines = [f"  {escaped(p.what)}" for p in group_problems(worth)]
    return "\n".join(["layout map: not all is as the rules say; print(scope.plan) shows all", *lines])


def row_cells(row: Row) -> tuple[str, ...]:
    """A row of a plan as text, a cell for each of `COLUMNS`."""
    a = row.first
    times = str(len(row.assignments)) if len(row.assignments) > 1 else ""
    if row.follows:
        cells = ("", "as its weight", "")
    else:
        layout = "replicated" if a.layout.is_fully_replicated() else str(a.layout)
        cells = (
            shape_text(a.variable.shape),
            layout,
            shape_text(a.shard_shape) if a.fits else "does not fit",
        )
    shape, layout, shard = cells
    held = size(row.device_bytes) if a.fits else ""
    return row.path, times, shape, a.variable.dtype, layout, shard, size(row.global_bytes), held, row.rule


def activation_cells(plan: Plan) -> list[tuple[str, ...]]:
    """The layers whose output is laid out, as text, repeated blocks in one row; a cell for each column."""
    groups: dict[object, list[Match]] = {}
    for match in plan.activations:
        groups.setdefault((path_shape(match.path), match.rule), []).append(match)
    return [
        (
            merge_paths([m.path for m in group]),
            str(len(group)) if len(group) > 1 else "",
            str(group[0].layout),
            str(group[0].rule.number if group[0].rule else ""),
        )
        for group in groups.values()
    ]


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Rows of text in columns, under a head and a rule."""
    table = [head, *(tuple(map(escaped, cells)) for cells in rows)]
    widths = [max(len(cells[i]) for cells in table) for i in range(len(head))]
    lines = [
        "  ".join(
            cell.rjust(width) if name in _RIGHT else cell.ljust(width)
            for cell, width, name in zip(cells, widths, head, strict=True)
        ).rstrip()
        for cells in table
    ]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return lines


def shape_text(shape: tuple[int, ...]) -> str:
    """A shape as people write it."""
    return " x ".join(map(str, shape)) or "scalar"
