"""Operations of torch that look at no other element than the one that they write.

An operation is listed if the bits of an element do not depend on where in memory it is: torch has one program for
vectors and one for what is left over at the end, and where these end depends on the number of threads. For `sigmoid`,
`silu`, `gelu`, `sinh`, `atan2`, `pow` with most exponents and some others the two do not agree to the last bit.
"""

from __future__ import annotations

import torch

from layoutmap.engines.torch.deferred_init.steps import Recorded
from layoutmap.engines.torch.operators import get_overload_name

aten = torch.ops.aten

FILLED: dict[object, int] = {
    **dict.fromkeys((aten.zeros, aten.zeros_like, aten.new_zeros, aten.zero_), 0),
    **dict.fromkeys((aten.ones, aten.ones_like, aten.new_ones), 1),
    # Uninitialized memory, whose contents are arbitrary.
    **dict.fromkeys((aten.empty, aten.empty_like, aten.empty_strided, aten.empty_permuted), 0),
    **dict.fromkeys((aten.new_empty, aten.new_empty_strided), 0),
}
"""Operations that put one value everywhere, with the value."""

FILLED_WITH: dict[object, int] = {
    aten.full: 1,
    aten.full_like: 1,
    aten.new_full: 2,
    aten.fill_: 1,
    aten.fill: 1,
}
"""The same, with the place of the value among the arguments."""

COPIES = {aten._to_copy, aten.clone, aten.copy_, aten.lift_fresh_copy}
"""Operations that return the values of a tensor, perhaps in another element type."""

ROWS = {aten.max, aten.min, aten.any, aten.all, aten.argmax, aten.argmin}
"""Operations that make one element of each row, the same whatever the other rows are."""

_ON_ELEMENTS = """
    abs add div floor_divide fmod mul neg reciprocal remainder rsub sub
    cos erf erfc erfinv exp expm1 log log10 log1p log2 sin tan tanh pow sqrt square
    ceil floor frac round sgn sign trunc clamp clamp_max clamp_min fmax fmin maximum minimum relu
    eq ge gt isinf isnan le lt ne __and__ __or__ __xor__ bitwise_and bitwise_not bitwise_or bitwise_xor
    logical_and logical_not logical_or logical_xor masked_fill where
"""
_POINTWISE = {
    getattr(aten, name + end)
    for name in _ON_ELEMENTS.split()
    for end in ("", "_")
    if hasattr(aten, name + end)
}
_EXPONENTS = (2, 3, 0.5, -1)

_RANDOM = "uniform_ normal_ random_ bernoulli_ exponential_ log_normal_ cauchy_ geometric_"
RANDOM_IN_PLACE = {getattr(aten, name) for name in _RANDOM.split()}
"""Operations in place that fill a tensor with random numbers."""

OVERWRITING = {*RANDOM_IN_PLACE, aten.zero_, aten.fill_, aten.copy_}
"""Operations in place that leave nothing of what was there before."""


def is_pointwise(step: Recorded) -> bool:
    """Return whether each element of a step's result depends only on its arguments' elements at the same place."""
    if step.op.overloadpacket not in _POINTWISE or get_overload_name(step.op).endswith("out"):
        return False
    if step.name == "pow":
        return step.args[1] in _EXPONENTS
    # Other factors may round once in one program and twice in the other.
    return step.kwargs.get("alpha", 1) in (1, -1)


def is_local(step: Recorded) -> bool:
    """Return whether a step needs only some elements at once, if its tensors have the same order in memory."""
    packet = step.op.overloadpacket
    known = packet in FILLED or packet in FILLED_WITH or packet in COPIES or packet in ROWS
    return (
        known or step.state is not None or is_pointwise(step) or packet in (aten.gather, aten.cat, aten.stack)
    )
