"""Laws about existing models: inspection returns the plan that the model was built from."""

from __future__ import annotations

from collections.abc import Iterator

from layoutmap.core.variables import Kind
from layoutmap.inspecting.inspect import inspect
from layoutmap.scope.layout_map import LayoutMap
from layoutmap.scope.scope import build
from layoutmap.testing.laws.trial import Trial


def compare_inspected_model_with_plan(trial: Trial) -> Iterator[str]:
    """Compare the variables, layouts, rules, and problems that `inspect` finds in a built model with its plan."""
    inspected = inspect(trial.model_pair[1])
    planned = {a.variable.path: a for a in trial.plan.assignments}
    for a in inspected.assignments:
        path, expected = a.variable.path, planned.pop(a.variable.path, None)
        if expected is None:
            # Training creates slots and metrics that a plan cannot predict, so do not compare these.
            if a.variable.kind not in (Kind.SLOT, Kind.METRIC):
                yield f"{path}: inspected, and not planned"
            continue
        for name in ("variable", "layout", "match"):
            if getattr(a, name) != getattr(expected, name):
                yield f"{path}: planned {getattr(expected, name)}, inspected {getattr(a, name)}"
    yield from (f"{path}: planned, and not inspected" for path in planned)
    plan_problems = {(problem.kind, problem.subject) for problem in trial.plan.problems}
    yield from (
        f"{problem.kind} of {problem.subject}: inspected, and not planned"
        for problem in inspected.problems
        if problem.severity != "note" and (problem.kind, problem.subject) not in plan_problems
    )


def compare_model_rebuilt_from_rules(trial: Trial) -> Iterator[str]:
    """Build the model again with the rules of `LayoutMap.from_model`, and compare the layouts of both models."""
    layout_map = LayoutMap.from_model(trial.model_pair[1])
    case = trial.case
    rebuilt = build(
        case.make_model, layout_map, inputs=case.plan_inputs, library=case.library, progress=False
    )
    expected = {a.variable.path: a.layout for a in inspect(trial.model_pair[1]).assignments}
    if len(layout_map) > len(expected):
        yield f"{len(layout_map)} rules for {len(expected)} variables"
    for a in inspect(rebuilt).assignments:
        if a.layout != expected[a.variable.path]:
            yield f"{a.variable.path}: found {expected[a.variable.path]}, built in {a.layout}:\n{layout_map}"
    for problem in case.plan(layout_map).problems:
        if problem.severity != "note" and problem not in trial.plan.problems:
            yield f"{problem.what}:\n{layout_map}"
