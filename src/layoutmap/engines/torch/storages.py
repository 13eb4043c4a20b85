"""Inspect the memory of tensors: which tensors share it, and how often a tensor was changed."""

from __future__ import annotations

import torch

from layoutmap.engines.tested import check_names_exist

check_names_exist("torch", (torch.Tensor, "_base _is_view _version"), (torch.UntypedStorage, "_cdata"))


def get_storage_key(tensor: torch.Tensor) -> int:
    """Return a key of a tensor's storage. Live tensors with equal keys share their memory."""
    # A tensor without values has no `data_ptr`, so return the address of the storage object.
    return tensor.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]


def get_tensor_version(tensor: torch.Tensor) -> int:
    """Return the number of in-place changes of a tensor, or 0 under `inference_mode`."""
    return 0 if tensor.is_inference() else tensor._version


def get_base_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor that a tensor is a view of, or the tensor itself."""
    return tensor if tensor._base is None else tensor._base


is_view_of_another = torch.Tensor._is_view
"""Return whether a tensor is a view of another tensor."""
