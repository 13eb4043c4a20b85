"""Split a pytree into its arrays by path, and rebuild it with new arrays."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from layoutmap.adapters.jax.tracing import is_array, is_random_key
from layoutmap.core.errors import ScopeError
from layoutmap.core.variables import AxisRoles, Kind, VariableSpec
from layoutmap.engines.jax.trees import find_memory_kind, is_flax_box


@dataclass(frozen=True, slots=True)
class ModelLeaf:
    """Describe an array of a model.

    Args:
        path: Path of the array.
        value: The array.
        kind: Purpose of the array.
        aliases: Other paths of the array, if the model contains it several times.
        annotation: Sharding annotation in the model's own code, as text; empty if there is none.
        use: How the module uses the axes of the array, if this is known.
        no_padding: Why the array cannot be stored padded; empty if it can.
    """

    path: str
    value: Any
    kind: Kind
    aliases: tuple[str, ...] = ()
    annotation: str = ""
    use: AxisRoles | None = None
    no_padding: str = ""


_EQUINOX = "it is in an Equinox module, and the filters of Equinox find only JAX arrays, no padded ones"

DescribeLeafFn = Callable[[Sequence[str], object], ModelLeaf]


@dataclass(frozen=True, slots=True)
class SplitModel:
    """Store the arrays of a model, and a function that rebuilds the model.

    Args:
        leaves: The arrays, in a fixed order.
        rebuild_model: Returns the model with other arrays, given in the order of `leaves`.
        layers: The paths of its callable modules; `None`: the model is a pytree without modules.
        order: Positions of the leaves in the order of a plan, in which the model's code assigns them; `None`: as above.
    """

    leaves: Sequence[ModelLeaf]
    rebuild_model: Callable[[Sequence[object]], Any]
    layers: Sequence[str] | None = None
    order: Sequence[int] | None = None

    @property
    def specs(self) -> list[VariableSpec]:
        """The arrays, described as variables of a plan, in the order of the leaves."""
        return [
            VariableSpec(
                leaf.path,
                tuple(leaf.value.shape),
                str(jax.dtypes.canonicalize_dtype(leaf.value.dtype, allow_extended_dtype=True)),
                leaf.kind,
                leaf.aliases,
                use=leaf.use,
                memory=find_memory_kind(leaf.value),
                no_padding=leaf.no_padding,
            )
            for leaf in self.leaves
        ]


def split_pytree(tree: object, describe_leaf: DescribeLeafFn | None = None) -> SplitModel:
    """Split a pytree into its arrays and a function that rebuilds it. Other leaves keep their positions.

    Args:
        tree: The pytree.
        describe_leaf: Describes an array, given its keys as text and the array. `None`: its path is the keys joined by
            dots. Floating-point arrays are weights, random keys are random states, and other arrays are states.

    Raises:
        ScopeError: Two arrays have the same path.
    """
    found, tree_def = jax.tree_util.tree_flatten_with_path(tree)
    values = [value for _, value in found]
    positions = [position for position, value in enumerate(values) if is_array(value)]
    if describe_leaf is None:
        named = flatten_with_paths(tree)
        leaves = [ModelLeaf(".".join(named[n][0]), values[n], infer_array_kind(values[n])) for n in positions]
    else:
        leaves = [describe_leaf([*map(format_pytree_key, found[n][0])], values[n]) for n in positions]
    _check_distinct_paths(leaves, tree)
    if "equinox" in sys.modules:
        in_modules = find_equinox_leaf_positions(tree_def)
        leaves = [
            replace(leaf, no_padding=_EQUINOX) if position in in_modules else leaf
            for position, leaf in zip(positions, leaves, strict=True)
        ]

    def rebuild_model(arrays: Sequence[object]) -> object:
        filled = list(values)
        for position, array in zip(positions, arrays, strict=True):
            filled[position] = array
        return jax.tree_util.tree_unflatten(tree_def, filled)

    return SplitModel(leaves, rebuild_model)


@functools.lru_cache
def find_equinox_leaf_positions(tree: Any) -> frozenset[int]:
    """Return the positions of a tree's leaves that are in Equinox modules."""
    module = sys.modules["equinox"].Module
    numbers = tree.unflatten(range(tree.num_leaves))
    tops = jax.tree.leaves(numbers, is_leaf=lambda value: isinstance(value, module))
    return frozenset(n for top in tops if isinstance(top, module) for n in jax.tree.leaves(top))


def flatten_with_paths(tree: object) -> list[tuple[tuple[str, ...], object]]:
    """List a pytree's leaves in order, each with the parts of its path. A flax box around an array adds no part."""
    return [
        ((*map(format_pytree_key, path), *map(format_pytree_key, inner[1:])), leaf)
        for path, node in jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_flax_box)[0]
        for inner, leaf in jax.tree_util.tree_flatten_with_path(node)[0]
    ]


def infer_array_kind(value: Any) -> Kind:
    """Infer an array's kind from its dtype: random state, weight, or other state."""
    if is_random_key(value):
        return Kind.RNG
    return Kind.WEIGHT if jnp.issubdtype(value.dtype, jnp.inexact) else Kind.STATE


def format_pytree_key(key: object) -> str:
    """Return one part of a path: an attribute name, a dict key, or a position in a sequence.

    A dict key that is a tuple, such as a path of flax, is joined by dots.
    """
    for attribute in ("key", "name", "idx"):
        if hasattr(key, attribute):
            return format_pytree_key(getattr(key, attribute))
    return ".".join(map(str, key)) if isinstance(key, tuple) else str(key)


def _check_distinct_paths(leaves: Sequence[ModelLeaf], model: object) -> None:

    paths = [path for leaf in leaves for path in (leaf.path, *leaf.aliases)]
    twice = (
        next((path for path in paths if paths.count(path) > 1), None) if len({*paths}) < len(paths) else None
    )
    if twice is not None:
        raise ScopeError(
            f"{twice}: two arrays of the model have this path",
            facts={"model": type(model).__name__},
            why="a path is the keys joined by dots, and different keys give this path",
            fix='rename one of them: a key with a dot, as in {"a.b": ..}, gives the same path as two keys',
        )
