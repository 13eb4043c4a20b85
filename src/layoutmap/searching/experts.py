"""The maps that an expert would try first, to hold what is found against them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from layoutmap.core.errors import LayoutMapError
from layoutmap.plan.lint.weights import is_named_as_taking_heads
from layoutmap.plan.planner import make_table
from layoutmap.rules import presets
from layoutmap.rules.rule_set import RuleSet
from layoutmap.searching.groups import Group, kernels_of_biases
from layoutmap.searching.options import REPLICATED, Grid, Option, Specs, specs_in, specs_of
from layoutmap.searching.space import Blocks, Layouts, Model, layouts_in


@dataclass(frozen=True)
class Expert:
    """A map that an expert would try.

    Args:
        name: What it is called.
        grid: The mesh.
        layout_map: The map.
        layouts: The layouts that it gives to groups.
        blocks: Those that it gives to outputs of blocks.
    """

    name: str
    grid: Grid
    layout_map: RuleSet
    layouts: Layouts
    blocks: Mapping[Blocks, Specs | None]


def fitting_preset(model: Model, grid: Grid) -> str | None:
    """The preset that has a rule for each weight of a model, of several that with the fewest rules for others."""
    unused: dict[str, int] = {}
    for name in presets.names():
        rules = _preset(name, grid)
        matching = [rules.matching_rules(group.paths[0]) for group in model.groups]
        if all(matching):
            unused[name] = len(rules) - len({found[0].number for found in matching})
    return min(unused, key=unused.__getitem__, default=None)


def _preset(name: str, grid: Grid, *, data: bool = False) -> RuleSet:
    fields = presets.read(name, grid.mesh, grid.model, grid.data if data else None)
    made = RuleSet(grid.mesh, activations=fields.activations, rest="replicated")
    for pattern, specs in fields.rules.items():
        made.add(pattern, specs, uneven="shrink" if grid.model else fields.uneven_rules.get(pattern))
    return made


def experts(model: Model, grid: Grid, preset: str | None) -> Iterator[Expert]:
    """The maps that an expert would try on a mesh.

    Without a `model` dim: data parallel and fully sharded; with one: Megatron's split, and both together.

    Args:
        model: The model.
        grid: The mesh.
        preset: The preset that fits the model; `None`: the split follows from what layers do with their weights.
    """
    batch = {b: (grid.data, *(None,) * (len(b.shape) - 1)) if grid.data else None for b in model.free_blocks}
    free = dict.fromkeys(model.free_blocks)
    biases = kernels_of_biases(model.groups)
    large = [group for group in model.groups if group.rank > 1 and group not in biases]
    if grid.model is None:
        yield _expert("data parallel", model, grid, {}, free)
        if grid.data:
            every = {group: specs_of(group, Option(data=True), grid) for group in large}
            yield _expert("fully sharded", model, grid, every, batch)
        return
    for data in (False, True) if grid.data else (False,):
        name = "Megatron's split" + ", fully sharded" * data
        if preset:
            yield from _of_preset(f"{name} (preset {preset})", model, grid, preset, data)
            continue
        layouts = {g: specs_of(g, Option(megatron_option(g).model, data), grid) for g in large}
        yield _expert(name, model, grid, layouts, batch if data else free)


def _expert(
    name: str, model: Model, grid: Grid, layouts: Layouts, blocks: Mapping[Blocks, Specs | None]
) -> Expert:
    return Expert(name, grid, model.map_of(grid, layouts, blocks), layouts, blocks)


def _of_preset(name: str, model: Model, grid: Grid, preset: str, data: bool) -> Iterator[Expert]:
    try:
        made = _preset(preset, grid, data=data)
        yield expert_of(name, model, grid, made)
    except LayoutMapError:  # a rule of it does not fit the mesh
        return


def expert_of(name: str, model: Model, grid: Grid, layout_map: RuleSet) -> Expert:
    """A map as an expert's.

    Raises:
        PlanError: Some of its layouts do not fit.
    """
    table = make_table(model.variables, layout_map, complete=False).check()
    layouts = layouts_in(
        model, {path: table[path].layout for group in model.groups for path in group.paths[:1]}
    )
    blocks = {b: _specs(layout_map, b) for b in model.free_blocks}
    return Expert(name, grid, layout_map, layouts, blocks)


def _specs(layout_map: RuleSet, blocks: Blocks) -> Specs | None:
    layout = layout_map.activations.get(blocks.paths[0])
    if layout is None or layout.rank != len(blocks.shape):
        return None
    return specs_in(layout)


def megatron_option(group: Group) -> Option:
    """Megatron's option for a weight: layers that widen over what comes out, layers that narrow over what goes in.

    Heads stay on one device; a table is sharded over its rows.
    """
    inside, outside, rows = (group.axes(role) for role in ("in", "out", "rows"))
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
        widens = not is_named_as_taking_heads(name)
        narrows = not widens
    return Option(outside[0]) if widens else Option(inside[0]) if narrows else REPLICATED
