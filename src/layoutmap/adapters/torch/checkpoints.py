"""What a checkpoint keeps of a torch module and of its optimizer.

The paths are those of `named_parameters` and `named_buffers`; a slot is `optimizer.<parameter>.<name>`. Buffers that
torch keeps out of state dicts are kept out here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from layoutmap.adapters.protocol import Stored
from layoutmap.adapters.torch.paths import Found, find_tensors
from layoutmap.core.variables import Kind, VariableSpec
from layoutmap.engines import get_engine


def stored(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> list[Stored]:
    """Return the tensors of a model, and the slots that its optimizer has made."""
    found = list(_kept(model))
    tensors = [Stored(_spec(each), each.tensor) for each in found]
    slots = [
        Stored(VariableSpec(path, tuple(slot.shape), _dtype(slot), Kind.SLOT, parent=parent), slot)
        for path, (parent, slot) in _slots(found, optimizer).items()
    ]
    return tensors + slots


def restored(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, arrays: Iterable[tuple[str, Any]]
) -> None:
    """Give tensors other values."""
    found = list(_kept(model))
    tensors = {each.path: each.tensor for each in found}
    tensors |= {path: slot for path, (_, slot) in _slots(found, optimizer).items()}
    with torch.no_grad():
        for path, array in arrays:
            tensor = tensors[path]
            if get_engine("torch").layout_of(tensor) is None:
                array = torch.as_tensor(array)
            tensor.copy_(array)


def settings_of(optimizer: torch.optim.Optimizer | None) -> list[dict[str, Any]]:
    """Return what an optimizer's groups say beside their parameters: learning rates and the like."""
    groups = [] if optimizer is None else optimizer.param_groups
    return [{name: value for name, value in group.items() if name != "params"} for group in groups]


def restore_settings(optimizer: torch.optim.Optimizer | None, settings: Iterable[Mapping[str, Any]]) -> None:
    """Put back what `settings_of` returned."""
    for group, found in zip([] if optimizer is None else optimizer.param_groups, settings, strict=False):
        group.update(found)


def _kept(model: torch.nn.Module) -> Iterator[Found]:
    for each in find_tensors(model):
        if not all(place.name in place.module._non_persistent_buffers_set for place in each.places):
            yield each


def _slots(
    found: Iterable[Found], optimizer: torch.optim.Optimizer | None
) -> dict[str, tuple[str, torch.Tensor]]:
    """The slots of an optimizer by path, each with the path of its parameter."""
    state: Mapping[Any, Mapping[str, Any]] = {} if optimizer is None else optimizer.state
    return {
        f"optimizer.{each.path}.{name}": (each.path, slot)
        for each in found
        for name, slot in state.get(each.tensor, {}).items()
        if isinstance(slot, torch.Tensor)
    }


def _spec(found: Found) -> VariableSpec:
    kind = Kind.STATE if found.is_buffer else Kind.WEIGHT
    tensor = found.tensor
    return VariableSpec(found.path, tuple(tensor.shape), _dtype(tensor), kind, tuple(found.aliases))


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
