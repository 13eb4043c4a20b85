"""Convert a plan to logical axis rules of flax and MaxText: names for axes, and mesh dims for each name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from layoutmap.core.errors import PlanError
from layoutmap.core.layout import Layout
from layoutmap.core.variables import make_unique_names
from layoutmap.plan.table import PlanTable
from layoutmap.plan.torch_styles import list_variables_for_library_rules, make_inexpressible_error
from layoutmap.rules.logical_axes import resolve_logical_axes_to_specs
from layoutmap.rules.partition_specs import flatten_tree_by_path, read_partition_spec

_CALL = "to_logical_axis_rules"

Dims = tuple[str, ...]
Names = tuple[str | None, ...]
Rules = list[tuple[str, str | Dims | None]]


def make_logical_axis_rules(plan: PlanTable, axes: Any) -> tuple[dict[str, Names], Rules]:
    """Return a dict from path to axis names, and rules that turn these names into the plan's layouts.

    Args:
        plan: The plan.
        axes: The axis names in the code of the model; `None`: new names.

    Raises:
        PlanError: No order of rules gives all of the layouts; names a variable that differs.
        RuleError: The names are of another form.
    """
    layouts = {a.variable.path: a.layout for a in list_variables_for_library_rules(plan, _CALL)}
    if axes is None:
        names, rules = _make_axis_names_and_rules(layouts)
    else:
        names = _read_axis_names(axes, layouts)
        rules = _make_ordered_rules(names, layouts)
    shapes = {a.variable.path: a.variable.shape for a in plan.assignments}
    resolved, _ = resolve_logical_axes_to_specs(rules, names, shapes, "linen", _CALL)
    for path in names:
        if Layout(resolved[path], plan.mesh) != layouts[path]:
            raise _make_conflict_error(
                path,
                names,
                layouts[path],
                f"the rules that the other variables need give it {Layout(resolved[path], plan.mesh)}",
            )
    return names, rules


def _list_axis_dims(layout: Layout) -> list[Dims]:
    return [tuple(layout.list_mesh_dims(axis)) for axis in range(layout.rank)]


def _make_axis_names_and_rules(layouts: Mapping[str, Layout]) -> tuple[dict[str, Names], Rules]:
    """Return a dict from path to new axis names, and their rules. A name stands for mesh dims, None for no dims."""
    used = [*dict.fromkeys(dims for layout in layouts.values() for dims in _list_axis_dims(layout) if dims)]
    name_of = dict(zip(used, make_unique_names([f"over_{'_'.join(dims)}" for dims in used]), strict=True))
    names = {
        path: tuple(name_of.get(dims) for dims in _list_axis_dims(layout)) for path, layout in layouts.items()
    }
    return names, [(name, _unwrap_single_dim(dims)) for dims, name in name_of.items()]


def _unwrap_single_dim(dims: Dims) -> str | Dims | None:
    return (dims[0] if len(dims) == 1 else dims) if dims else None


def _read_axis_names(axes: Any, layouts: Mapping[str, Layout]) -> dict[str, Names]:
    """Return the user's axis names by path, one for each axis of a variable, and None for axes without a name."""
    names_by_path = {
        path: read_partition_spec(names, f"{_CALL}: {path}")
        for path, names in flatten_tree_by_path(axes, _CALL).items()
    }
    found: dict[str, Names] = {}
    for path, layout in layouts.items():
        names = names_by_path.get(path, ())
        if len(names) > layout.rank or not all(name is None or isinstance(name, str) for name in names):
            what = f"axes named {names}"
            raise make_inexpressible_error(
                _CALL, path, what, f"it has {layout.rank} axes", "name each of its axes once"
            )
        found[path] = (*names, *(None,) * (layout.rank - len(names)))  # type: ignore[assignment]
    return found


def _make_ordered_rules(names: Mapping[str, Names], layouts: Mapping[str, Layout]) -> Rules:
    """Return rules in an order in which each name gets its mesh dims only on the axes that the layouts shard."""
    dims: dict[str, Dims] = {}
    for path, layout in layouts.items():
        for name, found in zip(names[path], _list_axis_dims(layout), strict=True):
            if name is None and found:
                raise _make_conflict_error(path, names, layout, "rules apply only to an axis with a name")
            if name is not None and found and dims.setdefault(name, found) != found:
                raise _make_conflict_error(
                    path, names, layout, f"{name!r} is sharded over {dims[name]} elsewhere"
                )
    before: dict[str, set[str]] = {
        name: set() for each in names.values() for name in each if name is not None
    }
    for path, layout in layouts.items():
        parts = dict(zip(names[path], _list_axis_dims(layout), strict=True))
        for name, found in parts.items():
            if name is None or found or name not in dims:
                continue
            takers = {other for other, taken in parts.items() if other and {*taken} & {*dims[name]}}
            if not takers:
                raise _make_conflict_error(
                    path, names, layout, f"{name!r} is sharded over {dims[name]} elsewhere"
                )
            before[name] |= takers
    ordered: list[str] = []
    while free := [name for name in before if name not in ordered and before[name] <= {*ordered}]:
        ordered += free
    return [
        (name, _unwrap_single_dim(dims.get(name, ())))
        for name in [*ordered, *(n for n in before if n not in ordered)]
    ]


def _make_conflict_error(path: str, names: Mapping[str, Names], layout: Layout, why: str) -> PlanError:
    fix = f"name its axes differently, or call {_CALL} without axes, which makes names that fit"
    return make_inexpressible_error(_CALL, path, f"the layout {layout} of the axes {names[path]}", why, fix)
