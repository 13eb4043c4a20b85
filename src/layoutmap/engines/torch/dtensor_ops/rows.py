"""Functions that each device computes on its own shards, as they treat images, channels or elements apart.

DTensor has a rule for some of them, but none for their gradients (of pooling: pytorch/pytorch#182526).
"""

from __future__ import annotations

from torch.nn import functional as F

from layoutmap.engines.torch.dtensor_ops.shards import apart
from layoutmap.engines.torch.operators import Args, Function, Kwargs
from layoutmap.engines.torch.placing import attainable_placements, placed_in


def _rms_norm(function: Function, args: Args, kwargs: Kwargs) -> object:
    shape = args[1] if len(args) > 1 else kwargs["normalized_shape"]
    return _but_last(len(shape))(function, args, kwargs)


def _pad(function: Function, args: Args, kwargs: Kwargs) -> object:
    given = {**dict(zip(("input", "pad", "mode", "value"), args, strict=False)), **kwargs}
    if given.get("mode", "constant") == "constant":  # DTensor has a rule for that one
        return function(*args, **kwargs)
    return _but_last(len(given["pad"]) // 2)(function, args, kwargs)


_ALL = apart(lambda rank: range(rank))
_FIRST = apart(lambda rank: range(1))


def _but_last(number: int) -> Function:
    """All axes but some at the end, which the function takes together."""
    return apart(lambda rank: range(rank - number))


def _in_place(function: Function, args: Args, kwargs: Kwargs) -> object:
    """A function that may change its input, whose shards are no memory to change."""
    given = {**dict(zip(_PARAMETERS[function], args, strict=False)), **kwargs}
    if not given.pop("inplace", False):
        return _ALL(function, (), given)
    x = given["input"]
    result = _ALL(function, (), {**given, "input": x.clone()})  # the backward pass needs what was there
    return x.copy_(placed_in(result, attainable_placements(x)))


_PARAMETERS: dict[object, tuple[str, ...]] = {
    F.hardtanh: ("input", "min_val", "max_val", "inplace"),
    **dict.fromkeys((F.relu6, F.hardswish, F.hardsigmoid), ("input", "inplace")),
}
ROWS: dict[object, Function] = {
    F.rms_norm: _rms_norm,
    F.pad: _pad,
    F.unfold: _but_last(3),
    F.fold: _but_last(2),
    **dict.fromkeys(_PARAMETERS, _in_place),
    **dict.fromkeys((F.logsigmoid, F.hardshrink, F.softshrink), _ALL),
    F.prelu: _FIRST,  # its weight is along the second axis
    **dict.fromkeys((F.avg_pool1d, F.max_pool1d, F.adaptive_avg_pool1d, F.adaptive_max_pool1d), _but_last(1)),
    **dict.fromkeys((F.avg_pool2d, F.max_pool2d, F.adaptive_avg_pool2d, F.adaptive_max_pool2d), _but_last(2)),
    **dict.fromkeys((F.avg_pool3d, F.max_pool3d, F.adaptive_avg_pool3d, F.adaptive_max_pool3d), _but_last(3)),
}
