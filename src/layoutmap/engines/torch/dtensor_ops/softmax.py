"""Compute `softmax` and `log_softmax` along a sharded axis, which DTensor would gather.

Devices exchange two numbers of each row instead: the largest, and the sum of exponentials.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from layoutmap.engines.torch.dtensor_ops.lookups import is_axis_sharded
from layoutmap.engines.torch.dtensor_ops.shards import find_kept_axes, join_shards, take_local_shard
from layoutmap.engines.torch.operators import Args, Function, Kwargs
from layoutmap.engines.torch.placing import compute_device_maximum, sum_over_devices


def compute_log_softmax(x: torch.Tensor, axis: int, mesh: DeviceMesh, along: Collection[int]) -> torch.Tensor:
    """Return log_softmax along a sharded axis, in float32 or a wider dtype.

    Args:
        x: The shard.
        axis: The axis.
        mesh: The mesh.
        along: The mesh dims over which the axis is sharded.
    """
    x = _subtract_maximum(x, axis, mesh, along)
    return x - sum_over_devices(x.exp().sum(axis, keepdim=True), mesh, along).log()


def _compute_softmax(x: torch.Tensor, axis: int, mesh: DeviceMesh, along: Collection[int]) -> torch.Tensor:
    x = _subtract_maximum(x, axis, mesh, along).exp()
    return x / sum_over_devices(x.sum(axis, keepdim=True), mesh, along)


def _subtract_maximum(x: torch.Tensor, axis: int, mesh: DeviceMesh, along: Collection[int]) -> torch.Tensor:
    x = x.to(torch.promote_types(x.dtype, torch.float32))  # like torch's kernels
    # The maximum cancels out, so it needs no gradient.
    return x - compute_device_maximum(x.detach().amax(axis, keepdim=True), mesh, along)


def _make_handler(of_shards: Callable[..., torch.Tensor], place: int) -> Function:
    """Return the handler of a softmax function with its dtype in argument number `place`."""

    def compute(function: Function, args: Args, kwargs: Kwargs) -> object:
        x = args[0] if args else kwargs["input"]
        axis = args[1] if len(args) > 1 else kwargs.get("dim")
        rank = x.ndim
        if axis is None or not -rank <= axis < rank or not is_axis_sharded(x, axis):
            return function(*args, **kwargs)
        axis, mesh = axis % rank, x.device_mesh
        kept = find_kept_axes([x], mesh, set(range(rank)) - {axis})
        along = find_kept_axes([x], mesh, {axis}, taken=kept, uneven={axis})
        if not along or not x.is_floating_point():  # an empty shard, or an input that torch refuses
            return function(*args, **kwargs)
        local = take_local_shard(x, mesh, {**kept, **along}, {**kept, **along})
        dtype = args[place] if len(args) > place else kwargs.get("dtype")
        local = local.to(dtype or local.dtype)
        return join_shards(
            of_shards(local, axis, mesh, along).to(local.dtype), mesh, {**kept, **along}, x.shape
        )

    return compute


SOFTMAX: dict[object, Function] = {
    F.softmax: _make_handler(_compute_softmax, 3),
    F.log_softmax: _make_handler(compute_log_softmax, 3),
    **dict.fromkeys((torch.softmax, torch.Tensor.softmax), _make_handler(_compute_softmax, 2)),
    **dict.fromkeys((torch.log_softmax, torch.Tensor.log_softmax), _make_handler(compute_log_softmax, 2)),
}
