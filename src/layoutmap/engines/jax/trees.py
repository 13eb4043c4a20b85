"""Pytrees of arrays: their leaves by path, and trees of specs and shardings for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Sharding

from layoutmap.core.variables import Kind, VariableSpec


def list_variables(tree: object) -> list[VariableSpec]:
    """Return the arrays of a pytree as variables by path. Random keys are random states."""
    found: list[VariableSpec] = []

    def note(path: str, leaf: Any) -> None:
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        found.append(VariableSpec(path, leaf.shape, str(leaf.dtype), Kind.RNG if is_key else Kind.WEIGHT))

    map_by_path(tree, note)
    return found


def map_by_path(tree: object, made: Callable[[str, Any], object]) -> Any:
    """Return a tree with a function's results for each array and its path, and None for other leaves."""

    def map_leaf(keys: Any, leaf: object) -> object:
        path = jax.tree_util.keystr(keys, simple=True, separator=".")
        # An array in an nnx Variable or linen box has the path of its container.
        return jax.tree.map(
            lambda each: made(path, each) if hasattr(each, "shape") and hasattr(each, "dtype") else None, leaf
        )

    return jax.tree_util.tree_map_with_path(map_leaf, tree, is_leaf=is_flax_box)


def is_flax_box(node: object) -> bool:
    """Return whether a node is a flax.nnx Variable or a flax.linen box, without importing flax."""
    kinds = {f"{kind.__module__.partition('.')[0]}.{kind.__name__}" for kind in type(node).__mro__}
    return not kinds.isdisjoint(("flax.Variable", "flax.AxisMetadata"))


def set_memory(array: jax.Array, memory: str | None) -> jax.Array:
    """Return a traced array in a kind of memory, and with `None` the array itself."""
    if memory is None:
        return array
    space = jax.memory.Space.Host if memory == "pinned_host" else jax.memory.Space.Device
    # JAX has no space for memory that is not pinned: it computes with such arrays as with those of the devices.
    return array if jax.typeof(array).memory_space == space else jax.device_put(array, space)


def find_memory(array: Any) -> str:
    """Find the memory kind of an array, as `"pinned_host"`, or an empty text for its devices' default."""
    sharding = getattr(array, "sharding", None)
    mesh = getattr(sharding, "mesh", None)
    if not isinstance(sharding, Sharding) or isinstance(mesh, jax.sharding.AbstractMesh):
        return ""
    kind = sharding.memory_kind
    return "" if kind in (None, next(iter(sharding.device_set)).default_memory().kind) else str(kind)
