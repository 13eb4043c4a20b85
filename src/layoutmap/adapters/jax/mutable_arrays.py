"""Find arrays that a plan cannot contain: mutable ones, and traced ones in objects that JAX does not traverse."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

import jax
import jax.core

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
    is_module = is_nnx(model)
    for keys, leaf in _list_leaves(model, is_module):
        if isinstance(leaf, jax.Ref) or (is_variable(leaf) and leaf.hijax):
            what = "a Variable of flax.nnx with hijax=True" if is_variable(leaf) else "a Ref of JAX"
            raise ScopeError(
                f"{_format_path(keys)}: a mutable array",
                facts={"value": what},
                why="JAX keeps it on the devices where it was created, and a compiled function cannot "
                "return it",
                fix="make it outside of nnx.var_defaults(hijax=True)"
                if is_variable(leaf)
                else "return its value, jax.freeze(ref), and create the Ref where it is used",
            )
        # For modules, `check_all_found` reports the attribute.
        if not is_module and has_hidden_tracer(leaf, _is_of_flax):
            raise ScopeError(
                f"{_format_path(keys)}: an array is hidden in an object",
                facts={"value": describe_type(leaf)},
                why="JAX finds arrays only in pytrees, and this is not one, so the array would be lost",
                fix="make the object a pytree: jax.tree_util.register_dataclass(..); or move its arrays "
                "out of it",
            )


def _list_leaves(model: object, is_module: bool) -> Iterator[tuple[Sequence[object], object]]:
    """List the leaves of a model, and the values of its Variables."""
    if is_module:
        nnx = sys.modules["flax.nnx"]
        found = ((keys, node) for keys, node in nnx.iter_graph(model) if not isinstance(node, nnx.Pytree))
    else:
        found = jax.tree_util.tree_flatten_with_path(model, is_leaf=is_variable)[0]
    for keys, leaf in found:
        yield keys, leaf
        if is_variable(leaf) and not leaf.hijax:
            value = leaf.get_raw_value()
            for each in (value,) if isinstance(value, jax.core.Tracer) else jax.tree.leaves(value):
                yield keys, each


def _format_path(keys: Sequence[object]) -> str:
    return ".".join(map(format_key, keys)) or "the model"


def _is_of_flax(value: object) -> bool:
    return is_variable(value) or is_object(value)
