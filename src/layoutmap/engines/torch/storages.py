"""The memory of tensors: which of them share it, and how often one was changed."""

from __future__ import annotations

import torch

from layoutmap.engines.tested import check_names

check_names("torch", (torch.Tensor, "_base _is_view _version"), (torch.UntypedStorage, "_cdata"))


def storage_key(tensor: torch.Tensor) -> int:
    """Equal for two tensors that are alive if they are in the same memory."""
    return tensor.untyped_storage()._cdata  # a tensor without values has no `data_ptr`  # pyright: ignore[reportPrivateUsage]


def version_of(tensor: torch.Tensor) -> int:
    """How often a tensor was changed in place; always 0 where torch does not count, under `inference_mode`."""
    return 0 if tensor.is_inference() else tensor._version


def base_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that a tensor is a view of; itself if it is none."""
    return tensor if tensor._base is None else tensor._base


is_view_of_another = torch.Tensor._is_view
"""Whether a tensor is a view of another."""
