"""Suggest layouts for replicated variables. Lint has no findings about the suggested layouts.

The plan's list of replicated variables, the fix for a variable without a rule, and lint use these layouts.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from layoutmap.core.layout import Layout
from layoutmap.core.specs import make_spec
from layoutmap.core.variables import Assignment, Kind, VariableSpec
from layoutmap.plan.lint.kernel_pairs import iterate_list_pairs
from layoutmap.plan.lint.linted_plan import LintedPlan
from layoutmap.plan.lint.low_rank import LowRankFactor
from layoutmap.plan.lint.weights import Weight, make_sibling_key

NAMES_OF_EXPERTS = ("expert", "experts")
"""Usual names of a mesh dim over which experts are sharded."""

_LEAST_BYTES, _LEAST_SHARE = 16 * 1024, 0.05
"""A table with fewer bytes and a smaller share of the weights stays replicated."""


class LayoutSuggestions:
    """Suggested layouts for the replicated variables of a plan.

    Each suggestion fits the present layouts of the other weights, so the suggestions can be applied in any order: the
    first of two consecutive kernels is sharded by its output axis and the second by its input axis (decisions/0210).

    Args:
        linted: The plan.
        find_changes: Function that returns the layouts with which lint replaces wrong ones, by the id of the
            assignment. Biases are sharded like these.
    """

    def __init__(
        self, linted: LintedPlan, find_changes: Callable[[], Mapping[int, Layout]] = dict[int, Layout]
    ) -> None:
        self.linted = linted
        self._find_changes = find_changes
        mesh = linted.plan.mesh
        dims = [dim for dim in mesh.mesh_dims if dim.size > 1]
        self._dims = sorted(
            dims, key=lambda dim: (dim.name in linted.batch_dims, dim.name in NAMES_OF_EXPERTS, -dim.size)
        )

    def advise_layout(self, a: Assignment) -> Layout | None:
        """Return the layout with which lint replaces a wrong one, else that of a sharded variable, else suggest one."""
        present = None if a.layout.is_fully_replicated() else a.layout
        return self._changed_layouts_by_id.get(id(a)) or present or self.suggest_layout(a)

    def suggest_layout(self, a: Assignment) -> Layout | None:
        """Return a sharded layout for a replicated variable, or None if no layout fits or it should stay replicated."""
        w = self.linted.weights_by_id.get(id(a))
        # A vector of unknown role is small, and each device needs whole routers and indices, so suggest no layout.
        is_kept = len(a.variable.shape) == 1 or is_index_or_mask(a.variable)
        if (w is None and is_kept) or id(a) in self.linted.experts.routers or self.is_small(a):
            return None
        if factor := self.linted.low_rank_factors.get(id(a)):
            return self._suggest_factor_layout(a, factor)
        if w is None or w.list_axes("rows"):
            sibling = self._find_sibling_layout(a)
            if sibling and w and self.linted.are_batch_outputs_free and not self._has_other_dim(sibling):
                sibling = None
            return sibling or self._suggest_first_even_axis_layout(a, w)
        if w.is_depthwise:
            return None
        is_kernel = w.list_axes("in") and w.list_axes("out")
        return self._suggest_kernel_layout(w) if is_kernel else self._suggest_bias_layout(w)

    def _suggest_factor_layout(self, a: Assignment, factor: LowRankFactor) -> Layout | None:
        """Return the layout for a low-rank factor: its axis is sharded like that of the base kernel with this role."""
        base = self.advise_layout(factor.base.assignment)
        if base is None or not factor.role:
            return None
        layout = make_sharded_layout(
            a.layout, factor.axis, base.list_mesh_dims(factor.base.list_axes(factor.role)[0])
        )
        return None if layout.is_fully_replicated() or layout.find_uneven_axes(a.variable.shape) else layout

    def is_small(self, a: Assignment) -> bool:
        """Return whether a variable is a table, or is added to each row of a batch, and too small to be sharded.

        An array of unknown role is added to each row if its first axis has size 1, like a table of positions.
        """
        w, size = self.linted.weights_by_id.get(id(a)), a.variable.global_bytes
        is_table = a.variable.shape[:1] == (1,) if w is None else bool(w.list_axes("rows"))
        return is_table and size < _LEAST_BYTES and size < _LEAST_SHARE * self._weight_bytes

    def _suggest_kernel_layout(self, w: Weight) -> Layout | None:
        """Return a layout for a kernel that fits the kernels before and after it, or None if no axis splits evenly."""
        out, into = w.list_axes("out")[0], w.list_axes("in")[0]
        for maker in self.linted.kernels_before.get(id(w), ()):
            if dims := self._remove_batch_dims(maker.list_dims(maker.list_axes("out")[0])):
                return self._make_even_layout(w, into, dims)
        for taker in self.linted.kernels_after.get(id(w), ()):
            if dims := self._remove_batch_dims(taker.list_dims(taker.list_axes("in")[0])):
                return self._make_even_layout(w, out, dims)
        for part in self._qkv_by_id.get(id(w), ()):
            if dims := part.list_dims(part.list_axes("out")[0]):
                return self._make_even_layout(w, out, dims)
        is_row = id(w) in self._row_sharded_kernel_ids
        makers, is_paired = self.linted.kernels_before.get(id(w), ()), id(w) in self.linted.kernels_after
        # If no next kernel reads sharded inputs, sharded outputs would be gathered, so then shard the input axis.
        is_last_row = not is_paired and any(
            maker.list_dims(maker.list_axes("in")[0]) or id(maker) in self._row_sharded_kernel_ids
            for maker in makers
        )
        for bias in self.linted.biases.get((w.assignment.variable.model, w.layer), ()):
            axes = [axis for axis, role in enumerate(bias.use.roles) if role == w.use.roles[out]]
            dims = self._remove_batch_dims(bias.list_dims(axes[0])) if axes else ()
            if dims and not (is_row or is_last_row or self._is_odd_bias(bias)):
                return self._make_even_layout(w, out, dims)
        if sibling := self._find_sibling_layout(w.assignment):
            return sibling
        if is_row:
            dims = self._remove_batch_dims(
                self.previous_kernels[id(w)].list_dims(self.previous_kernels[id(w)].list_axes("out")[0])
            )
            row = (
                self._make_even_layout(w, into, dims)
                if dims
                else self._suggest_layout_over_largest_dim(w, into)
            )
            return row or self._suggest_layout_over_batch_dim(w, out)
        if is_last_row:
            return self._suggest_layout_over_largest_dim(w, into)
        found = self._suggest_layout_over_largest_dim(w, out)
        if is_paired or makers or (found and self._remove_batch_dims(found.list_mesh_dims(out))):
            return found
        return self._suggest_layout_over_largest_dim(w, into) or found

    def _find_sibling_layout(self, a: Assignment) -> Layout | None:
        """Return the layout of the same weight in another block, or None if it is replicated there, too."""
        return self._sibling_layouts.get(make_sibling_key(a))

    def _suggest_bias_layout(self, w: Weight) -> Layout | None:
        """Return the layout for a bias that is sharded like its kernel's outputs, or None if it stays replicated.

        It stays so beside a kernel in unknown order, because it fits then even if the kernel's axes are swapped.
        """
        kernel = self.linted.find_kernel_of_bias(w)
        if kernel is None or id(kernel) in self.linted.unordered_kernels:
            return None
        advised = self._changed_layouts_by_id.get(id(kernel.assignment), kernel.layout)
        return make_bias_layout(w, replace(kernel, assignment=replace(kernel.assignment, layout=advised)))

    def suggest_kernel_layout_from_bias(self, kernel: Weight, bias: Weight, axis: int) -> Layout | None:
        """Return the layout of a kernel with an output axis sharded like its bias, or None if the bias seems wrong.

        The bias seems wrong if the axis of the kernel is already sharded, the kernel takes sharded inputs, another
        layout fits the kernels beside it, or the biases of most other blocks differ.
        """
        linted = self.linted
        dims = bias.list_dims(bias.use.roles.index(kernel.use.roles[axis]))
        is_row = id(kernel) in self._row_sharded_kernel_ids or id(kernel) in self.linted.attention_outputs
        is_stored = {*dims} <= {*linted.batch_dims}
        if kernel.list_dims(axis) or (is_row and not is_stored) or self._is_odd_bias(bias):
            return None
        near = (*linted.kernels_before.get(id(kernel), ()), *linted.kernels_after.get(id(kernel), ()))
        if is_stored or not any(other.list_dims(n) for other in near for n in range(len(other.shape))):
            return self._make_even_layout(kernel, axis, dims)
        layout = self._suggest_kernel_layout(kernel)
        return layout if layout is not None and layout.list_mesh_dims(axis) == dims else None

    def _is_odd_bias(self, bias: Weight) -> bool:
        """Return whether most of the biases of repeated blocks are sharded differently from this one."""
        siblings = self.linted.siblings[make_sibling_key(bias.assignment)]
        return sum(w.layout != bias.layout for w in siblings) > len(siblings) / 2

    def _suggest_layout_over_largest_dim(self, w: Weight, axis: int) -> Layout | None:
        """Return the layout with an axis sharded over the largest mesh dim that divides it, or None if no dim does."""
        # If a summed axis is sharded over the batch dim, each step gathers the weight or the batch, so skip this dim.
        is_sum = w.use.roles[axis].startswith("in")
        for dim in self._dims:
            if not (is_sum and dim.name in self.linted.batch_dims):
                found = self._make_even_layout(w, axis, (dim.name,))
                if found is not None:
                    return found
        return None

    def _suggest_layout_over_batch_dim(self, w: Weight, axis: int) -> Layout | None:
        """Return the layout with an axis sharded over a batch dim, or None if no batch dim divides its size."""
        dims = [dim.name for dim in self._dims if dim.name in self.linted.batch_dims]
        return next((found for dim in dims if (found := self._make_even_layout(w, axis, (dim,)))), None)

    def _make_even_layout(self, w: Weight, axis: int, dims: tuple[str, ...]) -> Layout | None:
        """Return the layout with one axis sharded over dims, or None if it is uneven or splits an attention head."""
        layout = make_sharded_layout(w.layout, axis, dims)
        if layout.find_uneven_axes(w.shape):
            return None
        role = w.use.roles[axis].partition(".")[0]
        is_of_heads = (
            role == "out"
            if id(w) in self._qkv_by_id
            else role == "in" and id(w) in self.linted.attention_outputs
        )
        unit = w.use.head_size if is_of_heads and w.use.head_size else 1
        return None if w.shape[axis] // layout.num_shards(axis) % unit else layout

    def _suggest_first_even_axis_layout(self, a: Assignment, table: Weight | None) -> Layout | None:
        """Shard one axis over the largest mesh dim that divides any axis. Return the layout, or None if no dim does.

        It is an axis of rows of a table, or the axis of a stack of experts, else the largest one.
        """
        shape, dims = a.variable.shape, self._dims
        rows = table.list_axes("rows") if table else ()
        if table and self.linted.are_batch_outputs_free:  # lint would report a table over the batch dim
            dims = [dim for dim in dims if dim.name not in self.linted.batch_dims]
        axes = sorted(range(len(shape)), key=lambda axis: (axis not in rows, -shape[axis]))
        if self.linted.is_expert_stack(a):
            dims = sorted(dims, key=lambda dim: dim.name not in NAMES_OF_EXPERTS)
            axes = range(len(shape))
        for dim in dims:
            for axis in axes:
                if shape[axis] and shape[axis] % dim.size == 0:
                    return make_sharded_layout(a.layout, axis, (dim.name,))
        return None

    def suggest_table_layout(self, w: Weight) -> Layout:
        """Return a layout for a table over no dim of the batch. It is replicated if no other dim fits."""
        whole = Layout.replicated(w.layout.mesh, w.layout.rank)
        return self._suggest_first_even_axis_layout(replace(w.assignment, layout=whole), w) or whole

    def _has_other_dim(self, layout: Layout) -> bool:
        """Return whether a layout shards an axis over another dim than those of the batch."""
        return any(self._remove_batch_dims(layout.list_mesh_dims(axis)) for axis in range(layout.rank))

    def _remove_batch_dims(self, dims: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(dim for dim in dims if dim not in self.linted.batch_dims)

    @cached_property
    def _changed_layouts_by_id(self) -> Mapping[int, Layout]:
        return self._find_changes()

    @cached_property
    def _weight_bytes(self) -> int:
        variables = [a.variable for a in self.linted.plan.assignments]
        return sum(v.global_bytes for v in variables if v.kind is Kind.WEIGHT)

    @cached_property
    def _sibling_layouts(self) -> Mapping[object, Layout]:
        """A dict from the result of `make_sibling_key` to the layout of a sharded weight with this key."""
        return {
            make_sibling_key(a): a.layout
            for a in self.linted.plan.assignments
            if a.fits and a.variable.kind is Kind.WEIGHT and not a.layout.is_fully_replicated()
        }

    @cached_property
    def _qkv_by_id(self) -> Mapping[int, Sequence[Weight]]:
        """A dict from the id of each query, key, or value kernel to all three kernels of its layer."""
        found: dict[int, Sequence[Weight]] = {}
        for block in self.linted.blocks:
            kernels = list(self.linted.find_attention_kernels(block).values())
            found |= {id(w): kernels for w in kernels}
        return found

    @cached_property
    def previous_kernels(self) -> Mapping[int, Weight]:
        """A dict from the id of a kernel to the last kernel that computes its input."""
        chains = (pair for block in self.linted.blocks for pair in iterate_list_pairs(block))
        return {id(second): first for first, second in itertools.chain(chains, self.linted.kernel_pairs)}

    @cached_property
    def _row_sharded_kernel_ids(self) -> frozenset[int]:
        """The ids of kernels to shard by input axes, because the kernels before them are sharded by output axes."""
        rows: set[int] = set()
        for w in self.linted.kernels:
            before = self.previous_kernels.get(id(w))
            if id(w) in self.linted.kernels_after and id(w) not in self.linted.kernels_before:
                continue  # the first kernel of a pair is sharded by its output axis, and only the second by its input
            if before is not None and id(before) not in rows and id(w) not in self._qkv_by_id:
                rows.add(id(w))
        return frozenset(rows)


def is_index_or_mask(variable: VariableSpec) -> bool:
    """Return whether a variable is no weight and has the dtype of indices or masks. Packed weights have others."""
    return variable.kind is Kind.STATE and variable.dtype in ("bool", "int64")


def make_sharded_layout(layout: Layout, axis: int, dims: tuple[str, ...]) -> Layout:
    """Return a layout with one axis sharded over the mesh dims `dims`, which are removed from the other axes."""
    kept = [
        dims if n == axis else tuple(dim for dim in layout.list_mesh_dims(n) if dim not in dims)
        for n in range(layout.rank)
    ]
    return Layout.from_valid_specs(map(make_spec, kept), layout.mesh, layout.memory)


def make_bias_layout(w: Weight, kernel: Weight) -> Layout | None:
    """Return the layout of a bias that is sharded like its kernel, or None if it would be replicated or uneven."""
    axes = {kernel.use.roles[axis]: axis for axis in kernel.list_axes("out")}
    layout = Layout.replicated(w.layout.mesh, w.layout.rank)
    for axis in w.list_axes("out"):
        kernel_axis = axes.get(w.use.roles[axis])
        if kernel_axis is not None and kernel.list_dims(kernel_axis):
            layout = make_sharded_layout(layout, axis, kernel.list_dims(kernel_axis))
    is_kept = layout.is_fully_replicated() or layout.find_uneven_axes(w.shape)
    return None if is_kept else layout
