"""Find arrays that a plan cannot contain: mutable ones, and traced ones in objects that JAX does not traverse."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import jax

from layoutmap.adapters.jax.hidden_arrays import has_hidden_tracer
from layoutmap.adapters.jax.objects import is_nnx, is_object, is_variable
from layoutmap.adapters.jax.pytrees import format_key
from layoutmap.core.arguments import describe_type
from layoutmap.core.errors import ScopeError


# A mutable array cannot be moved after its creation, so refuse it by name (decisions/0073).
def check_immutable(model: object) -> None:
    """Raise for a model with a mutable array, or with a traced array that JAX does not find.

    Args:
        model: A module of flax.nnx, or any pytree.

    Raises:
        ScopeError: It has one.
    """
    for path, leaf in _list_leaves(model):
        if (is_variable(leaf) and leaf.hijax) or isinstance(leaf, jax.Ref):
            what = "a Variable of flax.nnx with hijax=True" if is_variable(leaf) else "a Ref of JAX"
            raise ScopeError(
                f"{path or 'the model'}: a mutable array",
                facts={"value": what},
                why="JAX cannot move it to other devices, and a traced function cannot return it",
                fix="create it outside nnx.var_defaults(hijax=True)"
                if is_variable(leaf)
                else "return its value, jax.freeze(ref), and create the Ref where it is used",
            )
        # For modules, `check_all_found` reports the attribute.
        if not is_nnx(model) and has_hidden_tracer(leaf, _is_of_flax):
            raise ScopeError(
                f"{path or 'the model'}: an array is hidden in an object",
                facts={"value": describe_type(leaf)},
                why="JAX finds arrays only in pytrees, and this object is not one, so the array would be lost",
                fix="register it as a pytree, jax.tree_util.register_dataclass(..), or store its arrays elsewhere",
            )


def _list_leaves(model: object) -> Iterator[tuple[str, object]]:
    """List the leaves of a model, and the values of its Variables."""
    if is_nnx(model):
        found = sys.modules["flax.nnx"].iter_graph(model)
    else:
        found = jax.tree_util.tree_flatten_with_path(model, is_leaf=is_variable)[0]
    for keys, leaf in found:
        path = ".".join(map(format_key, keys))
        yield path, leaf
        if is_variable(leaf) and not leaf.hijax:
            yield from ((path, value) for value in jax.tree.leaves(leaf.get_raw_value()))


def _is_of_flax(value: object) -> bool:
    return is_variable(value) or is_object(value)
