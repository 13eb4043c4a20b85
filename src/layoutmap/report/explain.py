"""Explain why a variable of a plan has its layout, and how to change it."""

from __future__ import annotations

from collections.abc import Iterator

from layoutmap.core.errors import format_aligned_rows
from layoutmap.core.escaping import escape_text
from layoutmap.core.match import AS_FOUND, suggest_rule_change
from layoutmap.core.paths import format_path_regex_as_python
from layoutmap.core.specs import replace_unsharded_by_none
from layoutmap.core.text_table import format_bytes
from layoutmap.core.variables import Assignment, Kind, VariableSpec
from layoutmap.plan.table import PlanTable
from layoutmap.report.text import format_shape


def explain_variable_layout(plan: PlanTable, path: str, other_plan: PlanTable | None = None) -> str:
    """Return text that explains a variable's layout: the winning rule, other matches, problems, and how to change it.

    Args:
        plan: The plan.
        path: The variable's path.
        other_plan: A plan of the same variables with another layout map, to compare the layouts. `None`: no comparison.

    Raises:
        KeyError: The plan has no such variable.
    """
    assignment = plan[path]
    what, why, how = (
        [(name, escape_text(text)) for name, text in rows]
        for rows in (
            _iterate_variable_rows(assignment),
            _iterate_reason_rows(assignment),
            _iterate_change_instruction_rows(assignment),
        )
    )
    step = [(name, escape_text(text)) for name, text in iterate_collective_rows(plan, assignment)]
    compared = [] if other_plan is None else _make_comparison_rows(assignment, other_plan[path])
    rows = [*what, *why, *compared, *step, *_iterate_problem_rows(plan, assignment), *how]
    return format_aligned_rows(escape_text(assignment.variable.path), rows)


def _iterate_variable_rows(assignment: Assignment) -> Iterator[tuple[str, str]]:
    variable, layout = assignment.variable, assignment.layout
    if variable.aliases:
        yield "also called", ", ".join(variable.aliases)
    yield (
        "what",
        f"{variable.kind}, {variable.dtype}{list(variable.shape)}, {format_bytes(variable.global_bytes)}",
    )
    yield "layout", "replicated" if layout.is_fully_replicated() else str(layout)
    if assignment.fits:
        yield "per device", f"{format_shape(assignment.shard_shape)}, {format_bytes(assignment.shard_bytes)}"
    else:
        yield "per device", "does not fit"
    if assignment.global_init:
        yield "global init", assignment.global_init


def _iterate_reason_rows(assignment: Assignment) -> Iterator[tuple[str, str]]:
    match, variable = assignment.match, assignment.variable
    if match is None:
        if not variable.is_derived:
            yield "because", f"rules do not apply to a {variable.kind}; it is replicated"
        elif variable.axes is None and assignment.layout.is_fully_replicated():
            yield "because", f"it belongs to {variable.parent}, and is replicated"
        else:
            yield "because", f"it follows its parent: {variable.parent}"
            yield from _iterate_parent_axis_rows(variable)
        return
    if match.has_existing_layout:
        yield "because", AS_FOUND
        return
    if match.rule is None:
        yield "because", f"no rule matches, so {match.otherwise}"
        for pattern in match.near_misses:
            yield "near miss", pattern
        return
    meant = f", which is meant for it and not for its parent {variable.parent}" if variable.is_derived else ""
    yield "because", f"{match.rule}{meant}"
    if variable.parent and not variable.is_derived:
        yield from _iterate_parent_axis_rows(variable)
    for rule in match.others:
        yield "also matches", f"{rule}: would give {rule.layout}"


def _make_comparison_rows(assignment: Assignment, other: Assignment) -> list[tuple[str, str]]:
    """Return rows with the layout that another map gives a variable, and whether it is the same."""
    rule = other.match and other.match.rule
    agrees = assignment.layout.mesh.mesh_dims == other.layout.mesh.mesh_dims and (
        (assignment.layout.sharding_specs, assignment.layout.host_memory)
        == (other.layout.sharding_specs, other.layout.host_memory)
    )
    says = f"{rule or 'no rule'}: {other.layout}"
    return [("the map says", escape_text(says)), ("", "the same" if agrees else "another layout")]


def _iterate_parent_axis_rows(variable: VariableSpec) -> Iterator[tuple[str, str]]:
    """Yield one row with the parent axes of each axis of a derived variable. Yield nothing if they are unknown."""
    if variable.axes:
        texts = [f"of axis {' and '.join(map(str, of))}" if of else "of its own" for of in variable.axes]
        yield "its axes", ", ".join(f"{axis} {text}" for axis, text in enumerate(texts))


def iterate_collective_rows(plan: PlanTable, assignment: Assignment) -> Iterator[tuple[str, str]]:
    """Yield a row for each collective that a weight and its layer cause in a training step, if the plan has a cost."""
    cost, variable = plan.cost, assignment.variable
    if cost is None or variable.kind is not Kind.WEIGHT:
        return
    paths = (variable.path, *variable.aliases)
    layers = {path.rpartition(".")[0] for path in paths} - {""}
    found = [("in a step", each) for each in cost.format_collectives(paths)]
    yield from found or [("in a step", "nothing travels because of it")]
    for each in cost.format_collectives(layers):
        yield "its layer", each


def _iterate_problem_rows(plan: PlanTable, assignment: Assignment) -> Iterator[tuple[str, str]]:
    variable = assignment.variable
    for problem in plan.problems:
        is_its = problem.subject == variable.path and problem.model in ("", variable.model)
        if is_its and problem.kind not in ("no rule", "global init"):
            yield problem.severity, str(problem)


def _iterate_change_instruction_rows(assignment: Assignment) -> Iterator[tuple[str, str]]:
    match, variable = assignment.match, assignment.variable
    if match is None:
        if variable.kind is Kind.SLOT and variable.parent:
            yield "change it", f"with the rule of {variable.parent}"
        elif variable.parent:
            own = format_path_regex_as_python([variable.path])
            yield "change it", f"with the rule of {variable.parent}, or by one of its own: layout_map[{own}]"
        return
    if match.rule is not None:
        yield "change it", suggest_rule_change(match.rule, (variable.path, *variable.aliases))
    elif match.has_existing_layout:
        specs = tuple(replace_unsharded_by_none(assignment.layout.sharding_specs))
        pattern, memory = format_path_regex_as_python([match.path]), assignment.layout.host_memory
        rule = (
            f"layout_map.add({pattern}, {specs}, memory={memory!r})"
            if memory
            else f"layout_map[{pattern}] = {specs}"
        )
        yield "to say so", rule
    else:
        rule = f"layout_map[{format_path_regex_as_python([match.path])}] = {(None,) * len(variable.shape)}"
        yield "change it", f"{rule}, with mesh dims where it is to be sharded"
