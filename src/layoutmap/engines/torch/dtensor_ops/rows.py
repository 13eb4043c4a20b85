"""Functions that each device computes on its own shards, as they treat images, channels or elements apart.

DTensor has a rule for some of them, but none for their gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from layoutmap.core.errors import EngineError
from layoutmap.engines.torch.dtensor_ops.conversions import reduced
from layoutmap.engines.torch.dtensor_ops.gathered import on_gathered
from layoutmap.engines.torch.dtensor_ops.shards import apart
from layoutmap.engines.torch.private import tree_map


def _rms_norm(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    shape = args[1] if len(args) > 1 else kwargs["normalized_shape"]
    return _but_last(len(shape))(function, args, kwargs)


def _of_reduced(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Functions whose gradients DTensor can compute only where no sum is to be made, or not at all for the largest."""
    if any(isinstance(each, float) and math.isinf(each) for each in (*args[1:], *kwargs.values())):
        return on_gathered(function, args, kwargs)
    args, kwargs = tree_map(reduced, (args, kwargs))
    return function(*args, **kwargs)


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
        (
            F.normalize,
            F.cosine_similarity,
            F.hinge_embedding_loss,
            torch.norm,
            torch.Tensor.norm,
            torch.linalg.norm,
            torch.linalg.vector_norm,
            torch.linalg.matrix_norm,
        ),
        _of_reduced,
    ),
    **dict.fromkeys(
        (F.hardtanh, F.relu6, F.hardswish, F.hardsigmoid, F.logsigmoid, F.hardshrink, F.softshrink), _ALL
    ),
    F.prelu: _FIRST,
    **dict.fromkeys((F.avg_pool1d, F.max_pool1d, F.adaptive_avg_pool1d, F.adaptive_max_pool1d), _but_last(1)),
    **dict.fromkeys((F.avg_pool2d, F.max_pool2d, F.adaptive_avg_pool2d, F.adaptive_max_pool2d), _but_last(2)),
    **dict.fromkeys((F.avg_pool3d, F.max_pool3d, F.adaptive_avg_pool3d, F.adaptive_max_pool3d), _but_last(3)),
}
