"""Layouts that fit: what is taken where an axis does not divide, and what a variable takes over from another.

A rule says what is to happen to an axis whose size is no multiple of the number of shards:

    "error"      nothing is made; the plan says what to fix
    "replicate"  that axis is left unsharded
    "shrink"     it is sharded over as many of its mesh dims as divide it

A derived variable (a LoRA factor, the scale of a quantized kernel, a slot of an optimizer) is laid out as its parent,
axis for axis, by what each of its axes means.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Literal, get_args

from layoutmap.core.arguments import as_shape
from layoutmap.core.errors import RuleError, brief
from layoutmap.core.layout import Layout

Uneven = Literal["error", "replicate", "shrink"]
"""The policy for an axis that does not divide."""

Axes = tuple[tuple[int, ...], ...]
"""For each axis of a derived variable the axes of its parent that it is made of, major to minor; `()`: of none."""


def as_uneven(value: object, where: str) -> Uneven:
    """A policy, checked.

    Raises:
        RuleError: It is none.
    """
    for known in get_args(Uneven):
        if value == known:
            return known
    raise RuleError(
        f"{where}: uneven={brief(value)}",
        why="it says what happens to an axis that does not divide",
        fix=f"use one of {', '.join(map(repr, get_args(Uneven)))}",
    )


def fitted(layout: Layout, shape: Sequence[int], uneven: Uneven) -> Layout:
    """The layout that a tensor gets where a rule gives it one.

    Args:
        layout: The rule's layout.
        shape: The tensor's shape. One of another rank keeps the layout, and with it the error.
        uneven: What happens to an axis that does not divide. With `"shrink"` the subset of the axis's dims with the
            most shards is taken; of two with as many, that with the more major dims.

    Example:
        >>> from layoutmap import Mesh
        >>> layout = Layout([("data", "model"), None], Mesh(None, "data=3,model=4"))
        >>> print(fitted(layout, (16, 8), "shrink"), fitted(layout, (16, 8), "replicate"))
        (model, unsharded) (unsharded, unsharded)
    """
    if uneven == "error" or layout.rank != len(shape):
        return layout
    bad = layout.uneven_axes(shape)
    if not bad:
        return layout
    specs = list(layout.sharding_specs)
    for axis in bad:
        dims = layout.mesh_dims_of(axis) if uneven == "shrink" else ()
        specs[axis] = _largest(dims, as_shape(shape)[axis] or 0, layout)
    return Layout.from_valid_specs(specs, layout.mesh)


def _largest(dims: Sequence[str], size: int, layout: Layout) -> tuple[str, ...]:
    """The subset of an axis's dims, in their order, that splits it evenly into the most shards."""
    subsets = [s for n in range(len(dims) + 1) for s in itertools.combinations(dims, n)]
    counts = {s: math.prod(layout.mesh.dim_size(d) for d in s) for s in subsets}
    return max((s for s in subsets if size % counts[s] == 0), key=lambda s: counts[s])


def with_single_dims(layout: Layout) -> Layout:  # why: decisions/0004
    """The layout with each axis over one mesh dim, the largest of its dims; of two as large, the more major one.

    An axis whose other dims have one device stays as it is: they shard nothing.

    Example:
        >>> from layoutmap import Mesh
        >>> print(with_single_dims(Layout([("data", "model"), None], Mesh(None, "data=3,model=4"))))
        (model, unsharded)
    """
    specs = list(layout.sharding_specs)
    for axis in range(layout.rank):
        largest = max(layout.mesh_dims_of(axis), key=layout.mesh.dim_size, default="")
        if largest and layout.num_shards(axis) > layout.mesh.dim_size(largest):
            specs[axis] = largest
    return Layout.from_valid_specs(specs, layout.mesh)


def derived_layout(parent: Layout, axes: Axes) -> Layout:
    """The layout of a variable whose axes are those of another.

    An axis that is made of several follows the first, along which it is sharded in whole runs.

    Args:
        parent: The layout of the other variable.
        axes: What the axes are made of.

    Example:
        >>> from layoutmap import Mesh
        >>> kernel = Layout([None, "model"], Mesh(None, "batch=2,model=4"))
        >>> print(derived_layout(kernel, ((0,), ())), derived_layout(kernel, ((1,),)))
        (unsharded, unsharded) (model,)
    """
    return Layout([parent.mesh_dims_of(of[0]) if of else () for of in axes], parent.mesh)


def sharded_further(layout: Layout, shape: Sequence[int], dim: str) -> Layout:
    """A layout that is sharded over one more mesh dim, along the first axis that divides; as it is if none does.

    Args:
        layout: The layout.
        shape: The tensor's shape.
        dim: The mesh dim. A layout that is sharded over it stays as it is.

    Example:
        >>> from layoutmap import Mesh
        >>> print(sharded_further(Layout(["model", None], Mesh(None, "batch=2,model=4")), (16, 8), "batch"))
        ((model, batch), unsharded)
    """
    dims = [layout.mesh_dims_of(axis) for axis in range(layout.rank)]
    if layout.rank != len(shape) or any(dim in of for of in dims):
        return layout
    for axis, size in enumerate(shape):
        if size and size % (layout.num_shards(axis) * layout.mesh.dim_size(dim)) == 0:
            dims[axis] = (*dims[axis], dim)
            return Layout.from_valid_specs(dims, layout.mesh)
    return layout
