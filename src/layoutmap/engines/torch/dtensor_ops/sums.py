"""Reduce partial sums over the mesh immediately, where DTensor would defer it.

A product along a sharded axis, and a gradient that passes through a sharded weight, are partial sums. DTensor reduces
them as late as possible, and may shard the result along the first axis because that costs less. If the mesh
dim does not divide the batch, these shards are uneven, and the next change of shape fails.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from layoutmap.engines.torch.operators import Args, Function
from layoutmap.engines.torch.placing import reduce_if_partial, transform_gradient_in_backward
from layoutmap.engines.torch.trees import tree_map

_PRODUCTS = (  # pyright: ignore[reportUnknownVariableType]
    *(torch.matmul, torch.mm, torch.bmm, torch.einsum, torch.tensordot, functional.linear),  # pyright: ignore[reportUnknownMemberType]
    *(torch.Tensor.matmul, torch.Tensor.mm, torch.Tensor.bmm, torch.Tensor.__matmul__),
)


def is_batch_divisible(value: object) -> bool:
    """Return whether each mesh dim's size divides a DTensor's first axis. For other values, return True."""
    if not isinstance(value, DTensor) or not value.ndim:
        return True
    return all(value.shape[0] % size == 0 for size in value.device_mesh.shape)


class ProductReductionMode(TorchFunctionMode):
    """Function mode that reduces partial results of products immediately."""

    def __torch_function__(self, func: Function, types: object, args: Args = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _PRODUCTS:
            return func(*args, **kwargs)
        given, named = tree_map(reduce_gradient_in_backward, (args, kwargs))
        return reduce_if_partial(func(*given, **named))


def reduce_gradient_in_backward(value: object) -> object:
    """Reduce a DTensor's gradient when the backward pass reaches it. Return the DTensor or other value unchanged."""
    if not isinstance(value, DTensor) or not value.requires_grad:
        return value
    return transform_gradient_in_backward(value, reduce_if_partial)
