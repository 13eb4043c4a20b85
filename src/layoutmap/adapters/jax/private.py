"""Use private names of JAX, tested with jax 0.10.

`jax._src.interpreters.partial_eval.DynamicJaxprTracer._origin_msg`: the part of an error message that says from which
operations a traced array comes. Flax asks each traced array for its sharding, which raises, and JAX walks all earlier
operations to write a message that flax discards. So the time of a trace grows with the square of their number, as in
`nnx.eval_shape` (`benchmarks/jax_plan.py`). While models are traced here, the message is without that part. If a
release of JAX has no such name, traces are slow again.

`flax.nnx.Variable._raw_value`, found in flax 0.12: the value of a Variable. `set_raw_value` checks the current trace
twice, which takes longer than all other work between two steps of `jit_step`. The first Variable of a step is checked,
and the others are in the same trace. If the name does not exist, or the Variable is a mutable array of JAX (`hijax`),
`set_raw_value` is called for each Variable.

`jax.Array._sharding`: the sharding of an array. The public `sharding` is a Python property that returns it, and would
be the slowest part of a comparison of 400 arrays. If the name does not exist, public attributes are compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.core
import numpy as np

from layoutmap.engines.patches import AttributePatch, PatchGroup

_NAME = "_origin_msg"
_WITHOUT_ARRAYS = {type(None), bool, int, float, complex, np.ndarray}


def _make_error_message_patches() -> PatchGroup:
    try:
        from jax._src.interpreters.partial_eval import DynamicJaxprTracer as Traced
    except ImportError:
        return PatchGroup([])
    patch = AttributePatch(Traced, _NAME, lambda _: lambda tracer: "")
    return PatchGroup([patch] if _NAME in vars(Traced) else [])


_PATCHES = _make_error_message_patches()


def shorten_error_messages() -> AbstractContextManager[None]:
    """Return a context in which JAX's error messages omit the origin of traced arrays, which takes long to write."""
    return _PATCHES.activate()


def has_value_descriptor(variable: Any) -> bool:
    """Return whether a flax.nnx Variable stores its value in an entry of `__slots__` that can be assigned."""
    slots = {name for base in type(variable).__mro__ for name in getattr(base, "__slots__", ())}
    return "_raw_value" in slots and not variable.hijax


def find_value_descriptor(variables: Sequence[object]) -> Any:
    """Return the descriptor that reads and assigns the value of each of these Variables, or None if one has none.

    The descriptor is that of an entry of `__slots__`.
    """
    if not variables or not all(map(has_value_descriptor, variables)):
        return None
    return next(vars(base)["_raw_value"] for base in type(variables[0]).__mro__ if "_raw_value" in vars(base))


def has_private_sharding_attribute(array: object) -> bool:
    """Return whether an array has the private sharding attribute that `are_equal_types_and_shardings` compares."""
    return isinstance(array, jax.Array) and hasattr(array, "_sharding")


def are_equal_types_and_shardings(arrays: Iterable[Any], avals: list[Any], shardings: list[Any]) -> bool:
    """Return whether arrays have the types in `avals` and the shardings in `shardings`, and none is deleted.

    In the lists, replace equal types and shardings by those of the arrays, because identical objects compare faster.
    """
    try:
        for n, (array, aval, sharding) in enumerate(zip(arrays, avals, shardings, strict=True)):
            if array.aval is not aval or array._sharding is not sharding:
                if array.aval != aval or array._sharding != sharding:
                    return False
                avals[n], shardings[n] = array.aval, array._sharding
            if array.is_deleted():
                return False
    except AttributeError:  # not an array of JAX
        return False
    return True


def has_only_distinct_live_arrays(values: Iterable[Any], array_type: type[jax.Array]) -> bool:
    """Return whether a tree contains no traced or deleted array, and no array twice.

    Dicts, lists, and tuples are traversed without `jax.tree`, because that takes too long for a small step.

    Args:
        values: The tree.
        array_type: The class of most arrays, for which the check is fastest.
    """
    # Annotate these lists, because a call such as `list[jax.Array]()` takes too long for a small step.
    found: list[jax.Array] = []
    others: list[jax.Array] = []
    todo = [*values]
    for value in todo:
        cls = type(value)
        if cls is array_type:
            found.append(value)
        elif cls is dict:
            todo += value.values()
        elif issubclass(cls, (list, tuple)):
            todo += value
        elif isinstance(value, jax.Array):
            if isinstance(value, jax.core.Tracer):
                return False
            others.append(value)
        elif cls not in _WITHOUT_ARRAYS:
            leaves = jax.tree.leaves(value)
            if len(leaves) != 1 or leaves[0] is not value:
                todo += leaves
    if any(map(array_type.is_deleted, found)):
        return False
    if others:
        if any(each.is_deleted() for each in others):
            return False
        found += others
    return len({*map(id, found)}) == len(found)
