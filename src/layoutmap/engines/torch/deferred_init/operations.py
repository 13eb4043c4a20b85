"""List torch operations that can be computed element by element or row by row.

An operation is listed if the bits of an element do not depend on where in memory it is: torch has one program for
vectors and one for what is left over at the end, and where these end depends on the number of threads. For `sigmoid`,
`silu`, `gelu`, `sinh`, `atan2`, `pow` with most exponents and some others the two do not agree to the last bit.
"""

from __future__ import annotations

import torch

from layoutmap.engines.torch.deferred_init.steps import RecordedOperation
from layoutmap.engines.torch.operators import get_overload_name

aten = torch.ops.aten

FILLED: dict[object, int] = {
    **dict.fromkeys((aten.zeros, aten.zeros_like, aten.new_zeros, aten.zero_), 0),
    **dict.fromkeys((aten.ones, aten.ones_like, aten.new_ones), 1),
    # Uninitialized memory has arbitrary content, so zeros are valid.
    **dict.fromkeys((aten.empty, aten.empty_like, aten.empty_strided, aten.empty_permuted), 0),
    **dict.fromkeys((aten.new_empty, aten.new_empty_strided), 0),
}
"""Operations that fill a tensor with a fixed value, and the value."""

FILLED_WITH: dict[object, int] = {
    aten.full: 1,
    aten.full_like: 1,
    aten.new_full: 2,
    aten.fill_: 1,
    aten.fill: 1,
}
"""Operations that fill a tensor with an argument, and its position among the arguments."""

COPIES = {aten._to_copy, aten.clone, aten.copy_, aten.lift_fresh_copy}
"""Operations that copy a tensor's values, possibly to another dtype."""

ROWS = {aten.max, aten.min, aten.any, aten.all, aten.argmax, aten.argmin}
"""Operations that compute one element from each row, independently of other rows."""

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
"""In-place operations that fill a tensor with random numbers."""

OVERWRITING = {*RANDOM_IN_PLACE, aten.zero_, aten.fill_, aten.copy_}
"""In-place operations that overwrite all previous values."""


def is_pointwise(operation: RecordedOperation) -> bool:
    """Return whether each result element depends only on the arguments' elements at the same position."""
    if operation.op.overloadpacket not in _POINTWISE or get_overload_name(operation.op).endswith("out"):
        return False
    if operation.name == "pow":
        return operation.args[1] in _EXPONENTS
    # With any other `alpha`, a fused multiply-add rounds some elements once and others twice, so the bits may differ.
    return operation.kwargs.get("alpha", 1) in (1, -1)


def can_be_computed_in_spans(operation: RecordedOperation) -> bool:
    """Return whether an operation can be computed in spans, if its tensors have their axes in one memory order."""
    packet = operation.op.overloadpacket
    groups = FILLED, FILLED_WITH, COPIES, ROWS, (aten.gather, aten.cat, aten.stack)
    return operation.state is not None or is_pointwise(operation) or any(packet in each for each in groups)
