"""Find traced arrays in functions and objects that JAX does not traverse."""

from __future__ import annotations

import functools
from contextlib import suppress
from types import ModuleType

import jax
import jax.core

from layoutmap.adapters.jax.nnx_types import is_nnx_object_or_variable

_MAX_LEVELS = 3  # limit the depth of the search, because some objects reference the whole program


def has_hidden_tracer(leaf: object) -> bool:
    """Return whether a function's closure, or an object that is not a pytree, contains a traced array."""
    seen, todo = set[int](), [(leaf, 0)]
    while todo:
        each, depth = todo.pop()
        is_known = isinstance(each, (str, int, float, type, jax.Array, ModuleType))
        if is_known or id(each) in seen or type(each).__module__.startswith(("flax.", "jax.")):
            continue
        if is_nnx_object_or_variable(each) or not jax.tree_util.all_leaves([each]):
            continue
        seen.add(id(each))
        values = jax.tree.leaves(_list_referenced_values(each), is_leaf=is_nnx_object_or_variable)
        if any(isinstance(value, jax.core.Tracer) for value in values):
            return True
        if depth < _MAX_LEVELS:
            todo += [(value, depth + 1) for value in values]
    return False


def _list_referenced_values(owner: object) -> list[object]:
    """Return the attributes, defaults, bound arguments, and closure variables of a function or object."""
    values: list[object] = [getattr(owner, "__dict__", None), getattr(owner, "__defaults__", None)]
    if isinstance(owner, functools.partial):
        values += [owner.func, owner.args, owner.keywords]
    for cell in getattr(owner, "__closure__", None) or ():
        with suppress(ValueError):  # raised by a closure variable that has no value yet
            values.append(cell.cell_contents)
    return values
