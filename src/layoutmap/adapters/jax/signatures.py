"""The key of a compiled step: structure, static arguments, and leaves that are not arrays."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from layoutmap.core.errors import LayoutError

Key = int | str
"""An argument: its position, or its name if it is passed by name."""

Static = tuple[tuple[Key, type, object], ...]
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

    def are_in(self, leaves: Sequence[object]) -> bool:
        """Whether the leaves of the same tree have equal constants."""
        return all(
            leaves[n] is value or (type(leaves[n]) is type(value) and leaves[n] == value)
            for n, value in self.values.items()
        )

    def others(self, leaves: Sequence[object]) -> list[object]:
        """All leaves but the constants."""
        return [leaf for n, leaf in enumerate(leaves) if n not in self.values] if self.values else [*leaves]

    def filled(self, others: Iterable[object]) -> Any:
        """The tree, of its other leaves."""
        rest = iter(others)
        leaves = [self.values[n] if n in self.values else next(rest) for n in range(self.tree.num_leaves)]
        return jax.tree.unflatten(self.tree, leaves)

    def emptied(self, leaves: Sequence[object]) -> object:
        """The tree with `None` for each constant."""
        return jax.tree.unflatten(self.tree, [None if n in self.values else x for n, x in enumerate(leaves)])


def constants_in(tree: object) -> Constants:  # why: decisions/0134
    """Return the leaves of a tree that are no arrays: functions, texts, and numbers that are in a module of Equinox.

    What holds arrays of its own, as JAX or numpy would read them, is none, and neither is what cannot be compared.
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
class Signature:
    """The arguments of a step, without their arrays.

    Args:
        constants: The tree of all arguments that are no objects and not static, which have `None` in it.
        where: Where the objects are.
        static: The static arguments, each with its type and value.
        structure: What the objects are like.
        arrays: The tree of arguments with `None` for each constant, too.
        paths: The key paths of the leaves that are no object's.
        names: The paths of all leaves, as text; those of objects are last.
        owners: For each leaf of an object the number of the object in `where`.
        donated: For each leaf, whether it is donated.
        batches: For each leaf, whether it is a batch; `None`: numpy arrays are.
    """

    constants: Constants
    where: tuple[Key, ...]
    static: Static
    structure: object
    arrays: object
    paths: list[Any]
    names: list[str]
    owners: list[int]
    donated: list[bool]
    batches: list[bool] | None

    @property
    def num_plain(self) -> int:
        """How many of the leaves are no object's."""
        return len(self.paths)

    def takes(self, tree: object, leaves: Sequence[object], where: object, static: object) -> bool:
        """Whether it is that of these arguments, but for their objects."""
        return (
            self.where == where
            and self.static == static
            and self.constants.tree == tree
            and self.constants.are_in(leaves)
        )

    def arguments(self, leaves: Sequence[object]) -> tuple[list[object], dict[str, object]]:
        """The arguments of the compiled function: as they were passed, objects as lists of their arrays."""
        args, kwargs = jax.tree.unflatten(self.arrays, leaves[: self.num_plain])
        args = list(args)
        if self.where:
            of_objects = list[list[object]]([] for _ in self.where)
            for owner, leaf in zip(self.owners, leaves[self.num_plain :], strict=True):
                of_objects[owner].append(leaf)
            put(args, kwargs, zip(self.where, of_objects, strict=True))
        put(args, kwargs, ((key, value) for key, _, value in self.static))
        return args, kwargs

    def opened(
        self, args: Iterable[object], kwargs: dict[str, object], objects: Sequence[object]
    ) -> tuple[list[object], dict[str, object]]:
        """The arguments of the function itself, of those of the compiled one."""
        away = without((args, kwargs), {*self.where, *(key for key, _, _ in self.static)})
        args, kwargs = self.constants.filled(jax.tree.leaves(away))
        args = list(args)
        put(args, kwargs, zip(self.where, objects, strict=True))
        put(args, kwargs, ((key, value) for key, _, value in self.static))
        return args, kwargs


def without(
    arguments: tuple[Iterable[object], dict[str, object]], keys: Iterable[Key]
) -> tuple[tuple[object, ...], dict[str, object]]:
    """Positional arguments and those by name, with `None` for some."""
    args, kwargs = arguments
    return (
        tuple(None if n in keys else arg for n, arg in enumerate(args)),
        {name: None if name in keys else arg for name, arg in kwargs.items()},
    )


def put(args: list[object], kwargs: dict[str, object], values: Iterable[tuple[Key, object]]) -> None:
    """Put arguments in place."""
    for key, value in values:
        into: Any = args if isinstance(key, int) else kwargs
        into[key] = value


def parameters_of(function: Callable[..., object]) -> list[str]:
    """The names of a function's arguments that can be passed by position, if it says them."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]


def check_given(step: str, names: Sequence[str], leaves: Sequence[object], donated: Sequence[bool]) -> None:
    """Check that arrays have values, and that none which is donated is passed twice: with such XLA ends the process.

    Args:
        step: What the step is called.
        names: The paths of the leaves.
        leaves: The leaves.
        donated: Which of them are donated; empty: the leaves are not on the mesh yet.

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
