"""Check whether a plan contains all variables of the model.

Many layers create their weights at their first call. A plan without these weights would wrongly show that the model
fits. So missing weights are a problem of their own kind, which the JSON of a plan contains, too (decisions/0120).
"""

from __future__ import annotations

from collections.abc import Sequence

from layoutmap.core.errors import format_count, join_names
from layoutmap.core.variables import Kind
from layoutmap.plan.problems import Problem
from layoutmap.plan.table import PlanTable

NOT_BUILT = "not built"
"""The kind of the problem that layers have no weights yet."""


def make_unbuilt_layers_problem(model: str, layers: Sequence[str], *, called: bool) -> Problem:
    """Return the problem for layers that had no weights when the plan was made.

    Args:
        model: The name of the model; empty: unknown.
        layers: The names of the layers; empty: the model has no weights at all.
        called: Whether the model was called with symbolic inputs.
    """
    count = f"{format_count(len(layers), 'layer')} {'has' if len(layers) == 1 else 'have'}"
    what = f"{count} no weights yet: {join_names(layers)}" if layers else "it has no weights"
    if called:
        why = "the model was called with these inputs, which did not reach them"
        fix = "pass inputs that reach all layers, or leave out layers that the model never calls"
    else:
        why = "a model makes its weights at its first call, and has not been called"
        fix = "pass inputs=: an example batch, or keras.Input(...); a lazy layer of torch needs its sizes instead"
    return Problem("not built", "warning", model, f"{model}: {what}" if model else what, why=why, fix=fix)


def find_unbuilt_layers_problem(plan: PlanTable) -> Problem | None:
    """Return the problem that the plan lacks weights of unbuilt layers, or None if the plan is complete.

    A plan without any weight is always incomplete, because a check of it in CI would pass for every model.
    """
    recorded = next((problem for problem in plan.problems if problem.kind == NOT_BUILT), None)
    return recorded if recorded or has_weights(plan) else make_unbuilt_layers_problem("", (), called=False)


def has_weights(plan: PlanTable) -> bool:
    """Return whether the plan has a weight or state of a layer, not only variables of optimizers and metrics."""
    return any(a.variable.kind in (Kind.WEIGHT, Kind.STATE) for a in plan.assignments)
