"""Apply logical axis rules of flax and MaxText: `[("embed", "fsdp"), ("mlp", ("tensor",)), ...]`.

A model names the axes of each variable (`("embed", "mlp")`), and rules say over which mesh dims each name is sharded.
The two libraries of flax 0.12.8 read the same rules differently:

    linen  the first rule of a name applies whose dims do not shard another axis of this array, so later rules for
           the same name are alternatives; an axis whose name has no rule is unsharded
    nnx    the last rule of a name applies, even if another axis is sharded over its dims; a name without a rule is
           itself the name of a mesh dim
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, get_args

from layoutmap.core.errors import RuleError
from layoutmap.rules.partition_specs import (
    Shape,
    Specs,
    check_path_known,
    flatten_tree_by_path,
    pad_specs,
    read_partition_spec,
    read_rule_pairs,
)

Semantics = Literal["linen", "nnx"]

_Dims = str | tuple[str, ...] | None


def resolve_logical_axes_to_specs(
    rules: object, axes: object, shapes: Mapping[str, Shape], semantics: Semantics, where: str
) -> tuple[dict[str, Specs], tuple[str, ...]]:
    """Return the specs of arrays by path, and the axis names without a rule. For nnx, there are no such names.

    Raises:
        RuleError: The rules or axis names have another form, do not fit their array, or have no form in a layout.
    """
    if semantics not in get_args(Semantics):
        raise RuleError(
            f"{where}: semantics={semantics!r} is not known",
            why="linen and nnx resolve two rules for one name differently",
            fix="use 'linen' for MaxText and flax.linen, or 'nnx'",
        )
    read = [(name, _read_rule_dims(name, dims, where)) for name, dims in read_rule_pairs(rules, where)]
    known = {name for name, _ in read}
    found: dict[str, Specs] = {}
    without: dict[str, None] = {}
    for path, array_axes in flatten_tree_by_path(axes, where).items():
        check_path_known(path, shapes, where)
        at = f"{where}: {path}"
        names = read_partition_spec(array_axes, at)
        if semantics == "nnx":
            last = dict(read)
            specs = tuple(last.get(name, name) if isinstance(name, str) else name for name in names)
        else:
            specs = _apply_linen_rules(names, read, at)
            without |= dict.fromkeys(name for name in names if isinstance(name, str) and name not in known)
        found[path] = pad_specs(specs, shapes[path], at)
    return found, tuple(without)


def _read_rule_dims(name: str, dims: object, where: str) -> _Dims:
    return dims if isinstance(dims, str) else read_partition_spec((dims,), f"{where}: rule {name!r}")[0]


def _apply_linen_rules(names: Specs, rules: Sequence[tuple[str, _Dims]], where: str) -> Specs:
    """Return the specs for the axis names of one array, by the algorithm of `flax.linen.logical_to_mesh_axes`."""
    twice = next((name for name in names if isinstance(name, str) and names.count(name) > 1), None)
    if twice is not None:
        raise RuleError(
            f"{where}: two axes have the name {twice!r}",
            facts={"axes": names},
            why="linen applies a rule to only one axis of an array",
            fix="give the axes different names",
        )
    # Rules replace only names, so an axis that has None or a tuple of mesh dims instead of a name keeps this entry.
    taken: dict[int, _Dims] = {axis: name for axis, name in enumerate(names) if not isinstance(name, str)}
    for name, dims in rules:
        axis = names.index(name) if name in names else None
        used = {dim for each in taken.values() for dim in _make_dims_tuple(each)}
        if axis is not None and axis not in taken and not used & set(_make_dims_tuple(dims)):
            taken[axis] = dims
    return tuple(taken.get(axis) for axis in range(len(names)))


def _make_dims_tuple(dims: _Dims) -> tuple[str, ...]:
    return (dims,) if isinstance(dims, str) else dims or ()
