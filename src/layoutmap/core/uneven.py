"""Derive layouts for axes that do not divide evenly, and for variables that follow another variable's layout.

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

from layoutmap.core.arguments import check_shape
from layoutmap.core.errors import RuleError, shorten_repr
from layoutmap.core.layout import Layout

Uneven = Literal["error", "replicate", "shrink"]
"""The policy for an axis that does not divide."""

Axes = tuple[tuple[int, ...], ...]
"""For each axis of a derived variable the axes of its parent that it is made of, major to minor; `()`: of none."""


def check_uneven(value: object, where: str) -> Uneven:
    """Return an `uneven` setting, after a check.

    Raises:
        RuleError: It is none.
    """
    for known in get_args(Uneven):
        if value == known:
            return known
    raise RuleError(
        f"{where}: uneven={shorten_repr(value)}",
        why="it says what happens to an axis that does not divide",
        fix=f"use one of {', '.join(map(repr, get_args(Uneven)))}",
    )


def fit_layout(layout: Layout, shape: Sequence[int], uneven: Uneven) -> Layout:
    """Return the layout that a tensor gets from a rule, with the `uneven` setting applied.

    Args:
        layout: The rule's layout.
        shape: The tensor's shape. One of another rank keeps the layout, and with it the error.
        uneven: What happens to an axis that does not divide. With `"shrink"` the subset of the axis's dims with the
            most shards is taken; of two with as many, that with the more major dims.

    Example:
        >>> from layoutmap import Mesh
        >>> layout = Layout([("data", "model"), None], Mesh(None, "data=3,model=4"))
        >>> print(fit_layout(layout, (16, 8), "shrink"), fit_layout(layout, (16, 8), "replicate"))
        (model, unsharded) (unsharded, unsharded)
    """
    if uneven == "error" or layout.rank != len(shape):
        return layout
    bad = layout.find_uneven_axes(shape)
    if not bad:
        return layout
    specs = list(layout.sharding_specs)
    for axis in bad:
        dims = layout.list_mesh_dims(axis) if uneven == "shrink" else ()
        specs[axis] = _find_largest_subset(dims, check_shape(shape)[axis] or 0, layout)
    return Layout.from_valid_specs(specs, layout.mesh)


def _find_largest_subset(dims: Sequence[str], size: int, layout: Layout) -> tuple[str, ...]:
    """Return the subset of an axis's dims, in their order, that splits it evenly into the most shards."""
    subsets = [s for n in range(len(dims) + 1) for s in itertools.combinations(dims, n)]
    counts = {s: math.prod(layout.mesh.dim_size(d) for d in s) for s in subsets}
    return max((s for s in subsets if size % counts[s] == 0), key=lambda s: counts[s])


# TensorFlow shards an axis over one dim only, so the plan uses the largest of several (decisions/0004).
def keep_largest_dims(layout: Layout) -> Layout:
    """Return the layout with each axis over only the largest of its mesh dims. A tie goes to the more major dim.

    An axis whose other dims have one device stays as it is: they shard nothing.

    Example:
        >>> from layoutmap import Mesh
        >>> print(keep_largest_dims(Layout([("data", "model"), None], Mesh(None, "data=3,model=4"))))
        (model, unsharded)
    """
    specs = list(layout.sharding_specs)
    for axis in range(layout.rank):
        largest = max(layout.list_mesh_dims(axis), key=layout.mesh.dim_size, default="")
        if largest and layout.num_shards(axis) > layout.mesh.dim_size(largest):
            specs[axis] = largest
    return Layout.from_valid_specs(specs, layout.mesh)


def derive_layout(parent: Layout, axes: Axes) -> Layout:
    """Return the layout of a variable from that of its parent. `axes` maps its axes to the parent's.

    An axis that is made of several follows the first, along which it is sharded in whole runs.

    Args:
        parent: The layout of the other variable.
        axes: What the axes are made of.

    Example:
        >>> from layoutmap import Mesh
        >>> kernel = Layout([None, "model"], Mesh(None, "batch=2,model=4"))
        >>> print(derive_layout(kernel, ((0,), ())), derive_layout(kernel, ((1,),)))
        (unsharded, unsharded) (model,)
    """
    return Layout([parent.list_mesh_dims(of[0]) if of else () for of in axes], parent.mesh)


def add_sharding_dim(layout: Layout, shape: Sequence[int], dim: str) -> Layout:
    """Return a layout that is also sharded over `dim`, along the first axis that divides, or the same layout.

    Args:
        layout: The layout.
        shape: The tensor's shape.
        dim: The mesh dim. A layout that is sharded over it stays as it is.

    Example:
        >>> from layoutmap import Mesh
        >>> print(add_sharding_dim(Layout(["model", None], Mesh(None, "batch=2,model=4")), (16, 8), "batch"))
        ((model, batch), unsharded)
    """
    dims = [layout.list_mesh_dims(axis) for axis in range(layout.rank)]
    if layout.rank != len(shape) or any(dim in of for of in dims):
        return layout
    for axis, size in enumerate(shape):
        if size and size % (layout.num_shards(axis) * layout.mesh.dim_size(dim)) == 0:
            dims[axis] = (*dims[axis], dim)
            return Layout.from_valid_specs(dims, layout.mesh)
    return layout
