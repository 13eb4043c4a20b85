"""Find arrays that a plan cannot contain: mutable ones, and traced ones in objects that JAX does not traverse."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

import jax
import jax.core

from layoutmap.adapters.jax.hidden_arrays import has_hidden_tracer
from layoutmap.adapters.jax.nnx_types import is_nnx_module, is_nnx_variable
from layoutmap.adapters.jax.pytrees import format_pytree_key
from layoutmap.core.arguments import describe_type
from layoutmap.core.errors import ScopeError


# A mutable array cannot be moved to other devices after its creation, so raise an error with its path (decisions/0073).
def check_no_mutable_or_hidden_arrays(model: object) -> None:
    """Raise for a model with a mutable array, or with a traced array in an object that JAX does not traverse.

    Args:
        model: A module of flax.nnx, or any pytree.

    Raises:
        ScopeError: The model has such an array.
    """
    is_module = is_nnx_module(model)
    for keys, leaf in _iterate_leaves_with_keys(model, is_module):
        if isinstance(leaf, jax.Ref) or (is_nnx_variable(leaf) and leaf.hijax):
            what = "a Variable of flax.nnx with hijax=True" if is_nnx_variable(leaf) else "a Ref of JAX"
            raise ScopeError(
                f"{_format_path(keys)}: mutable arrays are not supported",
                facts={"value": what},
                why="a mutable array stays on the devices where it was created, and a compiled function cannot "
                "return it",
                fix="create the Variable outside of nnx.var_defaults(hijax=True)"
                if is_nnx_variable(leaf)
                else "return the value, jax.freeze(ref), and create the Ref where it is used",
            )
        # Leave modules out, because `check_state_has_all_arrays` raises an error for them that names the attribute.
        if not is_module and has_hidden_tracer(leaf):
            raise ScopeError(
                f"{_format_path(keys)}: an array is hidden in an object",
                facts={"value": describe_type(leaf)},
                why="JAX finds arrays only in pytrees, and this object is not a pytree, so the array would be lost",
                fix="make the object a pytree: jax.tree_util.register_dataclass(..); or move its arrays "
                "out of it",
            )


def _iterate_leaves_with_keys(model: object, is_module: bool) -> Iterator[tuple[Sequence[object], object]]:
    """Yield the leaves of a model and the arrays in its Variables, each with its keys."""
    if is_module:
        nnx = sys.modules["flax.nnx"]
        found = ((keys, node) for keys, node in nnx.iter_graph(model) if not isinstance(node, nnx.Pytree))
    else:
        found = jax.tree_util.tree_flatten_with_path(model, is_leaf=is_nnx_variable)[0]
    for keys, leaf in found:
        yield keys, leaf
        if is_nnx_variable(leaf) and not leaf.hijax:
            value = leaf.get_raw_value()
            for each in (value,) if isinstance(value, jax.core.Tracer) else jax.tree.leaves(value):
                yield keys, each


def _format_path(keys: Sequence[object]) -> str:
    return ".".join(map(format_pytree_key, keys)) or "the model"
