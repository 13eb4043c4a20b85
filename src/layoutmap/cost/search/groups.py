"""Group the variables that share a layout in a search: equal blocks share one, and biases follow kernels."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from layoutmap.core.paths import split_at_numbers
from layoutmap.core.variables import Kind, VariableSpec

_SMALL = 0.001  # share of all bytes below which a group is not searched


@dataclass(frozen=True)
class VariableGroup:
    """Variables of one shape at the same position in equal blocks."""

    paths: tuple[str, ...]
    shape: tuple[int, ...]
    roles: tuple[str, ...]  # of its axes, as `Use.roles`; empty if unknown
    num_bytes: int  # global size of all variables
    head_size: int | None = None  # of attention heads that share one axis
    # of list items: whether their numbers are odd, since Megatron's split of a list alternates
    parity: int | None = None

    @property
    def rank(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @cached_property
    def layer(self) -> tuple[str, ...]:
        """Path of the layer, split at its numbers."""
        return split_at_numbers(self.paths[0].rpartition(".")[0])

    def can_shard(self, axis: int, count: int, *, heads: bool = False) -> bool:
        """Return whether an axis has `count` even shards, of whole heads if `heads` is set."""
        unit = self.head_size if heads and self.head_size else 1
        return self.shape[axis] > 0 and self.shape[axis] % (count * unit) == 0

    def find_axes(self, role: str) -> tuple[int, ...]:
        """Return the axes with a role, `"in"`, `"out"`, or `"rows"`, in order."""
        named = [(name, axis) for axis, name in enumerate(self.roles) if name.partition(".")[0] == role]
        return tuple(axis for _, axis in sorted(named))

    @cached_property
    def search_class(self) -> tuple[object, ...]:
        """Properties that groups share if they are searched as one."""
        if not (self.find_axes("in") and self.find_axes("out")):
            return (self.shape, self.roles)
        inside, outside = (math.prod(self.shape[a] for a in self.find_axes(role)) for role in ("in", "out"))
        if self.rank > 2:  # a separate heads axis shows on which side the heads are
            return (self.roles,)
        how = (inside > outside) - (inside < outside) or (self.layer[-1], self.parity)
        return (self.roles, self.head_size is None, how)


def group_variables(variables: Iterable[VariableSpec]) -> tuple[VariableGroup, ...]:
    """Return the groups of all variables that rules apply to, in model order.

    Example:
        >>> kernels = [VariableSpec(f"blocks.{n}.up.kernel", (8, 32), "float32") for n in range(4)]
        >>> group_variables([*kernels, VariableSpec("head.kernel", (8, 99), "float32")])[0].num_bytes
        4096
    """
    found: dict[tuple[object, ...], list[VariableSpec]] = {}
    for variable in variables:
        if variable.kind in (Kind.WEIGHT, Kind.STATE) and not variable.follows and variable.rule_shape:
            key = split_at_numbers(variable.path), variable.rule_shape, _get_parity(variable)
            found.setdefault(key, []).append(variable)
    return tuple(_make_group(each) for each in found.values())


_ITEM = re.compile(r"(\d+)\.[^.]+$")


def _get_parity(variable: VariableSpec) -> int | None:
    item = _ITEM.search(variable.path)
    return int(item[1]) % 2 if item and variable.use else None


def _make_group(variables: Sequence[VariableSpec]) -> VariableGroup:
    uses = {(v.use.roles, v.use.head_size) if v.use else ((), None) for v in variables}
    roles, head_size = uses.pop() if len(uses) == 1 else ((), None)
    return VariableGroup(
        tuple(v.path for v in variables),
        variables[0].rule_shape,
        roles,
        sum(v.global_bytes for v in variables),
        head_size,
        _get_parity(variables[0]),
    )


def select_searched_groups(groups: Sequence[VariableGroup]) -> tuple[tuple[VariableGroup, ...], ...]:
    """Return the groups with searched layouts, one tuple for each shared choice.

    A group of small variables is not among them: a bias follows the kernel of its layer, a norm is replicated.
    """
    total = sum(group.num_bytes for group in groups)
    classes: dict[object, list[VariableGroup]] = {}
    for group in groups:
        if group.num_bytes >= _SMALL * total and (group.rank > 1 or group.num_bytes >= 0.1 * total):
            classes.setdefault(group.search_class, []).append(group)
    return tuple(tuple(each) for each in classes.values())


def match_biases(groups: Sequence[VariableGroup]) -> Mapping[VariableGroup, VariableGroup]:
    """Return the kernels of the same layers for each group of biases."""
    kernels = {
        (group.layer, group.parity): group
        for group in groups
        if group.find_axes("in") and group.find_axes("out")
    }
    return {
        group: kernels[group.layer, group.parity]
        for group in groups
        if group.roles and not group.find_axes("in") and (group.layer, group.parity) in kernels
    }
