"""Find low-rank factors (LoRA) beside a kernel: the product of the two is added to it.

They are the only kernels of a module beside the base kernel, as `a` and `b` in `query.base`, `query.a`, `query.b`. (The
factors of Keras and PEFT are derived variables: their layouts follow from the base kernel's.)
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from layoutmap.plan.lint.weights import Weight


class LowRankFactor(NamedTuple):
    """A factor's base kernel, and the role of the axes that both share: `"in"` of the first, `"out"` of the second."""

    base: Weight
    role: str


def find_low_rank_factors(weights: Iterable[Weight]) -> Mapping[int, LowRankFactor]:
    """Return a dict from the id of a factor's assignment to its base kernel and their shared role.

    The base and the first factor read one tensor, so without an order of calls there are none.
    """
    blocks: dict[tuple[str, str], list[Weight]] = defaultdict(list)
    for w in weights:
        if w.use.reads is not None and w.list_axes("in") and w.list_axes("out"):
            blocks[w.assignment.variable.model, w.block].append(w)
    found: dict[int, LowRankFactor] = {}
    for block in blocks.values():
        if len(block) != 3:
            continue
        base, *factors = sorted(block, key=lambda w: -math.prod(w.shape))
        first, second = sorted(factors, key=lambda w: w.use.reads != base.use.reads)
        rank, into, out = (
            first.list_axis_sizes("out"),
            base.list_axis_sizes("in"),
            base.list_axis_sizes("out"),
        )
        if (
            first.use.reads == base.use.reads != second.use.reads
            and (first.list_axis_sizes("in"), second.list_axis_sizes("in")) == (into, rank)
            and second.list_axis_sizes("out") == out
            and math.prod(rank) < min(math.prod(into), math.prod(out))
        ):
            found[id(first.assignment)] = LowRankFactor(base, "in")
            found[id(second.assignment)] = LowRankFactor(base, "out")
    return found
