"""Find the parameter of each leaf of an optimizer's state, and match the axes of both.

A leaf belongs to the parameter whose path its own path contains: `0.mu.blocks.3.kernel` to `blocks.3.kernel`. Its axes
stand for the parameter's axes of the same sizes, in the same order:

    mu, nu, trace, ...           the parameter's shape: its axes
    v_row, v_col                 Adafactor: all axes but the largest, all but the second largest
    mu.kernel.1 of SM3           one vector for each axis: that axis
    diff_params_memory           L-BFGS: an axis of its own, then those of the parameter
    a preconditioner (n, n)      Shampoo: the axis of size n, and one of its own
    projector (n, rank)          GaLore: the axis of size n, and one of its own

A leaf whose path contains no parameter's path, such as a step count, belongs to no parameter.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from layoutmap.core.uneven import Axes
from layoutmap.core.variables import Kind, VariableSpec, make_unique_names

PathParts = tuple[str, ...]
"""The parts of a path. A part may contain dots."""

# Adafactor reduces over the largest or second largest axis, so its slots lack that axis of the parameter.
_REMOVED = {"v_row": -1, "v_col": -2}


@dataclass(frozen=True, slots=True)
class OptimizerLeaf:
    """Describe a leaf of an optimizer's state.

    Args:
        parts: Path of the leaf in the state.
        shape: Shape of the leaf.
        dtype: Name of the element type.
    """

    parts: PathParts
    shape: tuple[int, ...]
    dtype: str


# Rules rarely match slots, so each slot inherits its parameter's layout axis by axis (decisions/0020).
def describe_slots(
    params: Mapping[PathParts, VariableSpec], leaves: Sequence[OptimizerLeaf]
) -> list[VariableSpec]:
    """Describe the leaves of an optimizer's state as variables, each with its parameter and the matching axes.

    Args:
        params: The parameters, by the parts of their paths in the tree that the optimizer was initialized with.
        leaves: The leaves of the optimizer's state.

    Example:
        >>> params = {("up", "kernel"): VariableSpec("up.kernel", (64, 256), "float32")}
        >>> (slot,) = describe_slots(params, [OptimizerLeaf(("0", "v_col", "up", "kernel"), (256,), "float32")])
        >>> slot.path, slot.parent, slot.axes
        ('optimizer.up.kernel.0.v_col', 'up.kernel', ((1,),))
    """
    slots = [_describe_slot(params, leaf) for leaf in leaves]
    paths = make_unique_names([slot.path for slot in slots])
    return [replace(slot, path=path) for slot, path in zip(slots, paths, strict=True)]


def _describe_slot(params: Mapping[PathParts, VariableSpec], leaf: OptimizerLeaf) -> VariableSpec:
    found = _locate_parameter_path(params, leaf.parts)
    if found is None:
        return VariableSpec(".".join(("optimizer", *leaf.parts)), leaf.shape, leaf.dtype, Kind.SLOT)
    start, end = found
    parent = params[leaf.parts[start:end]]
    axes = None
    if leaf.shape != parent.shape:
        name = leaf.parts[start - 1] if start else ""
        number = int(leaf.parts[end]) if end < len(leaf.parts) and leaf.parts[end].isdecimal() else None
        axes = match_axes(leaf.shape, parent.shape, name, number)
    return VariableSpec(
        ".".join(("optimizer", parent.path, *leaf.parts[:start], *leaf.parts[end:])),
        leaf.shape,
        leaf.dtype,
        Kind.SLOT,
        parent=parent.path,
        axes=axes,
        parent_shape=parent.shape,
        model=parent.model,
    )


def _locate_parameter_path(
    params: Mapping[PathParts, VariableSpec], parts: PathParts
) -> tuple[int, int] | None:
    """Return the start and stop of the longest parameter path in a leaf's path (of several, the last), or None."""
    for length in range(len(parts), -1, -1):
        for start in range(len(parts) - length, -1, -1):
            if parts[start : start + length] in params:
                return start, start + length
    return None


@cache
def match_axes(
    shape: tuple[int, ...], parameter_shape: tuple[int, ...], slot_name: str = "", index: int | None = None
) -> Axes:
    """Return a tuple for each axis of a slot: it contains the corresponding axis of the parameter, or is empty.

    Args:
        shape: The slot's shape.
        parameter_shape: The parameter's shape.
        slot_name: Name of the slot in the state, which tells the reduced axis if two axes have the same size.
        index: Index of the slot among several of one parameter. Of equally good matches, one with this axis is chosen.

    Example:
        >>> match_axes((3, 8, 16), (8, 16)), match_axes((16, 16), (8, 16)), match_axes((8,), (8, 8), "v_col")
        (((), (0,), (1,)), ((), (1,)), ((1,),))
    """
    if slot_name in _REMOVED and len(parameter_shape) > 1:
        removed = np.argsort(parameter_shape)[_REMOVED[slot_name]]
        kept = [axis for axis in range(len(parameter_shape)) if axis != removed]
        if shape == tuple(parameter_shape[axis] for axis in kept):
            return tuple((axis,) for axis in kept)
    for count in range(min(len(shape), len(parameter_shape)), 0, -1):
        matches = [
            (mine, theirs)
            # Optimizers add new axes in front, so try the last axes of the slot first.
            for mine in reversed(list(itertools.combinations(range(len(shape)), count)))
            for theirs in itertools.combinations(range(len(parameter_shape)), count)
            if all(shape[a] == parameter_shape[b] > 1 for a, b in zip(mine, theirs, strict=True))
        ]
        if matches:
            mine, theirs = next((match for match in matches if index in match[1]), matches[0])
            made_of = dict(zip(mine, theirs, strict=True))
            return tuple((made_of[axis],) if axis in made_of else () for axis in range(len(shape)))
    return ((),) * len(shape)
