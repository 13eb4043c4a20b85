"""Find and replace arrays of a flax.nnx module outside Variables: in attributes, or in lists, tuples, and dicts there.

Flax finds such arrays in attributes that are marked as data. `nnx.update` replaces an array that is itself an
attribute, but not one in a tuple or a dict.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.core
from flax import nnx

from layoutmap.adapters.jax.hidden_arrays import has_hidden_tracer
from layoutmap.adapters.jax.module_outputs import CallTracingHandler
from layoutmap.adapters.jax.nnx_types import is_nnx_object_or_variable
from layoutmap.adapters.jax.pytrees import format_pytree_key
from layoutmap.adapters.jax.tracing import is_array
from layoutmap.core.arguments import describe_type
from layoutmap.core.errors import ScopeError

Keys = tuple[str, ...]
Nodes = Iterable[tuple[tuple[object, ...], object]]
"""The nodes of a module with their paths, as `nnx.iter_graph` returns them."""


@dataclass(frozen=True, slots=True)
class ArrayAttribute:
    """Describe an attribute of an nnx module that contains arrays outside of Variables.

    Args:
        owner: A weak reference to the module.
        name: Name of the attribute.
        path: Path of the attribute in the model.
    """

    owner: weakref.ref[object]
    name: str
    path: Keys

    def assign_arrays(self, arrays: Mapping[Keys, object]) -> None:
        """Replace arrays of this attribute by those in `arrays`, a dict from path, as a tuple, to new array."""
        owner = self.owner()

        def replace_leaf(keys: Sequence[object], value: object) -> object:
            return arrays.get((*self.path, *map(format_pytree_key, keys)), value)

        old = getattr(owner, self.name)
        new = jax.tree_util.tree_map_with_path(replace_leaf, old, is_leaf=is_nnx_object_or_variable)
        setattr(owner, self.name, nnx.data(new))


def find_array_attributes(model: object) -> list[ArrayAttribute]:
    """Return the attributes of a model's modules that contain arrays outside of Variables."""
    return [
        ArrayAttribute(weakref.ref(node), name, (*map(format_pytree_key, path), name))
        for path, node in [*nnx.iter_graph(model)]
        if isinstance(node, nnx.Pytree)
        for name, value in vars(node).items()
        if any(map(is_array, jax.tree.leaves(value, is_leaf=is_nnx_object_or_variable)))
    ]


def mark_traced_attributes_as_data(nodes: Nodes) -> None:
    """Mark module attributes that are traced arrays as data, as flax itself does for arrays with values.

    Flax 0.12.8 treats traced arrays as static values, also in `nnx.eval_shape` and `nnx.jit`, and so loses them.
    """
    for _, node in nodes:
        if isinstance(node, nnx.Pytree):
            for name, value in [*vars(node).items()]:
                if isinstance(value, jax.core.Tracer):
                    setattr(node, name, nnx.data(value))


def check_state_has_all_arrays(nodes: Nodes, state: object) -> None:
    """Raise if a module contains traced arrays that its state lacks, because flax does not find them.

    Raises:
        ScopeError: A traced array is missing.
    """
    found = {id(leaf) for leaf in jax.tree.leaves(state) if isinstance(leaf, jax.core.Tracer)}
    owners = {path: node for path, node in nodes if isinstance(node, nnx.Pytree)}
    checked: dict[int, object] = {}
    for path, node in nodes:
        if isinstance(node, jax.core.Tracer) and id(node) not in found:
            length = next(n for n in range(len(path), -1, -1) if path[:n] in owners)
            owner, name = owners[path[:length]], str(path[length])
            raise ScopeError(
                f"{'.'.join(map(format_pytree_key, path[: length + 1]))}: a static attribute contains arrays",
                facts={"module": type(owner).__name__, "value": describe_type(getattr(owner, name))},
                why="flax.nnx finds arrays in lists, tuples, and dicts only if these are marked as data",
                fix="mark the value where the attribute is assigned: nnx.data(..)",
            )
        # layoutmap's own `CallTracingHandler` is not part of the model, so skip it.
        if isinstance(node, CallTracingHandler):
            continue
        if id(node) not in checked and has_hidden_tracer(node):
            raise ScopeError(
                f"{'.'.join(map(format_pytree_key, path))}: an array is hidden in a static attribute",
                facts={"value": describe_type(node)},
                why="flax.nnx finds arrays only in pytrees, and this value is not a pytree, so the array would be lost",
                fix="make the array an attribute of the module, and use the attribute in the call",
            )
        checked[id(node)] = node
