"""Plan, build, and shard optax optimizers. Their slots get the layouts of the parameters."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from layoutmap.core.arguments import describe_type
from layoutmap.core.errors import LayoutError, LayoutMapWarning, MeshError, ScopeError
from layoutmap.core.layout import Layout, check_memory
from layoutmap.core.mesh import Mesh, check_dim
from layoutmap.core.users_line import find_user_stacklevel
from layoutmap.core.variables import Assignment, Kind
from layoutmap.plan.planner import make_table
from layoutmap.plan.slots import is_sharded_by_zero
from layoutmap.report.text import format_warnings
from layoutmap.rules.rule_set import RuleSet
from layoutmap.scope.plan import Plan

if TYPE_CHECKING:
    from layoutmap.adapters.jax.optimizers import OptimizerVariables

# Import the adapter inside functions, because it loads JAX.


def plan_optimizer(
    layout_map: RuleSet, tx: object, params: object, wrt: object, zero_dim: str | None, memory: str | None
) -> Plan:
    """Plan the layouts of an optimizer's state. See `LayoutMap.plan_optimizer`."""
    from layoutmap.adapters.jax.optimizers import describe, find_params

    return _make_plan(layout_map, describe(_get_init(tx), find_params(params, wrt)), zero_dim, memory)


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
    from layoutmap.adapters.jax.models import is_nnx
    from layoutmap.adapters.jax.optimizers import describe, find_params, make_nnx_optimizer, make_state

    init, tree = _get_init(tx), find_params(params, wrt)
    found = describe(init, tree)
    plan = _check_plan(layout_map, found, zero_dim, memory, strict)
    layouts = _list_slot_layouts(plan)
    if not is_nnx(params):
        return make_state(init, tree, layouts)
    optimizer = make_nnx_optimizer(params, tx, wrt, lambda tree: make_state(init, tree, layouts))
    return _replicate_step(optimizer, plan.mesh)


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
    from layoutmap.adapters.jax.objects import is_nnx_optimizer
    from layoutmap.adapters.jax.optimizers import describe, find_params, move_state

    is_nnx = is_nnx_optimizer(state)
    leaves = state.opt_state if is_nnx else state
    found = describe(lambda _: leaves, find_params(params, state.wrt if is_nnx and wrt is None else wrt))
    plan = _check_plan(layout_map, found, zero_dim, memory, strict)
    moved = move_state(leaves, _list_slot_layouts(plan))
    return _replicate_step(state, plan.mesh) if is_nnx else moved


def _make_plan(
    layout_map: RuleSet, found: OptimizerVariables, zero_dim: str | None, memory: str | None
) -> Plan:
    check_memory(memory, "optimizer")
    mesh = layout_map.mesh
    first = next(iter(found.layouts), None)
    if first is not None:
        mesh = found.layouts[first].mesh
        for (_, path), layout in found.layouts.items():
            if layout.mesh != mesh:
                raise _make_mesh_error(f"params.{first[1]}", mesh, f"params.{path}", layout.mesh)
        if layout_map.mesh is not None and layout_map.mesh.mesh_dims != mesh.mesh_dims:
            raise _make_mesh_error("the layout map", layout_map.mesh, f"params.{first[1]}", mesh)
    if mesh is not None:
        check_dim("zero_dim", zero_dim, mesh, "slots are sharded over it, further than their weights")
    rules = layout_map if layout_map.mesh == mesh else RuleSet(mesh)
    table = make_table(
        [*found.weights, *found.slots], rules, complete=False, given=found.layouts, zero_dim=zero_dim
    )
    if memory is not None:
        table = replace(table, assignments=tuple(_choose_memory(a, memory) for a in table.assignments))
    return Plan.of(table)


def _choose_memory(assignment: Assignment, memory: str) -> Assignment:
    """Move the assignment of a slot to a memory kind. Counts, padded slots, and parameters keep theirs."""
    if not is_sharded_by_zero(assignment.variable) or assignment.is_padded:
        return assignment
    return replace(assignment, layout=assignment.layout.replace_memory(memory))


def _check_plan(
    layout_map: RuleSet, found: OptimizerVariables, zero_dim: str | None, memory: str | None, strict: bool
) -> Plan:
    for weight in found.weights:
        if weight.key not in found.layouts:
            raise LayoutError(
                f"params.{weight.path}: it has no layout",
                facts={
                    "shape": str(weight.shape),
                    "with a layout": f"{len(found.layouts)} of {len(found.weights)}",
                },
                why="slots are sharded like their parameters, and this parameter is on no mesh",
                fix="build the parameters with layout_map.build(..), or shard them: layout_map.apply(params)",
            )
    plan = _make_plan(layout_map, found, zero_dim, memory).check(strict=strict)
    if text := format_warnings(plan):
        warnings.warn(text, LayoutMapWarning, stacklevel=find_user_stacklevel())
    return plan


def _make_mesh_error(one: str, mesh: Mesh, other: str, other_mesh: Mesh) -> MeshError:
    return MeshError(
        f"{one} and {other} are on different meshes",
        facts={one: str(mesh), other: str(other_mesh)},
        why="an optimizer computes with all parameters at once, on one mesh",
        fix="move them to one mesh: layout_map.apply(params)",
    )


def _list_slot_layouts(plan: Plan) -> list[Layout]:
    return [a.layout for a in plan.assignments if a.variable.kind is Kind.SLOT]


def _replicate_step(optimizer: Any, mesh: Mesh) -> Any:
    from layoutmap.adapters.jax.optimizers import move_state

    move_state(optimizer.step, [Layout.replicated(mesh, 0)])
    return optimizer


def _get_init(tx: Any) -> Any:
    if callable(getattr(tx, "init", None)) and callable(getattr(tx, "update", None)):
        return tx.init
    raise ScopeError(
        "there is no optimizer",
        why=f"the argument for it is {describe_type(tx)}, without init and update",
        fix="pass one of optax, as in optax.adamw(1e-3); to shard an existing state, call "
        "apply_optimizer; optimizers of Keras and torch need neither, because their slots are sharded "
        "like their weights",
    )
