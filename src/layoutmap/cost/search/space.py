"""Define the layout maps that a search may return on one mesh, as points of a discrete space."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from layoutmap.core.paths import find_repeated_layers, make_path_regex, split_at_numbers
from layoutmap.core.specs import Specs
from layoutmap.core.variables import Kind, VariableSpec
from layoutmap.cost.search.descent import Point
from layoutmap.cost.search.groups import VariableGroup, group_variables, match_biases, select_searched_groups
from layoutmap.cost.search.options import (
    Grid,
    list_activation_options,
    list_options,
    make_bias_specs,
    make_specs,
)
from layoutmap.rules.merged_rules import make_group_rules
from layoutmap.rules.rule_set import RuleSet

Layouts = Mapping[VariableGroup, Specs]


@dataclass(frozen=True)
class Blocks:
    """Repeated layers that pass activations to each other."""

    paths: tuple[str, ...]
    shape: tuple[int, ...]  # of each output, the batch first


def find_blocks(
    outputs: Mapping[str, tuple[int, ...]], variables: Iterable[VariableSpec]
) -> tuple[Blocks, ...]:
    """Return the outermost repeated layers that have weights.

    Example:
        >>> paths = [f"h.{n}.up.kernel" for n in range(2)]
        >>> variables = [VariableSpec(path, (8, 32), "float32") for path in paths]
        >>> find_blocks({"h.0": (4, 6, 8), "h.0.up": (4, 6, 32), "h.1": (4, 6, 8), "h.1.up": (4, 6, 32)}, variables)
        (Blocks(paths=('h.0', 'h.1'), shape=(4, 6, 8)),)
    """
    layers = find_repeated_layers(v.path for v in variables)
    groups: dict[tuple[object, ...], list[str]] = {}
    for path, shape in outputs.items():
        if len(shape) > 1 and path in layers:
            groups.setdefault((split_at_numbers(path), len(shape)), []).append(path)
    repeated = [paths for paths in groups.values() if len(paths) > 1]
    above = tuple(f"{path}." for paths in repeated for path in paths)
    inner = {path for paths in repeated for path in paths if path.startswith(above)}
    return tuple(Blocks(tuple(paths), outputs[paths[0]]) for paths in repeated if not inner & set(paths))


@dataclass(frozen=True)
class Model:
    """Weights and layers of a model, for a search."""

    variables: tuple[VariableSpec, ...]
    blocks: tuple[Blocks, ...] = ()
    kept: RuleSet | None = None  # rules that come first in every map, and are not searched

    @cached_property
    def groups(self) -> tuple[VariableGroup, ...]:
        """Groups of variables that the search lays out, since no kept rule does."""
        return tuple(group for group in group_variables(self.variables) if not self._is_kept(group))

    def _is_kept(self, group: VariableGroup) -> bool:
        return self.kept is not None and any(self.kept.match(path).rule for path in group.paths)

    @cached_property
    def free_blocks(self) -> tuple[Blocks, ...]:
        """Blocks without a kept rule."""
        kept = self.kept
        return tuple(b for b in self.blocks if kept is None or not kept.activations.match(b.paths[0]).rule)

    @cached_property
    def owners(self) -> dict[str, str]:
        """Variable of each path that a rule could match."""
        return {
            path: v.path
            for v in self.variables
            if v.kind in (Kind.WEIGHT, Kind.STATE, Kind.RNG)
            for path in (v.path, *v.aliases)
        }

    def make_layout_map(self, grid: Grid, layouts: Layouts, blocks: Mapping[Blocks, Specs | None]) -> RuleSet:
        """Return the map that gives groups these layouts. Biases follow, and all others are replicated."""
        every = dict(layouts)
        for bias, kernel in match_biases(self.groups).items():
            if bias not in every and kernel in every:
                every[bias] = make_bias_specs(bias, kernel, every[kernel], grid)
        by_paths = {group.paths: every.get(group, (None,) * group.rank) for group in self.groups}
        rules = make_group_rules(by_paths, self.owners)
        outputs = {
            f"(.*\\.)?{make_path_regex(b.paths)}": specs for b, specs in blocks.items() if specs is not None
        }
        made = RuleSet(grid.mesh, rest="replicated")
        if self.kept is not None:
            made.update(self.kept)
        made.update({p: s for p, s in rules.items() if p not in made})
        made.activations.update({p: s for p, s in outputs.items() if p not in made.activations})
        return made


class Space:
    """Layout maps of one mesh. A point has a choice for each class of groups, and one for outputs.

    With `tied`, similar groups share one choice. `also` has layouts that groups and blocks may have besides the
    options.
    """

    def __init__(
        self,
        model: Model,
        grid: Grid,
        *,
        tied: bool = True,
        also: Iterable[tuple[Layouts, Mapping[Blocks, Specs | None]]] = (),
    ):
        self.model, self.grid = model, grid
        also = tuple(also)
        classes = select_searched_groups(model.groups)
        self.classes = classes if tied else tuple((group,) for each in classes for group in each)
        self._choices = [
            list(
                dict.fromkeys(
                    [*_list_group_choices(each, grid), *(_select_specs(each, layouts) for layouts, _ in also)]
                )
            )
            for each in self.classes
        ]
        blocks = model.free_blocks
        common = [list_activation_options(b.shape, grid) for b in blocks]
        options = [
            tuple(s if s in o else None for o in common) for s in dict.fromkeys(s for o in common for s in o)
        ]
        given = [tuple(outputs.get(b) for b in blocks) for _, outputs in also]
        self._outputs = list(dict.fromkeys([*options, *given])) if blocks else [tuple[Specs | None, ...]()]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of choices for each coordinate."""
        return (*map(len, self._choices), len(self._outputs))

    def make_layout_map(self, point: Point) -> RuleSet:
        """Return the layout map for a point."""
        layouts, blocks = self.get_layouts(point)
        return self.model.make_layout_map(self.grid, layouts, blocks)

    def get_layouts(self, point: Point) -> tuple[dict[VariableGroup, Specs], dict[Blocks, Specs | None]]:
        """Return the layouts for a point, of searched groups and of block outputs."""
        layouts: dict[VariableGroup, Specs] = {}
        for groups, choices, number in zip(self.classes, self._choices, point, strict=False):
            layouts.update(zip(groups, choices[number], strict=True))
        return layouts, dict(zip(self.model.free_blocks, self._outputs[point[-1]], strict=True))

    def find_point(self, layouts: Layouts, blocks: Mapping[Blocks, Specs | None]) -> Point:
        """Return the point of layouts that are among the choices."""
        classes = [
            choices.index(_select_specs(groups, layouts))
            for groups, choices in zip(self.classes, self._choices, strict=True)
        ]
        outputs = tuple(blocks.get(b) for b in self.model.free_blocks)
        return (*classes, self._outputs.index(outputs))


def _list_group_choices(groups: Sequence[VariableGroup], grid: Grid) -> list[tuple[Specs, ...]]:
    """Return the shared choices of groups: each option of any group, applied to all."""
    options = dict.fromkeys(option for group in groups for option in list_options(group, grid))
    return [tuple(make_specs(group, option, grid) for group in groups) for option in options]


def _select_specs(groups: Sequence[VariableGroup], layouts: Layouts) -> tuple[Specs, ...]:
    return tuple(layouts.get(group, (None,) * group.rank) for group in groups)
