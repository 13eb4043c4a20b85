"""Derive layouts for axes that cannot be split evenly, and for variables that follow another variable's layout.

A rule says what is to happen to an axis whose size is no multiple of the number of shards:

    "error"      no model is built; the plan says what to fix
    "replicate"  that axis is left unsharded
    "shrink"     it is sharded over as many of its mesh dims as divide it
    "pad"        its last shards hold fewer elements or none, and are padded where the framework needs equal shards

A tuple such as `("pad", "shrink")` names the next policy for variables that cannot be padded.

A derived variable (a LoRA factor, the scale of a quantized kernel, a slot of an optimizer) is sharded like its parent:
each of its axes stands for certain axes of the parent, and is sharded like these.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Literal, get_args

from layoutmap.core.arguments import validate_shape
from layoutmap.core.errors import RuleError, shorten_repr
from layoutmap.core.layout import Layout

Uneven = Literal["error", "replicate", "shrink", "pad"]
"""A policy for an axis that cannot be split evenly."""

UnevenSetting = Uneven | tuple[Uneven, ...]
"""A policy, or a tuple of `"pad"` and the policy for variables that cannot be padded."""

Axes = tuple[tuple[int, ...], ...]
"""Parent axes of each axis of a derived variable, major to minor. An axis that joins no parent axes has `()`."""


def validate_uneven_setting(value: object, where: str) -> UnevenSetting:
    """Check an `uneven` setting and return it, with a tuple in place of a list.

    Raises:
        RuleError: The value is not an `uneven` setting.
    """
    known: tuple[Uneven, ...] = get_args(Uneven)
    listed: list[tuple[Uneven, ...]] = [("pad", other) for other in known if other != "pad"]
    for setting in (*known, *listed):
        if value == setting or value == [*setting]:
            return setting
    raise RuleError(
        f"{where}: uneven={shorten_repr(value)} is not allowed",
        why="`uneven` sets what happens to an axis that cannot be split evenly",
        fix=f"use one of {', '.join(map(repr, known))}, or ('pad', 'shrink') where not all variables can be padded",
    )


def choose_uneven_policy(setting: UnevenSetting, *, can_pad: bool) -> Uneven:
    """Return the first policy of a setting that the variable allows, or `"error"` if it allows none.

    Example:
        >>> choose_uneven_policy(("pad", "shrink"), can_pad=False), choose_uneven_policy("pad", can_pad=False)
        ('shrink', 'error')
    """
    policies = _list_policies(setting)
    usable: list[Uneven] = [policy for policy in policies if can_pad or policy != "pad"]
    return usable[0] if usable else "error"


def format_uneven_setting(setting: UnevenSetting) -> str:
    """Return an `uneven` setting as text, as a user passes it as a keyword argument.

    Example:
        >>> format_uneven_setting("pad"), format_uneven_setting(("pad", "shrink"))
        ('uneven="pad"', 'uneven=("pad", "shrink")')
    """
    listed = ", ".join(f'"{policy}"' for policy in _list_policies(setting))
    return f"uneven={listed}" if isinstance(setting, str) else f"uneven=({listed})"


def _list_policies(setting: UnevenSetting) -> tuple[Uneven, ...]:
    return (setting,) if isinstance(setting, str) else setting


def apply_uneven_policy(layout: Layout, shape: Sequence[int], uneven: Uneven) -> Layout:
    """Return a rule's layout after an `uneven` policy has changed the specs of axes that cannot be split evenly.

    Args:
        layout: The rule's layout.
        shape: The tensor's shape. If its rank differs from that of the layout, the layout is returned unchanged.
        uneven: What happens to an axis that cannot be split evenly. `"shrink"` shards it over the subset of its mesh
            dims that divides it into the most shards; of two equal subsets, the one with the more major dims.
            `"replicate"` leaves it unsharded. `"pad"` and `"error"` change nothing.

    Example:
        >>> from layoutmap import Mesh
        >>> layout = Layout([("data", "model"), None], Mesh(None, "data=3,model=4"))
        >>> print(apply_uneven_policy(layout, (16, 8), "shrink"), apply_uneven_policy(layout, (16, 8), "replicate"))
        (model, unsharded) (unsharded, unsharded)
    """
    if uneven in ("error", "pad") or layout.rank != len(shape):
        return layout
    bad = layout.find_uneven_axes(shape)
    if not bad:
        return layout
    specs = list(layout.sharding_specs)
    for axis in bad:
        dims = layout.list_mesh_dims(axis) if uneven == "shrink" else ()
        specs[axis] = _find_largest_even_subset(dims, validate_shape(shape)[axis] or 0, layout)
    return Layout.from_valid_specs(specs, layout.mesh, layout.memory)


def _find_largest_even_subset(dims: Sequence[str], size: int, layout: Layout) -> tuple[str, ...]:
    """Return the subset of the mesh dims that splits an axis of this size evenly into the most shards."""
    subsets = [s for n in range(len(dims) + 1) for s in itertools.combinations(dims, n)]
    counts = {s: math.prod(layout.mesh.dim_size(d) for d in s) for s in subsets}
    return max((s for s in subsets if size % counts[s] == 0), key=lambda s: counts[s])


# TensorFlow shards an axis over one mesh dim only, so plans for it keep the largest dim (decisions/0004).
def keep_largest_dim_per_axis(layout: Layout) -> Layout:
    """Return the layout with each axis sharded only over its largest mesh dim, or the most major of equally large dims.

    An axis is unchanged if its other mesh dims have size 1, because they shard nothing.

    Example:
        >>> from layoutmap import Mesh
        >>> print(keep_largest_dim_per_axis(Layout([("data", "model"), None], Mesh(None, "data=3,model=4"))))
        (model, unsharded)
    """
    specs = list(layout.sharding_specs)
    for axis in range(layout.rank):
        largest = max(layout.list_mesh_dims(axis), key=layout.mesh.dim_size, default="")
        if largest and layout.num_shards(axis) > layout.mesh.dim_size(largest):
            specs[axis] = largest
    return Layout.from_valid_specs(specs, layout.mesh, layout.memory)


def derive_layout_from_parent(parent: Layout, axes: Axes) -> Layout:
    """Return the layout of a derived variable, such as an optimizer slot, from the layout of its parent.

    An axis that joins several parent axes is sharded like the first of them.

    Args:
        parent: The layout of the parent.
        axes: For each axis, the parent axes that it joins.

    Example:
        >>> from layoutmap import Mesh
        >>> kernel = Layout([None, "model"], Mesh(None, "batch=2,model=4"))
        >>> print(derive_layout_from_parent(kernel, ((0,), ())), derive_layout_from_parent(kernel, ((1,),)))
        (unsharded, unsharded) (model,)
    """
    specs = [parent.list_mesh_dims(of[0]) if of else () for of in axes]
    return Layout.from_valid_specs(specs, parent.mesh, parent.memory)


def derive_layout_with_dim(layout: Layout, shape: Sequence[int], dim: str) -> Layout:
    """Return a layout with one more mesh dim on the first axis that still splits evenly, or unchanged if no axis does.

    Args:
        layout: The layout.
        shape: The tensor's shape.
        dim: The mesh dim. A layout that is sharded over it stays as it is.

    Example:
        >>> from layoutmap import Mesh
        >>> print(derive_layout_with_dim(Layout(["model", None], Mesh(None, "batch=2,model=4")), (16, 8), "batch"))
        ((model, batch), unsharded)
    """
    dims = [layout.list_mesh_dims(axis) for axis in range(layout.rank)]
    if layout.rank != len(shape) or any(dim in of for of in dims):
        return layout
    for axis, size in enumerate(shape):
        if size and size % (layout.num_shards(axis) * layout.mesh.dim_size(dim)) == 0:
            dims[axis] = (*dims[axis], dim)
            return Layout.from_valid_specs(dims, layout.mesh, layout.memory)
    return layout
