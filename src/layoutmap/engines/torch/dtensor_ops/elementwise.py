"""Register sharding rules of elementwise operators for which DTensor has none, such as gradients of activations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import Placement, Replicate, Shard

from layoutmap.engines.torch.dtensor_ops.dispatch import has_sharding_rule, register_rule_temporarily

_NAMES = """
elu_backward hardshrink_backward hardsigmoid_backward hardswish hardswish_backward hardtanh_backward leaky_relu_backward
softplus_backward softshrink_backward
"""


def register_missing_rules() -> None:
    """Register the rules that DTensor lacks, until torch's patches are removed. They are right on any mesh."""
    ops = [getattr(torch.ops.aten, name).default for name in _NAMES.split()]
    register_rule_temporarily([op for op in ops if not has_sharding_rule(op)], _list_shardings)


def _list_shardings(*args: Any) -> list[tuple[Sequence[Placement], Sequence[Placement | None]]]:
    """Return the placements of the result and of the arguments: any axis is sharded in all tensors, or none is."""
    are_tensors = [hasattr(each, "placements") for each in args]
    rank = next(each.ndim for each, is_tensor in zip(args, are_tensors, strict=True) if is_tensor)
    placements = [Replicate(), *(Shard(axis) for axis in range(rank))]
    return [([each], [each if is_tensor else None for is_tensor in are_tensors]) for each in placements]
