"""Find arrays of a flax.nnx module outside Variables: in attributes, or in lists, tuples, and dicts there.

Flax finds them in attributes that it takes for data, and puts new ones in place for attributes themselves, but not
for what is in a tuple or a dict.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.core
from flax import nnx

from layoutmap.adapters.jax.hidden_arrays import has_hidden_tracer
from layoutmap.adapters.jax.module_outputs import TracedOutput
from layoutmap.adapters.jax.pytrees import format_key
from layoutmap.adapters.jax.tracing import is_array
from layoutmap.core.arguments import describe_type
from layoutmap.core.errors import ScopeError

Keys = tuple[str, ...]
Nodes = Iterable[tuple[tuple[object, ...], object]]
"""The nodes of a module with their paths, as `nnx.iter_graph` returns them."""


@dataclass(frozen=True, slots=True)
class AttributeArrays:
    """The arrays outside Variables in one attribute of an nnx module.

    Args:
        owner: The module, weakly.
        name: The attribute.
        path: Its path.
    """

    owner: weakref.ref[object]
    name: str
    path: Keys

    def put(self, arrays: Mapping[Keys, object]) -> None:
        """Assign new arrays by path."""
        owner = self.owner()

        def replace_leaf(keys: Sequence[object], value: object) -> object:
            return arrays.get((*self.path, *map(format_key, keys)), value)

        held = jax.tree_util.tree_map_with_path(replace_leaf, getattr(owner, self.name), is_leaf=_is_of_flax)
        setattr(owner, self.name, nnx.data(held))


def find_attribute_arrays(model: object) -> list[AttributeArrays]:
    """Return the attributes of a model's modules that contain arrays outside of Variables."""
    return [
        AttributeArrays(weakref.ref(node), name, (*map(format_key, path), name))
        for path, node in [*nnx.iter_graph(model)]
        if isinstance(node, nnx.Pytree)
        for name, value in vars(node).items()
        if any(map(is_array, jax.tree.leaves(value, is_leaf=_is_of_flax)))
    ]


def note_arrays(nodes: Nodes) -> None:
    """Register traced arrays in module attributes as data, as flax does for arrays with values.

    Flax 0.12.8 takes them for static values, here and in `nnx.eval_shape` and `nnx.jit`, and loses them.
    """
    for _, node in nodes:
        if isinstance(node, nnx.Pytree):
            for name, value in [*vars(node).items()]:
                if isinstance(value, jax.core.Tracer):
                    setattr(node, name, nnx.data(value))


def check_all_found(nodes: Nodes, state: object) -> None:
    """Raise if the state of a module lacks traced arrays that the module contains.

    Raises:
        ScopeError: It has not.
    """
    found = {id(leaf) for leaf in jax.tree.leaves(state) if isinstance(leaf, jax.core.Tracer)}
    owners = {path: node for path, node in nodes if isinstance(node, nnx.Pytree)}
    checked: dict[int, object] = {}
    for path, node in nodes:
        if isinstance(node, jax.core.Tracer) and id(node) not in found:
            length = next(n for n in range(len(path), -1, -1) if path[:n] in owners)
            owner, name = owners[path[:length]], str(path[length])
            raise ScopeError(
                f"{'.'.join(map(format_key, path[: length + 1]))}: arrays in a static attribute",
                facts={"module": type(owner).__name__, "value": describe_type(getattr(owner, name))},
                why="flax.nnx finds arrays in lists, tuples, and dicts only if they are marked as data",
                fix="mark it in its assignment: nnx.data(..)",
            )
        if isinstance(node, TracedOutput):  # this library's wrapper is not part of the model
            continue
        if id(node) not in checked and has_hidden_tracer(node, _is_of_flax):
            raise ScopeError(
                f"{'.'.join(map(format_key, path))}: an array is hidden in a static attribute",
                facts={"value": describe_type(node)},
                why="flax.nnx finds arrays only in pytrees, and this is not one, so the array would be lost",
                fix="make the array an attribute of the module, and use that in the call",
            )
        checked[id(node)] = node


def _is_of_flax(value: object) -> bool:
    return isinstance(value, (nnx.Pytree, nnx.Variable))
