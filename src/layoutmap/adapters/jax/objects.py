"""Read and update flax.nnx objects that a step takes as arguments and changes in place.

Flax takes about ten milliseconds to find the Variables of a module with a hundred of them, so this is done once. Before
each later step, only the contents of all containers are compared. If they are the same objects, so are the Variables.
"""

from __future__ import annotations

import dataclasses
import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from operator import is_
from typing import TYPE_CHECKING, Any

import jax

from layoutmap.adapters.jax.nnx_types import is_nnx_variable
from layoutmap.adapters.jax.outputs import ArgumentLeaf
from layoutmap.adapters.jax.private import find_value_descriptor
from layoutmap.adapters.jax.pytrees import format_pytree_key
from layoutmap.core.errors import ScopeError, join_names

if TYPE_CHECKING:
    pass


# `nnx.split` takes milliseconds, so split objects once, and compare only identities in later calls (decisions/0186).
class NnxArguments:
    """Read and write the arrays of the nnx objects that are arguments of one call. Shared arrays occur once.

    Args:
        nodes: The objects. They are not kept alive.

    Attributes:
        structure: The objects without their arrays; equal for objects that differ only in array values.
        names: For each object, the paths of its leaves.
        structure_index: Index of the structure among those that a step was called with, or -1.
    """

    def __init__(self, nodes: Sequence[object]):
        from flax import nnx

        from layoutmap.adapters.jax.held_arrays import find_array_attributes

        self._nodes = [weakref.ref(node, self._release_references) for node in nodes]
        graphdef, state = nnx.split(tuple(nodes))
        holders = jax.tree_util.tree_flatten_with_path(state, is_leaf=is_nnx_variable)[0]
        self._holders = [holder for _, holder in holders]
        self._keys = [tuple(map(format_pytree_key, path)) for path, _ in holders]
        self._attributes = find_array_attributes(tuple(nodes))
        self._slot = find_value_descriptor(self._holders)
        self._values_tree = jax.tree.structure(self._read_variable_values())
        paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(state)[0]]
        self._owners = [path[0].key for path in paths]
        self.names = self._group_leaves_by_object(map(_format_leaf_path, paths))
        self.structure = graphdef, jax.tree.structure(state)
        self.structure_index = -1
        self._seen: list[tuple[Callable[[], object], list[object]]] = []
        self._record_container_contents(nodes)

    def has_same_objects(self, nodes: Sequence[object]) -> bool:
        """Return whether `nodes` are the recorded objects, and have changed only in the values of Variables."""
        return (
            len(nodes) == len(self._nodes)
            and all(node is ref() for node, ref in zip(nodes, self._nodes, strict=True))
            and all(_has_same_content(seen(), content) for seen, content in self._seen)
        )

    def get_object_if_alive(self, index: int) -> object:
        """Return the object at a position, or None if it has been garbage-collected."""
        return self._nodes[index]()

    def read_arrays(self) -> list[list[Any]] | None:
        """Return the arrays of each object, or None if a Variable has a different number of arrays than before."""
        leaves, tree = jax.tree.flatten(self._read_variable_values())
        return self._group_leaves_by_object(leaves) if tree == self._values_tree else None

    def _group_leaves_by_object(self, leaves: Iterable[object]) -> list[list[Any]]:
        grouped: list[list[Any]] = [[] for _ in self._nodes]
        for owner, leaf in zip(self._owners, leaves, strict=True):
            grouped[owner].append(leaf)
        return grouped

    def write_arrays(self, new_arrays: Mapping[int, object]) -> None:
        """Assign new arrays, in a dict from leaf positions, to the Variables and attributes that contain the leaves."""
        values: Iterable[tuple[int, object]] = new_arrays.items()
        # If a Variable has several arrays, assign its whole value instead of single arrays.
        if self._values_tree.num_leaves != len(self._holders):
            leaves = jax.tree.leaves(self._read_variable_values())
            for number, value in new_arrays.items():
                leaves[number] = value
            values = enumerate(jax.tree.unflatten(self._values_tree, leaves))
        if self._slot is not None:
            is_checked = False
            for number, value in values:
                if is_checked:
                    self._slot.__set__(self._holders[number], value)
                else:
                    # `set_raw_value` checks the trace, which all Variables share, so call it only for the first one.
                    self._holders[number].set_raw_value(value)
                    is_checked = True
            return
        attribute_arrays = dict[Any, object]()
        for number, value in values:
            if not is_nnx_variable(holder := self._holders[number]):
                if holder is not value:
                    attribute_arrays[self._keys[number]] = self._holders[number] = value
            else:
                holder.set_raw_value(value)
        if attribute_arrays:
            for each in self._attributes:
                each.assign_arrays(attribute_arrays)
            self._seen = []
            self._record_container_contents([node() for node in self._nodes])

    def _read_variable_values(self) -> list[object]:
        if self._slot is not None:
            return [*map(self._slot.__get__, self._holders)]
        return [holder.get_raw_value() if is_nnx_variable(holder) else holder for holder in self._holders]

    def _record_container_contents(self, nodes: Sequence[object]) -> None:
        """Record the values in each container, so that `has_same_objects` can compare them with later ones."""
        todo, known = list(nodes), set[int]()
        while todo:
            container = todo.pop()
            content = _list_contained_values(container)
            if content is None or id(container) in known:
                continue
            known.add(id(container))
            if not isinstance(container, tuple):
                is_node = any(container is node for node in nodes)
                seen = weakref.ref(container) if is_node else _make_strong_reference(container)
                self._seen.append((seen, list(content)))
            todo += content

    def _release_references(self, _: object) -> None:
        self._holders, self._seen = [], []


def _has_same_content(container: object, expected: Sequence[object]) -> bool:
    """Return whether a container contains exactly the expected objects."""
    content = _list_contained_values(container)
    return content is not None and len(content) == len(expected) and all(map(is_, content, expected))


def _make_strong_reference(value: object) -> Callable[[], object]:
    return lambda: value


def _list_contained_values(container: object) -> Collection[object] | None:
    """Return the values in a container, or None for a value that is not a container."""
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


def rebuild_nnx_objects(structure: Any, leaves: Sequence[object]) -> Sequence[object]:
    """Return copies of nnx objects that contain `leaves`, such as traced arrays, instead of their own arrays."""
    from flax import nnx

    graphdef, tree = structure
    return nnx.merge(graphdef, jax.tree.unflatten(tree, leaves))


def find_arrays_to_write_back(
    structure: object, nodes: Sequence[object], old_arrays: Sequence[object], inputs: Sequence[ArgumentLeaf]
) -> dict[int, object]:
    """Return a dict from leaf positions to new arrays of objects: those that a step replaced, and all donated ones.

    Args:
        structure: The structure of the objects before the step.
        nodes: The objects after the step.
        old_arrays: The arrays of the objects before the step.
        inputs: The leaves of the step's arguments that are these arrays.

    Raises:
        ScopeError: The step has changed more than arrays.
    """
    from flax import nnx

    graphdef, state = nnx.split(tuple(nodes))
    leaves, tree = jax.tree_util.tree_flatten_with_path(state)
    if (graphdef, tree) != structure:
        found, names = [_format_leaf_path(path) for path, _ in leaves], [each.name for each in inputs]
        added, removed = [n for n in found if n not in names], [n for n in names if n not in found]
        cause = "it adds or removes Variables" if added or removed else "it changes a static attribute"
        raise ScopeError(
            "the step changes the structure of one of its arguments",
            facts={"added": join_names(added), "removed": join_names(removed)} if added or removed else {},
            why=f"a compiled step can only replace the arrays of existing Variables, but {cause}",
            fix="change modules outside the step, and remove sown values inside it: nnx.pop(model, ...)",
        )
    return {
        number: new
        for number, (old, (_, new), each) in enumerate(zip(old_arrays, leaves, inputs, strict=True))
        if new is not old or each.is_donated
    }


def _format_leaf_path(path: Sequence[object]) -> str:
    """Format the path of a leaf in its object, without the object's number and the Variable's own keys."""
    parts = [jax.tree_util.keystr((key,), simple=True) for key in path]
    return ".".join(parts[1:-1] if parts[-1] == "value" else parts[1:])
