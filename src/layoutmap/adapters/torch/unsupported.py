"""Find tensors that cannot be sharded, or only with restrictions, before any is created."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch.distributed.tensor import DTensor

from layoutmap.adapters.torch.paths import ModelTensor
from layoutmap.adapters.torch.tensor_classes import PLAIN_CLASSES, format_class_name, is_composed_of_tensors
from layoutmap.core.unsupported import UnsupportedFeature
from layoutmap.engines.torch.storages import get_storage_key

_KNOWN = (*PLAIN_CLASSES, DTensor)


def find_unsupported_tensors(tensors: Sequence[tuple[ModelTensor, str]]) -> list[UnsupportedFeature]:
    """Return the tensors that a scope cannot shard, or shards with a warning, each with the reason.

    Args:
        tensors: Pairs of a tensor and the name of its model. Each tensor is listed once.
    """
    return [*_iterate_unsupported_tensors(tensors), *_iterate_shared_tensors(tensors)]


def _iterate_unsupported_tensors(tensors: Sequence[tuple[ModelTensor, str]]) -> Iterator[UnsupportedFeature]:
    """Yield the tensors that have no values, are not dense, or belong to a class that is lost in a DTensor."""
    for model_tensor, model in tensors:
        tensor = model_tensor.tensor
        if tensor.device.type == "meta":
            yield UnsupportedFeature(
                model_tensor.path,
                "it is on the meta device",
                "such a tensor has no value, and no record of how it would get one",
                "build the model without torch.device('meta'): a scope defers the values itself",
                model=model,
            )
        elif tensor.layout != torch.strided:
            yield UnsupportedFeature(
                model_tensor.path,
                f"it is {tensor.layout}",
                "a layout shards dense tensors",
                "make it dense: tensor.to_dense()",
                model=model,
            )
        elif not isinstance(tensor, DTensor) and is_composed_of_tensors(tensor):
            yield UnsupportedFeature(
                model_tensor.path,
                f"it is a {format_class_name(type(tensor))}, which consists of other tensors",
                "it is unknown which of their elements belong to which shard",
                "lay out the model without it (for torchao: without quantize_), or keep this model on one device",
                model=model,
            )
        elif type(tensor) not in _KNOWN:
            yield UnsupportedFeature(
                model_tensor.path,
                f"it is a {format_class_name(type(tensor))}",
                "it becomes a DTensor, and what its own class does is lost",
                "make it a torch.nn.Parameter",
                "warning" if isinstance(tensor, torch.nn.Parameter) else "error",
                model=model,
            )


def _iterate_shared_tensors(tensors: Sequence[tuple[ModelTensor, str]]) -> Iterator[UnsupportedFeature]:
    """Yield each tensor that has the same memory and shape as another tensor of a model."""
    first_by_memory: dict[object, tuple[ModelTensor, str]] = {}
    for model_tensor, model in tensors:
        tensor = model_tensor.tensor
        if isinstance(tensor, DTensor) or tensor.layout != torch.strided or not tensor.numel():
            continue
        key = (get_storage_key(tensor), tensor.storage_offset(), tuple(tensor.shape), tensor.stride())
        other, its_model = first_by_memory.setdefault(key, (model_tensor, model))
        if other is not model_tensor:
            its_path = other.path if its_model == model else f"{its_model}: {other.path}"
            yield UnsupportedFeature(
                model_tensor.path,
                f"it shares its memory with {its_path}",
                "a layout gives each of the two tensors its own memory, so training would make them differ",
                "let both names hold one and the same parameter: b.weight = a.weight",
                model=model,
            )
