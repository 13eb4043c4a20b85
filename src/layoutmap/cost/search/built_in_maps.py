"""Make the built-in layout maps, which start a search and are compared with its result."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from layoutmap.core.errors import LayoutMapError
from layoutmap.core.specs import Specs
from layoutmap.cost.search.groups import VariableGroup, map_biases_to_kernels
from layoutmap.cost.search.options import (
    REPLICATED,
    LayoutOption,
    MeshRoles,
    list_specs_with_none,
    make_group_specs,
)
from layoutmap.cost.search.space import BlockStack, GroupLayouts, SearchedModel
from layoutmap.plan.lint.weights import is_attention_output_name
from layoutmap.plan.planner import make_plan_table
from layoutmap.rules import presets
from layoutmap.rules.rule_set import RuleSet


@dataclass(frozen=True)
class BuiltInMap:
    """Layout map that starts a search, such as data parallel, with its layouts of variable groups and block outputs."""

    name: str
    roles: MeshRoles
    layout_map: RuleSet
    layouts: GroupLayouts
    output_specs: Mapping[BlockStack, Specs | None]


def _make_preset_rules(preset_name: str, roles: MeshRoles, *, fsdp: bool = False) -> RuleSet:
    fsdp_dim = roles.data_dim if fsdp else None
    fields = presets.read_preset(preset_name, roles.mesh, roles.model_dim, fsdp_dim, roles.batch_dim)
    made = RuleSet(roles.mesh, activations=fields.activations, rest="replicated")
    for pattern, specs in fields.rules.items():
        made.add(pattern, specs, uneven="shrink" if roles.model_dim else fields.uneven_rules.get(pattern))
    return made


def iterate_built_in_maps(
    model: SearchedModel,
    roles: MeshRoles,
    preset: str | None,
    # The search counts the cost of these maps like that of others, so its result is at least as fast (decisions/0094).
) -> Iterator[BuiltInMap]:
    """Yield the layout maps that people usually choose for a mesh.

    Without a model dim, these are data parallel, and fully sharded along the largest, the input, or the output axis.
    With a model dim, they are Megatron's split, alone and fully sharded. The split follows the preset, or without a
    preset the roles of axes or the order of layers. On all meshes, embedding tables and banks of experts are also
    sharded over each dim.
    """
    dim = roles.batch_dim
    batch = {b: (dim, *(None,) * (len(b.shape) - 1)) if dim else None for b in model.searched_blocks}
    free = dict.fromkeys(model.searched_blocks)
    biases = map_biases_to_kernels(model.groups)
    kernels = [group for group in model.groups if group.rank > 1 and group not in biases]
    found: list[tuple[str, GroupLayouts, Mapping[BlockStack, Specs | None]]] = []
    if roles.model_dim is None:
        found.append(("data parallel", {}, free))
        if roles.data_dim:
            every = {
                group: make_group_specs(group, LayoutOption(shards_data_dim=True), roles) for group in kernels
            }
            found.append(("fully sharded", every, batch))
            for role in ("in", "out"):
                layouts = {
                    g: _make_one_axis_specs(g, g.find_axes(role), roles.data_dim, roles) or every[g]
                    for g in kernels
                }
                found.append((f"fully sharded, {role}put axes", layouts, batch))
    for fsdp in () if roles.model_dim is None else (False, True) if roles.data_dim else (False,):
        name = "Megatron's split" + ", fully sharded" * fsdp
        if preset:
            yield from _iterate_preset_map_if_valid(f"{name} (preset {preset})", model, roles, preset, fsdp)
            continue
        layouts = {
            g: make_group_specs(g, LayoutOption(choose_megatron_option(g).model_axis, fsdp), roles)
            for g in kernels
        }
        found.append((name, layouts, batch if fsdp else free))
        alternating = {
            g: make_group_specs(g, LayoutOption(axis, fsdp), roles)
            for g, axis in _iterate_alternating_axes(model, kernels)
        }
        found.append((f"{name}, alternating", {**layouts, **alternating}, batch if fsdp else free))
    for dim in (roles.data_dim, roles.model_dim):
        tables = {g: _make_one_axis_specs(g, g.find_axes("rows"), dim, roles) for g in kernels}
        found.append((f"rows of tables over {dim}", _select_sharding_layouts(tables), free))
        banks = {
            g: _make_one_axis_specs(g, (0,), dim, roles)
            for g in kernels
            if g.rank > 2 and 0 not in g.find_axes("in")
        }
        found.append((f"experts over {dim}", _select_sharding_layouts(banks), free))
    known: set[object] = set()
    for name, layouts, blocks in found:
        key = frozenset(_select_sharding_layouts(layouts).items()), frozenset(blocks.items())
        if key not in known and (layouts or name == "data parallel"):
            yield BuiltInMap(name, roles, model.make_layout_map(roles, layouts, blocks), layouts, blocks)
        known.add(key)


def _make_one_axis_specs(
    group: VariableGroup, axes: Sequence[int], dim: str | None, roles: MeshRoles
) -> Specs | None:
    """Return specs that shard the first of `axes` that `dim` can shard evenly, or None without such an axis."""
    if dim is None:
        return None
    for axis in axes:
        if group.can_shard(axis, roles.mesh.dim_size(dim), whole_heads=True):
            return tuple(dim if n == axis else None for n in range(group.rank))
    return None


def _select_sharding_layouts(layouts: Mapping[VariableGroup, Specs | None]) -> dict[VariableGroup, Specs]:
    """Return only the layouts that shard an axis."""
    return {group: specs for group, specs in layouts.items() if specs is not None and any(specs)}


def _iterate_alternating_axes(
    model: SearchedModel, kernels: Sequence[VariableGroup]
) -> Iterator[tuple[VariableGroup, int]]:
    """Yield groups of dense kernels with the axis to shard: in model order, alternately the output and the input."""
    positions = {variable.path: position for position, variable in enumerate(model.variables)}
    dense = [
        g for g in kernels if g.rank == 2 and g.find_axes("in") and g.find_axes("out") and g.head_size is None
    ]
    if model.blocks and all(group.parity is None for group in dense):
        return  # Megatron's split already alternates between the kernels in a block
    every = sorted((positions[path], path) for group in dense for path in group.paths)
    order = {path: position for position, (_, path) in enumerate(every)}
    for group in dense:
        yield group, group.find_axes("in" if order[group.paths[0]] % 2 else "out")[0]


def _iterate_preset_map_if_valid(
    name: str, model: SearchedModel, roles: MeshRoles, preset: str, fsdp: bool
) -> Iterator[BuiltInMap]:
    try:
        made = _make_preset_rules(preset, roles, fsdp=fsdp)
        yield make_built_in_map(name, model, roles, made)
    except LayoutMapError:  # the preset has a rule that does not fit the mesh, so skip this map
        return


def make_built_in_map(name: str, model: SearchedModel, roles: MeshRoles, layout_map: RuleSet) -> BuiltInMap:
    """Return a layout map as a built-in map, with the layouts that its rules give to the model's groups and blocks.

    Raises:
        PlanError: Some of its layouts do not fit.
    """
    table = make_plan_table(model.variables, layout_map, complete=False).check()
    layouts = {group: list_specs_with_none(table[group.paths[0]].layout) for group in model.groups}
    blocks = {b: _get_output_specs(layout_map, b) for b in model.searched_blocks}
    return BuiltInMap(name, roles, layout_map, layouts, blocks)


def _get_output_specs(layout_map: RuleSet, blocks: BlockStack) -> Specs | None:
    layout = layout_map.activations.get(blocks.paths[0])
    if layout is None or layout.rank != len(blocks.shape):
        return None
    return list_specs_with_none(layout)


def choose_megatron_option(group: VariableGroup) -> LayoutOption:
    """Return a group's layout in Megatron's split: widening layers shard their outputs, narrowing layers their inputs.

    A head of attention stays on one device, and a table is sharded along its rows. Other groups are replicated.
    """
    inside, outside, rows = (group.find_axes(role) for role in ("in", "out", "rows"))
    if rows:
        return LayoutOption(rows[0])
    if not (inside and outside):
        return REPLICATED
    name = re.sub(r"\d+", "", group.paths[0].split(".")[-2]) if "." in group.paths[0] else ""
    if len(outside) > len(inside):
        return LayoutOption(outside[0])
    if len(inside) > len(outside):
        return LayoutOption(inside[0])
    shape = group.shape
    widens, narrows = shape[inside[0]] < shape[outside[0]], shape[inside[0]] > shape[outside[0]]
    if group.head_size:
        widens = not is_attention_output_name(name)
        narrows = not widens
    return LayoutOption(outside[0]) if widens else LayoutOption(inside[0]) if narrows else REPLICATED
