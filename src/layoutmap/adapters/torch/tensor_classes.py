"""Handle tensor classes that consist of several tensors, such as torchao's quantized ones."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

from layoutmap.engines.torch.deferred_init import FakeTensor
from layoutmap.engines.torch.local_tensors import LocalTensor, get_rank_tensors
from layoutmap.engines.torch.specs import get_local

PLAIN_CLASSES = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer, FakeTensor)
"""The classes that store their values in one tensor."""


def find_local_tensor_class(tensor: torch.Tensor) -> type[torch.Tensor]:
    """Return the class of a tensor, or of a DTensor's local tensor."""
    local: torch.Tensor = get_local(tensor) if isinstance(tensor, DTensor) else tensor
    if isinstance(local, LocalTensor):
        local = next(iter(get_rank_tensors(local).values()))
    return local.__class__


def is_composed_of_tensors(tensor: torch.Tensor) -> bool:
    """Return whether a tensor, or a shard of it, consists of other tensors."""
    kind = find_local_tensor_class(tensor)
    return kind not in PLAIN_CLASSES and hasattr(kind, "__tensor_flatten__")


def format_class_name(tensor_class: type) -> str:
    """Return the name of a class, preceded by its module's name."""
    return f"{tensor_class.__module__}.{tensor_class.__qualname__}"


def find_stored_dtype(tensor: torch.Tensor) -> torch.dtype:
    """Return a tensor's element type in memory, which may differ from `dtype` if it consists of other tensors."""
    if isinstance(tensor, DTensor) or not is_composed_of_tensors(tensor):
        return tensor.dtype
    parts = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]  # type: ignore[attr-defined]
    return next((part.dtype for part in parts if part.shape == tensor.shape), tensor.dtype)
