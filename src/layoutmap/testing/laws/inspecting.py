"""Laws of models that exist: what is read off their arrays is what they were built as."""

from __future__ import annotations

from collections.abc import Iterator

from layoutmap.scope.inspecting import inspect
from layoutmap.testing.laws.trial import Trial


def what_is_inspected_is_what_was_planned(trial: Trial) -> Iterator[str]:
    """The variables of a built model, with their layouts, rules and problems, are those of its plan."""
    found = inspect(trial.pair[1])
    planned = {a.variable.path: a for a in trial.plan.assignments}
    for a in found.assignments:
        path, expected = a.variable.path, planned.get(a.variable.path)
        if expected is None:
            if not path.startswith("optimizer."):  # optimizers may make slots that no plan can know
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
