"""Laws of models that exist: what is read off their arrays is what they were built as."""

from __future__ import annotations

from collections.abc import Iterator

from layoutmap.core.variables import Kind
from layoutmap.inspecting.inspect import inspect
from layoutmap.scope.layout_map import LayoutMap
from layoutmap.scope.scope import build
from layoutmap.testing.laws.trial import Trial


def what_is_inspected_is_what_was_planned(trial: Trial) -> Iterator[str]:
    """The variables of a built model, with their layouts, rules and problems, are those of its plan."""
    found = inspect(trial.pair[1])
    planned = {a.variable.path: a for a in trial.plan.assignments}
    for a in found.assignments:
        path, expected = a.variable.path, planned.get(a.variable.path)
        if expected is None:
            if a.variable.kind not in (Kind.SLOT, Kind.METRIC):  # training makes some that no plan can know
                yield f"{path}: inspected, and not planned"
            continue
        for name in ("variable", "layout", "match"):
            if getattr(a, name) != getattr(expected, name):
                yield f"{path}: planned {getattr(expected, name)}, inspected {getattr(a, name)}"
    inspected = {a.variable.path for a in found.assignments}
    yield from (f"{path}: planned, and not inspected" for path in planned if path not in inspected)
    of_plan = {(each.kind, each.subject) for each in trial.plan.problems}
    yield from (
        f"{each.kind} of {each.subject}: inspected, and not planned"
        for each in found.problems
        if each.severity != "note" and (each.kind, each.subject) not in of_plan
    )


def rules_read_off_a_model_build_it_again(trial: Trial) -> Iterator[str]:
    """A map of a built model has no more rules than variables, and with it the model has the same layouts."""
    layout_map = LayoutMap.from_model(trial.pair[1])
    case = trial.case
    again = build(case.make_model, layout_map, inputs=case.inputs, library=case.library, progress=False)
    expected = {a.variable.path: a.layout for a in inspect(trial.pair[1]).assignments}
    if len(layout_map) > len(expected):
        yield f"{len(layout_map)} rules for {len(expected)} variables"
    for a in inspect(again).assignments:
        if a.layout != expected[a.variable.path]:
            yield f"{a.variable.path}: found {expected[a.variable.path]}, built in {a.layout}:\n{layout_map}"
    for problem in case.plan(layout_map).problems:
        if problem.severity != "note" and problem not in trial.plan.problems:
            yield f"{problem.what}:\n{layout_map}"
