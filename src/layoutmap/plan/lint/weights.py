"""Weights with the roles and shards of their axes, for the checks of lint."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from layoutmap.core.layout import Layout
from layoutmap.core.paths import split_path_at_numbers
from layoutmap.core.variables import Assignment, AxisRoles
from layoutmap.plan.lint.inferred_roles import (
    ATTENTION_OUTPUT,
)


@dataclass(frozen=True, slots=True)
class Weight:
    """A weight with known axis roles, the mesh dims over which it is gathered, and those of the batch."""

    assignment: Assignment
    use: AxisRoles
    layer: str
    """The path of its layer."""
    gathered_dims: tuple[str, ...] = ()
    batch_dims: tuple[str, ...] = ()
    place: str = ""
    """The path of a wrapper module in place of the layer in its block. `""`: the layer has no wrapper."""

    @property
    def path(self) -> str:
        """The path of the weight."""
        return self.assignment.variable.path

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weight."""
        return self.assignment.variable.shape

    @property
    def layout(self) -> Layout:
        """The layout of the weight."""
        return self.assignment.layout

    @property
    def block(self) -> str:
        """Path of the module that contains the layer, or its wrapper."""
        return (self.place or self.layer).rpartition(".")[0]

    @property
    def layer_name(self) -> str:
        """The name of the layer, or of its wrapper, in its block."""
        return (self.place or self.layer).rpartition(".")[2]

    @property
    def name(self) -> str:
        """The path inside of the block, which is the same in all repeated blocks."""
        return self.path.removeprefix(f"{self.block}.")

    @property
    def is_depthwise(self) -> bool:
        """Whether it is of a convolution in which each output has one input: its outputs are sharded as its inputs."""
        return len(self.shape) > 2 and self.list_axis_sizes("in") == (1,)

    def list_axes(self, role: str) -> tuple[int, ...]:
        """Return the axes with a role, `"in"`, `"out"`, or `"rows"`, in the order of the numbers in their roles."""
        return _group_axes_by_role(self.use.roles).get(role, ())

    def list_axis_sizes(self, role: str) -> tuple[int, ...]:
        """Return the sizes of the axes with a role, `"in"`, `"out"`, or `"rows"`."""
        return _group_axis_sizes_by_role(self.use.roles, self.shape).get(role, ())

    def list_dims(self, axis: int) -> tuple[str, ...]:
        """Return the mesh dims over which an axis is sharded while its layer computes."""
        return list_sharding_dims_in_compute(self.layout, self.gathered_dims, self.batch_dims)[axis]

    def count_shards(self, axis: int) -> int:
        """Return the number of shards of an axis while its layer computes."""
        return math.prod(self.layout.mesh.dim_size(dim) for dim in self.list_dims(axis))

    def count_heads(self, role: str) -> int:
        """Return the number of attention heads along the first axis with a role, `"in"` or `"out"`."""
        return self.list_axis_sizes(role)[0] // (self.use.head_size or 1)

    @property
    def layout_text(self) -> str:
        """The layout and the rule that gave it, as text."""
        return f"{self.layout}{format_rule_suffix(self.assignment)}"


# Thousands of weights have only a few different roles and layouts, so results are cached.
@lru_cache(4096)
def _group_axes_by_role(roles: tuple[str, ...]) -> dict[str, tuple[int, ...]]:
    """Return a dict from role to axes: {"out": (0,), "in": (1, 2)} for the roles ("out.0", "in.0", "in.1")."""
    found: dict[str, list[int]] = {}
    for role, axis in sorted((role, axis) for axis, role in enumerate(roles)):
        found.setdefault(role.partition(".")[0], []).append(axis)
    return {role: tuple(axes) for role, axes in found.items()}


@lru_cache(4096)
def _group_axis_sizes_by_role(roles: tuple[str, ...], shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Return a dict from role to sizes: {"out": (8,), "in": (2, 4)} for ("out.0", "in.0", "in.1") and (8, 2, 4)."""
    return {role: tuple(shape[axis] for axis in axes) for role, axes in _group_axes_by_role(roles).items()}


@lru_cache(4096)
def list_sharding_dims_in_compute(
    layout: Layout, gathered_dims: tuple[str, ...], batch_dims: tuple[str, ...]
) -> tuple[tuple[str, ...], ...]:
    """Return for each axis the mesh dims over which a weight is sharded while its layer computes.

    `fully_shard` gathers a weight over `gathered_dims` before the product. The rows of the batch are sharded over its
    dim, so an axis that is sharded over the batch dim and other dims counts as sharded over the other dims only.
    """

    def list_axis_sharding_dims_in_compute(axis: int) -> tuple[str, ...]:
        dims = [dim for dim in layout.list_mesh_dims(axis) if layout.mesh.dim_size(dim) > 1]
        dims = [dim for dim in dims if dim not in gathered_dims]
        return tuple(dim for dim in dims if dim not in batch_dims or len(dims) == 1)

    return tuple(map(list_axis_sharding_dims_in_compute, range(layout.rank)))


def is_attention_output_name(layer_name: str) -> bool:
    """Return whether a layer has the name of an output projection of attention."""
    return ATTENTION_OUTPUT.fullmatch(layer_name) is not None


def make_sibling_key(a: Assignment) -> object:
    """Return a key that is equal for the same weight in repeated blocks, and different for all other weights."""
    v = a.variable
    return (v.model, split_path_at_numbers(v.path), v.shape) if any(map(str.isdigit, v.path)) else id(a)


def format_rule_suffix(assignment: Assignment) -> str:
    """Return the rule of a layout, or `no rule`, as text to append to the layout, or "" if rules do not apply to it."""
    match = assignment.match
    return (
        f"     {match.rule}"
        if match and match.rule
        else "     no rule"
        if match and not match.has_existing_layout
        else ""
    )
