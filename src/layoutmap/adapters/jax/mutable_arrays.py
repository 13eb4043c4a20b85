"""Arrays of a model that no plan can have: mutable ones, and traced ones in objects that JAX does not look into."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from contextlib import suppress
from types import ModuleType

import jax
import jax.core

from layoutmap.adapters.jax.objects import is_nnx, is_object, is_variable
from layoutmap.adapters.jax.pytrees import key_text
from layoutmap.core.arguments import kind_of
from layoutmap.core.errors import ScopeError

_MOST_LEVELS = 3  # objects below objects: some lead to all of a program


def check_immutable(model: object) -> None:  # why: decisions/0187
    """Check that a model has no mutable array, and no traced one that a plan would not find.

    Args:
        model: A module of flax.nnx, or any pytree.

    Raises:
        ScopeError: It has one.
    """
    for path, leaf in _list_leaves(model):
        if getattr(leaf, "hijax", False) or isinstance(leaf, jax.Ref):
            what = "a Variable of flax.nnx with hijax=True" if is_variable(leaf) else "a Ref of JAX"
            raise ScopeError(
                f"{path or 'the model'}: a mutable array",
                facts={"value": what},
                why="JAX keeps it on the devices where it was made, and a program that makes it returns no array",
                fix="make it outside of nnx.var_defaults(hijax=True)"
                if is_variable(leaf)
                else "return its value: jax.freeze(ref); and make a Ref where it is used",
            )
        if not is_nnx(model) and hides_tracer(leaf):  # of a module flax.nnx knows the attribute
            raise ScopeError(
                f"{path or 'the model'}: an array is hidden in an object",
                facts={"value": kind_of(leaf)},
                why="JAX looks for arrays in pytrees only, and this is not one, so the array would be lost",
                fix="make the object a pytree: jax.tree_util.register_dataclass(..); or keep its arrays beside it",
            )


def _list_leaves(model: object) -> Iterator[tuple[str, object]]:
    """List the leaves of a model, and the values that its Variables hold."""
    if is_nnx(model):
        found = sys.modules["flax.nnx"].iter_graph(model)
    else:
        found = jax.tree_util.tree_flatten_with_path(model, is_leaf=is_variable)[0]
    for keys, leaf in found:
        path = ".".join(map(key_text, keys))
        yield path, leaf
        if is_variable(leaf) and not leaf.hijax:
            yield from ((path, value) for value in jax.tree.leaves(leaf.get_raw_value()))


def hides_tracer(leaf: object) -> bool:
    """Return whether a function closes over a traced array, or an object that is no pytree has one below it."""
    seen, todo = set[int](), [(leaf, 0)]
    while todo:
        each, depth = todo.pop()
        is_known = isinstance(each, (str, int, float, type, jax.Array, ModuleType))
        if is_known or id(each) in seen or type(each).__module__.startswith(("flax.", "jax.")):
            continue
        if is_variable(each) or is_object(each) or not jax.tree_util.all_leaves([each]):
            continue
        seen.add(id(each))
        held = jax.tree.leaves(_list_held(each), is_leaf=lambda value: is_variable(value) or is_object(value))
        if any(isinstance(value, jax.core.Tracer) for value in held):
            return True
        if depth < _MOST_LEVELS:
            todo += [(value, depth + 1) for value in held]
    return False


def _list_held(owner: object) -> list[object]:
    held: list[object] = [getattr(owner, "__dict__", None), getattr(owner, "__defaults__", None)]
    if isinstance(owner, functools.partial):
        held += [owner.func, owner.args, owner.keywords]
    for cell in getattr(owner, "__closure__", None) or ():
        with suppress(ValueError):  # nothing was assigned to the name
            held.append(cell.cell_contents)
    return held
