"""Arguments read and checked: Python's own int, text and shape, or an error that says what was passed."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable
from typing import Any

from layoutmap.core.errors import LayoutError, MeshError

_HALF_A_PAIR = re.compile(r"[\ud800-\udfff]")


def kind_of(value: Any) -> str:
    """The type of a wrong argument in words, with its module where that is not this library."""
    if value is None:
        return "None"
    module = type(value).__module__.partition(".")[0]
    prefix = "" if module in ("builtins", "layoutmap") else f"{module}."
    return f"of type {prefix}{type(value).__name__}"


def as_int(value: Any) -> int | None:
    """Python's int for a whole number of any type, since those of numpy wrap; `None` for all else, bools included."""
    if type(value) is int:
        return value
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None


def as_text(text: str) -> str:
    """Python's str for a text of a class derived from it, such as numpy's: what is written to files is plain."""
    return str.__str__(text)


def as_rank(rank: int) -> int:
    """A number of axes, checked.

    Raises:
        LayoutError: It is no whole number, or negative.
    """
    found = as_int(rank)
    if found is None or found < 0:
        raise LayoutError(
            f"a layout of rank {rank!r}",
            why="the rank is the number of a tensor's axes, 0 or more",
            fix="pass the tensor's number of axes",
        )
    return found


def as_axis(axis: int, rank: int) -> int:
    """The number of an axis, checked.

    Raises:
        LayoutError: It is no whole number, or there is no such axis.
    """
    found = as_int(axis)
    if found is None:
        raise LayoutError(
            f"axis {axis!r} of a layout of rank {rank}",
            why=f"it is {kind_of(axis)}, and axes are numbered",
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
            f"axis {found} of a layout of rank {rank}",
            why=why,
            fix="count axes from 0, forwards" if rank else "a scalar's layout cannot be sharded",
        )
    return found


def as_shape(shape: Iterable[Any]) -> tuple[int | None, ...]:
    """A shape in Python's ints, those of numpy wrap; `None` and -1 stand for a size that is not known.

    Raises:
        LayoutError: A size is no whole number, or below -1.
    """
    sizes = tuple(shape)
    if all(type(n) is int and n >= 0 for n in sizes):
        return sizes
    found = tuple(None if n is None else as_int(n) for n in sizes)
    why = ""
    for given, n in zip(sizes, found, strict=True):
        if n is None and given is not None:
            why = f"{given!r} is {kind_of(given)}, not a whole number"
        elif n is not None and n < -1:
            why = "an axis has 0 elements or more; None or -1 stands for a size that is not known"
    if why:
        kind = "a negative size" if why.startswith("an axis") else "a size that is not a number of elements"
        raise LayoutError(f"the shape {sizes} has {kind}", why=why, fix="give the sizes of the tensor")
    return found


def check_encodable(name: str, what: str) -> None:
    """Raise if a name has half a surrogate pair: it could be written neither as text nor as protobuf."""
    if _HALF_A_PAIR.search(name):
        raise MeshError(
            f"{what} {name!r} has half a surrogate pair",
            why="no encoding can write it",
            fix=f"name it {_HALF_A_PAIR.sub('_', name)!r}",
        )
