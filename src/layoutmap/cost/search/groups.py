"""The variables of a model in groups that a search lays out as one: equal blocks are tied, biases follow kernels."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from layoutmap.core.paths import split_at_numbers
from layoutmap.core.variables import Kind, VariableSpec

_SMALL = (
    0.001  # of all bytes: what such a group takes decides nothing, and its rule would be one more to read
)


@dataclass(frozen=True)
class Group:
    """Variables of one shape whose paths differ in numbers only: those of equal blocks.

    Args:
        paths: Their paths, in the order of the model.
        shape: Their shape.
        roles: What their layer does with their axes, as `Use.roles`; empty if that is not known.
        num_bytes: Global size of all of them.
        head_size: The size of one head of attention, where heads are side by side in one axis.
        parity: Of layers that are themselves the items of a list, whether their numbers are odd: Megatron's split of
            such a list alternates.
    """

    paths: tuple[str, ...]
    shape: tuple[int, ...]
    roles: tuple[str, ...]
    num_bytes: int
    head_size: int | None = None
    parity: int | None = None

    @property
    def rank(self) -> int:
        """Their number of axes."""
        return len(self.shape)

    @cached_property
    def layer(self) -> tuple[str, ...]:
        """The path of their layer, between its numbers."""
        return split_at_numbers(self.paths[0].rpartition(".")[0])

    def divides(self, axis: int, count: int, *, heads: bool = False) -> bool:
        """Whether an axis can be sharded evenly into so many shards; with `heads`, into whole heads."""
        unit = self.head_size if heads and self.head_size else 1
        return self.shape[axis] > 0 and self.shape[axis] % (count * unit) == 0

    def axes(self, role: str) -> tuple[int, ...]:
        """The axes of a role: `"in"`, `"out"` or `"rows"`, the first of them first."""
        named = [(name, axis) for axis, name in enumerate(self.roles) if name.partition(".")[0] == role]
        return tuple(axis for _, axis in sorted(named))

    @cached_property
    def alike(self) -> tuple[object, ...]:
        """The properties of groups that are searched as one: the same use, and all that widen or all that narrow."""
        if not (self.axes("in") and self.axes("out")):
            return (self.shape, self.roles)
        inside, outside = (math.prod(self.shape[a] for a in self.axes(role)) for role in ("in", "out"))
        if self.rank > 2:  # heads have an axis of their own, which tells on which side they are
            return (self.roles,)
        how = (inside > outside) - (inside < outside) or (self.layer[-1], self.parity)
        return (self.roles, self.head_size is None, how)


def groups_of(variables: Iterable[VariableSpec]) -> tuple[Group, ...]:
    """The groups of all variables that rules are for, in the order of the model.

    Example:
        >>> kernels = [VariableSpec(f"blocks.{n}.up.kernel", (8, 32), "float32") for n in range(4)]
        >>> groups_of([*kernels, VariableSpec("head.kernel", (8, 99), "float32")])[0].num_bytes
        4096
    """
    found: dict[tuple[object, ...], list[VariableSpec]] = {}
    for variable in variables:
        if variable.kind in (Kind.WEIGHT, Kind.STATE) and not variable.follows and variable.rule_shape:
            key = split_at_numbers(variable.path), variable.rule_shape, _parity(variable)
            found.setdefault(key, []).append(variable)
    return tuple(_group(each) for each in found.values())


_ITEM = re.compile(r"(\d+)\.[^.]+$")


def _parity(variable: VariableSpec) -> int | None:
    item = _ITEM.search(variable.path)
    return int(item[1]) % 2 if item and variable.use else None


def _group(variables: Sequence[VariableSpec]) -> Group:
    uses = {(v.use.roles, v.use.head_size) if v.use else ((), None) for v in variables}
    roles, head_size = uses.pop() if len(uses) == 1 else ((), None)
    return Group(
        tuple(v.path for v in variables),
        variables[0].rule_shape,
        roles,
        sum(v.global_bytes for v in variables),
        head_size,
        _parity(variables[0]),
    )


def searched(groups: Sequence[Group]) -> tuple[tuple[Group, ...], ...]:
    """The groups whose layouts are searched, those that are alike together.

    A group of small variables is not among them: a bias follows the kernel of its layer, a norm is replicated.
    """
    total = sum(group.num_bytes for group in groups)
    classes: dict[object, list[Group]] = {}
    for group in groups:
        if group.num_bytes >= _SMALL * total and (group.rank > 1 or group.num_bytes >= 0.1 * total):
            classes.setdefault(group.alike, []).append(group)
    return tuple(tuple(each) for each in classes.values())


def kernels_of_biases(groups: Sequence[Group]) -> Mapping[Group, Group]:
    """For each group of small variables with roles, the kernels of the same layers."""
    kernels = {
        (group.layer, group.parity): group for group in groups if group.axes("in") and group.axes("out")
    }
    return {
        group: kernels[group.layer, group.parity]
        for group in groups
        if group.roles and not group.axes("in") and (group.layer, group.parity) in kernels
    }
