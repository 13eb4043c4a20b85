"""Express layouts of torch modules as the tensor parallel styles that torch and transformers share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from layoutmap.core.errors import PlanError
from layoutmap.core.layout import Layout
from layoutmap.core.match import KERAS
from layoutmap.core.variables import Assignment, Kind
from layoutmap.plan.table import PlanTable

ModuleVariables = Mapping[str, Assignment]
"""The variables of a module by name, without those of its submodules."""

_LINEAR, _EMBEDDING = ("out.0", "in.0"), ("rows", "out.0")
_SHARDED_AXES: dict[tuple[str, ...], dict[Literal["colwise", "rowwise"], dict[str, int | None]]] = {
    _LINEAR: {"colwise": {"weight": 0, "bias": 0}, "rowwise": {"weight": 1, "bias": None}},
    _EMBEDDING: {"colwise": {"weight": 1}, "rowwise": {"weight": 0}},
}


@dataclass(frozen=True, slots=True)
class StyledModule:
    """A module with the layouts of a tensor parallel style.

    Args:
        path: Its path.
        kind: The style; `"sequence"`: its weights are replicated, and it computes with shards of the sequence.
        dim: The mesh dim.
        is_embedding: Whether it is an embedding table. Otherwise it is a linear layer or, with `"sequence"`, any layer.
        is_paired: Whether a sibling module takes its sharded outputs, or produces its sharded inputs.
        output: The sharded axis of its output, `-1` for the last; `None`: the output is replicated.
    """

    path: str
    kind: Literal["colwise", "rowwise", "sequence"]
    dim: str
    is_embedding: bool = False
    is_paired: bool = False
    output: int | None = None


# Approximate layouts would change the training, so raise for layouts without an exact equivalent (decisions/0014).
def list_variables_for_library_rules(plan: PlanTable, caller: str) -> list[Assignment]:
    """Return the variables to which another library's rules apply: all except slots and metrics.

    Raises:
        PlanError: The plan has errors, a variable is in host memory, or a slot is not laid out as its weight.
    """
    plan.check()
    for a in plan.assignments:
        v = a.variable
        if a.layout.host_memory:
            why, fix = "rules of the other library name no memory", "leave memory out of the rules"
            raise make_inexpressible_error(caller, v.path, f"the layout {a.layout}", why, fix)
        if v.kind is Kind.SLOT and not a.layout.is_fully_replicated():
            parent = plan[v.parent].layout if v.parent and v.parent in plan else None
            if v.axes is not None or a.layout != parent:
                raise make_inexpressible_error(
                    caller,
                    v.path,
                    f"the layout {a.layout} of an optimizer's slot",
                    "the other library gives a slot the layout of its weight",
                    "plan the model without its optimizer",
                )
    return [a for a in plan.assignments if a.variable.kind in (Kind.WEIGHT, Kind.STATE, Kind.RNG)]


def make_inexpressible_error(caller: str, path: str, what: str, why: str, fix: str) -> PlanError:
    """Return, but do not raise, the error for a part of a plan that another library cannot express."""
    return PlanError(f"{caller}: {path}: {what} cannot be expressed", why=why, fix=fix)


def group_variables_by_module(plan: PlanTable, caller: str) -> dict[str, dict[str, Assignment]]:
    """Return the variables of a torch plan by module and name. A shared variable is in each of its modules.

    Raises:
        PlanError: The plan is not of a torch model, or see `list_variables_for_library_rules`.
    """
    found: dict[str, dict[str, Assignment]] = {}
    for a in list_variables_for_library_rules(plan, caller):
        if a.variable.name.startswith(KERAS):
            what, why = "a variable of Keras", "the styles are for modules of torch"
            raise make_inexpressible_error(
                caller, a.variable.path, what, why, "use to_keras or to_partition_specs"
            )
        for path in (a.variable.path, *a.variable.aliases):
            module, _, name = path.rpartition(".")
            found.setdefault(module, {})[name] = a
    return found


def list_sharding_dims(layout: Layout) -> tuple[str, ...]:
    """Return the mesh dims over which the axes of a layout are sharded, in the order of the axes."""
    return tuple(dim for axis in range(layout.rank) for dim in layout.list_mesh_dims(axis))


def find_styled_modules(
    plan: PlanTable, modules: Mapping[str, ModuleVariables], caller: str
) -> dict[str, StyledModule]:
    """Return a dict from path to module, for modules that are sharded as in a tensor parallel style.

    A module that is sharded by columns has a sharded output if a sibling module is sharded by rows, as in attention and
    gated units; otherwise its output is replicated. Activation rules override this.

    Raises:
        PlanError: No style has the output layout of an activation rule.
    """
    outputs = {match.path: match.layout for match in plan.activations if match.layout is not None}
    found = {path: s for path, variables in modules.items() if (s := _make_styled_module(path, variables))}
    sides = {(path.rpartition(".")[0], s.dim, s.kind) for path, s in found.items() if not s.is_embedding}
    for path, styled in found.items():
        other = "rowwise" if styled.kind == "colwise" else "colwise"
        if not styled.is_embedding and (path.rpartition(".")[0], styled.dim, other) in sides:
            found[path] = replace(styled, is_paired=True, output=-1 if styled.kind == "colwise" else None)
    of_weights = {
        dim for members in modules.values() for a in members.values() for dim in list_sharding_dims(a.layout)
    }
    for path, layout in outputs.items():
        axes = {
            axis: dims for axis in range(layout.rank) if (dims := {*layout.list_mesh_dims(axis)} & of_weights)
        }
        styled = found.get(path)
        if styled is not None and not axes:
            found[path] = replace(styled, output=None)
        elif axes:
            found[path] = _with_sharded_output_axis(path, styled, modules.get(path), axes, layout, caller)
    return found


def _with_sharded_output_axis(
    path: str,
    styled: StyledModule | None,
    variables: ModuleVariables | None,
    axes: Mapping[int, set[str]],
    layout: Layout,
    caller: str,
) -> StyledModule:
    """Return a copy of a styled module that shards its output along a rule's axis, or raise if no style can do so."""
    (axis, dims), *more = axes.items()
    if (
        styled is None
        and variables
        and not any(list_sharding_dims(a.layout) for a in variables.values())
        and axis < layout.rank - 1
    ):
        styled = StyledModule(path, "sequence", next(iter(dims)))
    if styled is None or more or dims != {styled.dim}:
        raise make_inexpressible_error(
            caller,
            path,
            f"the layout {layout} of its output",
            "only outputs of linear layers, embeddings, and norms can be sharded, over the mesh dim of their weights",
            "plan without this activation rule",
        )
    return replace(styled, output=-1 if axis == layout.rank - 1 else axis)


def _make_styled_module(path: str, variables: ModuleVariables) -> StyledModule | None:
    weight = variables.get("weight")
    dims = {dim for a in variables.values() for dim in list_sharding_dims(a.layout)}
    use = weight.variable.use if weight else None
    if (
        weight is None
        or use is None
        or len(dims) != 1
        or weight.variable.path != f"{path}.weight".lstrip(".")
    ):
        return None  # the plan knows the axis roles of a shared weight only in its first module, so others get no style
    (dim,) = dims
    axes = {name: _find_sharded_axis(a.layout) for name, a in variables.items()}
    for kind, expected in _SHARDED_AXES.get(use.roles, {}).items():
        if axes == {name: expected.get(name, -1) for name in axes}:
            return StyledModule(path, kind, dim, is_embedding=use.roles == _EMBEDDING)
    return None


def _find_sharded_axis(layout: Layout) -> int | None:
    return next((axis for axis in range(layout.rank) if layout.list_mesh_dims(axis)), None)
