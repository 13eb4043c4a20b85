"""Reduce partial sums over the mesh immediately, where DTensor would defer it.

A product of what is sharded along the axis that it sums over, and a gradient that comes back through what is sharded,
is a sum that is still to be made. DTensor makes it when it must, and then shards the result along the first axis, where
that costs less. For a batch that does not divide it shards unevenly, and fails at the next change of shape.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from layoutmap.engines.torch.operators import Args, Function
from layoutmap.engines.torch.placing import hook_gradient, reduce_partial
from layoutmap.engines.torch.trees import tree_map

_PRODUCTS = (  # pyright: ignore[reportUnknownVariableType]
    *(torch.matmul, torch.mm, torch.bmm, torch.einsum, torch.tensordot, functional.linear),  # pyright: ignore[reportUnknownMemberType]
    *(torch.Tensor.matmul, torch.Tensor.mm, torch.Tensor.bmm, torch.Tensor.__matmul__),
)


def is_batch_divisible(value: object) -> bool:
    """Return whether the first axis of a tensor divides evenly over each mesh dim."""
    if not isinstance(value, DTensor) or not value.ndim:
        return True
    return all(value.shape[0] % size == 0 for size in value.device_mesh.shape)


class SummingUp(TorchFunctionMode):
    """Reduce the results of products immediately while open."""

    def __torch_function__(self, func: Function, types: object, args: Args = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _PRODUCTS:
            return func(*args, **kwargs)
        given, named = tree_map(reduce_gradient, (args, kwargs))
        return reduce_partial(func(*given, **named))


def reduce_gradient(value: object) -> object:
    """Return the same value with a gradient that is reduced in the backward pass."""
    if not isinstance(value, DTensor) or not value.requires_grad:
        return value
    return hook_gradient(value, reduce_partial)
