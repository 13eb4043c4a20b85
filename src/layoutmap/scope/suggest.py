"""Suggest the first layout map for a model: `layoutmap.suggest`."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from layoutmap.core.errors import LayoutMapWarning, PlanError
from layoutmap.core.mesh import Mesh, check_dims_in_mesh
from layoutmap.core.specs import BatchDim
from layoutmap.core.unsupported import UNKNOWN_ORDER_KIND
from layoutmap.core.users_line import find_user_stacklevel
from layoutmap.plan.completeness import find_unbuilt_layers_problem
from layoutmap.plan.suggest_rules import suggest_rules
from layoutmap.plan.table import PlanTable
from layoutmap.scope.layout_map import LayoutMap
from layoutmap.scope.scope import plan


def suggest(
    make_model: Callable[[], Any],
    mesh: Mesh | str,
    *,
    inputs: object = None,
    batch_dim: BatchDim | None = None,
    library: str | None = None,
) -> LayoutMap:
    """Suggest a first layout map for a model, with the reason for each rule.

    A model of a known family gets the rules of its preset. For other models, the rules follow from the roles of the
    layers: the first of two products is sharded by columns and the second by rows, attention by heads, an embedding by
    its rows, and expert weights by experts. A router of experts, and a weight that the mesh does not divide, are
    replicated. Nothing is compiled,
    allocated, or timed. `layoutmap.search` compares maps by the time of a step.

    Args:
        make_model: Function that creates and returns the model.
        mesh: Mesh, or its dims as in `"batch=2,model=4"`. Weights are sharded over one dim: the largest one over which
            batches are not sharded.
        inputs: See `layoutmap.build`.
        batch_dim: Mesh dims over which batches are sharded; `None`: those called batch, data, dp, or fsdp.
        library: See `layoutmap.build`.

    Returns:
        The map. `str` shows the reasons, and `to_yaml` writes them as comments. Variables without a rule are
        replicated.

    Raises:
        PlanError: A layer has no weights yet, so `inputs` are needed. Or the mesh does not have the dim.
        ScopeError: The function did not return a model.

    Example:
        >>> import keras, layoutmap as lm
        >>> def make():
        ...     layers = [keras.layers.Dense(64, name="up"), keras.layers.Dense(16, name="down")]
        ...     return keras.Sequential([keras.Input((16,)), *layers])
        >>> print(lm.suggest(make, "batch=2,model=4"))
        LayoutMap on batch=2, model=4, 3 rules
              # column: outputs are sharded, as the inputs of down are
           1  up\\.kernel$    (unsharded, model)
              # bias: sharded as the output of its kernel
           2  up\\.bias$      (model,)
              # row: takes the sharded outputs of up, and the sums are all-reduced over model
           3  down\\.kernel$  (model, unsharded)
        the rest is replicated
    """
    model_plan = plan(make_model, LayoutMap(mesh), inputs=inputs, library=library)
    missing = find_unbuilt_layers_problem(model_plan)
    if missing is not None:
        raise PlanError(
            f"suggest: {missing.what}",
            why=missing.why,
            fix="pass an example input of the model: suggest(.., inputs=..)",
        )
    return suggest_layout_map(model_plan, batch_dim)


def suggest_layout_map(table: PlanTable, batch_dim: BatchDim | None) -> LayoutMap:
    """Suggest a first layout map for the variables of a plan.

    Raises:
        PlanError: The plan's mesh does not have the batch dim.

    Warns:
        LayoutMapWarning: The model's call with `inputs` failed, so the order of calls is unknown.
    """
    check_dims_in_mesh("suggest: batch_dim", batch_dim, table.mesh, "batches are sharded over it", PlanError)
    for p in table.problems:
        if p.kind == UNKNOWN_ORDER_KIND:
            warning = LayoutMapWarning(f"suggest: {p.what}", why=p.why, fix=p.fix)
            warnings.warn(warning, stacklevel=find_user_stacklevel())
    found = LayoutMap(table.mesh, rest="replicated")
    found.update(suggest_rules(table, batch_dim))
    return found
