"""Format a plan as a table for terminals and as HTML for notebooks, without scripts or external files.

Each name is escaped before it is put into a line, because a newline in a path could not be told from a new row later.
"""

from __future__ import annotations

from layoutmap.core.errors import format_count
from layoutmap.core.escaping import escape_text
from layoutmap.core.match import Match, Rule
from layoutmap.core.paths import format_merged_paths, split_path_at_numbers
from layoutmap.core.specs import format_specs
from layoutmap.core.text_table import format_bytes, format_html_pre, format_html_table, format_table
from layoutmap.core.variables import format_variable_names, has_several_models
from layoutmap.plan.completeness import NOT_BUILT
from layoutmap.plan.problems import merge_problems
from layoutmap.plan.table import PlanTable
from layoutmap.report.rows import TableRow, make_table_rows

COLUMNS = ("variable", "times", "shape", "dtype", "layout", "shard", "bytes", "per device", "rule")
ACTIVATION_COLUMNS = ("layer's output", "times", "layout", "rule")
_RIGHT_ALIGNED = {"times", "bytes", "per device"}
_DROPPABLE = ("times", "dtype", "bytes", "shard", "shape", "rule")
_MAX_RULES = 40


def format_plan_summary(plan: PlanTable) -> str:
    """Return the number of variables, mesh, bytes, and problems of a plan in one line."""
    warnings = [problem for problem in plan.warnings if problem.kind != NOT_BUILT]
    faults = [format_count(len(plan.errors), "error")] * bool(plan.errors)
    faults += ["incomplete"] * (len(warnings) < len(plan.warnings))
    faults += [format_count(len(warnings), "warning")] * bool(warnings)
    host = f", {format_bytes(plan.host_bytes)} in host memory for each" if plan.host_bytes else ""
    return (
        f"{format_count(len(plan), 'variable')} on {escape_text(str(plan.mesh))}, {format_bytes(plan.global_bytes)}, "
        f"{format_bytes(plan.device_bytes)} per device{host}; {', '.join(faults) or 'no problems'}"
    )


def format_plan_text(plan: PlanTable, verdict_text: str, width: int | None = None) -> str:
    """Return a plan as text: the verdict, the table of variables, the rules, the totals, and the problems."""
    lines = [verdict_text, ""]
    lines += format_table(
        COLUMNS, map(format_row_cells, make_table_rows(plan)), _RIGHT_ALIGNED, width=width, drop=_DROPPABLE
    )
    rules = _list_used_rules(plan)
    if rules:
        lines += ["", *(escape_text(str(rule)) for rule in rules[:_MAX_RULES])]
    if len(rules) > _MAX_RULES:
        lines.append(f"... and {len(rules) - _MAX_RULES} more rules")
    if plan.activations:
        cells = format_activation_rows(plan)
        lines += ["", *format_table(ACTIVATION_COLUMNS, cells, _RIGHT_ALIGNED, width=width, drop=_DROPPABLE)]
    lines += ["", f"Plan: {format_plan_summary(plan)}"]
    if plan.cost:
        lines.append(f"Cost: {plan.cost.line}")
    largest = plan.largest_variable_initialized_unsharded
    if largest:
        names = zip(
            format_variable_names([a.variable for a in plan.assignments]), plan.assignments, strict=True
        )
        path = escape_text(next(name for name, a in names if a is largest))
        lines.append(
            f"largest variable initialized on one device: {path}, {format_bytes(largest.variable.global_bytes)}"
        )
    for problem in merge_problems(plan.errors):
        lines += ["", f"error: {problem}"]
    grouped = merge_problems(plan.warnings)
    for problem in grouped:
        if problem.kind != "no rule":
            lines += ["", f"warning: {problem}"]
    no_rule = [p for p in grouped if p.kind == "no rule"]
    if no_rule:
        count = sum(p.kind == "no rule" for p in plan.problems)
        which = "this one, so it is" if count == 1 else f"these {count}, so they are"
        lines += ["", f"warning: no rule matches {which} replicated;"]
        lines[-1] += ' add rules, or set layout_map.rest = "replicated"'
        subjects = [escape_text(f"{p.model}: {p.subject}" if p.model else p.subject) for p in no_rule]
        width = max(map(len, subjects))
        lines += [f"  {s:<{width}}  {escape_text(p.fix)}" for s, p in zip(subjects, no_rule, strict=True)]
    notes = [
        f"note: {escape_text('; '.join(filter(None, (p.what, p.fix))))}"
        for p in merge_problems(plan.problems)
        if p.severity == "note" and p.kind in ("uneven", "unused dim", "gathering", "plain")
    ]
    return "\n".join([*lines, *([""] if notes else []), *notes])


def _list_used_rules(plan: PlanTable) -> list[Rule]:
    """Return the rules that determine a variable's layout, in map order."""
    won = {a.match.rule.number: a.match.rule for a in plan.assignments if a.match and a.match.rule}
    return [won[number] for number in sorted(won)]


def format_plan_warnings(plan: PlanTable) -> str:
    """Return the warnings of a plan that a scope shows, as one text, or an empty string if there are none.

    Variables without a rule that have fewer than two axes are left out, because biases and scales are small and mostly
    replicated on purpose.
    """
    several = has_several_models([a.variable for a in plan.assignments])
    ranks = {(several * a.variable.model, a.variable.path): len(a.variable.shape) for a in plan.assignments}
    worth = [p for p in plan.warnings if p.kind != "no rule" or ranks[p.model, p.subject] > 1]
    if not worth:
        return ""
    lines = [f"  {escape_text(p.what)}" for p in merge_problems(worth)]
    return "\n".join(
        [
            "layout map: the plan has warnings; print(lm.plan(make_model, layout_map)) shows where every variable goes",
            *lines,
        ]
    )


def format_row_cells(row: TableRow) -> tuple[str, ...]:
    """Return the cells of a row of the table, one text for each of `COLUMNS`."""
    a = row.example_assignment
    times = str(len(row.assignments)) if len(row.assignments) > 1 else ""
    if row.matches_weights:
        cells = ("", "as its weight", "")
    else:
        layout = str(a.layout)
        if a.layout.is_fully_replicated():
            layout = layout.replace(format_specs(a.layout.sharding_specs), "replicated", 1)
        cells = (
            format_shape(a.variable.shape),
            layout,
            format_shape(a.shard_shape) if a.fits else "does not fit",
        )
    shape, layout, shard = cells
    device_bytes = format_bytes(row.shard_bytes) if a.fits else ""
    return (
        row.path,
        times,
        shape,
        a.variable.dtype,
        layout,
        shard,
        format_bytes(row.global_bytes),
        device_bytes,
        row.rule_text,
    )


def format_activation_rows(plan: PlanTable) -> list[tuple[str, ...]]:
    """Return the cells of a row for each layer with an activation rule, with repeated blocks in one row."""
    groups: dict[object, list[Match]] = {}
    for match in plan.activations:
        groups.setdefault((split_path_at_numbers(match.path), match.rule), []).append(match)
    return [
        (
            format_merged_paths([m.path for m in group]),
            str(len(group)) if len(group) > 1 else "",
            str(group[0].layout),
            str(group[0].rule.number if group[0].rule else ""),
        )
        for group in groups.values()
    ]


def format_shape(shape: tuple[int, ...]) -> str:
    """Return a shape as text, such as "512 x 1365"."""
    return " x ".join(map(str, shape)) or "scalar"


def format_plan_html(plan: PlanTable, verdict_text: str) -> str:
    """Return the verdict, the tables, the cost, and the problems of a plan as HTML."""
    rows = [format_row_cells(row) for row in make_table_rows(plan)]
    found = "".join(
        format_html_pre(f"{p.severity}: {p}") for p in merge_problems(plan.errors + plan.warnings)
    )
    activations = (
        format_html_table("", ACTIVATION_COLUMNS, format_activation_rows(plan)) if plan.activations else ""
    )
    cost = plan.cost.to_html() if plan.cost else ""
    return (
        format_html_pre(verdict_text)
        + format_html_table(f"Plan: {format_plan_summary(plan)}", COLUMNS, rows)
        + activations
        + cost
        + found
    )
