"""The maps that a search may return on one mesh: a choice for each class of groups, and one for outputs of blocks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from layoutmap.core.paths import find_repeated_layers, make_path_regex, split_at_numbers
from layoutmap.core.specs import Specs
from layoutmap.core.variables import Kind, VariableSpec
from layoutmap.cost.search.descent import Point
from layoutmap.cost.search.groups import Group, groups_of, kernels_of_biases, searched
from layoutmap.cost.search.options import Grid, activation_options, bias_specs, options_of, specs_of
from layoutmap.rules.merged_rules import make_group_rules
from layoutmap.rules.rule_set import RuleSet

Layouts = Mapping[Group, Specs]


@dataclass(frozen=True)
class Blocks:
    """Repeated layers between which activations pass.

    Args:
        paths: Their paths.
        shape: The shape of what each returns, the batch first.
    """

    paths: tuple[str, ...]
    shape: tuple[int, ...]


def blocks_of(
    outputs: Mapping[str, tuple[int, ...]], variables: Iterable[VariableSpec]
) -> tuple[Blocks, ...]:
    """The repeated layers of a model that have weights and are in no other repeated layer.

    Args:
        outputs: The shape of what each layer returns, by its path.
        variables: The variables.

    Example:
        >>> paths = [f"h.{n}.up.kernel" for n in range(2)]
        >>> variables = [VariableSpec(path, (8, 32), "float32") for path in paths]
        >>> blocks_of({"h.0": (4, 6, 8), "h.0.up": (4, 6, 32), "h.1": (4, 6, 8), "h.1.up": (4, 6, 32)}, variables)
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
    """The weights and layers of a model, for a search.

    Args:
        variables: Its variables.
        blocks: Its blocks.
        kept: Rules that stand first in every map, and are not searched.
    """

    variables: tuple[VariableSpec, ...]
    blocks: tuple[Blocks, ...] = ()
    kept: RuleSet | None = None

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        """The groups that no kept rule is for."""
        return tuple(group for group in groups_of(self.variables) if not self._is_kept(group))

    def _is_kept(self, group: Group) -> bool:
        return self.kept is not None and any(self.kept.match(path).rule for path in group.paths)

    @cached_property
    def free_blocks(self) -> tuple[Blocks, ...]:
        """The blocks that no kept rule is for."""
        kept = self.kept
        return tuple(b for b in self.blocks if kept is None or not kept.activations.match(b.paths[0]).rule)

    @cached_property
    def owners(self) -> dict[str, str]:
        """Whose path each path is that a rule could match."""
        return {
            path: v.path
            for v in self.variables
            if v.kind in (Kind.WEIGHT, Kind.STATE, Kind.RNG)
            for path in (v.path, *v.aliases)
        }

    def map_of(self, grid: Grid, layouts: Layouts, blocks: Mapping[Blocks, Specs | None]) -> RuleSet:
        """The map that gives groups these layouts; biases follow, and what has none is replicated."""
        every = dict(layouts)
        for bias, kernel in kernels_of_biases(self.groups).items():
            if bias not in every and kernel in every:
                every[bias] = bias_specs(bias, kernel, every[kernel], grid)
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
    """The maps of one mesh: a point of it has a choice for each class, and a last one for the outputs of blocks.

    Args:
        model: The model.
        grid: The mesh.
        tied: Whether groups that are alike have one choice together.
        also: Layouts that groups may have besides the options, and with them layouts of blocks.
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
        classes = searched(model.groups)
        self.classes = classes if tied else tuple((group,) for each in classes for group in each)
        self._choices = [
            list(dict.fromkeys([*_options(each, grid), *(_taken(each, layouts) for layouts, _ in also)]))
            for each in self.classes
        ]
        blocks = model.free_blocks
        common = [activation_options(b.shape, grid) for b in blocks]
        options = [
            tuple(s if s in o else None for o in common) for s in dict.fromkeys(s for o in common for s in o)
        ]
        given = [tuple(outputs.get(b) for b in blocks) for _, outputs in also]
        self._outputs = list(dict.fromkeys([*options, *given])) if blocks else [tuple[Specs | None, ...]()]

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of choices for each coordinate."""
        return (*map(len, self._choices), len(self._outputs))

    def map_of(self, point: Point) -> RuleSet:
        """The map of a point."""
        layouts, blocks = self.layouts_of(point)
        return self.model.map_of(self.grid, layouts, blocks)

    def layouts_of(self, point: Point) -> tuple[dict[Group, Specs], dict[Blocks, Specs | None]]:
        """The layouts of a point, for the groups that are searched and for the outputs of blocks."""
        layouts: dict[Group, Specs] = {}
        for groups, choices, number in zip(self.classes, self._choices, point, strict=False):
            layouts.update(zip(groups, choices[number], strict=True))
        return layouts, dict(zip(self.model.free_blocks, self._outputs[point[-1]], strict=True))

    def point_of(self, layouts: Layouts, blocks: Mapping[Blocks, Specs | None]) -> Point:
        """The point of layouts that are among the choices."""
        classes = [
            choices.index(_taken(groups, layouts))
            for groups, choices in zip(self.classes, self._choices, strict=True)
        ]
        outputs = tuple(blocks.get(b) for b in self.model.free_blocks)
        return (*classes, self._outputs.index(outputs))


def _options(groups: Sequence[Group], grid: Grid) -> list[tuple[Specs, ...]]:
    """The choices of groups together: each option of any of them, fitted to all."""
    options = dict.fromkeys(option for group in groups for option in options_of(group, grid))
    return [tuple(specs_of(group, option, grid) for group in groups) for option in options]


def _taken(groups: Sequence[Group], layouts: Layouts) -> tuple[Specs, ...]:
    return tuple(layouts.get(group, (None,) * group.rank) for group in groups)
