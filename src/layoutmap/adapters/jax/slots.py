"""Find the parameter of each leaf of an optimizer's state, and match their axes.

A leaf belongs to the parameter whose path is in its own path: `0.mu.blocks.3.kernel` to `blocks.3.kernel`. Its axes are
those of the parameter that have the same sizes, in the same order:

    mu, nu, trace, ...           the parameter's shape: its axes
    v_row, v_col                 Adafactor: all axes but the largest, all but the second largest
    mu.kernel.1 of SM3           one vector for each axis: that axis
    diff_params_memory           L-BFGS: an axis of its own, then those of the parameter
    a preconditioner (n, n)      Shampoo: the axis of size n, and one of its own
    projector (n, rank)          GaLore: the axis of size n, and one of its own

A leaf with no parameter's path in its own, such as a step count, belongs to none.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from layoutmap.core.uneven import Axes
from layoutmap.core.variables import Kind, VariableSpec, make_unique_names

Parts = tuple[str, ...]
"""The parts of a path; one of them may have dots in it."""

# Adafactor's slots lack the largest or second largest axis.
_REMOVED = {"v_row": -1, "v_col": -2}


@dataclass(frozen=True, slots=True)
class StateLeaf:
    """A leaf of an optimizer's state.

    Args:
        parts: Its path in the state.
        shape: Its shape.
        dtype: The name of its element type.
    """

    parts: Parts
    shape: tuple[int, ...]
    dtype: str


# Rules rarely match slots, so each slot inherits its parameter's layout axis by axis (decisions/0020).
def describe_slots(params: Mapping[Parts, VariableSpec], leaves: Sequence[StateLeaf]) -> list[VariableSpec]:
    """Describe the leaves of an optimizer's state as variables, each with its parameter and axes.

    Args:
        params: The parameters, by the parts of their paths in the tree that the optimizer was initialized with.
        leaves: The leaves of its state.

    Example:
        >>> params = {("up", "kernel"): VariableSpec("up.kernel", (64, 256), "float32")}
        >>> (slot,) = describe_slots(params, [StateLeaf(("0", "v_col", "up", "kernel"), (256,), "float32")])
        >>> slot.path, slot.parent, slot.axes
        ('optimizer.up.kernel.0.v_col', 'up.kernel', ((1,),))
    """
    slots = [_describe_slot(params, leaf) for leaf in leaves]
    paths = make_unique_names([slot.path for slot in slots])
    return [replace(slot, path=path) for slot, path in zip(slots, paths, strict=True)]


def _describe_slot(params: Mapping[Parts, VariableSpec], leaf: StateLeaf) -> VariableSpec:
    found = _find_parameter(params, leaf.parts)
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


def _find_parameter(params: Mapping[Parts, VariableSpec], parts: Parts) -> tuple[int, int] | None:
    """Find the longest parameter path in a leaf's path, the last one if several match, and return its span."""
    for length in range(len(parts), -1, -1):
        for start in range(len(parts) - length, -1, -1):
            if parts[start : start + length] in params:
                return start, start + length
    return None


@cache
def match_axes(
    shape: tuple[int, ...], of: tuple[int, ...], name: str = "", number: int | None = None
) -> Axes:
    """Match each axis of a slot with parameter axes, as many of equal size as possible, in order.

    Args:
        shape: The other shape.
        of: The parameter's shape.
        name: What the state calls it; says which axis was reduced over if two have one size.
        number: Its number among those of the parameter: the axis that it is for, if that has its size.

    Example:
        >>> match_axes((3, 8, 16), (8, 16)), match_axes((16, 16), (8, 16)), match_axes((8,), (8, 8), "v_col")
        (((), (0,), (1,)), ((), (1,)), ((1,),))
    """
    if name in _REMOVED and len(of) > 1:
        removed = np.argsort(of)[_REMOVED[name]]
        kept = [axis for axis in range(len(of)) if axis != removed]
        if shape == tuple(of[axis] for axis in kept):
            return tuple((axis,) for axis in kept)
    for count in range(min(len(shape), len(of)), 0, -1):
        matches = [
            (mine, theirs)
            # Optimizers prepend axes, so try the last axes first.
            for mine in reversed(list(itertools.combinations(range(len(shape)), count)))
            for theirs in itertools.combinations(range(len(of)), count)
            if all(shape[a] == of[b] > 1 for a, b in zip(mine, theirs, strict=True))
        ]
        if matches:
            mine, theirs = next((match for match in matches if number in match[1]), matches[0])
            made_of = dict(zip(mine, theirs, strict=True))
            return tuple((made_of[axis],) if axis in made_of else () for axis in range(len(shape)))
    return ((),) * len(shape)
