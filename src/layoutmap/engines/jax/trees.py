"""Pytrees of arrays: their leaves by path, and trees of specs and shardings for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from layoutmap.core.layout import Layout
from layoutmap.core.variables import Kind, VariableSpec
from layoutmap.engines.jax.devices import named_sharding, partition_spec


def variables_of(tree: Any) -> list[VariableSpec]:
    """The arrays of a pytree, by path; a random key is a random state."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [_variable(_path(keys), leaf) for keys, leaf in leaves if _is_array(leaf)]


def _variable(path: str, leaf: Any) -> VariableSpec:
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return VariableSpec(path, leaf.shape, str(leaf.dtype), Kind.RNG if is_key else Kind.WEIGHT)


def partition_specs(tree: Any, layout_of: Callable[[str], Layout]) -> Any:
    """The tree with a `PartitionSpec` for each array, by path, and `None` for each leaf that is none."""
    return _mapped(tree, lambda path: partition_spec(layout_of(path)))


def named_shardings(tree: Any, layout_of: Callable[[str], Layout]) -> Any:
    """The tree with a `NamedSharding` for each array, by path, and `None` for each leaf that is none.

    Raises:
        MeshError: The machine does not have the devices.
    """
    return _mapped(tree, lambda path: named_sharding(layout_of(path)))


def _mapped(tree: Any, made: Callable[[str], Any]) -> Any:
    return jax.tree_util.tree_map_with_path(
        lambda keys, leaf: made(_path(keys)) if _is_array(leaf) else None, tree
    )


def _path(keys: Any) -> str:
    return jax.tree_util.keystr(keys, simple=True, separator=".")


def _is_array(leaf: Any) -> bool:
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")
