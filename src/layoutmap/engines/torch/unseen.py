"""Changes in place of `tensor.data`, which autograd does not see: between a forward pass and its backward pass.

On one device that computes with the new values of what it has saved. Here it may have saved other values in their
place, or a copy in another layout, which has former ones: such a pass is refused.
"""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

from layoutmap.core.errors import EngineError
from layoutmap.engines.torch import simulation
from layoutmap.engines.torch.backward import get_backward_node
from layoutmap.engines.torch.specs import get_local
from layoutmap.engines.torch.storages import get_base

_IS_UNSEEN = "_layoutmap_unseen"  # attribute of a tensor whose changes autograd does not count
_NUMBER = "_layoutmap_number"  # attribute of a storage: number of such changes, in a one-element list


def get_memory(tensor: torch.Tensor) -> torch.UntypedStorage:
    """Return the storage of a DTensor on this device, or on the first simulated one."""
    return simulation.get_first_piece(get_local(tensor)).untyped_storage()


def hide_changes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same tensor, marked so that autograd does not see its changes."""
    setattr(tensor, _IS_UNSEEN, True)
    return tensor


def has_hidden_changes(tensor: torch.Tensor) -> bool:
    """Return whether autograd does not see the changes of a tensor."""
    return hasattr(get_base(tensor), _IS_UNSEEN)


def count(memory: torch.UntypedStorage) -> None:
    """Count a change of a memory."""
    if (number := getattr(memory, _NUMBER, None)) is not None:
        number[0] += 1


# A backward pass with changed values would be silently wrong, so changes are counted (decisions/0151).
def snapshot_counters(*tensors: torch.Tensor) -> list[tuple[list[int], int]]:
    """Return the change counters of the DTensors among some tensors, with their current values."""
    found: list[tuple[list[int], int]] = []
    for each in tensors:
        if isinstance(each, DTensor) and type(simulation.get_first_piece(get_local(each))) is torch.Tensor:
            # Counted per storage, because views share it.
            number = vars(get_memory(each)).setdefault(_NUMBER, [0])
            found.append((number, number[0]))
    return found


def check(numbers: list[tuple[list[int], int]]) -> None:
    """Raise in the backward pass if a tensor was changed since its version was recorded.

    Raises:
        EngineError: They were.
    """
    if any(number[0] != before for number, before in numbers):
        raise EngineError(
            "a backward pass of a tensor whose values were changed in place, through tensor.data",
            facts={"gradient of": get_backward_node()},
            why="on a mesh, the backward pass may see the former values in another layout, instead of "
            "the new ones",
            fix="change the tensor after the backward pass, or compute with a copy of it: f(tensor.clone())",
        )
