"""Make the layout maps that an expert would try, to start a search and to compare with its result."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from layoutmap.core.errors import LayoutMapError
from layoutmap.core.specs import Specs
from layoutmap.cost.search.groups import VariableGroup, match_biases
from layoutmap.cost.search.options import REPLICATED, Grid, Option, get_specs, make_specs
from layoutmap.cost.search.space import Blocks, Layouts, Model
from layoutmap.plan.lint.weights import is_attention_output_name
from layoutmap.plan.planner import make_table
from layoutmap.rules import presets
from layoutmap.rules.rule_set import RuleSet


@dataclass(frozen=True)
class ExpertMap:
    """Layout map that an expert would try, with the layouts that it gives to groups and to outputs of blocks."""

    name: str
    grid: Grid
    layout_map: RuleSet
    layouts: Layouts
    blocks: Mapping[Blocks, Specs | None]


def _read_preset(name: str, grid: Grid, *, data: bool = False) -> RuleSet:
    fields = presets.read_preset(name, grid.mesh, grid.model, grid.data if data else None, grid.batch)
    made = RuleSet(grid.mesh, activations=fields.activations, rest="replicated")
    for pattern, specs in fields.rules.items():
        made.add(pattern, specs, uneven="shrink" if grid.model else fields.uneven_rules.get(pattern))
    return made


def make_expert_maps(
    model: Model,
    grid: Grid,
    preset: str | None,
    # Formulas misjudge maps, so expert maps are counted, too, and the result is never slower (decisions/0094).
) -> Iterator[ExpertMap]:
    """Yield the layout maps that an expert would try on a mesh.

    Without a `model` dim: data parallel, and fully sharded along the largest, the input, or the output axis. With one:
    Megatron's split by the preset, or else by the roles of layers and by their order, also fully sharded, and rows of
    tables and experts over each dim.
    """
    batch = {b: (grid.batch, *(None,) * (len(b.shape) - 1)) if grid.data else None for b in model.free_blocks}
    free = dict.fromkeys(model.free_blocks)
    biases = match_biases(model.groups)
    large = [group for group in model.groups if group.rank > 1 and group not in biases]
    found: list[tuple[str, Layouts, Mapping[Blocks, Specs | None]]] = []
    if grid.model is None:
        found.append(("data parallel", {}, free))
        if grid.data:
            every = {group: make_specs(group, Option(data=True), grid) for group in large}
            found.append(("fully sharded", every, batch))
            for role in ("in", "out"):
                layouts = {
                    g: _shard_first_axis(g, g.find_axes(role), grid.data, grid) or every[g] for g in large
                }
                found.append((f"fully sharded, {role}put axes", layouts, batch))
    for data in () if grid.model is None else (False, True) if grid.data else (False,):
        name = "Megatron's split" + ", fully sharded" * data
        if preset:
            yield from _make_preset_map(f"{name} (preset {preset})", model, grid, preset, data)
            continue
        layouts = {g: make_specs(g, Option(choose_megatron_option(g).model, data), grid) for g in large}
        found.append((name, layouts, batch if data else free))
        alternating = {
            g: make_specs(g, Option(axis, data), grid) for g, axis in _choose_alternating_axes(model, large)
        }
        found.append((f"{name}, alternating", {**layouts, **alternating}, batch if data else free))
    for dim in (grid.data, grid.model):
        tables = {g: _shard_first_axis(g, g.find_axes("rows"), dim, grid) for g in large}
        found.append((f"rows of tables over {dim}", _drop_unsharded(tables), free))
        banks = {
            g: _shard_first_axis(g, (0,), dim, grid)
            for g in large
            if g.rank > 2 and 0 not in g.find_axes("in")
        }
        found.append((f"experts over {dim}", _drop_unsharded(banks), free))
    known: set[object] = set()
    for name, layouts, blocks in found:
        key = frozenset(_drop_unsharded(layouts).items()), frozenset(blocks.items())
        if key not in known and (layouts or name == "data parallel"):
            yield ExpertMap(name, grid, model.make_layout_map(grid, layouts, blocks), layouts, blocks)
        known.add(key)


def _shard_first_axis(group: VariableGroup, axes: Sequence[int], dim: str | None, grid: Grid) -> Specs | None:
    """Return specs that shard the first of some axes that `dim` divides, or None without one."""
    if dim is None:
        return None
    for axis in axes:
        if group.can_shard(axis, grid.mesh.dim_size(dim), heads=True):
            return tuple(dim if n == axis else None for n in range(group.rank))
    return None


def _drop_unsharded(layouts: Mapping[VariableGroup, Specs | None]) -> dict[VariableGroup, Specs]:
    """Return the layouts that shard an axis."""
    return {group: specs for group, specs in layouts.items() if specs is not None and any(specs)}


def _choose_alternating_axes(
    model: Model, large: Sequence[VariableGroup]
) -> Iterator[tuple[VariableGroup, int]]:
    """Yield an axis for each dense layer, in turn an output axis and an input axis."""
    places = {variable.path: number for number, variable in enumerate(model.variables)}
    plain = [
        g for g in large if g.rank == 2 and g.find_axes("in") and g.find_axes("out") and g.head_size is None
    ]
    if model.blocks and all(group.parity is None for group in plain):
        return  # layer roles already determine consecutive kernels inside blocks
    every = sorted((places[path], path) for group in plain for path in group.paths)
    number_of = {path: number for number, (_, path) in enumerate(every)}
    for group in plain:
        yield group, group.find_axes("in" if number_of[group.paths[0]] % 2 else "out")[0]


def _make_preset_map(name: str, model: Model, grid: Grid, preset: str, data: bool) -> Iterator[ExpertMap]:
    try:
        made = _read_preset(preset, grid, data=data)
        yield make_expert_map(name, model, grid, made)
    except LayoutMapError:  # a rule of the preset does not fit the mesh
        return


def make_expert_map(name: str, model: Model, grid: Grid, layout_map: RuleSet) -> ExpertMap:
    """Return a layout map as an expert map, with the layouts that it gives.

    Raises:
        PlanError: Some of its layouts do not fit.
    """
    table = make_table(model.variables, layout_map, complete=False).check()
    layouts = {group: get_specs(table[group.paths[0]].layout) for group in model.groups}
    blocks = {b: _get_specs(layout_map, b) for b in model.free_blocks}
    return ExpertMap(name, grid, layout_map, layouts, blocks)


def _get_specs(layout_map: RuleSet, blocks: Blocks) -> Specs | None:
    layout = layout_map.activations.get(blocks.paths[0])
    if layout is None or layout.rank != len(blocks.shape):
        return None
    return get_specs(layout)


def choose_megatron_option(group: VariableGroup) -> Option:
    """Return Megatron's option: widening layers shard outputs, and narrowing layers shard inputs.

    Heads stay on one device; a table is sharded over its rows.
    """
    inside, outside, rows = (group.find_axes(role) for role in ("in", "out", "rows"))
    if rows:
        return Option(rows[0])
    if not (inside and outside):
        return REPLICATED
    name = re.sub(r"\d+", "", group.paths[0].split(".")[-2]) if "." in group.paths[0] else ""
    if len(outside) > len(inside):
        return Option(outside[0])
    if len(inside) > len(outside):
        return Option(inside[0])
    shape = group.shape
    widens, narrows = shape[inside[0]] < shape[outside[0]], shape[inside[0]] > shape[outside[0]]
    if group.head_size:
        widens = not is_attention_output_name(name)
        narrows = not widens
    return Option(outside[0]) if widens else Option(inside[0]) if narrows else REPLICATED
