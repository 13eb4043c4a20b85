"""Find low-rank factors (LoRA) beside a kernel: the product of the two is added to it.

They are the only two kernels of a module beside the base kernel, as `a` and `b` beside `query.base` in `query`, or the
only two arrays of unknown use, or those of `LoRALinear` of flax.nnx. (The factors of Keras and PEFT are derived
variables: their layouts follow from the base kernel's.)
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from layoutmap.core.variables import Assignment, Kind
from layoutmap.plan.lint.weights import Weight

_Modules = Mapping[tuple[str, str], Sequence[Weight]]


class LowRankFactor(NamedTuple):
    """A factor's base kernel, and the axis that both share.

    Args:
        base: The base kernel.
        role: The role of the axis: `"in"` of the first factor, `"out"` of the second one. `""`: unknown.
        axis: The axis of the factor.
    """

    base: Weight
    role: str
    axis: int


def find_low_rank_factors(
    weights: Iterable[Weight], assignments: Iterable[Assignment]
) -> Mapping[int, LowRankFactor]:
    """Return a dict from the id of a factor's assignment to its base kernel and their shared axis.

    Args:
        weights: The weights with known axis roles.
        assignments: All variables.
    """
    weights, modules = list(weights), defaultdict[tuple[str, str], list[Weight]](list)
    for w in weights:
        # Roles that only names and shapes show can be those of two factors, which look like two consecutive kernels.
        if w.assignment.variable.use is not None and w.list_axes("in") and w.list_axes("out"):
            modules[w.assignment.variable.model, w.block].append(w)
            modules[w.assignment.variable.model, w.layer].append(w)
    return {
        **dict(_iterate_kernels_of_factors(modules)),
        **dict(_iterate_arrays_of_factors(modules, assignments)),
        **dict(_iterate_factors_with_rank_axis(modules, weights)),
    }


def _iterate_kernels_of_factors(modules: _Modules) -> Iterator[tuple[int, LowRankFactor]]:
    """Yield the factors with known axis roles.

    The base and the first factor read one tensor, so without an order of calls there are none.
    """
    for kernels in modules.values():
        if len(kernels) != 3 or any(w.use.reads is None for w in kernels):
            continue
        base, *factors = sorted(kernels, key=lambda w: -math.prod(w.shape))
        first, second = sorted(factors, key=lambda w: w.use.reads != base.use.reads)
        into, out = base.list_axis_sizes("in"), base.list_axis_sizes("out")
        rank = first.list_axis_sizes("out")
        if (
            first.use.reads == base.use.reads != second.use.reads
            and (first.list_axis_sizes("in"), second.list_axis_sizes("in")) == (into, rank)
            and second.list_axis_sizes("out") == out
            and math.prod(rank) < min(math.prod(into), math.prod(out))
        ):
            yield id(first.assignment), LowRankFactor(base, "in", first.list_axes("in")[0])
            yield id(second.assignment), LowRankFactor(base, "out", second.list_axes("out")[0])


def _iterate_arrays_of_factors(
    modules: _Modules, assignments: Iterable[Assignment]
) -> Iterator[tuple[int, LowRankFactor]]:
    """Yield the factors of unknown use. If the base kernel is square, their shapes do not show which is the first."""
    arrays: dict[tuple[str, str], list[Assignment]] = defaultdict(list)
    for a in assignments:
        v = a.variable
        if v.kind is Kind.WEIGHT and len(v.shape) == 2 and v.parent is None and v.use is None and a.fits:
            arrays[v.model, v.path.rpartition(".")[0]].append(a)
    for module, pair in arrays.items():
        if len(pair) != 2 or len(kernels := modules.get(module, ())) != 1:
            continue
        (base,) = kernels
        match base.list_axis_sizes("in"), base.list_axis_sizes("out"):
            case (into,), (out,):
                sizes = {"in": into, "out": out}
            case _:
                continue
        for roles in itertools.permutations(sizes):
            axes = [
                [n for n in (0, 1) if a.variable.shape[n] == sizes[role] != a.variable.shape[1 - n]]
                for a, role in zip(pair, roles, strict=True)
            ]
            ranks = {a.variable.shape[1 - n] for a, each in zip(pair, axes, strict=True) for n in each}
            if all(len(each) == 1 for each in axes) and len(ranks) == 1 and max(ranks) < min(into, out):
                for a, role, (axis,) in zip(pair, roles, axes, strict=True):
                    yield id(a), LowRankFactor(base, role if into != out else "", axis)


def _iterate_factors_with_rank_axis(
    modules: _Modules, weights: Iterable[Weight]
) -> Iterator[tuple[int, LowRankFactor]]:
    """Yield the factors of which the adapter knows that an axis is the rank. The base kernel is in the outer layer."""
    for w in weights:
        bases = modules.get((w.assignment.variable.model, w.block), ())
        match [role for role in ("in", "out") if w.list_axes(role)]:
            case [role] if len(w.shape) == 2 and "" in w.use.roles and len(bases) == 1:
                yield id(w.assignment), LowRankFactor(bases[0], role, w.list_axes(role)[0])
            case _:
                pass
