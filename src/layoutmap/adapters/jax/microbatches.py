"""Split batches into microbatches without moving rows between devices, and detect steps that do move rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr, Literal, Var

from layoutmap.core.errors import LayoutError
from layoutmap.engines.jax.programs import CALLS, iterate_inner_jaxprs

T = TypeVar("T")
_KEEPS_ROWS = ("convert_element_type", "copy", "copy_p", "sharding_constraint", "reshard")


def microbatches(batch: T, num: int) -> T:
    """Split each array of a batch into microbatches, along a new first axis to scan over.

    Microbatch `i` has the rows `i`, `i + num`, `i + 2 * num`, and so on, which come from all devices, so each device
    computes with its own rows. In contrast, `x.reshape(num, -1, ..)` takes consecutive rows, which are on one device or
    few: in a scan over them, every device computes with all rows of a microbatch. The results are the same, unless the
    loss depends on the order of rows.

    Args:
        batch: Pytree of arrays of shape `(rows, ...)`. In a step, their rows may be sharded.
        num: Number of microbatches. It must divide the number of rows.

    Returns:
        The same tree, with arrays of shape `(num, rows // num, ...)`.

    Raises:
        LayoutError: An array has no first axis, or `num` does not divide its rows.

    Example:
        >>> lm.microbatches(np.arange(6), 2)
        array([[0, 2, 4],
               [1, 3, 5]])

    References:
        `optax.microbatching.reshape_batch_axis`, https://optax.readthedocs.io/en/latest/api/microbatching.html
    """

    def split_array(path: tuple[object, ...], array: Any) -> object:
        shape = np.shape(array)
        if not shape or num < 1 or shape[0] % num:
            name = f"batch{jax.tree_util.keystr(path)}"
            raise LayoutError(
                f"microbatches: {name} cannot be split into {num} parts",
                facts={"shape": shape},
                why=f"{num} does not divide its {shape[0]} rows" if shape else "it has no rows",
                fix="change the number of microbatches or rows"
                if shape
                else "pass it unchanged to each microbatch",
            )
        kind = np if isinstance(array, np.ndarray) else jnp
        return kind.swapaxes(kind.reshape(array, (shape[0] // num, num, *shape[1:])), 0, 1)

    return jax.tree_util.tree_map_with_path(split_array, batch)


def find_microbatches_of_consecutive_rows(
    jaxpr: Jaxpr, batch_positions: Sequence[int]
) -> Iterator[tuple[int, int]]:
    """Yield, for each batch that a scan splits into consecutive rows, its position and the number of microbatches.

    Args:
        jaxpr: The program of a step.
        batch_positions: Positions of the program's arguments whose first axis is sharded.
    """
    whole = {jaxpr.invars[number]: number for number in batch_positions}
    yield from _iterate_scanned_microbatches(jaxpr, whole, {})


def _iterate_scanned_microbatches(
    jaxpr: Jaxpr, whole: dict[Var, int], split: dict[Var, tuple[int, int]]
) -> Iterator[tuple[int, int]]:
    """Yield the same pairs as `find_microbatches_of_consecutive_rows`, for a program or a program inside it.

    Args:
        jaxpr: The program.
        whole: From each variable with all rows of a batch, to the position of the batch. Variables are added to it.
        split: From each variable with a batch split into microbatches, to the position and the number of microbatches.
            Variables are added to it.
    """
    for eqn in jaxpr.eqns:
        name, inputs = eqn.primitive.name, [var for var in eqn.invars if not isinstance(var, Literal)]
        if name in _KEEPS_ROWS and inputs and inputs[0] in whole:
            whole[eqn.outvars[0]] = whole[inputs[0]]
        elif name == "reshape" and inputs and inputs[0] in whole and eqn.params["sharding"] is None:
            source: Any = inputs[0]
            before, after = source.aval.shape, eqn.outvars[0].aval.shape  # type: ignore[attr-defined]
            if len(after) > 1 and 1 < after[0] < before[0] == after[0] * after[1]:
                split[eqn.outvars[0]] = whole[inputs[0]], after[0]
        elif name == "scan":
            for inner in iterate_inner_jaxprs(eqn.params.values()):
                for mine, var in zip(inner.invars, eqn.invars, strict=True):
                    # JAX 0.11 does not tell which inputs a scan iterates over. Find them by their lower rank inside it.
                    if not isinstance(var, Literal) and var in split and _get_rank(mine) < _get_rank(var):
                        yield split[var]
        elif name in CALLS:
            for inner in iterate_inner_jaxprs(eqn.params.values()):
                pairs = [
                    p for p in zip(inner.invars, eqn.invars, strict=False) if not isinstance(p[1], Literal)
                ]
                inner_rows = {mine: whole[outer] for mine, outer in pairs if outer in whole}
                inner_splits = {mine: split[outer] for mine, outer in pairs if outer in split}
                yield from _iterate_scanned_microbatches(inner, inner_rows, inner_splits)
                whole |= _map_to_outer_variables(inner, eqn.outvars, inner_rows)
                split |= _map_to_outer_variables(inner, eqn.outvars, inner_splits)


def _get_rank(var: Any) -> int:
    return len(var.aval.shape)


def _map_to_outer_variables(inner: Jaxpr, outer_results: Sequence[Var], values: dict[Var, T]) -> dict[Var, T]:
    """Return those of `values` that belong to an inner program's results, by the outer variables of these results."""
    pairs = zip(inner.outvars, outer_results, strict=False)
    return {outer: values[mine] for mine, outer in pairs if not isinstance(mine, Literal) and mine in values}
