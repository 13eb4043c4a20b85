"""Changes in place of `tensor.data`, which autograd does not see: between a forward pass and its backward pass.

On one device that computes with the new values of what it has saved. Here it may have saved other values in their
place, or a copy in another layout, which has former ones: such a pass is refused.
"""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

from layoutmap.core.errors import EngineError
from layoutmap.engines.torch import simulation
from layoutmap.engines.torch.backward import gradient_of
from layoutmap.engines.torch.specs import local_of
from layoutmap.engines.torch.storages import base_of

_IS_UNSEEN = "_layoutmap_unseen"  # of a tensor: autograd does not see its changes
_NUMBER = "_layoutmap_number"  # of a memory: how many such changes there were, in a list of one


def memory_of(tensor: torch.Tensor) -> torch.UntypedStorage:
    """The storage of a DTensor on this device, or on the first; torch has one object of it while it is allocated."""
    return simulation.plain(local_of(tensor)).untyped_storage()


def hide(tensor: torch.Tensor) -> torch.Tensor:
    """The same tensor, of which autograd does not see changes."""
    setattr(tensor, _IS_UNSEEN, True)
    return tensor


def is_unseen(tensor: torch.Tensor) -> bool:
    """Whether autograd does not see changes of a tensor."""
    return hasattr(base_of(tensor), _IS_UNSEEN)


def count(memory: torch.UntypedStorage) -> None:
    """Count a change of a memory."""
    if (number := getattr(memory, _NUMBER, None)) is not None:
        number[0] += 1


def numbers_of(*tensors: torch.Tensor) -> list[tuple[list[int], int]]:  # why: decisions/0151
    """The numbers of changes of the DTensors among some tensors, which go on, and what they are now."""
    found: list[tuple[list[int], int]] = []
    for each in tensors:
        if isinstance(each, DTensor) and type(simulation.plain(local_of(each))) is torch.Tensor:
            number = vars(memory_of(each)).setdefault(_NUMBER, [0])  # of the storage, which views share
            found.append((number, number[0]))
    return found


def check(numbers: list[tuple[list[int], int]]) -> None:
    """Refuse a backward pass of tensors that were changed since their numbers were taken.

    Raises:
        EngineError: They were.
    """
    if any(number[0] != before for number, before in numbers):
        raise EngineError(
            "a backward pass of a tensor whose values were changed in place, through tensor.data",
            facts={"gradient of": gradient_of()},
            why="on a mesh it may have the former values, in another layout, where on one device it has the new ones",
            fix="change the tensor after the backward pass, or compute with a copy of it: f(tensor.clone())",
        )
