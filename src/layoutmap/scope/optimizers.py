"""Plan, build, and shard optax optimizers. Their slots get the layouts of the parameters."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from layoutmap.core.arguments import describe_type
from layoutmap.core.errors import LayoutError, LayoutMapWarning, MeshError, ScopeError
from layoutmap.core.layout import Layout, validate_memory_kind
from layoutmap.core.mesh import Mesh, check_dims_in_mesh
from layoutmap.core.users_line import find_user_stacklevel
from layoutmap.core.variables import Assignment, Kind
from layoutmap.engines import get_engine
from layoutmap.plan.planner import make_plan_table
from layoutmap.plan.slots import is_sharded_by_zero_dim
from layoutmap.report.text import format_plan_warnings
from layoutmap.rules.rule_set import RuleSet
from layoutmap.scope.plan import Plan

if TYPE_CHECKING:
    from layoutmap.adapters.jax.optimizers import OptimizerVariables

# The adapter is imported inside functions, because it loads JAX, which programs with other frameworks do not need.


def plan_optimizer(
    layout_map: RuleSet, tx: object, params: object, wrt: object, zero_dim: str | None, memory: str | None
) -> Plan:
    """Plan the layouts of an optimizer's state. See `LayoutMap.plan_optimizer`."""
    from layoutmap.adapters.jax.optimizers import describe_optimizer_variables, get_parameter_tree

    return _plan_slots(
        layout_map,
        describe_optimizer_variables(_get_init_function(tx), get_parameter_tree(params, wrt)),
        zero_dim,
        memory,
    )


def build_optimizer(
    layout_map: RuleSet,
    tx: object,
    params: object,
    wrt: object,
    zero_dim: str | None,
    memory: str | None,
    strict: bool,
) -> Any:
    """Create an optimizer's state with each leaf in its layout. See `LayoutMap.build_optimizer`."""
    from layoutmap.adapters.jax.nnx_types import is_nnx_module
    from layoutmap.adapters.jax.optimizers import (
        create_sharded_optimizer_state,
        describe_optimizer_variables,
        get_parameter_tree,
        make_nnx_optimizer,
    )

    init, tree = _get_init_function(tx), get_parameter_tree(params, wrt)
    variables = describe_optimizer_variables(init, tree)
    plan = _plan_and_check_slots(layout_map, variables, zero_dim, memory, strict)
    layouts = _list_slot_layouts(plan)
    if not is_nnx_module(params):
        return create_sharded_optimizer_state(init, tree, layouts)
    optimizer = make_nnx_optimizer(
        params, tx, wrt, lambda tree: create_sharded_optimizer_state(init, tree, layouts)
    )
    return _replicate_step_count(optimizer, plan.mesh)


def apply_optimizer(
    layout_map: RuleSet,
    state: Any,
    params: Any,
    wrt: Any,
    zero_dim: str | None,
    memory: str | None,
    strict: bool,
) -> Any:
    """Shard an optimizer's existing state. See `LayoutMap.apply_optimizer`."""
    from layoutmap.adapters.jax.nnx_types import is_nnx_optimizer
    from layoutmap.adapters.jax.optimizers import (
        describe_optimizer_variables,
        get_parameter_tree,
        relayout_optimizer_state,
    )

    is_nnx = is_nnx_optimizer(state)
    leaves = state.opt_state if is_nnx else state
    variables = describe_optimizer_variables(
        lambda _: leaves, get_parameter_tree(params, state.wrt if is_nnx and wrt is None else wrt)
    )
    plan = _plan_and_check_slots(layout_map, variables, zero_dim, memory, strict)
    moved = relayout_optimizer_state(leaves, _list_slot_layouts(plan))
    return _replicate_step_count(state, plan.mesh) if is_nnx else moved


def shard_unsharded_optimizer(layout_map: RuleSet, state: Any, model: Any) -> Any:
    """Return an optimizer's existing state, sharded like the weights of a model unless an array is on a mesh."""
    from layoutmap.adapters.jax.checkpoints import list_optimizer_arrays
    from layoutmap.adapters.jax.training import unwrap_train_state

    engine = get_engine("jax")
    if any(engine.get_layout(each.array) is not None for each in list_optimizer_arrays(model, state)):
        return state
    return apply_optimizer(layout_map, state, unwrap_train_state(model), None, None, None, strict=False)


def _plan_slots(
    layout_map: RuleSet, variables: OptimizerVariables, zero_dim: str | None, memory: str | None
) -> Plan:
    validate_memory_kind(memory, "optimizer")
    mesh = layout_map.mesh
    first = next(iter(variables.layouts), None)
    if first is not None:
        mesh = variables.layouts[first].mesh
        for (_, path), layout in variables.layouts.items():
            if layout.mesh != mesh:
                raise _make_mesh_error(f"params.{first[1]}", mesh, f"params.{path}", layout.mesh)
        if layout_map.mesh is not None and layout_map.mesh.mesh_dims != mesh.mesh_dims:
            raise _make_mesh_error("the layout map", layout_map.mesh, f"params.{first[1]}", mesh)
    if mesh is not None:
        check_dims_in_mesh(
            "zero_dim", zero_dim, mesh, "slots are sharded over it, further than their weights"
        )
    rules = layout_map if layout_map.mesh == mesh else RuleSet(mesh)
    table = make_plan_table(
        [*variables.weights, *variables.slots],
        rules,
        complete=False,
        existing_layouts=variables.layouts,
        zero_dim=zero_dim,
    )
    if memory is not None:
        table = replace(table, assignments=tuple(_replace_slot_memory(a, memory) for a in table.assignments))
    return Plan.from_table(table)


def _replace_slot_memory(assignment: Assignment, memory: str) -> Assignment:
    """Return a slot's assignment in this memory kind. Other assignments and padded ones are returned unchanged."""
    if not is_sharded_by_zero_dim(assignment.variable) or assignment.is_padded:
        return assignment
    return replace(assignment, layout=assignment.layout.replace_memory(memory))


def _plan_and_check_slots(
    layout_map: RuleSet, variables: OptimizerVariables, zero_dim: str | None, memory: str | None, strict: bool
) -> Plan:
    for weight in variables.weights:
        if weight.key not in variables.layouts:
            raise LayoutError(
                f"params.{weight.path} has no layout",
                facts={
                    "shape": str(weight.shape),
                    "parameters with a layout": f"{len(variables.layouts)} of {len(variables.weights)}",
                },
                why="slots are sharded like their parameters, and this parameter is on no mesh",
                fix="build the parameters with layout_map.build(..), or shard them: layout_map.apply(params)",
            )
    plan = _plan_slots(layout_map, variables, zero_dim, memory).check(strict=strict)
    if text := format_plan_warnings(plan):
        warnings.warn(text, LayoutMapWarning, stacklevel=find_user_stacklevel())
    return plan


def _make_mesh_error(first_name: str, first_mesh: Mesh, second_name: str, second_mesh: Mesh) -> MeshError:
    return MeshError(
        f"{first_name} and {second_name} are on different meshes",
        facts={first_name: str(first_mesh), second_name: str(second_mesh)},
        why="an optimizer computes with all parameters at once, on one mesh",
        fix="move the parameters to one mesh: layout_map.apply(params)",
    )


def _list_slot_layouts(plan: Plan) -> list[Layout]:
    return [a.layout for a in plan.assignments if a.variable.kind is Kind.SLOT]


def _replicate_step_count(optimizer: Any, mesh: Mesh) -> Any:
    from layoutmap.adapters.jax.optimizers import relayout_optimizer_state

    relayout_optimizer_state(optimizer.step, [Layout.replicated(mesh, 0)])
    return optimizer


def _get_init_function(tx: Any) -> Any:
    if callable(getattr(tx, "init", None)) and callable(getattr(tx, "update", None)):
        return tx.init
    raise ScopeError(
        "tx= is not an optimizer",
        why=f"it is {describe_type(tx)}, and has no init and update",
        fix="pass an optimizer of optax, as in optax.adamw(1e-3); to shard an existing state, call "
        "apply_optimizer; optimizers of Keras and torch need neither call, because their slots are sharded "
        "like their weights",
    )
