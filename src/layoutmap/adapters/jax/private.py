"""Use private names of JAX, tested with jax 0.10.

`jax._src.interpreters.partial_eval.DynamicJaxprTracer._origin_msg`: the part of an error message that says from which
operations a traced array comes. Flax asks each array for its sharding; a traced one has none, and JAX walks all
operations so far for a message that nobody reads, so the time of a trace grows with the square of their number, as that
of `nnx.eval_shape` does (`benchmarks/jax_plan.py`). While models are traced here, the message is without that part. If
the name is gone, traces are slow again.

`flax.nnx.Variable._raw_value`, found in flax 0.12: the value of a Variable. `set_raw_value` checks twice in which trace
it is, which takes longer than all else between two steps of `jit_step`; after the first Variable that is known.
If the name is gone, or JAX itself holds the Variable, `set_raw_value` is called for each.

`jax.Array._sharding`: the sharding of an array. `sharding` is a function of Python that returns it, which would be the
slowest part of a comparison of 400 arrays. If the name is gone, each array is described by its public attributes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.core
import numpy as np

from layoutmap.engines.patches import Attribute, Patches

_NAME = "_origin_msg"
_WITHOUT_ARRAYS = {type(None), bool, int, float, complex, np.ndarray}


def _make_patches() -> Patches:
    try:
        from jax._src.interpreters.partial_eval import DynamicJaxprTracer as Traced
    except ImportError:
        return Patches([])
    return Patches([Attribute(Traced, _NAME, lambda _: lambda tracer: "")] if _NAME in vars(Traced) else [])


_PATCHES = _make_patches()


def shorten_messages() -> AbstractContextManager[None]:
    """Omit the origin of traced arrays from JAX's error messages while the context is open."""
    return _PATCHES.activate()


def has_assignable_value(variable: Any) -> bool:
    """Return whether the value of a Variable of flax.nnx may be changed in its slot."""
    slots = {name for base in type(variable).__mro__ for name in getattr(base, "__slots__", ())}
    return "_raw_value" in slots and not variable.hijax


def find_value_slot(variables: Sequence[object]) -> Any:
    """Return the slot of the values of Variables that all may be read and changed through it, or None."""
    if not variables or not all(map(has_assignable_value, variables)):
        return None
    return next(vars(base)["_raw_value"] for base in type(variables[0]).__mro__ if "_raw_value" in vars(base))


def has_sharding(array: object) -> bool:
    """Return whether an array can be passed to `are_same_arrays`."""
    return isinstance(array, jax.Array) and hasattr(array, "_sharding")


def are_same_arrays(arrays: Iterable[Any], avals: list[Any], shardings: list[Any]) -> bool:
    """Return whether arrays have these types and shardings, and none is deleted.

    Equal types and shardings are put into the lists, since the same objects compare faster the next time.
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


def are_distinct_arrays(values: Iterable[Any], kind: type[jax.Array]) -> bool:
    """Return whether no array in a tree is traced or deleted, and none is there twice.

    Dicts, lists, and tuples are looked through without `jax.tree`, which takes longer than a small step may.

    Args:
        values: The tree.
        kind: The class of most arrays.
    """
    # A call of `list[Any]` takes longer than a small step may.
    found: list[jax.Array] = []
    others: list[jax.Array] = []
    todo = [*values]
    for value in todo:
        cls = type(value)
        if cls is kind:
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
    if any(map(kind.is_deleted, found)):
        return False
    if others:
        if any(each.is_deleted() for each in others):
            return False
        found += others
    return len({*map(id, found)}) == len(found)
