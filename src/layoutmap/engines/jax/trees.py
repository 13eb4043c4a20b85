"""List the leaves of pytrees by path, and make trees of specs and shardings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Sharding

from layoutmap.core.variables import Kind, VariableSpec


def list_variables(tree: object) -> list[VariableSpec]:
    """Return a `VariableSpec` for each array of a pytree, with its path. The kind of random keys is `RNG`."""
    found: list[VariableSpec] = []

    def append_variable(path: str, leaf: Any) -> None:
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        found.append(VariableSpec(path, leaf.shape, str(leaf.dtype), Kind.RNG if is_key else Kind.WEIGHT))

    map_arrays_by_path(tree, append_variable)
    return found


def map_arrays_by_path(tree: object, function: Callable[[str, Any], object]) -> Any:
    """Return a tree with `function(path, array)` in place of each array. Other leaves become None."""

    def map_leaf(keys: Any, leaf: object) -> object:
        path = jax.tree_util.keystr(keys, simple=True, separator=".")
        # An array in an nnx Variable or linen box has its container's path, so treat the box as a leaf.
        return jax.tree.map(
            lambda each: function(path, each) if hasattr(each, "shape") and hasattr(each, "dtype") else None,
            leaf,
        )

    return jax.tree_util.tree_map_with_path(map_leaf, tree, is_leaf=is_flax_box)


def is_flax_box(node: object) -> bool:
    """Return whether a node is a flax.nnx Variable or a flax.linen box, without importing flax."""
    kinds = {f"{kind.__module__.partition('.')[0]}.{kind.__name__}" for kind in type(node).__mro__}
    return not kinds.isdisjoint(("flax.Variable", "flax.AxisMetadata"))


def move_to_memory(array: jax.Array, memory: str | None) -> jax.Array:
    """Move a traced array to a memory kind. `None` keeps the array unchanged."""
    if memory is None:
        return array
    space = jax.memory.Space.Host if memory == "pinned_host" else jax.memory.Space.Device
    # JAX treats unpinned host memory like device memory in traces, so such arrays need no move.
    return array if jax.typeof(array).memory_space == space else jax.device_put(array, space)


def find_memory_kind(array: Any) -> str:
    """Return the memory kind of an array, such as `"pinned_host"`, or an empty text for the devices' default."""
    sharding = getattr(array, "sharding", None)
    mesh = getattr(sharding, "mesh", None)
    if not isinstance(sharding, Sharding) or isinstance(mesh, jax.sharding.AbstractMesh):
        return ""
    kind = sharding.memory_kind
    return "" if kind in (None, next(iter(sharding.device_set)).default_memory().kind) else str(kind)
