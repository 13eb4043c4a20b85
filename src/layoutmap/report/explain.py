"""Why one variable of a plan is where it is, and what to type to have it elsewhere."""

from __future__ import annotations

from collections.abc import Iterator

from layoutmap.core.errors import aligned
from layoutmap.core.escaping import escaped
from layoutmap.core.match import AS_FOUND, how_to_change
from layoutmap.core.paths import path_pattern
from layoutmap.core.specs import with_none
from layoutmap.core.text_table import size
from layoutmap.core.variables import Assignment, Kind, VariableSpec
from layoutmap.plan.table import PlanTable
from layoutmap.report.text import shape_text


def explain_text(plan: PlanTable, path: str, asked: PlanTable | None = None) -> str:
    """The explanation of a variable's layout: the rule that won, other rules, problems, and what to type.

    Args:
        plan: The plan.
        path: The variable's path.
        asked: What another layout map says of the same variables.

    Raises:
        KeyError: The plan has no such variable.
    """
    assignment = plan[path]
    what, why, how = (
        [(name, escaped(text)) for name, text in rows]
        for rows in (_what(assignment), _why(assignment), _how(assignment))
    )
    step = [(name, escaped(text)) for name, text in in_a_step(plan, assignment)]
    compared = [] if asked is None else _compared(assignment, asked[path])
    rows = [*what, *why, *compared, *step, *_problems(plan, assignment), *how]
    return aligned(escaped(assignment.variable.path), rows)


def _what(assignment: Assignment) -> Iterator[tuple[str, str]]:
    variable, layout = assignment.variable, assignment.layout
    if variable.aliases:
        yield "also called", ", ".join(variable.aliases)
    yield "what", f"{variable.kind}, {variable.dtype}{list(variable.shape)}, {size(variable.global_bytes)}"
    yield "layout", "replicated" if layout.is_fully_replicated() else str(layout)
    if assignment.fits:
        yield "per device", f"{shape_text(assignment.shard_shape)}, {size(assignment.shard_bytes)}"
    else:
        yield "per device", "does not fit"
    if assignment.global_init:
        yield "global init", assignment.global_init


def _why(assignment: Assignment) -> Iterator[tuple[str, str]]:
    match, variable = assignment.match, assignment.variable
    if match is None:
        if not variable.follows:
            yield "because", f"rules do not apply to a {variable.kind}; it is replicated"
        elif variable.axes is None and assignment.layout.is_fully_replicated():
            yield "because", f"it belongs to {variable.parent}, and is replicated"
        else:
            yield "because", f"it follows its parent: {variable.parent}"
            yield from _axes(variable)
        return
    if match.is_found:
        yield "because", AS_FOUND
        return
    if match.rule is None:
        yield "because", f"no rule matches, so {match.otherwise}"
        for pattern in match.near_misses:
            yield "near miss", pattern
        return
    meant = f", which is meant for it and not for its parent {variable.parent}" if variable.follows else ""
    yield "because", f"{match.rule}{meant}"
    if variable.parent and not variable.follows:
        yield from _axes(variable)
    for rule in match.others:
        yield "also matches", f"{rule}: would give {rule.layout}"


def _compared(here: Assignment, asked: Assignment) -> list[tuple[str, str]]:
    """The layout of another map for a variable, and whether it is the same."""
    rule = asked.match and asked.match.rule
    agrees = here.layout.mesh.mesh_dims == asked.layout.mesh.mesh_dims and (
        here.layout.sharding_specs == asked.layout.sharding_specs
    )
    says = f"{rule or 'no rule'}: {asked.layout}"
    return [("the map says", escaped(says)), ("", "the same" if agrees else "another layout")]


def _axes(variable: VariableSpec) -> Iterator[tuple[str, str]]:
    """The axes of its parent that each axis of a derived variable is made of."""
    if variable.axes:
        texts = [f"of axis {' and '.join(map(str, of))}" if of else "of its own" for of in variable.axes]
        yield "its axes", ", ".join(f"{axis} {text}" for axis, text in enumerate(texts))


def in_a_step(plan: PlanTable, assignment: Assignment) -> Iterator[tuple[str, str]]:
    """The collectives that a variable's layout causes; none if the plan has no cost, or it takes no part."""
    cost, variable = plan.cost, assignment.variable
    if cost is None or variable.kind is not Kind.WEIGHT:
        return
    paths = (variable.path, *variable.aliases)
    layers = {path.rpartition(".")[0] for path in paths} - {""}
    found = [("in a step", each) for each in cost.rows_of(paths)]
    yield from found or [("in a step", "nothing travels because of it")]
    for each in cost.rows_of(layers):
        yield "its layer", each


def _problems(plan: PlanTable, assignment: Assignment) -> Iterator[tuple[str, str]]:
    variable = assignment.variable
    for problem in plan.problems:
        is_its = problem.subject == variable.path and problem.model in ("", variable.model)
        if is_its and problem.kind not in ("no rule", "global init"):
            yield problem.severity, str(problem)


def _how(assignment: Assignment) -> Iterator[tuple[str, str]]:
    match, variable = assignment.match, assignment.variable
    if match is None:
        if variable.kind is Kind.SLOT and variable.parent:
            yield "change it", f"with the rule of {variable.parent}"
        elif variable.parent:
            own = path_pattern([variable.path])
            yield "change it", f"with the rule of {variable.parent}, or by one of its own: layout_map[{own}]"
        return
    if match.rule is not None:
        yield "change it", how_to_change(match.rule, (variable.path, *variable.aliases))
    elif match.is_found:
        specs = tuple(with_none(assignment.layout.sharding_specs))
        yield "to say so", f"layout_map[{path_pattern([match.path])}] = {specs}"
    else:
        rule = f"layout_map[{path_pattern([match.path])}] = {(None,) * len(variable.shape)}"
        yield "change it", f"{rule}, with mesh dims where it is to be sharded"
