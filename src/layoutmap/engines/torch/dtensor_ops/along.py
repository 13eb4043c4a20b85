"""What takes or puts along one axis of DTensors, at an index: each device computes its own shards of the other axes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from layoutmap.engines.torch.dtensor_ops.conversions import placed, reduced
from layoutmap.engines.torch.dtensor_ops.gathered import changes_in_place, on_gathered
from layoutmap.engines.torch.dtensor_ops.shards import join, kept_axes, local_shard, mesh_of


def _by_index(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """What takes or puts along one axis, at an index: of as many axes as the tensor, or of one."""
    values: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
    x: Any = values.get(0, values.get("input"))
    index: Any = values.get(2, values.get("index"))
    dim = values.get(1, values.get("dim"))
    tensors = {name: each for name, each in values.items() if isinstance(each, torch.Tensor) and each.ndim}
    along = [each for each in tensors.values() if each is not index or index.ndim == x.ndim]
    are_numbers = any(isinstance(each, DTensor) and not each.ndim for each in values.values())
    if not isinstance(dim, int) or are_numbers or any(each.ndim != x.ndim for each in along):
        return on_gathered(function, args, kwargs)
    mesh = mesh_of(tensors.values())
    free = [a for a in range(x.ndim) if a != dim % x.ndim and len({each.shape[a] for each in along}) == 1]
    kept = kept_axes(along, mesh, free)
    for name, each in tensors.items():
        is_along = any(each is other for other in along)
        values[name] = local_shard(each, mesh, kept if is_along else {}, kept)
    in_place = changes_in_place(function)
    if in_place:
        values[0] = values[0].clone()
    local = function(*(values[i] for i in range(len(args))), **{name: values[name] for name in kwargs})
    result = join(local, mesh, kept)
    return x.copy_(placed(result, reduced(x.detach()).placements)) if in_place else result


_BY_INDEX = (
    *("gather", "scatter", "scatter_", "scatter_add", "scatter_add_", "scatter_reduce", "scatter_reduce_"),
    *("index_add", "index_add_", "index_copy", "index_copy_", "index_fill", "index_fill_", "index_reduce"),
    *("index_reduce_", "index_select", "take_along_dim"),
)
ALONG: dict[Any, Callable[..., Any]] = {
    **{
        getattr(home, name): _by_index
        for home in (torch.Tensor, torch)
        for name in _BY_INDEX
        if hasattr(home, name)
    },
}
