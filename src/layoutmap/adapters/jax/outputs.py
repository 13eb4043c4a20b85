"""Choose the shardings of a step's results: a result that replaces an argument keeps its layouts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend.core import Jaxpr, Literal, Var

from layoutmap.core.errors import LayoutError
from layoutmap.engines.jax.programs import CALLS, iterate_inner_jaxprs

Tree = Any  # pytree; JAX has no type for it
Subtree = tuple[Tree, int]
"""A part of a tree: its structure, and the position of its first leaf in the whole tree."""

_REORDERING = frozenset(("conv_general_dilated", "dot_general", "gather", "transpose"))
"""Operations whose result is never an update of an operand, even if both have the same shape."""


@dataclass(frozen=True, slots=True)
class ArgumentLeaf:
    """Describe a leaf of a step's arguments.

    Args:
        name: Path of the leaf.
        shape: Shape without padding.
        sharding: Sharding that a result takes over; `None`: the argument was on no mesh and is not donated.
        is_donated: Whether the step may reuse the buffers of the leaf.
    """

    name: str
    shape: tuple[int, ...]
    sharding: jax.sharding.Sharding | None
    is_donated: bool


# A step may return two trees of equal shapes in swapped order, so a result replaces an argument only if the
# traced operations update it (decisions/0186).
def choose_result_shardings(
    results: object,
    jaxpr: Jaxpr,
    inputs: Sequence[ArgumentLeaf],
    arguments: Sequence[Subtree],
) -> list[object]:
    """Return a list with the sharding of each result that replaces an argument, and `None` for each other result.

    The first result replaces the first argument, the second result the second, if it has the structure and shapes of
    that argument and is an update of it; a tree of several arrays need only be no update of another argument. A donated
    argument is also replaced by its update at another place, whole or in parts, or by any result at its own place.

    Args:
        results: The results of the step: a tree of shapes.
        jaxpr: The operations of the step, whose first results are these.
        inputs: The leaves of its arguments.
        arguments: The arguments that results can replace, in order.

    Raises:
        LayoutError: A donated argument is returned with another shape.
    """
    leaves, tree = jax.tree.flatten(results)
    shapes, sources = [leaf.shape for leaf in leaves], find_updated_inputs(jaxpr)
    chosen: list[object] = [None] * len(leaves)

    def try_to_copy_shardings(argument: Subtree, result: Subtree, *, must_be_update: bool = True) -> bool:
        (old, start), (new, at) = argument, result
        if old != new or not old.num_leaves:
            return False
        pairs = [(inputs[start + n], at + n) for n in range(old.num_leaves)]
        can_replace = all(
            each.sharding is not None and each.shape == shapes[n] and chosen[n] is None for each, n in pairs
        ) and (not must_be_update or any(sources[n] >> start + n - at & 1 for _, n in pairs))
        if can_replace:
            chosen[at : at + new.num_leaves] = [each.sharding for each, _ in pairs]
        return can_replace

    several = (tree.node_data() or [None])[0] in (tuple, list)
    is_whole = not several or (bool(arguments) and arguments[0][0] == tree)
    in_order = [*zip(arguments, [(tree, 0)] if is_whole else _iterate_children((tree, 0)), strict=False)]
    kept = list[Subtree]()
    for argument, (new, at) in in_order:
        is_new = new.num_leaves > 1 and not any(sources[at : at + new.num_leaves])
        if try_to_copy_shardings(argument, (new, at), must_be_update=not is_new):
            kept.append(argument)
    donated = [
        each for each in arguments if each[0].num_leaves and inputs[each[1]].is_donated and each not in kept
    ]
    subtrees = [*_iterate_subtrees((tree, 0))]

    def try_to_copy_shardings_of_parts(argument: Subtree) -> None:
        for part in _iterate_children(argument):
            if not any(try_to_copy_shardings(part, subtree) for subtree in subtrees):
                try_to_copy_shardings_of_parts(part)

    for argument in [
        a for a in donated if not any(try_to_copy_shardings(a, subtree) for subtree in subtrees)
    ]:
        own_places = [new for each, new in in_order if each is argument]
        if not any(try_to_copy_shardings(argument, new, must_be_update=False) for new in own_places):
            _check_donated_shapes(inputs[argument[1] :], argument[0], subtrees, shapes)
            try_to_copy_shardings_of_parts(argument)
    return chosen


def find_updated_inputs(jaxpr: Jaxpr) -> list[int]:
    """Return a bit mask for each result of a program. Its bits are the inputs that the result may be an update of.

    A result is an update if a chain of operations leads to it from the input, in which each value has the same shape.
    """
    sources: dict[Var | Literal, int] = {var: 1 << number for number, var in enumerate(jaxpr.invars)}
    for eqn in jaxpr.eqns:
        inner = next(iterate_inner_jaxprs(eqn.params.values()), None) if eqn.primitive.name in CALLS else None
        if inner and [len(inner.invars), len(inner.outvars)] == [len(eqn.invars), len(eqn.outvars)]:
            updated = find_updated_inputs(inner)
        elif eqn.primitive.name in _REORDERING:
            updated = [0] * len(eqn.outvars)
        else:
            updated = [
                sum(1 << n for n, each in enumerate(eqn.invars) if _get_shape(each) == _get_shape(var))
                for var in eqn.outvars
            ]
        for var, operands in zip(eqn.outvars, updated, strict=True):
            sources[var] = 0
            for number, each in enumerate(eqn.invars):
                if operands >> number & 1 and not isinstance(each, Literal):
                    sources[var] |= sources.get(each, 0)
    return [0 if isinstance(var, Literal) else sources.get(var, 0) for var in jaxpr.outvars]


def _get_shape(var: Var | Literal) -> object:
    return getattr(var.aval, "shape", None)


def _check_donated_shapes(
    inputs: Sequence[ArgumentLeaf], tree: Tree, results: Sequence[Subtree], shapes: Sequence[tuple[int, ...]]
) -> None:
    """Raise if a result with the tree structure of a donated argument has arrays of different shapes."""
    for start in [start for each, start in results if each == tree and tree.num_leaves > 1]:
        for given, after in zip(inputs, shapes[start : start + tree.num_leaves], strict=False):
            if given.shape != after:
                raise LayoutError(
                    f"{given.name}: the step changes the shape of this donated argument",
                    facts={"before": given.shape, "after": after},
                    why="a result that replaces a donated argument has that argument's layouts",
                    fix="return the argument with its old shape, or remove it from donate_argnums",
                )


def _iterate_children(subtree: Subtree) -> Iterator[Subtree]:
    tree, start = subtree
    for child in tree.children():
        yield child, start
        start += child.num_leaves


def _iterate_subtrees(subtree: Subtree) -> Iterator[Subtree]:
    """Yield a tree and all of its subtrees that have leaves."""
    if subtree[0].num_leaves:
        yield subtree
        for child in _iterate_children(subtree):
            yield from _iterate_subtrees(child)
