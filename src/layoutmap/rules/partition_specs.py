"""Convert JAX PartitionSpecs to rules: specs by array, or specs by regex as in EasyLM.

A `PartitionSpec` may have fewer entries than the array has axes, but a rule has one for each axis. So the shapes of the
arrays are needed. The rules match exactly these arrays, and arrays that differ only in the numbers of repeated blocks
share one. JAX is not imported: each iterable with valid entries is accepted as a spec.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

from layoutmap.core.arguments import as_int, describe_type
from layoutmap.core.errors import RuleError, join_names, shorten_repr
from layoutmap.core.mesh import Mesh
from layoutmap.core.paths import make_path_regex, split_path_at_numbers
from layoutmap.core.specs import Specs
from layoutmap.core.variables import Assignment
from layoutmap.rules.merged_rules import find_whole_path_pattern_parts, merge_patterns
from layoutmap.rules.near_misses import find_nearest_candidates
from layoutmap.rules.patterns import compile_pattern, explain_why_pattern_is_slow

Shape = tuple[int, ...]
"""The shape of an array."""

_UNCONSTRAINED = "UNCONSTRAINED"
_ENTRIES = "an entry is None, a mesh dim, or a tuple of mesh dims"


def flatten_tree_by_path(tree: Any, where: str) -> dict[str, Any]:
    """Return the leaves of a tree of dicts and lists by path. A list that is a shape or a spec is a leaf.

    Raises:
        RuleError: The tree is not a dict.
    """
    if not isinstance(tree, Mapping):
        raise RuleError(
            f"{where}: {shorten_repr(tree)} is not a dict",
            why=f"it is {describe_type(tree)}, but entries need paths",
            fix='pass a dict by path, as in {"d1.kernel": ...}, or nested dicts',
        )
    return dict(_iterate_paths_and_leaves(tree, ""))


def _iterate_paths_and_leaves(tree: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    children: Iterable[tuple[Any, Any]] = ()
    if isinstance(tree, Mapping):
        children = cast("Mapping[Any, Any]", tree).items()
    elif _is_list_or_tuple(tree) and not all(map(_is_shape_or_spec_entry, tree)):
        children = enumerate(cast("list[Any]", tree))
    else:
        yield prefix.removesuffix("."), tree
    for key, child in children:
        yield from _iterate_paths_and_leaves(child, f"{prefix}{key}.")


def _is_shape_or_spec_entry(value: Any) -> bool:
    """Return whether a value can be a size in a shape or an entry in a spec, so that a list of these is a leaf."""
    if _is_list_or_tuple(value):
        return all(isinstance(dim, str) for dim in value)
    return value is None or isinstance(value, (str, int)) or str(value) == _UNCONSTRAINED


# A `PartitionSpec` may be shorter than the array's rank, so read the shapes of all arrays (decisions/0014).
def read_shapes_by_path(parameters: object, where: str) -> dict[str, Shape]:
    """Return the shapes of all arrays by path, from a plan or a tree of shapes or arrays.

    Raises:
        RuleError: It is not a dict, or a leaf has no shape.
    """
    found: dict[str, Shape] = {}
    for path, leaf in flatten_tree_by_path(parameters, where).items():
        shape = leaf.variable.shape if isinstance(leaf, Assignment) else getattr(leaf, "shape", leaf)
        if not _is_list_or_tuple(shape) or any(as_int(n) is None for n in shape):
            raise RuleError(
                f"{where}: {path} has no shape",
                facts={"value": shorten_repr(leaf)},
                why="a PartitionSpec may omit trailing axes, but a layout needs a spec for each axis",
                fix="give the array's shape, or anything with a shape: jax.eval_shape(init, ...) returns such a tree, "
                "and nn.meta.unbox(tree) one without the boxes of flax",
            )
        found[path] = tuple(shape)
    return found


def read_partition_spec(value: object, where: str) -> Specs:
    """Return the entries of a PartitionSpec or NamedSharding as a tuple, which is empty for None.

    Raises:
        RuleError: The value is neither, or has a memory kind, a partial sum, or an entry that a layout cannot have.
    """
    memory = getattr(value, "memory_kind", None)
    if memory not in (None, "device"):
        raise _make_unsupported_error(
            where,
            f"memory kind {memory!r}",
            "a rule from a PartitionSpec cannot name a memory kind",
            "leave this spec out, and add its rule with layout_map.add(.., memory=..)",
        )
    spec: Any = getattr(value, "spec", value)
    for name in ("unreduced", "reduced"):
        if dims := getattr(spec, name, None):
            raise _make_unsupported_error(
                where, f"{name}={sorted(dims)}", "a variable cannot store partial sums", f"leave {name} out"
            )
    if spec is None:
        return ()
    if _is_not_sequence(spec):
        raise RuleError(
            f"{where}: {shorten_repr(spec)} is not a PartitionSpec",
            why=f"it is {describe_type(spec)}",
            fix='write PartitionSpec(None, "model") or a tuple; for boxed flax variables use nn.get_partition_spec(..)',
        )
    return tuple(_read_spec_entry(entry, axis, where) for axis, entry in enumerate(spec))


def _read_spec_entry(entry: Any, axis: int, where: str) -> str | tuple[str, ...] | None:
    if entry is None or isinstance(entry, str):
        return entry
    if _is_list_or_tuple(entry) and all(isinstance(dim, str) for dim in entry):
        return tuple(entry)
    why = _ENTRIES
    if str(entry) == _UNCONSTRAINED:
        why = f"it leaves the axis to JAX's compiler, but a layout has a spec for each axis: {_ENTRIES}"
    fix = "write None in its place, or the names of mesh dims"
    raise _make_unsupported_error(where, f"entry {shorten_repr(entry)} of axis {axis}", why, fix)


def _make_unsupported_error(where: str, what: str, why: str, fix: str) -> RuleError:
    return RuleError(f"{where}: {what} is not supported in a layout", why=why, fix=fix)


def pad_specs(specs: Specs, shape: Shape, where: str) -> Specs:
    """Return specs with one entry for each axis of a shape: None for the last axes that a PartitionSpec omits.

    Raises:
        RuleError: There are more entries than axes.
    """
    if len(specs) > len(shape):
        raise RuleError(
            f"{where}: the spec has {len(specs)} entries, but the array has {len(shape)} axes",
            facts={"shape": shape, "spec": specs},
            why="a PartitionSpec has at most one entry for each axis",
            fix="remove entries, or pass the correct shapes",
        )
    return (*specs, *[None] * (len(shape) - len(specs)))


def make_path_rules(specs: Mapping[str, Specs]) -> dict[str, Specs]:
    """Return rules, as specs by pattern, that give arrays their specs by path. Blocks of equal specs share a rule.

    Example:
        >>> make_path_rules({"blocks.0.up": (None, "x"), "blocks.1.up": (None, "x"), "out": ("x", None)})
        {'blocks\\\\.\\\\d+\\\\.up$': (None, 'x'), 'out$': ('x', None)}
    """
    groups: dict[tuple[str, ...], dict[Specs, list[str]]] = {}
    for path, array_specs in specs.items():
        groups.setdefault(split_path_at_numbers(path), {}).setdefault(array_specs, []).append(path)
    rules: dict[str, Specs] = {}
    for by_specs in groups.values():
        for array_specs, paths in by_specs.items():
            others = [path for specs, others in by_specs.items() if specs != array_specs for path in others]
            (pattern,) = merge_patterns([find_whole_path_pattern_parts(paths, paths, others)])
            # A rules file may not have a pattern with many alternatives, so write a rule for each path instead.
            is_slow = bool(explain_why_pattern_is_slow(pattern))
            patterns = [make_path_regex([path]) for path in paths] if is_slow else [pattern]
            rules |= dict.fromkeys(patterns, array_specs)
    return rules


def read_spec_tree(tree: object, shapes: Mapping[str, Shape], mesh: Mesh, where: str) -> dict[str, Specs]:
    """Return the specs in a tree of PartitionSpecs or NamedShardings by path, with an entry for each axis.

    Raises:
        RuleError: A leaf is neither, does not fit its array, or is on another mesh, or there is no such array.
    """
    found: dict[str, Specs] = {}
    for path, sharding in flatten_tree_by_path(tree, where).items():
        check_path_known(path, shapes, where)
        its_mesh = getattr(sharding, "mesh", None)
        if its_mesh is not None and list(its_mesh.shape.items()) != list(mesh.dim_sizes.items()):
            raise RuleError(
                f"{where}: the sharding of {path} is on another mesh",
                facts={
                    "map's": str(mesh),
                    "the sharding's": ", ".join(f"{n}={s}" for n, s in its_mesh.shape.items()),
                },
                why="all variables of a model share one mesh",
                fix="pass the mesh of the shardings, or PartitionSpecs, which have no mesh",
            )
        found[path] = pad_specs(
            read_partition_spec(sharding, f"{where}: {path}"), shapes[path], f"{where}: {path}"
        )
    return found


def check_path_known(path: str, shapes: Mapping[str, Shape], where: str) -> None:
    """Raise a `RuleError` if no array has this path."""
    if path not in shapes:
        near = find_nearest_candidates(path, shapes, 1)
        raise RuleError(
            f"{where}: {path} is not one of the arrays",
            why=f"none of the {len(shapes)} shapes has this path",
            fix=f"did you mean {near[0]}?" if near else "remove this path, or pass the shape of its array",
        )


def resolve_partition_rules(
    rules: object, shapes: Mapping[str, Shape], where: str
) -> tuple[dict[str, Specs], tuple[str, ...]]:
    """Return the specs that EasyLM-style rules give to arrays by path, and a list of the rules that no array uses.

    Raises:
        RuleError: A rule is not a pair of a regex and a PartitionSpec, or no rule matches an array.
    """
    compiled = [
        (
            compile_pattern(pattern, f"{where}: rule {number}"),
            read_partition_spec(spec, f"{where}: rule {number} {pattern!r}"),
        )
        for number, (pattern, spec) in enumerate(read_rule_pairs(rules, where), 1)
    ]
    found: dict[str, Specs] = {}
    used: set[int] = set()
    missing: list[str] = []
    for path, shape in shapes.items():
        if math.prod(shape) == 1:  # EasyLM replicates arrays of one element without a rule, so skip the rules
            found[path] = (None,) * len(shape)
            continue
        name = path.replace(".", "/")
        position = next((n for n, (regex, _) in enumerate(compiled) if regex.search(name)), None)
        if position is None:
            missing.append(path)
            continue
        used.add(position)
        at = f"{where}: rule {position + 1} {compiled[position][0].pattern!r}, which matches {path}"
        found[path] = pad_specs(compiled[position][1], shape, at)
    if missing:
        raise RuleError(
            f"{where}: {len(missing)} arrays have no rule",
            facts={"arrays": join_names(missing)},
            why="no regex is found in their paths, which are read with slashes, as in 'layers/0/kernel'",
            fix='add rules for them, or (".*", PartitionSpec()) as the last rule to replicate all others',
        )
    unused = [f"{n + 1}  {regex.pattern}" for n, (regex, _) in enumerate(compiled) if n not in used]
    return found, tuple(unused)


def read_rule_pairs(rules: Any, where: str) -> list[tuple[str, Any]]:
    """Return rules as a list of pairs of a text and a value, after checking that they are pairs.

    Raises:
        RuleError: The rules are not a sequence, or one is not a pair that starts with text.
    """
    if _is_not_sequence(rules):
        raise RuleError(
            f"{where}: {shorten_repr(rules)} are not rules",
            why=f"they are {describe_type(rules)}",
            fix='write a list of pairs, in order, as in [("embed", "fsdp"), ("mlp", "tensor")]',
        )
    found: list[tuple[str, Any]] = []
    for number, rule in enumerate(rules, 1):
        if not _is_list_or_tuple(rule) or len(rule) != 2 or not isinstance(rule[0], str):
            raise RuleError(
                f"{where}: rule {number} cannot be read: {shorten_repr(rule)}",
                why="a rule is a pair: a name or regex as text, and mesh dims or a spec",
                fix='write it as in ("mlp", "tensor")',
            )
        found.append((rule[0], rule[1]))
    return found


# A TypeGuard would narrow values of type `Any` to a list of unknown items, so return bool.
def _is_list_or_tuple(value: object) -> bool:
    return isinstance(value, (tuple, list))


def _is_not_sequence(value: object) -> bool:
    return isinstance(value, (str, Mapping)) or not isinstance(value, Iterable)
