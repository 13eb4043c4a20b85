"""Where the results of a step go: what corresponds to an argument has its layout; pure but for JAX's trees."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from layoutmap.core.errors import LayoutError

Shape = tuple[int, ...]
KeyPath = tuple[Any, ...]
Tree = Any  # a tree of JAX, which has no type


@dataclass(slots=True)
class Arguments:  # why: decisions/0069
    """The arguments of a step, as its results are compared with them.

    Args:
        tree: Their tree: positional ones, and those by name.
        paths: The key path of each leaf.
        shapes: The shape of each leaf.
        shardings: The sharding of each leaf.
        donated: Whether the buffers of each leaf are donated.
    """

    tree: Tree
    paths: Sequence[KeyPath]
    shapes: Sequence[Shape]
    shardings: Sequence[jax.sharding.Sharding]
    donated: Sequence[bool]
    _starts: dict[object, list[int]] = field(default_factory=dict, init=False)
    _claimed: set[int] = field(default_factory=set, init=False)

    def __post_init__(self) -> None:
        for tree, start in _subtrees(self.tree, 0):
            self._starts.setdefault(self._signature(tree, start, self.shapes), []).append(start)

    def shardings_of(self, results: object, otherwise: Callable[[Shape], object]) -> object:
        """Return a sharding for each result, in their tree.

        A subtree of the results has the layouts of the first subtree of the arguments with the same structure and
        shapes that no other result has taken, or else of the first. A single array has that of an argument's leaf of
        its shape whose path ends as its own.

        Args:
            results: What the step returns: a tree of shapes.
            otherwise: Returns the sharding of a result that corresponds to no argument.

        Raises:
            LayoutError: A donated argument is returned with another shape.
        """
        found, tree = jax.tree_util.tree_flatten_with_path(results)
        paths, shapes = [path for path, _ in found], [leaf.shape for _, leaf in found]
        shardings: list[object] = [None] * len(found)
        todo = [(tree, 0)]
        while todo:
            below, start = todo.pop()
            if below.num_leaves == 0:
                continue
            if jax.tree_util.treedef_is_leaf(below):
                shardings[start] = self._of_leaf(paths[start], shapes[start]) or otherwise(shapes[start])
                continue
            same = self._starts.get(self._signature(below, start, shapes))
            if same:
                first = next((s for s in same if s not in self._claimed), same[0])
                self._claimed.add(first)
                shardings[start : start + below.num_leaves] = self.shardings[first : first + below.num_leaves]
                continue
            self._check_shapes(below, start, shapes)
            todo += reversed(list(_children(below, start)))
        return jax.tree.unflatten(tree, shardings)

    def _signature(self, tree: Tree, start: int, shapes: Sequence[Shape]) -> object:
        return tree, tuple(shapes[start : start + tree.num_leaves])

    def _of_leaf(self, path: KeyPath, shape: Shape) -> object:
        """The sharding of the leaf of this shape whose path has the most keys in common with another, from the end."""
        best, most = None, 0
        for theirs, of, sharding, donated in zip(
            self.paths, self.shapes, self.shardings, self.donated, strict=True
        ):
            if of == shape and shape:
                pairs = enumerate(zip(reversed(path), reversed(theirs), strict=False))
                common = next((n for n, (a, b) in pairs if a != b), min(len(path), len(theirs)))
                # The only result, and state that the step was given.
                common = common or int(not path and donated)
                if common > most:
                    best, most = sharding, common
        return best

    def _check_shapes(self, tree: Tree, start: int, shapes: Sequence[Shape]) -> None:
        """Check that what has the structure of a donated argument has its shapes, too."""
        for argument, of in _arguments(self.tree):
            if argument == tree and self.donated[of]:
                for i in range(tree.num_leaves):
                    if self.shapes[of + i] != shapes[start + i]:
                        raise LayoutError(
                            f"{path_text(self.paths[of + i])}: the step changes its shape",
                            facts={"before": self.shapes[of + i], "after": shapes[start + i]},
                            why="what a step returns for a donated argument has that argument's layouts",
                            fix="return it with its shape, or do not donate it",
                        )


def path_text(path: KeyPath) -> str:
    """The path of an argument's leaf as one would write it: `args[0]['kernel']`.

    Example:
        >>> path_text(jax.tree_util.tree_flatten_with_path(((1,), {"rate": 2}))[0][1][0])
        "kwargs['rate']"
    """
    return ("args", "kwargs")[path[0].idx] + jax.tree_util.keystr(path[1:])


def _children(tree: Tree, start: int) -> Iterator[tuple[Tree, int]]:
    for child in tree.children():
        yield child, start
        start += child.num_leaves


def _subtrees(tree: Tree, start: int) -> Iterator[tuple[Tree, int]]:
    """A tree and all below it that have leaves, each with the number of its first leaf; single leaves are left out."""
    if tree.num_leaves and not jax.tree_util.treedef_is_leaf(tree):
        yield tree, start
        for child, at in _children(tree, start):
            yield from _subtrees(child, at)


def _arguments(tree: Tree) -> Iterator[tuple[Tree, int]]:
    """The trees of the single arguments."""
    for group, start in _children(tree, 0):
        for argument, at in _children(group, start):
            if argument.num_leaves > 1:
                yield argument, at
