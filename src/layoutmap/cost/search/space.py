"""Define the layout maps that a search may return on one mesh, as points of a discrete space."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from layoutmap.core.paths import find_repeated_layers, make_path_regex, split_path_at_numbers
from layoutmap.core.specs import Specs
from layoutmap.core.variables import Kind, VariableSpec
from layoutmap.cost.search.descent import Point
from layoutmap.cost.search.groups import (
    VariableGroup,
    group_variables,
    map_biases_to_kernels,
    select_searched_groups,
)
from layoutmap.cost.search.options import (
    MeshRoles,
    list_activation_options,
    list_group_options,
    make_bias_specs,
    make_group_specs,
)
from layoutmap.rules.merged_rules import make_rules_for_path_groups
from layoutmap.rules.rule_set import RuleSet

GroupLayouts = Mapping[VariableGroup, Specs]


@dataclass(frozen=True)
class BlockStack:
    """Repeated layers, each of which passes its output to the next."""

    paths: tuple[str, ...]
    shape: tuple[int, ...]  # shape of each layer's output, with the batch axis first


def find_block_stacks(
    outputs: Mapping[str, tuple[int, ...]], variables: Iterable[VariableSpec]
) -> tuple[BlockStack, ...]:
    """Return stacks of the outermost repeated layers with weights. `outputs` maps layer paths to output shapes.

    Example:
        >>> paths = [f"h.{n}.up.kernel" for n in range(2)]
        >>> variables = [VariableSpec(path, (8, 32), "float32") for path in paths]
        >>> find_block_stacks({"h.0": (4, 8), "h.0.up": (4, 32), "h.1": (4, 8), "h.1.up": (4, 32)}, variables)
        (BlockStack(paths=('h.0', 'h.1'), shape=(4, 8)),)
    """
    layers = find_repeated_layers(v.path for v in variables)
    groups: dict[tuple[object, ...], list[str]] = {}
    for path, shape in outputs.items():
        if len(shape) > 1 and path in layers:
            groups.setdefault((split_path_at_numbers(path), len(shape)), []).append(path)
    repeated = [paths for paths in groups.values() if len(paths) > 1]
    outer = tuple(f"{path}." for paths in repeated for path in paths)
    inner = {path for paths in repeated for path in paths if path.startswith(outer)}
    return tuple(BlockStack(tuple(paths), outputs[paths[0]]) for paths in repeated if not inner & set(paths))


@dataclass(frozen=True)
class SearchedModel:
    """Variables and repeated layers of a model that a search finds layouts for."""

    variables: tuple[VariableSpec, ...]
    blocks: tuple[BlockStack, ...] = ()
    kept: RuleSet | None = None  # first rules of each map, which the search does not change

    @cached_property
    def groups(self) -> tuple[VariableGroup, ...]:
        """Groups of the variables that no kept rule matches, so that the search chooses their layouts."""
        return tuple(group for group in group_variables(self.variables) if not self._has_kept_rule(group))

    def _has_kept_rule(self, group: VariableGroup) -> bool:
        return self.kept is not None and any(self.kept.match(path).rule for path in group.paths)

    @cached_property
    def searched_blocks(self) -> tuple[BlockStack, ...]:
        """Stacks of blocks with outputs that no kept rule matches."""
        kept = self.kept
        return tuple(b for b in self.blocks if kept is None or not kept.activations.match(b.paths[0]).rule)

    @cached_property
    def variable_paths_by_alias(self) -> dict[str, str]:
        """Map from each path or alias that a rule could match to the path of its variable."""
        return {
            path: v.path
            for v in self.variables
            if v.kind in (Kind.WEIGHT, Kind.STATE, Kind.RNG)
            for path in (v.path, *v.aliases)
        }

    def make_layout_map(
        self, roles: MeshRoles, layouts: GroupLayouts, output_specs: Mapping[BlockStack, Specs | None]
    ) -> RuleSet:
        """Return the map with these layouts. A bias without one follows its kernel, and other groups are replicated."""
        every = dict(layouts)
        for bias, kernel in map_biases_to_kernels(self.groups).items():
            if bias not in every and kernel in every:
                every[bias] = make_bias_specs(bias, kernel, every[kernel], roles)
        by_paths = {group.paths: every.get(group, (None,) * group.rank) for group in self.groups}
        rules = make_rules_for_path_groups(by_paths, self.variable_paths_by_alias)
        outputs = {
            f"(.*\\.)?{make_path_regex(b.paths)}": specs
            for b, specs in output_specs.items()
            if specs is not None
        }
        made = RuleSet(roles.mesh, rest="replicated")
        if self.kept is not None:
            made.update(self.kept)
        made.update({p: s for p, s in rules.items() if p not in made})
        made.activations.update({p: s for p, s in outputs.items() if p not in made.activations})
        return made


class LayoutSpace:
    """Layout maps on one mesh as points. Each coordinate is an index of a layout to try.

    With `tie_similar`, a tuple has similar groups, and otherwise one group. `extra_layouts` are further layouts to try.
    """

    def __init__(
        self,
        model: SearchedModel,
        roles: MeshRoles,
        *,
        tie_similar: bool = True,
        extra_layouts: Iterable[tuple[GroupLayouts, Mapping[BlockStack, Specs | None]]] = (),
    ):
        self.model, self.roles = model, roles
        extra_layouts = tuple(extra_layouts)
        classes = select_searched_groups(model.groups)
        self.classes = classes if tie_similar else tuple((group,) for each in classes for group in each)
        self._choices = [_list_shared_choices(groups, roles) for groups in self.classes]
        for groups, choices in zip(self.classes, self._choices, strict=True):
            choices += [_list_specs(groups, layouts) for layouts, _ in extra_layouts]
            choices[:] = dict.fromkeys(choices)
        blocks = model.searched_blocks
        common = [list_activation_options(b.shape, roles) for b in blocks]
        options = [
            tuple(s if s in o else None for o in common) for s in dict.fromkeys(s for o in common for s in o)
        ]
        extra = [tuple(outputs.get(b) for b in blocks) for _, outputs in extra_layouts]
        self._outputs = list(dict.fromkeys([*options, *extra])) if blocks else [tuple[Specs | None, ...]()]

    @property
    def num_choices(self) -> tuple[int, ...]:
        """Number of choices for each coordinate."""
        return (*map(len, self._choices), len(self._outputs))

    def make_layout_map(self, point: Point) -> RuleSet:
        """Return the layout map for a point."""
        layouts, blocks = self.get_layouts_of_point(point)
        return self.model.make_layout_map(self.roles, layouts, blocks)

    def get_layouts_of_point(
        self, point: Point
    ) -> tuple[dict[VariableGroup, Specs], dict[BlockStack, Specs | None]]:
        """Return a point's layouts as two dicts: from variable groups and from stacks of blocks to their specs."""
        layouts: dict[VariableGroup, Specs] = {}
        for groups, choices, choice in zip(self.classes, self._choices, point, strict=False):
            layouts.update(zip(groups, choices[choice], strict=True))
        return layouts, dict(zip(self.model.searched_blocks, self._outputs[point[-1]], strict=True))

    def find_point(self, layouts: GroupLayouts, output_specs: Mapping[BlockStack, Specs | None]) -> Point:
        """Return the point that has these layouts. Raise a `ValueError` if they are not among the choices."""
        classes = [
            choices.index(_list_specs(groups, layouts))
            for groups, choices in zip(self.classes, self._choices, strict=True)
        ]
        outputs = tuple(output_specs.get(b) for b in self.model.searched_blocks)
        return (*classes, self._outputs.index(outputs))


def _list_shared_choices(groups: Sequence[VariableGroup], roles: MeshRoles) -> list[tuple[Specs, ...]]:
    """Return the choices of groups that share an option. Each choice has the specs of all groups under one option."""
    options = dict.fromkeys(option for group in groups for option in list_group_options(group, roles))
    return [tuple(make_group_specs(group, option, roles) for group in groups) for option in options]


def _list_specs(groups: Sequence[VariableGroup], layouts: GroupLayouts) -> tuple[Specs, ...]:
    return tuple(layouts.get(group, (None,) * group.rank) for group in groups)
