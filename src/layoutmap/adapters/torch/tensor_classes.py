"""Classes of tensors that keep their values in tensors of their own, as those of torchao that are quantized."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

from layoutmap.engines.torch.deferred_init import FakeTensor
from layoutmap.engines.torch.local_tensors import LocalTensor, pieces_by_rank
from layoutmap.engines.torch.specs import local_of

PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer, FakeTensor)
"""The classes that keep their values as torch does."""


def local_class(tensor: torch.Tensor) -> type[torch.Tensor]:
    """Return the class that computes with the values of a tensor; of a `DTensor` its local tensor's."""
    local: torch.Tensor = local_of(tensor) if isinstance(tensor, DTensor) else tensor
    if isinstance(local, LocalTensor):
        local = next(iter(pieces_by_rank(local).values()))
    return local.__class__


def is_composed(tensor: torch.Tensor) -> bool:
    """Return whether a tensor, or a shard of it, consists of other tensors."""
    kind = local_class(tensor)
    return kind not in PLAIN and hasattr(kind, "__tensor_flatten__")


def class_name(kind: type) -> str:
    """Return the name of a class, with that of its module."""
    return f"{kind.__module__}.{kind.__qualname__}"


def stored_dtype(tensor: torch.Tensor) -> torch.dtype:
    """Return the element type in which the elements of a tensor are stored; a composed one shows another."""
    if isinstance(tensor, DTensor) or not is_composed(tensor):
        return tensor.dtype
    parts = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]  # type: ignore[attr-defined]
    return next((part.dtype for part in parts if part.shape == tensor.shape), tensor.dtype)
