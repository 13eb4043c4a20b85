"""Pytrees of arrays: their leaves by path, and trees of specs and shardings for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Sharding

from layoutmap.core.variables import Kind, VariableSpec


def variables_of(tree: object) -> list[VariableSpec]:
    """The arrays of a pytree, by path; a random key is a random state."""
    found: list[VariableSpec] = []

    def note(path: str, leaf: Any) -> None:
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        found.append(VariableSpec(path, leaf.shape, str(leaf.dtype), Kind.RNG if is_key else Kind.WEIGHT))

    mapped_by_path(tree, note)
    return found


def mapped_by_path(tree: object, made: Callable[[str, Any], object]) -> Any:
    """The tree with what is made of each array and its path, its keys joined by dots; `None` for any other leaf."""

    def of_leaf(keys: Any, leaf: object) -> object:
        path = jax.tree_util.keystr(keys, simple=True, separator=".")
        # The array in a variable of nnx or in a box of linen has the path of that.
        return jax.tree.map(
            lambda each: made(path, each) if hasattr(each, "shape") and hasattr(each, "dtype") else None, leaf
        )

    return jax.tree_util.tree_map_with_path(of_leaf, tree, is_leaf=is_flax_box)


def is_flax_box(node: object) -> bool:
    """Whether this is a variable of flax.nnx or a box of flax.linen; found out without loading flax."""
    kinds = {f"{kind.__module__.partition('.')[0]}.{kind.__name__}" for kind in type(node).__mro__}
    return not kinds.isdisjoint(("flax.Variable", "flax.AxisMetadata"))


def find_memory(array: Any) -> str:
    """Find the kind of memory that holds an array, as `"pinned_host"`; empty: that of its devices, or not known."""
    sharding = getattr(array, "sharding", None)
    mesh = getattr(sharding, "mesh", None)
    if not isinstance(sharding, Sharding) or isinstance(mesh, jax.sharding.AbstractMesh):
        return ""
    kind = sharding.memory_kind
    return "" if kind in (None, next(iter(sharding.device_set)).default_memory().kind) else str(kind)
