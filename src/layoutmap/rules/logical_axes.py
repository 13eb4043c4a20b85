"""Logical axis rules of flax and MaxText: `[("embed", "fsdp"), ("mlp", ("tensor",)), ...]`.

A model names the axes of each variable (`("embed", "mlp")`), and rules say over which mesh dims each name is sharded.
The two libraries of flax 0.12.8 read the same rules differently:

    linen  a rule is taken where its axis has no dims yet and no dim of it shards another axis of this array; so the
           first that can be wins, and a name may have further rules to fall back on; a name without a rule is
           unsharded
    nnx    the last rule of a name wins, whatever shards the other axes; a name without a rule is that of a mesh dim
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, get_args

from layoutmap.core.errors import RuleError
from layoutmap.rules.partition_specs import Shape, Specs, check_known, fitted, leaves, pairs, read_spec

Semantics = Literal["linen", "nnx"]

_Dims = str | tuple[str, ...] | None


def logical_specs(
    rules: object, axes: object, shapes: Mapping[str, Shape], semantics: Semantics, where: str
) -> tuple[dict[str, Specs], tuple[str, ...]]:
    """The specs that rules give to arrays with named axes, by path; and the names that have no rule, in linen.

    Raises:
        RuleError: Rules or axes are of another form, do not fit their array, or say what a layout cannot.
    """
    if semantics not in get_args(Semantics):
        raise RuleError(
            f"{where}: semantics={semantics!r}",
            why="linen and nnx treat two rules for one name differently",
            fix="use 'linen', as MaxText and flax.linen do, or 'nnx'",
        )
    read = [(name, _dims(name, dims, where)) for name, dims in pairs(rules, where)]
    known = {name for name, _ in read}
    found: dict[str, Specs] = {}
    without: dict[str, None] = {}
    for path, given in leaves(axes, where).items():
        check_known(path, shapes, where)
        at = f"{where}: {path}"
        names = read_spec(given, at)
        if semantics == "nnx":
            last = dict(read)
            specs = tuple(last.get(name, name) if isinstance(name, str) else name for name in names)
        else:
            specs = _first_free(names, read, at)
            without |= dict.fromkeys(name for name in names if isinstance(name, str) and name not in known)
        found[path] = fitted(specs, shapes[path], at)
    return found, tuple(without)


def _dims(name: str, dims: object, where: str) -> _Dims:
    return dims if isinstance(dims, str) else read_spec((dims,), f"{where}: rule {name!r}")[0]


def _first_free(names: Specs, rules: Sequence[tuple[str, _Dims]], where: str) -> Specs:
    """As `flax.linen.logical_to_mesh_axes`: rules in order, each where its axis and its dims are free."""
    twice = next((name for name in names if isinstance(name, str) and names.count(name) > 1), None)
    if twice is not None:
        raise RuleError(
            f"{where}: two axes have the name {twice!r}",
            facts={"axes": names},
            why="a rule of linen is for one axis of that name",
            fix="give the axes different names",
        )
    # An axis without a name is unsharded, and one of mesh dims keeps them.
    taken: dict[int, _Dims] = {axis: name for axis, name in enumerate(names) if not isinstance(name, str)}
    for name, dims in rules:
        axis = names.index(name) if name in names else None
        used = {dim for each in taken.values() for dim in _each(each)}
        if axis is not None and axis not in taken and not used & set(_each(dims)):
            taken[axis] = dims
    return tuple(taken.get(axis) for axis in range(len(names)))


def _each(dims: _Dims) -> tuple[str, ...]:
    return (dims,) if isinstance(dims, str) else dims or ()
