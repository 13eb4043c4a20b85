"""Compute functions that treat images, channels, or elements independently on each device's shards.

DTensor has a rule for some of them, but none for their gradients (of pooling: pytorch/pytorch#182526).
"""

from __future__ import annotations

from torch.nn import functional as F

from layoutmap.engines.torch.dtensor_ops.shards import make_shard_handler
from layoutmap.engines.torch.operators import Args, Function, Kwargs


def _compute_rms_norm(function: Function, args: Args, kwargs: Kwargs) -> object:
    shape = args[1] if len(args) > 1 else kwargs["normalized_shape"]
    return _make_last_axes_handler(len(shape))(function, args, kwargs)


def _compute_pad(function: Function, args: Args, kwargs: Kwargs) -> object:
    given = {**dict(zip(("input", "pad", "mode", "value"), args, strict=False)), **kwargs}
    if given.get("mode", "constant") == "constant":  # DTensor computes this mode correctly, so call it
        return function(*args, **kwargs)
    return _make_last_axes_handler(len(given["pad"]) // 2)(function, args, kwargs)


_FIRST = make_shard_handler(lambda rank: range(1))


def _make_last_axes_handler(num_axes: int) -> Function:
    """Return the handler of a function that combines elements along its last `num_axes` axes only."""
    return make_shard_handler(lambda rank: range(rank - num_axes))


ROWS: dict[object, Function] = {
    F.rms_norm: _compute_rms_norm,
    F.pad: _compute_pad,
    F.unfold: _make_last_axes_handler(3),
    F.fold: _make_last_axes_handler(2),
    F.logsigmoid: make_shard_handler(range),
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
