"""Split a pytree into its arrays by path, and rebuild it with new arrays."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from layoutmap.adapters.jax.tracing import is_array, is_key
from layoutmap.core.errors import ScopeError
from layoutmap.core.variables import Kind, Use, VariableSpec
from layoutmap.engines.jax.trees import find_memory, is_flax_box


@dataclass(frozen=True, slots=True)
class Leaf:
    """An array of a model.

    Args:
        path: Its path.
        value: The array.
        kind: Its purpose.
        aliases: Its other paths, if it is in several places.
        annotation: What the model's own code says of its layout, as a rule would; empty for most.
        use: What is done with its axes, where that is known.
        no_padding: Why it cannot be stored padded; empty if it can.
    """

    path: str
    value: Any
    kind: Kind
    aliases: tuple[str, ...] = ()
    annotation: str = ""
    use: Use | None = None
    no_padding: str = ""


_EQUINOX = "filters of Equinox find only arrays of JAX itself"

Describe = Callable[[Sequence[str], object], Leaf]


@dataclass(frozen=True, slots=True)
class Parts:
    """The arrays of a model, and a function that rebuilds the model.

    Args:
        leaves: The arrays, in a fixed order.
        put_together: Makes a model of other arrays, in that order.
        layers: The paths of its modules that can be called; `None`: it has no modules.
        order: The numbers of the leaves in the order in which the model's code assigns them, which is that of a plan.
    """

    leaves: Sequence[Leaf]
    put_together: Callable[[Sequence[object]], Any]
    layers: Sequence[str] | None = None
    order: Sequence[int] | None = None

    @property
    def specs(self) -> list[VariableSpec]:
        """The arrays as variables of a plan, in the order of the leaves."""
        return [
            VariableSpec(
                leaf.path,
                tuple(leaf.value.shape),
                str(jax.dtypes.canonicalize_dtype(leaf.value.dtype, allow_extended_dtype=True)),
                leaf.kind,
                leaf.aliases,
                use=leaf.use,
                memory=find_memory(leaf.value),
                no_padding=leaf.no_padding,
            )
            for leaf in self.leaves
        ]


def take_apart(tree: object, describe: Describe | None = None) -> Parts:
    """Split a pytree into its arrays and a function that rebuilds it. Other leaves keep their positions.

    Args:
        tree: The pytree.
        describe: Makes a leaf of the keys that lead to an array, as text, and the array. `None`: the path is the keys
            joined by dots; what rounds is a weight, random keys are random states, and all else is state.

    Raises:
        ScopeError: Two arrays have one path.
    """
    found, tree_def = jax.tree_util.tree_flatten_with_path(tree)
    values = [value for _, value in found]
    places = [place for place, value in enumerate(values) if is_array(value)]
    if describe is None:
        named = list_leaves(tree)
        leaves = [Leaf(".".join(named[n][0]), values[n], infer_kind(values[n])) for n in places]
    else:
        leaves = [describe([*map(format_key, found[place][0])], values[place]) for place in places]
    _check_distinct(leaves, tree)
    if "equinox" in sys.modules:
        in_modules = find_equinox_leaves(tree_def)
        leaves = [
            replace(leaf, no_padding=_EQUINOX) if place in in_modules else leaf
            for place, leaf in zip(places, leaves, strict=True)
        ]

    def put_together(arrays: Sequence[object]) -> object:
        filled = list(values)
        for place, array in zip(places, arrays, strict=True):
            filled[place] = array
        return jax.tree_util.tree_unflatten(tree_def, filled)

    return Parts(leaves, put_together)


@functools.lru_cache
def find_equinox_leaves(tree: Any) -> frozenset[int]:
    """Return the numbers of the leaves that are in Equinox modules."""
    module = sys.modules["equinox"].Module
    numbers = tree.unflatten(range(tree.num_leaves))
    tops = jax.tree.leaves(numbers, is_leaf=lambda value: isinstance(value, module))
    return frozenset(n for top in tops if isinstance(top, module) for n in jax.tree.leaves(top))


def list_leaves(tree: object) -> list[tuple[tuple[str, ...], object]]:
    """List a pytree's leaves in order, with the parts of their paths. A flax box adds no part."""
    return [
        ((*map(format_key, path), *map(format_key, inner[1:])), leaf)
        for path, node in jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_flax_box)[0]
        for inner, leaf in jax.tree_util.tree_flatten_with_path(node)[0]
    ]


def infer_kind(value: Any) -> Kind:
    """Infer an array's purpose from its dtype."""
    if is_key(value):
        return Kind.RNG
    return Kind.WEIGHT if jnp.issubdtype(value.dtype, jnp.inexact) else Kind.STATE


def format_key(key: object) -> str:
    """Return one part of a path: an attribute name, a dict key, or a position in a sequence.

    A dict's key that is a tuple, such as a path of flax, is joined by dots.
    """
    for attribute in ("key", "name", "idx"):
        if hasattr(key, attribute):
            return format_key(getattr(key, attribute))
    return ".".join(map(str, key)) if isinstance(key, tuple) else str(key)


def _check_distinct(leaves: Sequence[Leaf], model: object) -> None:
    paths = [path for leaf in leaves for path in (leaf.path, *leaf.aliases)]
    twice = (
        next((path for path in paths if paths.count(path) > 1), None) if len({*paths}) < len(paths) else None
    )
    if twice is not None:
        raise ScopeError(
            f"{twice}: two arrays of the model have this path",
            facts={"model": type(model).__name__},
            why="a path joins keys by dots, and here different keys give the same path",
            fix='rename one of them: a key with a dot, as in {"a.b": ..}, gives the same path as two keys',
        )
