"""When sums over the mesh are made: at once, where DTensor would leave them to whoever uses them.

A product of what is cut along the axis that it sums over, and a gradient that comes back through what is cut, is a sum
that is still to be made. DTensor makes it when it must, and then cuts the result along the first axis, where that costs
less. For a batch that does not divide it cuts unevenly, and fails at the next change of shape.
"""

from __future__ import annotations

from typing import Any

import keras
import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.nn import functional
from torch.overrides import TorchFunctionMode

__all__ = ["SummingUp", "divides", "summed_up", "with_summed_gradients"]

_PRODUCTS = (
    *(torch.matmul, torch.mm, torch.bmm, torch.einsum, torch.tensordot, functional.linear),
    *(torch.Tensor.matmul, torch.Tensor.mm, torch.Tensor.bmm, torch.Tensor.__matmul__),
)


def divides(value: Any) -> bool:
    """Whether the first axis of a tensor can be cut evenly over each dim of its mesh."""
    if not isinstance(value, DTensor) or not value.ndim:
        return True
    return all(value.shape[0] % size == 0 for size in value.device_mesh.mesh.shape)


def summed_up(values: Any) -> Any:
    """What a layer puts out, with sums over the mesh made: once here, not by each of those who use it.

    The rows of an embedding that is cut by rows are such a sum, too, and can be used once only.
    """
    return keras.tree.map_structure(_summed_up, values, none_is_leaf=True)


def with_summed_gradients(values: Any) -> Any:
    """The same values, whose gradients are summed up when they come back."""
    return keras.tree.map_structure(_with_summed_gradient, values, none_is_leaf=True)


class SummingUp(TorchFunctionMode):
    """While open, products and their gradients are summed up at once."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _PRODUCTS:
            return func(*args, **(kwargs or {}))
        args, kwargs = with_summed_gradients((args, kwargs or {}))
        return _summed_up(func(*args, **kwargs))


def _summed_up(value: Any) -> Any:
    if not isinstance(value, DTensor) or not any(each.is_partial() for each in value.placements):
        return value
    made = [Replicate() if each.is_partial() else each for each in value.placements]
    return value.redistribute(value.device_mesh, made)


def _with_summed_gradient(value: Any) -> Any:
    if not isinstance(value, DTensor) or not value.requires_grad:
        return value
    return _SummedGradient.apply(value)


class _SummedGradient(torch.autograd.Function):
    """The same tensor."""

    @staticmethod
    def forward(ctx: Any, value: Any) -> Any:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> Any:
        return _summed_up(upstream[0])
