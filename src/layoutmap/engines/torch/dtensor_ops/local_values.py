"""Track tensors that a program takes out of DTensors with `to_local` or `full_tensor` in a model's call.

A plain tensor beside a DTensor counts as the global tensor, equal on all devices. A shard differs between devices, so
shards and all tensors that are computed from them are marked:

- beside replicated tensors, each device computes with its own shard, and the result is marked, too
- beside any other DTensor, or as an output of the model, a shard is refused
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Placement
from torch.utils.weak import WeakIdKeyDictionary

from layoutmap.core.errors import EngineError
from layoutmap.engines.torch.dtensor_ops.gathered import format_function_name, is_in_place
from layoutmap.engines.torch.modes import list_function_modes
from layoutmap.engines.torch.operators import Args, Function, Kwargs
from layoutmap.engines.torch.trees import tree_leaves

# torch.load refuses a file of tensors with own attributes, so store this property in a table (decisions/0151).
_marks: Any = WeakIdKeyDictionary()
"""For each local tensor, whether it differs between devices."""


def record_if_local_tensor_is_shard(local: torch.Tensor, placements: Sequence[Placement]) -> torch.Tensor:
    """Record, for the local tensor of a DTensor, whether it differs between devices, and return the local tensor."""
    differs = not all(each.is_replicate() for each in placements)
    # Only function modes read the value `False`, so without a mode, store only `True`.
    if differs or list_function_modes():
        _marks[local] = differs
    return local


def _list_shard_records(values: object) -> list[bool]:
    """Return, for each recorded local tensor among some values, whether it differs between devices."""
    leaves = tree_leaves(values) if _marks else ()
    return [_marks[each] for each in leaves if isinstance(each, torch.Tensor) and each in _marks]


def has_local_tensor(values: object) -> bool:
    """Return whether some values contain a recorded local tensor of a DTensor."""
    return bool(_list_shard_records(values))


def has_shard(values: object) -> bool:
    """Return whether some values contain a tensor that differs between devices."""
    return any(_list_shard_records(values))


def record_which_results_are_shards(function: Function, args: Args, kwargs: Kwargs, result: Any) -> Any:
    """Return the results of a function of local tensors, after recording whether they differ between devices."""
    differs = has_shard((args, kwargs))
    for each in tree_leaves((result, args[:1] if is_in_place(function) else (), kwargs.get("out"))):
        if isinstance(each, torch.Tensor) and not isinstance(each, DTensor):
            _marks[each] = differs
    return result


def check_no_shard_with_dtensor(
    function: Function, args: Args, kwargs: Kwargs, changed: Sequence[torch.Tensor]
) -> None:
    """Raise an `EngineError` if a call combines a shard with a sharded DTensor, or changes a DTensor by a shard."""
    for each in tree_leaves((args, kwargs)):
        if isinstance(each, DTensor) and (
            any(each is other for other in changed) or not all(p.is_replicate() for p in each.placements)
        ):
            raise make_shard_error(
                f"{format_function_name(function)}: combines a local shard with a tensor on a mesh", each
            )


def check_value_is_not_shard(description: str, value: object) -> None:
    """Raise an `EngineError` if a value is a shard, where the global tensor is needed."""
    if isinstance(value, torch.Tensor) and not isinstance(value, DTensor) and has_shard(value):
        raise make_shard_error(f"{description} is a local shard, but must be the global tensor", value)


def make_shard_error(description: str, tensor: torch.Tensor) -> EngineError:
    """Return the error for a shard that is used where the global tensor is needed."""
    layout = {"layout": str(tensor.placements)} if isinstance(tensor, DTensor) else {}
    return EngineError(
        description,
        facts={"shape": tuple(tensor.shape), **layout},
        why="to_local() returns the shard of each device, and here it would be taken for the whole tensor",
        fix="use the tensor itself or tensor.full_tensor(), or combine the shards first: "
        "DTensor.from_local(shard, mesh, placements)",
    )
