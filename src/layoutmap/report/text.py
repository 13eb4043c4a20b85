"""A plan as a table for the terminal, and as HTML for notebooks: one table, no scripts, no outside files.

Names are escaped here, each where it is put into a line: afterwards a newline of a path is one of the table.
"""

from __future__ import annotations

from layoutmap.core.errors import counted
from layoutmap.core.escaping import escaped
from layoutmap.core.match import Match, Rule
from layoutmap.core.paths import merge_paths, path_shape
from layoutmap.core.text_table import format_pre, html_table, size, text_table
from layoutmap.core.variables import full_names, has_several_models
from layoutmap.plan.completeness import NOT_BUILT
from layoutmap.plan.problems import group_problems
from layoutmap.plan.table import PlanTable
from layoutmap.plan.verdict import verdict_of
from layoutmap.report.rows import Row, plan_rows

COLUMNS = ("variable", "times", "shape", "dtype", "layout", "shard", "bytes", "per device", "rule")
ACTIVATION_COLUMNS = ("layer's output", "times", "layout", "rule")
_RIGHT = {"times", "bytes", "per device"}
_DROP = ("times", "dtype", "bytes", "shard", "shape", "rule")
_MOST_RULES = 40


def plan_line(plan: PlanTable) -> str:
    """A plan in one line."""
    warnings = [problem for problem in plan.warnings if problem.kind != NOT_BUILT]
    faults = [counted(len(plan.errors), "error")] * bool(plan.errors)
    faults += ["incomplete"] * (len(warnings) < len(plan.warnings))
    faults += [counted(len(warnings), "warning")] * bool(warnings)
    host = f", {size(plan.host_bytes)} in host memory for each" if plan.host_bytes else ""
    return (
        f"{counted(len(plan), 'variable')} on {escaped(str(plan.mesh))}, {size(plan.global_bytes)}, "
        f"{size(plan.device_bytes)} per device{host}; {', '.join(faults) or 'no problems'}"
    )


def plan_text(plan: PlanTable, width: int | None = None) -> str:
    """The verdict on a plan, its table and totals, and its problems in full; `width`: of its tables at most."""
    lines = [str(verdict_of(plan)), ""]
    lines += text_table(COLUMNS, map(row_cells, plan_rows(plan)), _RIGHT, width=width, drop=_DROP)
    rules = _rules_that_won(plan)
    if rules:
        lines += ["", *(escaped(str(rule)) for rule in rules[:_MOST_RULES])]
    if len(rules) > _MOST_RULES:
        lines.append(f"... and {len(rules) - _MOST_RULES} more rules")
    if plan.activations:
        cells = activation_cells(plan)
        lines += ["", *text_table(ACTIVATION_COLUMNS, cells, _RIGHT, width=width, drop=_DROP)]
    lines += ["", f"Plan: {plan_line(plan)}"]
    if plan.cost:
        lines.append(f"Cost: {plan.cost.line}")
    largest = plan.largest_global_init
    if largest:
        names = zip(full_names([a.variable for a in plan.assignments]), plan.assignments, strict=True)
        path = escaped(next(name for name, a in names if a is largest))
        lines.append(
            f"largest variable initialized on one device: {path}, {size(largest.variable.global_bytes)}"
        )
    for problem in group_problems(plan.errors):
        lines += ["", f"error: {problem}"]
    grouped = group_problems(plan.warnings)
    for problem in grouped:
        if problem.kind != "no rule":
            lines += ["", f"warning: {problem}"]
    no_rule = [p for p in grouped if p.kind == "no rule"]
    if no_rule:
        count = sum(p.kind == "no rule" for p in plan.problems)
        which = "this one, so it is" if count == 1 else f"these {count}, so they are"
        lines += ["", f"warning: no rule matches {which} replicated;"]
        lines[-1] += ' add rules, or set layout_map.rest = "replicated"'
        subjects = [escaped(f"{p.model}: {p.subject}" if p.model else p.subject) for p in no_rule]
        width = max(map(len, subjects))
        lines += [f"  {s:<{width}}  {escaped(p.fix)}" for s, p in zip(subjects, no_rule, strict=True)]
    taken = [
        f"note: {escaped('; '.join(filter(None, (p.what, p.fix))))}"
        for p in group_problems(plan.problems)
        if p.severity == "note" and p.kind in ("uneven", "unused dim", "gathering", "plain")
    ]
    return "\n".join([*lines, *([""] if taken else []), *taken])


def _rules_that_won(plan: PlanTable) -> list[Rule]:
    """The rules that decide on a variable, in their order."""
    won = {a.match.rule.number: a.match.rule for a in plan.assignments if a.match and a.match.rule}
    return [won[number] for number in sorted(won)]


def warning_text(plan: PlanTable) -> str:
    """The warnings of a scope; empty if there are none.

    That is every rule that does not do what it says, and every variable without a rule that has two axes or more:
    biases and scales are small and mostly meant to be replicated, and are in the plan.
    """
    several = has_several_models([a.variable for a in plan.assignments])
    ranks = {(several * a.variable.model, a.variable.path): len(a.variable.shape) for a in plan.assignments}
    worth = [p for p in plan.warnings if p.kind != "no rule" or ranks[p.model, p.subject] > 1]
    if not worth:
        return ""
    lines = [f"  {escaped(p.what)}" for p in group_problems(worth)]
    return "\n".join(
        [
            "layout map: the plan has warnings; print(lm.plan(make_model, layout_map)) shows where every variable goes",
            *lines,
        ]
    )


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
    if a.variable.memory:
        layout = f"{layout} in {a.variable.memory}"
    held = size(row.shard_bytes) if a.fits else ""
    return row.path, times, shape, a.variable.dtype, layout, shard, size(row.global_bytes), held, row.rule


def activation_cells(plan: PlanTable) -> list[tuple[str, ...]]:
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


def shape_text(shape: tuple[int, ...]) -> str:
    """A shape as people write it."""
    return " x ".join(map(str, shape)) or "scalar"


def plan_html(plan: PlanTable) -> str:
    """The verdict on a plan and its table, with its errors and warnings below."""
    rows = [row_cells(row) for row in plan_rows(plan)]
    found = "".join(format_pre(f"{p.severity}: {p}") for p in group_problems(plan.errors + plan.warnings))
    activations = html_table("", ACTIVATION_COLUMNS, activation_cells(plan)) if plan.activations else ""
    cost = plan.cost.to_html() if plan.cost else ""
    verdict = format_pre(str(verdict_of(plan)))
    return verdict + html_table(f"Plan: {plan_line(plan)}", COLUMNS, rows) + activations + cost + found
