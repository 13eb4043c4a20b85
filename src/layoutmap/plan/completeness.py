"""Check whether a plan contains all variables of the model.

A layer makes its weights when it is first called. A plan without them is no evidence: nothing of it does not fit, and
no weight in it is sent. So what a plan lacks is a problem of its own kind, which files of plans keep as well: see
docs/decisions/0120.
"""

from __future__ import annotations

from collections.abc import Sequence

from layoutmap.core.errors import format_count, join_names
from layoutmap.core.variables import Kind
from layoutmap.plan.problems import Problem
from layoutmap.plan.table import PlanTable

NOT_BUILT = "not built"
"""The kind of the problem for layers that have no weights yet."""


def make_unbuilt_problem(model: str, layers: Sequence[str], *, called: bool) -> Problem:
    """Return the problem for layers that had no weights when the plan was made.

    Args:
        model: What the model is called; empty: that is not known.
        layers: The layers' names; none: the model has no weight at all.
        called: Whether the model was called with symbols of its inputs.
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


def find_missing_weights(plan: PlanTable) -> Problem | None:
    """Return the problem for a plan that lacks variables, or None if the plan is complete.

    A plan without weights lacks something, whatever else it says: as a gate it would let all pass.
    """
    said = next((problem for problem in plan.problems if problem.kind == NOT_BUILT), None)
    return said if said or has_weights(plan) else make_unbuilt_problem("", (), called=False)


def has_weights(plan: PlanTable) -> bool:
    """Return whether the plan has a variable of a layer, not only those of optimizers, losses, and RNGs."""
    return any(a.variable.kind in (Kind.WEIGHT, Kind.STATE) for a in plan.assignments)
