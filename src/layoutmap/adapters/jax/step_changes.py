"""Explain why a step was compiled again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from layoutmap.core.errors import shorten_repr


class CompiledArguments(NamedTuple):
    """Store the properties of the arguments for which a step was compiled.

    Args:
        names: Name of each array among the arguments.
        types: Shape and dtype of each array.
        shardings: Sharding of each array.
        static: Static arguments, and leaves that are not arrays: the name and value of each.
    """

    names: Sequence[str]
    types: Sequence[tuple[tuple[int, ...], object]]
    shardings: Sequence[object]
    static: Sequence[tuple[str, object]]


def format_first_difference(before: CompiledArguments, after: CompiledArguments) -> str:
    """Return the first difference between the arguments of two compilations as text.

    Example:
        >>> first = CompiledArguments(["x"], [((3,), "float32")], [None], [])
        >>> format_first_difference(first, first._replace(types=[((4,), "float32")]))
        'x: shape (3,) -> (4,)'
    """
    for (name, value), (other, new) in zip(before.static, after.static, strict=False):
        if name == other and value != new:
            return f"{name}: {shorten_repr(value)} -> {shorten_repr(new)}"
    if list(before.names) != list(after.names):
        added = [name for name in after.names if name not in before.names]
        removed = [name for name in before.names if name not in after.names]
        return "; ".join(
            f"{what} {', '.join(names[:3])}{', ..' * (len(names) > 3)}"
            for what, names in (("added", added), ("removed", removed))
            if names
        )
    for name, (old_shape, old_dtype), (shape, dtype) in zip(
        after.names, before.types, after.types, strict=True
    ):
        if old_shape != shape:
            return f"{name}: shape {old_shape} -> {shape}"
        if old_dtype != dtype:
            return f"{name}: dtype {old_dtype} -> {dtype}"
    for name, old, new in zip(after.names, before.shardings, after.shardings, strict=True):
        if old != new:
            return f"{name}: layout {getattr(old, 'spec', old)} -> {getattr(new, 'spec', new)}"
    return "a different structure of the arguments"
