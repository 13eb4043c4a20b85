"""Read and update flax.nnx objects that a step takes as arguments and changes in place.

To look through a module takes flax some ten milliseconds for a hundred Variables, so it is done once. Before each later
step it is only checked that every container in it has what it had: then its Variables are those that were found.
"""

from __future__ import annotations

import dataclasses
import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from operator import is_
from typing import TYPE_CHECKING, Any, TypeGuard

import jax

from layoutmap.adapters.jax.outputs import Input
from layoutmap.adapters.jax.private import find_value_slot
from layoutmap.adapters.jax.pytrees import format_key
from layoutmap.core.errors import ScopeError, join_names

if TYPE_CHECKING:
    from flax import nnx


def _is_of_nnx(value: object, kind: str) -> bool:
    nnx = sys.modules.get("flax.nnx")  # nnx objects exist only if flax was imported
    return nnx is not None and isinstance(value, getattr(nnx, kind))


def is_nnx(model: object) -> TypeGuard[nnx.Module]:
    """Return whether a model is a module of flax.nnx."""
    return _is_of_nnx(model, "Module")


def is_object(value: object) -> bool:
    """Return whether a value is an nnx module, an optimizer, or another object that contains Variables."""
    return _is_of_nnx(value, "Pytree")


def is_variable(value: object) -> TypeGuard[nnx.Variable[Any]]:
    """Return whether a value is an nnx Variable."""
    return _is_of_nnx(value, "Variable")


def is_nnx_optimizer(state: object) -> TypeGuard[nnx.Optimizer[Any]]:
    """Return whether an object is an nnx optimizer."""
    return _is_of_nnx(state, "Optimizer")


# `nnx.split` takes milliseconds, so split objects once and compare their identities (decisions/0186).
class StepObjects:
    """Inspect the nnx objects of one call together, so that arrays they share are found once.

    Args:
        nodes: The objects. They are not kept alive.

    Attributes:
        structure: All but the arrays; equal for objects that are alike.
        names: For each object the paths of its leaves.
        token: The number of the structure among those of a step.
    """

    def __init__(self, nodes: Sequence[object]):
        from flax import nnx

        from layoutmap.adapters.jax.held_arrays import find_attribute_arrays

        self._nodes = [weakref.ref(node, self._clear_contents) for node in nodes]
        graphdef, state = nnx.split(tuple(nodes))
        places = jax.tree_util.tree_flatten_with_path(state, is_leaf=is_variable)[0]
        self._places = [place for _, place in places]
        self._keys = [tuple(map(format_key, path)) for path, _ in places]
        self._held = find_attribute_arrays(tuple(nodes))
        self._slot = find_value_slot(self._places)
        self._values_tree = jax.tree.structure(self._values())
        paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(state)[0]]
        self._owners = [path[0].key for path in paths]
        self.names = self._group_by_owner(map(_format_leaf_path, paths))
        self.structure = graphdef, jax.tree.structure(state)
        self.token = -1
        self._seen: list[tuple[Callable[[], object], list[object]]] = []
        self._record_contents(nodes)

    def is_unchanged(self, nodes: Sequence[object]) -> bool:
        """Return whether these are the same objects, with changes only in the values of Variables."""
        return (
            len(nodes) == len(self._nodes)
            and all(node is ref() for node, ref in zip(nodes, self._nodes, strict=True))
            and all(_has_content(seen(), content) for seen, content in self._seen)
        )

    def get_node(self, number: int) -> object:
        """Return an object by its number."""
        return self._nodes[number]()

    def read(self) -> list[list[Any]] | None:
        """Return the arrays of each object, or None if a Variable has another number of arrays than before."""
        leaves, tree = jax.tree.flatten(self._values())
        return self._group_by_owner(leaves) if tree == self._values_tree else None

    def _group_by_owner(self, leaves: Iterable[object]) -> list[list[Any]]:
        grouped: list[list[Any]] = [[] for _ in self._nodes]
        for owner, leaf in zip(self._owners, leaves, strict=True):
            grouped[owner].append(leaf)
        return grouped

    def write(self, changed: Mapping[int, object]) -> None:
        """Assign arrays to the Variables and attributes that contain them, by leaf number."""
        values: Iterable[tuple[int, object]] = changed.items()
        if self._values_tree.num_leaves != len(self._places):  # a Variable contains several arrays
            leaves = jax.tree.leaves(self._values())
            for number, value in changed.items():
                leaves[number] = value
            values = enumerate(jax.tree.unflatten(self._values_tree, leaves))
        if self._slot is not None:
            is_checked = False
            for number, value in values:
                if is_checked:
                    self._slot.__set__(self._places[number], value)
                else:
                    # It checks in which trace it is, which the others share.
                    self._places[number].set_raw_value(value)
                    is_checked = True
            return
        held = dict[Any, object]()
        for number, value in values:
            if not is_variable(place := self._places[number]):
                if place is not value:
                    held[self._keys[number]] = self._places[number] = value
            else:
                place.set_raw_value(value)
        if held:
            for each in self._held:
                each.put(held)
            self._seen = []
            self._record_contents([node() for node in self._nodes])

    def _values(self) -> list[object]:
        if self._slot is not None:
            return [*map(self._slot.__get__, self._places)]
        return [place.get_raw_value() if is_variable(place) else place for place in self._places]

    def _record_contents(self, nodes: Sequence[object]) -> None:
        """Record the content of each container. Only the nodes themselves are referenced weakly."""
        todo, known = list(nodes), set[int]()
        while todo:
            container = todo.pop()
            content = _list_content(container)
            if content is None or id(container) in known:
                continue
            known.add(id(container))
            if not isinstance(container, tuple):
                is_node = any(container is node for node in nodes)
                seen = weakref.ref(container) if is_node else _make_constant(container)
                self._seen.append((seen, list(content)))
            todo += content

    def _clear_contents(self, _: object) -> None:
        self._places, self._seen = [], []


def _has_content(container: object, expected: Sequence[object]) -> bool:
    """Return whether a container has the same objects as before."""
    content = _list_content(container)
    return content is not None and len(content) == len(expected) and all(map(is_, content, expected))


def _make_constant(value: object) -> Callable[[], object]:
    return lambda: value


def _list_content(container: object) -> Collection[object] | None:
    """Return the values in a container, or None for a value that is no container."""
    if isinstance(container, dict):
        return container.values()
    if isinstance(container, (list, tuple)):
        return container
    nnx = sys.modules["flax.nnx"]
    if isinstance(container, (nnx.Pytree, nnx.State)):
        return vars(container).values()
    if dataclasses.is_dataclass(container) and not isinstance(container, type):
        return [getattr(container, field.name, None) for field in dataclasses.fields(container)]
    return None


def open_objects(structure: Any, leaves: Sequence[object]) -> Sequence[object]:
    """Return copies of objects with the arrays of a trace."""
    from flax import nnx

    graphdef, tree = structure
    return nnx.merge(graphdef, jax.tree.unflatten(tree, leaves))


def find_changed_arrays(
    structure: object, nodes: Sequence[object], before: Sequence[object], inputs: Sequence[Input]
) -> dict[int, object]:
    """Return the arrays of objects that a step changed or that were donated, by leaf number.

    Args:
        structure: The structure of the objects before.
        nodes: The objects.
        before: Their arrays before.
        inputs: The leaves of the step's arguments that these are.

    Raises:
        ScopeError: The step has changed more than arrays.
    """
    from flax import nnx

    graphdef, state = nnx.split(tuple(nodes))
    leaves, tree = jax.tree_util.tree_flatten_with_path(state)
    if (graphdef, tree) != structure:
        found, names = [_format_leaf_path(path) for path, _ in leaves], [each.name for each in inputs]
        added, gone = [n for n in found if n not in names], [n for n in names if n not in found]
        has_other = (
            "their set has changed" if added or gone else "an attribute that is not an array is another one"
        )
        raise ScopeError(
            "the step changes the structure of one of its arguments",
            facts={"added": join_names(added), "removed": join_names(gone)} if added or gone else {},
            why="a compiled step can only replace the arrays of existing Variables; " + has_other,
            fix="change modules outside the step, and remove sown values inside it: nnx.pop(model, ...)",
        )
    return {
        number: new
        for number, (old, (_, new), each) in enumerate(zip(before, leaves, inputs, strict=True))
        if new is not old or each.is_donated
    }


def _format_leaf_path(path: Sequence[object]) -> str:
    """Format the path of a leaf in its object, without the object's number and the Variable's own keys."""
    parts = [jax.tree_util.keystr((key,), simple=True) for key in path]
    return ".".join(parts[1:-1] if parts[-1] == "value" else parts[1:])
