"""Find traced arrays in functions and objects that JAX does not traverse."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import suppress
from types import ModuleType

import jax
import jax.core

_MAX_LEVELS = 3  # limit for nested objects, because some of them reference the whole program


def has_hidden_tracer(leaf: object, is_of_flax: Callable[[object], bool]) -> bool:
    """Return whether a function's closure, or an object that is not a pytree, contains a traced array."""
    seen, todo = set[int](), [(leaf, 0)]
    while todo:
        each, depth = todo.pop()
        is_known = isinstance(each, (str, int, float, type, jax.Array, ModuleType))
        if is_known or id(each) in seen or type(each).__module__.startswith(("flax.", "jax.")):
            continue
        if is_of_flax(each) or not jax.tree_util.all_leaves([each]):
            continue
        seen.add(id(each))
        held = jax.tree.leaves(_list_held(each), is_leaf=is_of_flax)
        if any(isinstance(value, jax.core.Tracer) for value in held):
            return True
        if depth < _MAX_LEVELS:
            todo += [(value, depth + 1) for value in held]
    return False


def _list_held(owner: object) -> list[object]:
    held: list[object] = [getattr(owner, "__dict__", None), getattr(owner, "__defaults__", None)]
    if isinstance(owner, functools.partial):
        held += [owner.func, owner.args, owner.keywords]
    for cell in getattr(owner, "__closure__", None) or ():
        with suppress(ValueError):  # a closure variable without a value
            held.append(cell.cell_contents)
    return held
