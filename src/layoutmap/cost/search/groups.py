"""Group the variables at the same position of equal blocks, because a search gives them the same layout."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from layoutmap.core.paths import split_path_at_numbers
from layoutmap.core.variables import Kind, VariableSpec

_SMALL = 0.001  # the search chooses no layout for a group with less than this share of all bytes


@dataclass(frozen=True)
class VariableGroup:
    """Variables of one shape at the same position in equal blocks."""

    paths: tuple[str, ...]
    shape: tuple[int, ...]
    roles: tuple[str, ...]  # roles of the axes, as in `VariableSpec.use.roles`; empty: unknown
    num_bytes: int  # bytes of all variables together, unsharded
    head_size: int | None = None  # size of an attention head, if one axis contains all heads
    # index in a list of layers, modulo 2, because Megatron's split alternates between the layers; None: not in a list
    parity: int | None = None

    @property
    def rank(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @cached_property
    def layer_path_parts(self) -> tuple[str, ...]:
        """Path of the layer, split at its numbers, so that it is equal for repeated layers."""
        return split_path_at_numbers(self.paths[0].rpartition(".")[0])

    def can_shard(self, axis: int, num_shards: int, *, whole_heads: bool = False) -> bool:
        """Return whether an axis has `num_shards` equal shards, without split attention heads if `whole_heads`."""
        unit = self.head_size if whole_heads and self.head_size else 1
        return self.shape[axis] > 0 and self.shape[axis] % (num_shards * unit) == 0

    def find_axes(self, role: str) -> tuple[int, ...]:
        """Return the axes with the role `"in"`, `"out"`, or `"rows"`, sorted by number for roles like `"in.0"`."""
        named = [(name, axis) for axis, name in enumerate(self.roles) if name.partition(".")[0] == role]
        return tuple(axis for _, axis in sorted(named))

    @cached_property
    def similarity_key(self) -> tuple[object, ...]:
        """Key that is equal for similar groups. They share one layout in the first part of a search."""
        if not (self.find_axes("in") and self.find_axes("out")):
            return (self.shape, self.roles)
        inside, outside = (math.prod(self.shape[a] for a in self.find_axes(role)) for role in ("in", "out"))
        # Heads have an axis of their own, so the roles alone tell the kernels of attention apart.
        if self.rank > 2:
            return (self.roles,)
        how = (inside > outside) - (inside < outside) or (self.layer_path_parts[-1], self.parity)
        return (self.roles, self.head_size is None, how)


def group_variables(variables: Iterable[VariableSpec]) -> tuple[VariableGroup, ...]:
    """Return the groups of all variables that rules can match (weights and state), in the order of the model.

    Example:
        >>> kernels = [VariableSpec(f"blocks.{n}.up.kernel", (8, 32), "float32") for n in range(4)]
        >>> group_variables([*kernels, VariableSpec("head.kernel", (8, 99), "float32")])[0].num_bytes
        4096
    """
    found: dict[tuple[object, ...], list[VariableSpec]] = {}
    for variable in variables:
        if variable.kind in (Kind.WEIGHT, Kind.STATE) and not variable.is_derived and variable.rule_shape:
            key = (split_path_at_numbers(variable.path), variable.rule_shape, _get_index_parity(variable))
            found.setdefault(key, []).append(variable)
    return tuple(_make_variable_group(each) for each in found.values())


_ITEM = re.compile(r"(\d+)\.[^.]+$")


def _get_index_parity(variable: VariableSpec) -> int | None:
    item = _ITEM.search(variable.path)
    return int(item[1]) % 2 if item and variable.use else None


def _make_variable_group(variables: Sequence[VariableSpec]) -> VariableGroup:
    uses = {(v.use.roles, v.use.head_size) if v.use else ((), None) for v in variables}
    roles, head_size = uses.pop() if len(uses) == 1 else ((), None)
    return VariableGroup(
        tuple(v.path for v in variables),
        variables[0].rule_shape,
        roles,
        sum(v.global_bytes for v in variables),
        head_size,
        _get_index_parity(variables[0]),
    )


def select_searched_groups(groups: Sequence[VariableGroup]) -> tuple[tuple[VariableGroup, ...], ...]:
    """Return the groups for which a search chooses layouts, as tuples of similar groups that share one choice.

    Groups of small variables are left out: a bias follows the kernel of its layer, and a norm is replicated.
    """
    total = sum(group.num_bytes for group in groups)
    classes: dict[object, list[VariableGroup]] = {}
    for group in groups:
        if group.num_bytes >= _SMALL * total and (group.rank > 1 or group.num_bytes >= 0.1 * total):
            classes.setdefault(group.similarity_key, []).append(group)
    return tuple(tuple(each) for each in classes.values())


def map_biases_to_kernels(groups: Sequence[VariableGroup]) -> Mapping[VariableGroup, VariableGroup]:
    """Map each group of biases to the group of kernels that belong to the same layers."""
    kernels = {
        (group.layer_path_parts, group.parity): group
        for group in groups
        if group.find_axes("in") and group.find_axes("out")
    }
    return {
        group: kernels[group.layer_path_parts, group.parity]
        for group in groups
        if group.roles and not group.find_axes("in") and (group.layer_path_parts, group.parity) in kernels
    }
