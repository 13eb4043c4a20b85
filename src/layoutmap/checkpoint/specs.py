"""Convert the variables of a checkpoint to the specs of a plan."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from layoutmap.checkpoint.source import SavedVariable
from layoutmap.core.variables import Kind, VariableSpec


def make_variable_specs(variables: Iterable[SavedVariable]) -> list[VariableSpec]:
    """Convert saved variables to the specs that a plan needs, in the same order.

    The parent of a slot is the weight of its shape whose path is contained in the slot's path. The longest path wins.

    Example:
        >>> kernel = SavedVariable("d1.kernel", (8, 4), "float32")
        >>> slot = SavedVariable("optimizer.d1.kernel.momentum", (8, 4), "float32", Kind.SLOT)
        >>> [each.parent for each in make_variable_specs([kernel, slot])]
        [None, 'd1.kernel']
    """
    known = list(variables)
    weights = {each.path: each for each in known if each.kind is Kind.WEIGHT}
    return [
        VariableSpec(
            v.path,
            v.shape,
            v.dtype,
            v.kind,
            v.aliases,
            _find_parent_path(v, weights) if v.kind is Kind.SLOT else None,
        )
        for v in known
    ]


def _find_parent_path(slot: SavedVariable, weights: Mapping[str, SavedVariable]) -> str | None:
    parts = slot.path.split(".")
    for length in range(len(parts) - 1, 0, -1):
        for start in range(len(parts) - length, -1, -1):
            path = ".".join(parts[start : start + length])
            if path in weights and weights[path].shape == slot.shape:
                return path
    return None
