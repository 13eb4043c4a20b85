"""The shardings of a step's results: a result that replaces an argument has the argument's layouts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from layoutmap.core.errors import LayoutError
from layoutmap.engines.jax.programs import CALLS, inner_jaxprs

Tree = Any  # a tree of JAX, which has no type
_REORDERING = frozenset(("conv_general_dilated", "dot_general", "gather", "transpose"))
"""Operations whose result may have the shape of an operand without being an update of it."""


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument of a step, or a part of a donated one.

    Args:
        tree: Its tree.
        start: The number of its first leaf among all inputs of the step.
        names: The path of each leaf.
        shapes: The shape of each leaf.
        shardings: The sharding of each leaf; empty: it was on no mesh.
        is_donated: Whether its buffers are donated.
    """

    tree: Tree
    start: int
    names: Sequence[str]
    shapes: Sequence[tuple[int, ...]]
    shardings: Sequence[jax.sharding.Sharding]
    is_donated: bool

    def split(self) -> list[Argument]:
        """Split it into its children."""
        parts: list[Argument] = []
        for child, at in _children(self.tree, 0):
            of = slice(at, at + child.num_leaves)
            names, shapes, shardings = self.names[of], self.shapes[of], self.shardings[of]
            parts.append(Argument(child, self.start + at, names, shapes, shardings, self.is_donated))
        return parts


def choose_shardings(
    results: object, jaxpr: Jaxpr, arguments: Sequence[Argument]
) -> object:  # why: decisions/0186
    """Return the sharding of each result that replaces an argument, and `None` for each other, in their tree.

    The first result replaces the first argument, the second result the second, if it has the structure and shapes of
    that argument and is an update of it; a tree of several arrays need only be no update of another argument. A donated
    argument is also replaced by its update at another place, whole or in parts, or by any result at its own place.

    Args:
        results: The results of the step: a tree of shapes.
        jaxpr: The operations of the step, whose first results are these.
        arguments: The arguments of the step, in order.

    Raises:
        LayoutError: A donated argument is returned with another shape.
    """
    leaves, tree = jax.tree.flatten(results)
    shapes, sources = [leaf.shape for leaf in leaves], find_sources(jaxpr)
    shardings: list[object] = [None] * len(leaves)

    def put(argument: Argument, place: tuple[Tree, int], *, is_update: bool = True) -> bool:
        below, start = place
        numbers = range(start, start + below.num_leaves)
        can_replace = (
            len(argument.shardings) > 0
            and below == argument.tree
            and [shapes[n] for n in numbers] == [*argument.shapes]
            and all(shardings[n] is None for n in numbers)
            and (not is_update or any(sources[n] >> argument.start + i & 1 for i, n in enumerate(numbers)))
        )
        if can_replace:
            shardings[start : start + below.num_leaves] = argument.shardings
        return can_replace

    several = (tree.node_data() or [None])[0] in (tuple, list)
    is_whole = not several or (bool(arguments) and arguments[0].tree == tree)
    in_order = [*zip(arguments, [(tree, 0)] if is_whole else _children(tree, 0), strict=False)]
    kept: list[int] = []
    for argument, (below, start) in in_order:
        is_new = below.num_leaves > 1 and not any(sources[start : start + below.num_leaves])
        if put(argument, (below, start), is_update=not is_new):
            kept.append(argument.start)
    rest = [each for each in arguments if each.is_donated and each.start not in kept]
    subtrees = [*_subtrees(tree, 0)]

    def put_parts(argument: Argument) -> None:
        for part in argument.split():
            if not any(put(part, place) for place in subtrees):
                put_parts(part)

    for argument in [each for each in rest if not any(put(each, place) for place in subtrees)]:
        own = [place for each, place in in_order if each is argument]
        if not any(put(argument, place, is_update=False) for place in own):
            _check_shapes(argument, subtrees, shapes)
            put_parts(argument)
    return jax.tree.unflatten(tree, shardings)


def find_sources(jaxpr: Jaxpr) -> list[int]:
    """Return for each result of a program the inputs that it is an update of, as a mask of bits.

    An update has the shape of the input, as has each value on the way.
    """
    sources: dict[Var | Literal, int] = {var: 1 << number for number, var in enumerate(jaxpr.invars)}

    def source(var: Var | Literal) -> int:
        return 0 if isinstance(var, Literal) else sources.get(var, 0)

    for eqn in jaxpr.eqns:
        operands: list[Var | Literal]
        called = _called(eqn)
        for number, var in enumerate(eqn.outvars):
            if called is not None:
                steps = [n for n in range(len(eqn.invars)) if called[number] >> n & 1]
                operands = [eqn.invars[n] for n in steps]
            elif eqn.primitive.name in _REORDERING:
                operands = []
            else:
                operands = [each for each in eqn.invars if _shape(each) == _shape(var)]
            mask = 0
            for each in operands:
                mask |= source(each)
            sources[var] = mask
    return [source(var) for var in jaxpr.outvars]


def _shape(var: Var | Literal) -> object:
    return getattr(var.aval, "shape", None)


def _called(eqn: JaxprEqn) -> list[int] | None:
    """Return the sources of the results of a call; `None`: the operation is none."""
    inner = [*inner_jaxprs(eqn.params.values())] if eqn.primitive.name in CALLS else []
    if inner and len(inner[0].invars) == len(eqn.invars) and len(inner[0].outvars) == len(eqn.outvars):
        return find_sources(inner[0])
    return None


def _check_shapes(
    argument: Argument, results: Sequence[tuple[Tree, int]], shapes: Sequence[tuple[int, ...]]
) -> None:
    """Check that no result with the structure of a donated argument has another shape somewhere."""
    for tree, start in results:
        if tree == argument.tree and tree.num_leaves > 1:
            for number, (name, shape) in enumerate(zip(argument.names, argument.shapes, strict=True)):
                if shape != shapes[start + number]:
                    raise LayoutError(
                        f"{name}: the step changes its shape",
                        facts={"before": shape, "after": shapes[start + number]},
                        why="what a step returns for a donated argument has that argument's layouts",
                        fix="return it with its shape, or do not donate it",
                    )


def format_path(path: tuple[Any, ...]) -> str:
    """Format the path of an argument's leaf as one would write it: `args[0]['kernel']`.

    Example:
        >>> format_path(jax.tree_util.tree_flatten_with_path(((1,), {"rate": 2}))[0][1][0])
        "kwargs['rate']"
    """
    return ("args", "kwargs")[path[0].idx] + jax.tree_util.keystr(path[1:])


def _children(tree: Tree, start: int) -> Iterator[tuple[Tree, int]]:
    for child in tree.children():
        yield child, start
        start += child.num_leaves


def _subtrees(tree: Tree, start: int) -> Iterator[tuple[Tree, int]]:
    """A tree and all below it that have leaves, each with the number of its first leaf."""
    if tree.num_leaves:
        yield tree, start
        for child, at in _children(tree, start):
            yield from _subtrees(child, at)
