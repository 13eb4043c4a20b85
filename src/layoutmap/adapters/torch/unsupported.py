"""Find tensors that cannot be sharded, or only with restrictions, before any is created."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch.distributed.tensor import DTensor

from layoutmap.adapters.torch.paths import FoundTensor
from layoutmap.adapters.torch.tensor_classes import PLAIN, class_name, is_composed
from layoutmap.core.unsupported import Unsupported
from layoutmap.engines.torch.storages import get_storage_key

_KNOWN = (*PLAIN, DTensor)


def find_unsupported(tensors: Sequence[tuple[FoundTensor, str]]) -> list[Unsupported]:
    """Return the tensors of a scope that cannot be sharded, with the reasons.

    Args:
        tensors: Each once, and the name of its model.
    """
    return [*_check_each_tensor(tensors), *_check_shared_memory(tensors)]


def _check_each_tensor(tensors: Sequence[tuple[FoundTensor, str]]) -> Iterator[Unsupported]:
    for found, model in tensors:
        tensor = found.tensor
        if tensor.device.type == "meta":
            yield Unsupported(
                found.path,
                "it is on the meta device",
                "such a tensor has no value, and no record of how it would get one",
                "build the model without torch.device('meta'): a scope defers the values itself",
                model=model,
            )
        elif tensor.layout != torch.strided:
            yield Unsupported(
                found.path,
                f"it is {tensor.layout}",
                "a layout shards dense tensors",
                "make it dense: tensor.to_dense()",
                model=model,
            )
        elif not isinstance(tensor, DTensor) and is_composed(tensor):
            yield Unsupported(
                found.path,
                f"it is a {class_name(type(tensor))}, which consists of other tensors",
                "which of their elements belong to which shard is not known",
                "lay out the model without it (for torchao: without quantize_), or keep this model on one device",
                model=model,
            )
        elif type(tensor) not in _KNOWN:
            yield Unsupported(
                found.path,
                f"it is a {class_name(type(tensor))}",
                "it becomes a DTensor, and what its own class does is lost",
                "make it a torch.nn.Parameter",
                "warning" if isinstance(tensor, torch.nn.Parameter) else "error",
                model=model,
            )


def _check_shared_memory(tensors: Sequence[tuple[FoundTensor, str]]) -> Iterator[Unsupported]:
    known: dict[object, tuple[FoundTensor, str]] = {}
    for found, model in tensors:
        tensor = found.tensor
        if isinstance(tensor, DTensor) or tensor.layout != torch.strided or not tensor.numel():
            continue
        key = (get_storage_key(tensor), tensor.storage_offset(), tuple(tensor.shape), tensor.stride())
        other, its_model = known.setdefault(key, (found, model))
        if other is not found:
            its_path = other.path if its_model == model else f"{its_model}: {other.path}"
            yield Unsupported(
                found.path,
                f"it shares its memory with {its_path}",
                "they are two tensors, and in layouts each has memory of its own, so they would part in training",
                "let both names hold one and the same parameter: b.weight = a.weight",
                model=model,
            )
