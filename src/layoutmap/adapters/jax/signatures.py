"""Arguments of a compiled step, and the part of them that it is compiled for beside the shapes of arrays."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from layoutmap.core.errors import LayoutError

Key = int | str
"""An argument: its position, or its name if it is passed by name."""

Arguments = tuple[Sequence[Any], dict[str, Any]]
"""Positional arguments, and those by name."""

ARRAYS = (jax.Array, np.ndarray, np.generic)
NUMBERS = (int, float, complex)


@dataclass(slots=True, eq=False)
class Constants:
    """A tree, and those of its leaves that are compiled into a program since they are no arrays.

    Args:
        tree: The tree of all leaves.
        values: Those leaves, by their numbers.
    """

    tree: Any
    values: dict[int, object]

    def match(self, leaves: Sequence[object], tree: object) -> bool:
        """Return whether a tree has equal constants, each of the same type."""
        return tree == self.tree and all(
            leaves[n] is value or (type(leaves[n]) is type(value) and leaves[n] == value)
            for n, value in self.values.items()
        )

    def fill(self, others: Iterable[object]) -> Any:
        """Return the tree of its other leaves."""
        rest = iter(others)
        leaves = [self.values[n] if n in self.values else next(rest) for n in range(self.tree.num_leaves)]
        return jax.tree.unflatten(self.tree, leaves)

    def empty(self, leaves: Sequence[object]) -> Any:
        """Return the tree with `None` for each constant."""
        return jax.tree.unflatten(self.tree, [None if n in self.values else x for n, x in enumerate(leaves)])


def find_constants(tree: object) -> Constants:  # why: decisions/0186
    """Return the leaves of a tree that are no arrays: functions, texts, and numbers that are in a module of Equinox.

    A leaf with arrays of its own, as JAX or numpy would read them, is none, and neither is one that has no hash.
    """
    tops = jax.tree.leaves(tree, is_leaf=_is_equinox)
    leaves = [(leaf, _is_equinox(top)) for top in tops for leaf in jax.tree.leaves(top)]
    found = {n: leaf for n, (leaf, in_module) in enumerate(leaves) if _is_constant(leaf, in_module)}
    return Constants(jax.tree.structure(tree), found)


def _is_constant(leaf: object, in_module: bool) -> bool:
    if isinstance(leaf, NUMBERS) and not isinstance(leaf, np.generic):
        return in_module
    return isinstance(leaf, Hashable) and not (hasattr(leaf, "__array__") or hasattr(leaf, "shape"))


def _is_equinox(value: object) -> bool:
    equinox = sys.modules.get("equinox")
    return equinox is not None and isinstance(value, equinox.Module)


@dataclass(slots=True, eq=False)
class Variant:
    """The part of a step's arguments that its traced function closes over.

    Args:
        objects: The positions and names of the arguments that are objects of nnx.
        structure: All of these objects but their arrays.
        constants: The constants of the arguments, without static ones.
    """

    objects: tuple[Key, ...]
    structure: object
    constants: Constants


def replace_arguments(arguments: Arguments, values: Iterable[tuple[Key, object]]) -> Arguments:
    """Return arguments with other values for some."""
    args, kwargs = [*arguments[0]], {**arguments[1]}
    for key, value in values:
        into: Any = args if isinstance(key, int) else kwargs
        into[key] = value
    return args, kwargs


def clear_arguments(arguments: Arguments, keys: Collection[Key]) -> Arguments:
    """Return arguments with `None` for some."""
    return replace_arguments(arguments, [(key, None) for key, _ in select_arguments(arguments, keys)])


def select_arguments(arguments: Arguments, keys: Collection[Key]) -> list[tuple[Key, Any]]:
    """Select some arguments, in the order of their leaves."""
    return [(key, each) for key, each in list_arguments(arguments) if key in keys] if keys else []


def list_arguments(arguments: Arguments) -> list[tuple[Key, Any]]:
    """List arguments in the order of their leaves: those by name are sorted."""
    return [*enumerate(arguments[0]), *sorted(arguments[1].items())]


def list_parameters(function: Callable[..., object]) -> list[str]:
    """List the names of a function's arguments that can be passed by position, if its signature is known."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]


def check_leaves(step: str, names: Sequence[str], leaves: Sequence[object], donated: Sequence[bool]) -> None:
    """Check that arrays have values, and that no donated one is passed twice, with which XLA would end the process.

    Args:
        step: The name of the step.
        names: The paths of the leaves.
        leaves: The leaves.
        donated: Whether each is donated; empty: the leaves are not on the mesh yet.

    Raises:
        LayoutError: One has none, or is passed twice.
    """
    for name, leaf in zip(names, leaves, strict=True):
        if isinstance(leaf, jax.Array) and leaf.is_deleted():
            raise LayoutError(
                f"{step}: {name} was donated, and has no values any more",
                why="an earlier step, or another compiled function, has reused the memory of this array for its "
                "results",
                fix="pass on what the step returned: state = step(state, batch); or donate less: donate_argnums",
            )
    if any(donated) and len({*map(id, leaves)}) < len(leaves):
        seen: dict[int, int] = {}
        for number, leaf in enumerate(leaves):
            first = seen.setdefault(id(leaf), number)
            if first != number and (donated[first] or donated[number]):
                raise LayoutError(
                    f"{step}: {names[first]} and {names[number]} are the same array, which is donated",
                    why="the memory of a donated array is reused for results, so it can be passed only once",
                    fix="pass a copy of one of them: jax.tree.map(jnp.copy, ..); or donate less: donate_argnums",
                )
