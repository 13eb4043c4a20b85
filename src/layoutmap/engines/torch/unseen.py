"""Detect in-place changes through `tensor.data`, which autograd does not count, before a backward pass.

On one device, the backward pass computes with the new values of saved tensors. On a mesh, it may have saved a copy in
another layout, which has the former values, so such a pass is refused.
"""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

from layoutmap.core.errors import EngineError
from layoutmap.engines.torch import simulation
from layoutmap.engines.torch.backward import get_backward_node_name
from layoutmap.engines.torch.specs import get_local
from layoutmap.engines.torch.storages import get_base_tensor

_IS_UNSEEN = "_layoutmap_unseen"  # attribute of a tensor: autograd does not count its changes
_COUNTER = "_layoutmap_number"  # attribute of a storage: a list with the number of changes that autograd does not count


def get_storage(tensor: torch.Tensor) -> torch.UntypedStorage:
    """Return the storage of a DTensor on this device, or on the first simulated device."""
    return simulation.get_first_local_tensor(get_local(tensor)).untyped_storage()


def mark_changes_as_hidden(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same tensor with a mark that autograd does not count its in-place changes."""
    setattr(tensor, _IS_UNSEEN, True)
    return tensor


def has_hidden_changes(tensor: torch.Tensor) -> bool:
    """Return whether a tensor, or the tensor that it is a view of, has the mark of `mark_changes_as_hidden`."""
    return hasattr(get_base_tensor(tensor), _IS_UNSEEN)


def increment_change_counter(storage: torch.UntypedStorage) -> None:
    """Increment the change counter of a storage, if it has one."""
    if (counter := getattr(storage, _COUNTER, None)) is not None:
        counter[0] += 1


# A backward pass would silently be wrong if saved values had changed, so changes are counted (decisions/0151).
def snapshot_change_counters(*tensors: torch.Tensor) -> list[tuple[list[int], int]]:
    """Return pairs of the change counter of each DTensor among some tensors, and the counter's present value."""
    found: list[tuple[list[int], int]] = []
    for each in tensors:
        if (
            isinstance(each, DTensor)
            and type(simulation.get_first_local_tensor(get_local(each))) is torch.Tensor
        ):
            # Count changes per storage, because views share the storage.
            counter = vars(get_storage(each)).setdefault(_COUNTER, [0])
            found.append((counter, counter[0]))
    return found


def check_tensor_unchanged(counters: list[tuple[list[int], int]]) -> None:
    """Raise an `EngineError` if a tensor was changed through `tensor.data` since `snapshot_change_counters`."""
    if any(counter[0] != before for counter, before in counters):
        raise EngineError(
            "the values of a tensor were changed in place through tensor.data before its backward pass",
            facts={"gradient of": get_backward_node_name()},
            why="on a mesh, the backward pass may use a copy, which has the former values",
            fix="change the tensor after the backward pass, or compute with a copy of it: f(tensor.clone())",
        )
