"""Functions that each device computes on its own shards, as they treat images, channels or elements apart.

DTensor has a rule for some of them, but none for their gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.nn import functional as F

from layoutmap.core.errors import EngineError
from layoutmap.engines.torch.dtensor_ops.conversions import reduced
from layoutmap.engines.torch.dtensor_ops.gathered import on_gathered
from layoutmap.engines.torch.dtensor_ops.shards import apart


def _rms_norm(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    shape = args[1] if len(args) > 1 else kwargs["normalized_shape"]
    return _but_last(len(shape))(function, args, kwargs)


def _pad(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    given = {**dict(zip(("input", "pad", "mode", "value"), args, strict=False)), **kwargs}
    if given.get("mode", "constant") == "constant":
        return function(*args, **kwargs)
    return _but_last(len(given["pad"]) // 2)(function, args, kwargs)


_ALL = apart(lambda rank: range(rank))
_FIRST = apart(lambda rank: range(1))


def _but_last(number: int) -> Callable[..., Any]:
    """All axes but some at the end, which the function takes together."""
    return apart(lambda rank: range(rank - number))


def _embedding(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Rows of a table that is sharded along them are summed up at once: that can be done only once."""
    given = {**dict(zip(_EMBEDDING, args, strict=False)), **kwargs}
    if given.get("max_norm") is not None:
        raise EngineError(
            "embedding: max_norm on a table that is on a mesh",
            facts={"max_norm": given["max_norm"]},
            why="it changes rows of the table while it reads them, and each device would change others",
            fix="embed without max_norm, and clip the table after each step: torch.renorm(weight, 2, 0, max_norm)",
        )
    if given.get("scale_grad_by_freq", False):
        return on_gathered(function, args, kwargs)
    return reduced(function(*args, **kwargs))


_EMBEDDING = ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")

ROWS: dict[Any, Callable[..., Any]] = {
    F.embedding: _embedding,
    F.rms_norm: _rms_norm,
    F.pad: _pad,
    F.unfold: _but_last(3),
    F.fold: _but_last(2),
    **dict.fromkeys(
        (F.hardtanh, F.relu6, F.hardswish, F.hardsigmoid, F.logsigmoid, F.hardshrink, F.softshrink), _ALL
    ),
    F.prelu: _FIRST,
    **dict.fromkeys((F.avg_pool1d, F.max_pool1d, F.adaptive_avg_pool1d, F.adaptive_max_pool1d), _but_last(1)),
    **dict.fromkeys((F.avg_pool2d, F.max_pool2d, F.adaptive_avg_pool2d, F.adaptive_max_pool2d), _but_last(2)),
    **dict.fromkeys((F.avg_pool3d, F.max_pool3d, F.adaptive_avg_pool3d, F.adaptive_max_pool3d), _but_last(3)),
}
