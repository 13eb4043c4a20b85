"""Compute functions that treat images, channels, or elements independently on each device's shards.

DTensor has a rule for some of them, but none for their gradients (of pooling: pytorch/pytorch#182526).
"""

from __future__ import annotations

from torch.nn import functional as F

from layoutmap.engines.torch.dtensor_ops.shards import make_shard_handler
from layoutmap.engines.torch.operators import Args, Function, Kwargs
from layoutmap.engines.torch.placing import find_reachable_placements, redistribute_if_needed


def _compute_rms_norm(function: Function, args: Args, kwargs: Kwargs) -> object:
    shape = args[1] if len(args) > 1 else kwargs["normalized_shape"]
    return _make_last_axes_handler(len(shape))(function, args, kwargs)


def _compute_pad(function: Function, args: Args, kwargs: Kwargs) -> object:
    given = {**dict(zip(("input", "pad", "mode", "value"), args, strict=False)), **kwargs}
    if given.get("mode", "constant") == "constant":  # DTensor computes this mode correctly, so call it
        return function(*args, **kwargs)
    return _make_last_axes_handler(len(given["pad"]) // 2)(function, args, kwargs)


_ALL = make_shard_handler(lambda rank: range(rank))
_FIRST = make_shard_handler(lambda rank: range(1))


def _make_last_axes_handler(num_axes: int) -> Function:
    """Return the handler of a function that combines elements along its last `num_axes` axes only."""
    return make_shard_handler(lambda rank: range(rank - num_axes))


def _compute_with_inplace_option(function: Function, args: Args, kwargs: Kwargs) -> object:
    """Compute a function with an option `inplace`. If it is true, the result is copied to the input."""
    given = {**dict(zip(_PARAMETERS[function], args, strict=False)), **kwargs}
    if not given.pop("inplace", False):
        return _ALL(function, (), given)
    x = given["input"]
    result = _ALL(function, (), {**given, "input": x.clone()})  # clone, as backward needs the original input
    return x.copy_(redistribute_if_needed(result, find_reachable_placements(x)))


_PARAMETERS: dict[object, tuple[str, ...]] = {
    F.hardtanh: ("input", "min_val", "max_val", "inplace"),
    **dict.fromkeys((F.relu6, F.hardswish, F.hardsigmoid), ("input", "inplace")),
}
ROWS: dict[object, Function] = {
    F.rms_norm: _compute_rms_norm,
    F.pad: _compute_pad,
    F.unfold: _make_last_axes_handler(3),
    F.fold: _make_last_axes_handler(2),
    **dict.fromkeys(_PARAMETERS, _compute_with_inplace_option),
    **dict.fromkeys((F.logsigmoid, F.hardshrink, F.softshrink), _ALL),
    F.prelu: _FIRST,  # each weight belongs to an index of axis 1, so only axis 0 stays sharded
    **dict.fromkeys(
        (F.avg_pool1d, F.max_pool1d, F.adaptive_avg_pool1d, F.adaptive_max_pool1d), _make_last_axes_handler(1)
    ),
    **dict.fromkeys(
        (F.avg_pool2d, F.max_pool2d, F.adaptive_avg_pool2d, F.adaptive_max_pool2d), _make_last_axes_handler(2)
    ),
    **dict.fromkeys(
        (F.avg_pool3d, F.max_pool3d, F.adaptive_avg_pool3d, F.adaptive_max_pool3d), _make_last_axes_handler(3)
    ),
}
