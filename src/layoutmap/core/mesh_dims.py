"""Define mesh dims, and parse the forms in which users write them."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from layoutmap.core import tf_format
from layoutmap.core.arguments import as_int, check_name_is_encodable, convert_to_builtin_str, describe_type
from layoutmap.core.errors import MeshError, shorten_repr

UNSHARDED = "unsharded"
"""The sharding spec of an axis that is not sharded: every device stores all of it."""

_FORBIDDEN = re.compile(r"[,|=:\s]")
_FIX_DIMS = 'write "batch=2,model=4", {"batch": 2, "model": 4} or [("batch", 2), ("model", 4)]'
_FIX_AXIS_TYPES = 'write axis_types="explicit", or by dim: axis_types={"model": "explicit"}'
AXIS_TYPES = ("auto", "explicit")
_MAX_DEVICES = 1 << 20  # a larger mesh is probably a mistake, and each device takes memory


@dataclass(frozen=True, slots=True)
class MeshDimension:
    """One named direction of a mesh.

    Args:
        name: Its name, as used in layouts.
        size: Number of devices along it.
        axis_type: JAX's type of it: `"auto"`, or `"explicit"`, where the shardings of arrays are part of their types.
            Not compared: it changes how programs are written, not where arrays are.

    Example:
        >>> MeshDimension("model", 4)
        MeshDimension(name='model', size=4)

    References:
        https://docs.jax.dev/en/latest/notebooks/explicit-sharding.html
    """

    name: str
    size: int
    axis_type: str = field(default="auto", compare=False, repr=False)

    def __str__(self) -> str:
        return f"{self.name}={self.size}"


def parse_mesh_dims(
    mesh_dims: str | Mapping[str, int] | Iterable[MeshDimension | tuple[str, int]],
) -> tuple[MeshDimension, ...]:
    """Return mesh dims from text, a dict, or pairs of name and size. The names and sizes are not checked.

    Args:
        mesh_dims: `"batch=2,model=4"`, `{"batch": 2, "model": 4}`, or pairs `[("batch", 2), ("model", 4)]`. A size
            may be -1 here; only `create_mesh` accepts that.

    Raises:
        MeshError: The text is not of the form `name=size,...`, or an entry is no pair of a name and an integer.

    Example:
        >>> parse_mesh_dims("batch=2,model=4")
        (MeshDimension(name='batch', size=2), MeshDimension(name='model', size=4))
    """
    entries: list[Any]
    if isinstance(mesh_dims, str):
        entries = (
            [_parse_mesh_dim(part, mesh_dims) for part in mesh_dims.split(",")] if mesh_dims.strip() else []
        )
    elif isinstance(mesh_dims, Mapping):
        entries = [*mesh_dims.items()]
    else:
        try:
            entries = list(mesh_dims)
        except TypeError:
            raise MeshError(
                f"mesh dims {shorten_repr(mesh_dims)} cannot be read",
                why=f"they are {describe_type(mesh_dims)}",
                fix=_FIX_DIMS,
            ) from None
    return tuple(_convert_to_mesh_dimension(entry) for entry in entries)


def _parse_mesh_dim(part: str, whole_text: str) -> tuple[str, int]:
    name, _, size = part.partition("=")
    try:
        return name.strip(), int(size)
    except ValueError:
        raise MeshError(
            f"mesh dims {shorten_repr(whole_text)} cannot be read",
            why=f"{shorten_repr(part.strip())} is not name=size, with an integer as the size",
            fix=_FIX_DIMS,
        ) from None


def _convert_to_mesh_dimension(entry: Any) -> MeshDimension:
    pair: Any = ()
    axis_type = "auto"
    if isinstance(entry, MeshDimension):
        pair, axis_type = (entry.name, entry.size), entry.axis_type
    elif isinstance(entry, Sequence) and not isinstance(entry, str):
        pair = entry  # pyright: ignore[reportUnknownVariableType]
    why = ""
    if len(pair) != 2:
        why = "a mesh dim is a pair of a name and a size"
    elif not isinstance(pair[0], str):
        why = f"its name is {describe_type(pair[0])}, not text"
    elif as_int(pair[1]) is None:
        why = f"its size is {describe_type(pair[1])}, not an integer"
    elif operator.index(pair[1]).bit_length() > 63:
        why = "its size has more than 63 bits"
    if why:
        raise MeshError(f"mesh dim {shorten_repr(entry)} cannot be read", why=why, fix=_FIX_DIMS)  # pyright: ignore[reportUnknownArgumentType]
    return MeshDimension(convert_to_builtin_str(pair[0]), operator.index(pair[1]), axis_type)


def check_dims(dims: tuple[MeshDimension, ...]) -> None:
    """Raise a `MeshError` if a dim has an invalid name or size, or the mesh has too many devices."""
    seen: set[str] = set()
    for dim in dims:
        why = fix = ""
        if not dim.name:
            why, fix = "layouts refer to a dim by its name", 'name it, as in ("model", 4)'
        elif dim.name in seen:
            why = "a layout could not tell the two dims of that name apart"
            fix = f"rename one of them, to {dim.name + '_2'!r} for instance"
        elif dim.name in (UNSHARDED, tf_format.MATCH):
            why, fix = f"layouts reserve {dim.name!r} for axes that are not sharded", "use another name"
        elif _FORBIDDEN.search(dim.name):
            why = "blanks and the characters , | = : separate the parts of a mesh written as text"
            fix = f"name it {_FORBIDDEN.sub('_', dim.name)!r}"
        elif dim.size < 1:
            why, fix = (
                "a dim has at least one device",
                f"use size 1, ({dim.name!r}, 1), for a dim that shards nothing",
            )
            if dim.size == -1:
                fix = "call create_mesh, which computes a size of -1 from the number of devices"
        check_name_is_encodable(dim.name, "mesh dim")
        if why:
            raise MeshError(
                f"mesh dim {dim.name!r} of size {dim.size} is not allowed",
                facts={"mesh": ", ".join(map(str, dims))},
                why=why,
                fix=fix,
            )
        seen.add(dim.name)
    size = 1
    for dim in dims:
        size *= dim.size
        if size > 10**18:  # stop here, because Python raises if a message has a number of thousands of digits
            break
    if size > _MAX_DEVICES:
        raise MeshError(
            f"mesh of {size} devices is not allowed",
            facts={"mesh": ", ".join(map(str, dims))},
            why=f"a mesh has at most {_MAX_DEVICES} devices",
            fix="check the sizes: one of them may be a mistake",
        )


def replace_axis_types(dims: tuple[MeshDimension, ...], axis_types: Any) -> tuple[MeshDimension, ...]:
    """Return the dims with new axis types: one for all dims, a list with one for each, or a dict by dim name.

    Raises:
        MeshError: A type is neither `"auto"` nor `"explicit"`, or there is no such dim.
    """
    if axis_types is None:
        return dims
    if isinstance(axis_types, Mapping):
        by_name: dict[str, Any] = dict(axis_types)  # pyright: ignore[reportUnknownArgumentType]
    elif isinstance(axis_types, (tuple, list)):
        each: list[Any] = [*axis_types]  # pyright: ignore[reportUnknownVariableType]
        if len(each) != len(dims):
            raise MeshError(
                f"axis types {shorten_repr(each)} do not fit the mesh",
                facts={"mesh": ", ".join(map(str, dims))},
                why=f"there are {len(each)} of them for {len(dims)} dims",
                fix=_FIX_AXIS_TYPES,
            )
        by_name = {dim.name: value for dim, value in zip(dims, each, strict=True)}
    else:
        by_name = {dim.name: axis_types for dim in dims}
    for name, value in by_name.items():
        # JAX's axis types are enum members named `Auto` and `Explicit`, so compare their names in lower case.
        text = str(getattr(value, "name", value)).lower()
        if text not in AXIS_TYPES or name not in [dim.name for dim in dims]:
            raise MeshError(
                f"axis type {shorten_repr(value)} of mesh dim {name!r} is not allowed",
                facts={"mesh": ", ".join(map(str, dims))},
                why="the mesh has no such dim"
                if text in AXIS_TYPES
                else 'an axis type is "auto" or "explicit"',
                fix=_FIX_AXIS_TYPES,
            )
        by_name[name] = text
    return tuple(replace(dim, axis_type=by_name.get(dim.name, dim.axis_type)) for dim in dims)


def replace_unknown_size(dims: tuple[MeshDimension, ...], num_devices: int) -> tuple[MeshDimension, ...]:
    """Return the dims with a size of -1 replaced by the size that follows from the number of devices."""
    unknown = [dim for dim in dims if dim.size == -1]
    if not unknown:
        return dims
    if len(unknown) > 1:
        raise MeshError(
            f"mesh dims {', '.join(dim.name for dim in unknown)} all have size -1",
            why="the number of devices determines only one unknown size",
            fix="write the sizes of all dims but one",
        )
    known = math.prod(dim.size for dim in dims if dim.size != -1)
    if known < 1 or num_devices % known:
        raise MeshError(
            f"the size -1 of mesh dim {unknown[0].name!r} cannot be determined",
            facts={"mesh": ", ".join(map(str, dims)), "devices": num_devices},
            why=f"{num_devices} devices are not a multiple of {known}",
            fix="change the other sizes, or pass devices=",
        )
    return tuple(replace(dim, size=num_devices // known) if dim.size == -1 else dim for dim in dims)


def list_prime_factors(number: int) -> list[int]:
    """Return the prime factors of a number, with repetitions, the smallest first."""
    least = next((n for n in range(2, math.isqrt(number) + 1) if number % n == 0), number)
    return [] if number == 1 else [least, *list_prime_factors(number // least)]
