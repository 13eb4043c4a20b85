"""Suggest a layout for a replicated variable, which lint does not report.

The plan's list of replicated variables, the fix of a variable without a rule, and lint take their layouts from here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

from layoutmap.core.layout import Layout
from layoutmap.core.specs import spec_from_dims
from layoutmap.core.variables import Assignment, Kind
from layoutmap.plan.lint.weights import Linted, Weight, get_sibling_key, is_attention_output


class Suggestions:
    """Layouts for the replicated variables of a plan, one weight at a time.

    Each fits the other weights as they are, so they may be followed in any order: of two consecutive kernels the first
    is sharded by its output axis and the second by its input axis (decisions/0210).
    """

    def __init__(self, linted: Linted) -> None:
        self._linted = linted
        mesh = linted.plan.mesh
        dims = [dim for dim in mesh.mesh_dims if dim.size > 1]
        self._dims = sorted(dims, key=lambda dim: (dim.name in linted.batch_dims, -dim.size))

    def suggest_layout(self, a: Assignment) -> Layout | None:
        """Return the layout for a replicated variable, or None if it is best replicated or no axis divides."""
        w = self._weights.get(id(a))
        if w is None or w.axes("rows"):
            rows = w.axes("rows") if w else ()
            axes = sorted(range(len(a.variable.shape)), key=lambda axis: axis not in rows)
            return self._find_sibling(a) or self._shard_first(a, axes)
        return self._suggest_for_kernel(w) if w.axes("in") and w.axes("out") else self._follow_kernel(w)

    def _suggest_for_kernel(self, w: Weight) -> Layout | None:
        out, into = w.axes("out")[0], w.axes("in")[0]
        for maker in self._linted.kernels_before.get(id(w), ()):
            if dims := self._remove_batch_dim(maker.dims(maker.axes("out")[0])):
                return self._shard(w, into, dims)
        for taker in self._linted.kernels_after.get(id(w), ()):
            if dims := self._remove_batch_dim(taker.dims(taker.axes("in")[0])):
                return self._shard(w, out, dims)
        for part in self._parts.get(id(w), ()):
            if dims := part.dims(part.axes("out")[0]):
                return self._shard(w, out, dims)
        if sibling := self._find_sibling(w.assignment):
            return sibling
        if id(w) in self._row_kernels:
            dims = self._remove_batch_dim(
                self._previous_kernels[id(w)].dims(self._previous_kernels[id(w)].axes("out")[0])
            )
            row = self._shard(w, into, dims) if dims else self._shard_largest(w, into)
            return row or self._shard_over_batch_dim(w, out)
        makers, is_paired = self._linted.kernels_before.get(id(w), ()), id(w) in self._linted.kernels_after
        # Sharded outputs of a kernel help only if the next kernel reads them sharded.
        if not is_paired and any(maker.dims(maker.axes("in")[0]) for maker in makers):
            return self._shard_largest(w, into)
        found = self._shard_largest(w, out)
        is_paired = is_paired or bool(makers)
        return found if found is not None or is_paired else self._shard_largest(w, into)

    def _find_sibling(self, a: Assignment) -> Layout | None:
        """Return the layout of the same weight in another block, if that is sharded."""
        return self._siblings.get(get_sibling_key(a))

    def _follow_kernel(self, w: Weight) -> Layout | None:
        """Return the layout of a bias over the dims of its kernel."""
        kernel = self._kernels.get((w.assignment.variable.model, w.layer))
        return None if kernel is None else make_matching_layout(w, kernel)

    def suggest_from_bias(self, kernel: Weight, bias: Weight, axis: int) -> Layout | None:
        """Return the layout of a kernel with an output axis sharded as an axis of its bias is.

        The result is `None` if the bias is wrong: the kernel is sharded by its outputs or takes sharded inputs, another
        layout fits the kernels next to it, or the biases of other blocks differ.
        """
        linted = self._linted
        dims = bias.dims(bias.use.roles.index(kernel.use.roles[axis]))
        siblings = [w for w in linted.siblings[get_sibling_key(bias.assignment)] if w is not bias]
        is_row = id(kernel) in self._row_kernels or is_attention_output(kernel)
        is_stored = {*dims} <= {*linted.batch_dims}
        if (
            kernel.dims(axis)
            or (is_row and not is_stored)
            or sum(w.layout != bias.layout for w in siblings) > len(siblings) / 2
        ):
            return None
        near = (*linted.kernels_before.get(id(kernel), ()), *linted.kernels_after.get(id(kernel), ()))
        if is_stored or not any(other.dims(number) for other in near for number in range(len(other.shape))):
            return self._shard(kernel, axis, dims)
        layout = self._suggest_for_kernel(kernel)
        return layout if layout is not None and layout.list_mesh_dims(axis) == dims else None

    def _shard_largest(self, w: Weight, axis: int) -> Layout | None:
        # If a summed axis is sharded over the batch dim, each step gathers the weight or the batch.
        is_sum = w.use.roles[axis].startswith("in")
        for dim in self._dims:
            if not (is_sum and dim.name in self._linted.batch_dims):
                found = self._shard(w, axis, (dim.name,))
                if found is not None:
                    return found
        return None

    def _shard_over_batch_dim(self, w: Weight, axis: int) -> Layout | None:
        """Return the layout of a row kernel that is stored in shards over the batch dim, or None if that is uneven."""
        dims = [dim.name for dim in self._dims if dim.name in self._linted.batch_dims]
        return next((found for dim in dims if (found := self._shard(w, axis, (dim,)))), None)

    def _shard(self, w: Weight, axis: int, dims: tuple[str, ...]) -> Layout | None:
        """Return the layout with one axis sharded, or None if that is uneven or splits a head of attention."""
        layout = make_sharded_layout(w.layout, axis, dims)
        if layout.find_uneven_axes(w.shape):
            return None
        role = w.use.roles[axis].partition(".")[0]
        is_of_heads = role == "out" if id(w) in self._parts else role == "in" and is_attention_output(w)
        unit = w.use.head_size if is_of_heads and w.use.head_size else 1
        return None if w.shape[axis] // layout.num_shards(axis) % unit else layout

    def _shard_first(self, a: Assignment, axes: Sequence[int]) -> Layout | None:
        """Return the layout with the first axis sharded that the largest dim divides."""
        shape = a.variable.shape
        for dim in self._dims:
            for axis in axes:
                if shape[axis] and shape[axis] % dim.size == 0:
                    return make_sharded_layout(a.layout, axis, (dim.name,))
        return None

    def _remove_batch_dim(self, dims: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(dim for dim in dims if dim not in self._linted.batch_dims)

    @cached_property
    def _weights(self) -> Mapping[int, Weight]:
        return {id(w.assignment): w for w in self._linted.weights}

    @cached_property
    def _kernels(self) -> Mapping[tuple[str, str], Weight]:
        return {(w.assignment.variable.model, w.layer): w for w in self._linted.kernels}

    @cached_property
    def _siblings(self) -> Mapping[object, Layout]:
        """Layouts of sharded weights by path without numbers and shape."""
        return {
            get_sibling_key(a): a.layout
            for a in self._linted.plan.assignments
            if a.fits and a.variable.kind is Kind.WEIGHT and not a.layout.is_fully_replicated()
        }

    @cached_property
    def _parts(self) -> Mapping[int, Sequence[Weight]]:
        """Query, key, and value kernels of an attention by each of them."""
        found: dict[int, Sequence[Weight]] = {}
        for block in self._linted.blocks:
            parts = list(self._linted.parts(block).values())
            found |= {id(w): parts for w in parts}
        return found

    @cached_property
    def _previous_kernels(self) -> Mapping[int, Weight]:
        """The last kernel before a kernel in its block that outputs the sizes of its input."""
        found: dict[int, Weight] = {}
        for block in self._linted.blocks:
            outputs: dict[tuple[int, ...], Weight] = {}
            for w in block:
                if w.sizes("in") in outputs:
                    found[id(w)] = outputs[w.sizes("in")]
                outputs[w.sizes("out")] = w
        return found

    @cached_property
    def _row_kernels(self) -> frozenset[int]:
        """Kernels that are sharded by input axes, since those before them are sharded by output axes."""
        rows: set[int] = set()
        for w in self._linted.kernels:
            before = self._previous_kernels.get(id(w))
            if id(w) in self._linted.kernels_after and id(w) not in self._linted.kernels_before:
                continue  # the first kernel of a pair is handled with its second one
            if before is not None and id(before) not in rows and id(w) not in self._parts:
                rows.add(id(w))
        return frozenset(rows)


def make_sharded_layout(layout: Layout, axis: int, dims: tuple[str, ...]) -> Layout:
    """Return a layout with one axis sharded over dims. Other axes keep their own, without these dims."""
    kept = [
        dims if number == axis else tuple(dim for dim in layout.list_mesh_dims(number) if dim not in dims)
        for number in range(layout.rank)
    ]
    return Layout.from_valid_specs(map(spec_from_dims, kept), layout.mesh, layout.memory)


def make_matching_layout(w: Weight, kernel: Weight) -> Layout | None:
    """Return the layout of a bias with its axes sharded as those of its kernel, or None if that is replicated."""
    axes = {kernel.use.roles[axis]: axis for axis in kernel.axes("out")}
    layout = Layout.replicated(w.layout.mesh, w.layout.rank)
    for axis in w.axes("out"):
        number = axes.get(w.use.roles[axis])
        if number is not None and kernel.dims(number):
            layout = make_sharded_layout(layout, axis, kernel.dims(number))
    is_kept = layout.is_fully_replicated() or layout.find_uneven_axes(w.shape)
    return None if is_kept else layout
