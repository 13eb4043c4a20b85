"""Check arguments and convert them to Python's int, str, and tuple, with an error that shows the wrong value."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable
from typing import Any

from layoutmap.core.errors import LayoutError, MeshError

_HALF_A_PAIR = re.compile(r"[\ud800-\udfff]")


def describe_type(value: Any) -> str:
    """Return a phrase for messages that names the type of a wrong argument: `of type numpy.ndarray`, or `None`."""
    if value is None:
        return "None"
    module = type(value).__module__.partition(".")[0]
    prefix = "" if module in ("builtins", "layoutmap") else f"{module}."
    return f"of type {prefix}{type(value).__name__}"


def as_int(value: Any) -> int | None:
    """Return an integer of any type, such as numpy's, as Python's int. Return None for a bool or a non-integer."""
    if type(value) is int:
        return value
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None


def convert_to_builtin_str(text: str) -> str:
    """Convert a text of a subclass of str, such as numpy's, to Python's str, which YAML and JSON can write."""
    return str.__str__(text)


def validate_rank(rank: int) -> int:
    """Check that a rank is an integer of 0 or more, and return it as an int.

    Raises:
        LayoutError: The rank is not an integer, or is negative.
    """
    found = as_int(rank)
    if found is None or found < 0:
        raise LayoutError(
            f"a layout cannot have the rank {rank!r}",
            why="the rank is the number of a tensor's axes, 0 or more",
            fix="pass the tensor's number of axes",
        )
    return found


def validate_axis(axis: int, rank: int) -> int:
    """Check that an axis exists in a tensor of this rank, and return it as an int.

    Raises:
        LayoutError: The axis is not an integer, or does not exist.
    """
    found = as_int(axis)
    if found is None:
        raise LayoutError(
            f"a layout of rank {rank} has no axis {axis!r}",
            why=f"the axis is {describe_type(axis)}, and axes are integers",
            fix="pass the axis's number, from 0",
        )
    if not 0 <= found < rank:
        why = (
            f"its axes are 0 to {rank - 1}"
            if rank > 1
            else "its only axis is 0"
            if rank
            else "it has no axes"
        )
        raise LayoutError(
            f"a layout of rank {rank} has no axis {found}",
            why=why,
            fix="count axes upwards from 0" if rank else "use Layout.replicated(mesh, 0)",
        )
    return found


def validate_shape(shape: Iterable[Any]) -> tuple[int | None, ...]:
    """Check a shape and convert its sizes to Python's ints. None and -1 stand for an unknown size.

    Raises:
        LayoutError: A size is not an integer, or is below -1.
    """
    sizes = tuple(shape)
    if all(type(n) is int and n >= 0 for n in sizes):
        return sizes
    found = tuple(None if n is None else as_int(n) for n in sizes)
    why = ""
    for given, n in zip(sizes, found, strict=True):
        if n is None and given is not None:
            why = f"{given!r} is {describe_type(given)}, not an integer"
        elif n is not None and n < -1:
            why = "an axis has 0 elements or more; None or -1 stands for a size that is not known"
    if why:
        kind = "a negative size" if why.startswith("an axis") else "a size that is not a number of elements"
        raise LayoutError(f"the shape {sizes} has {kind}", why=why, fix="give the sizes of the tensor")
    return found


def check_name_is_encodable(name: str, label: str) -> None:
    """Raise a `MeshError` if a name, which `label` describes, has half a surrogate pair. UTF-8 cannot encode it."""
    if _HALF_A_PAIR.search(name):
        raise MeshError(
            f"{label} {name!r} has half a surrogate pair",
            why="no encoding can write it",
            fix=f"name it {_HALF_A_PAIR.sub('_', name)!r}",
        )
