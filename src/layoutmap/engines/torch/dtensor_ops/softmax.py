"""Compute `softmax` and `log_softmax` along a sharded axis, which DTensor would gather.

Devices exchange two numbers of each row instead: the largest, and the sum of exponentials.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from layoutmap.engines.torch.dtensor_ops.lookups import is_axis_sharded
from layoutmap.engines.torch.dtensor_ops.shards import (
    find_axes_that_stay_sharded,
    redistribute_to_local_shard,
    wrap_shards_as_dtensor,
)
from layoutmap.engines.torch.operators import Args, Function, Kwargs
from layoutmap.engines.torch.placing import find_maximum_over_devices, sum_over_devices


def compute_log_softmax(
    x: torch.Tensor, axis: int, mesh: DeviceMesh, mesh_dims: Collection[int]
) -> torch.Tensor:
    """Return this device's shard of log_softmax along a sharded axis, in float32 or a wider dtype."""
    x = _subtract_maximum(x, axis, mesh, mesh_dims)
    return x - sum_over_devices(x.exp().sum(axis, keepdim=True), mesh, mesh_dims).log()


def _compute_softmax(
    x: torch.Tensor, axis: int, mesh: DeviceMesh, mesh_dims: Collection[int]
) -> torch.Tensor:
    """Return this device's shard of softmax along a sharded axis, in float32 or a wider dtype."""
    x = _subtract_maximum(x, axis, mesh, mesh_dims).exp()
    return x / sum_over_devices(x.sum(axis, keepdim=True), mesh, mesh_dims)


def _subtract_maximum(
    x: torch.Tensor, axis: int, mesh: DeviceMesh, mesh_dims: Collection[int]
) -> torch.Tensor:
    """Return a shard minus the maximum along an axis over all devices."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))  # torch's kernels also convert to float32
    # The maximum cancels out of the softmax, so it needs no gradient.
    return x - find_maximum_over_devices(x.detach().amax(axis, keepdim=True), mesh, mesh_dims)


def _make_softmax_handler(compute_shard: Callable[..., torch.Tensor], dtype_position: int) -> Function:
    """Return the handler of a softmax function. Its dtype is the argument at `dtype_position`."""

    def compute_along_sharded_axis(function: Function, args: Args, kwargs: Kwargs) -> object:
        x = args[0] if args else kwargs["input"]
        axis = args[1] if len(args) > 1 else kwargs.get("dim")
        rank = x.ndim
        if axis is None or not -rank <= axis < rank or not is_axis_sharded(x, axis):
            return function(*args, **kwargs)
        axis, mesh = axis % rank, x.device_mesh
        kept = find_axes_that_stay_sharded([x], mesh, set(range(rank)) - {axis})
        mesh_dims = find_axes_that_stay_sharded(
            [x], mesh, {axis}, excluded_mesh_dims=kept, uneven_axes={axis}
        )
        if (
            not mesh_dims or not x.is_floating_point()
        ):  # a shard would be empty, or torch must refuse the dtype, so call torch
            return function(*args, **kwargs)
        local = redistribute_to_local_shard(x, mesh, {**kept, **mesh_dims}, {**kept, **mesh_dims})
        dtype = args[dtype_position] if len(args) > dtype_position else kwargs.get("dtype")
        local = local.to(dtype or local.dtype)
        return wrap_shards_as_dtensor(
            compute_shard(local, axis, mesh, mesh_dims).to(local.dtype), mesh, {**kept, **mesh_dims}, x.shape
        )

    return compute_along_sharded_axis


SOFTMAX: dict[object, Function] = {
    F.softmax: _make_softmax_handler(_compute_softmax, 3),
    F.log_softmax: _make_softmax_handler(compute_log_softmax, 3),
    **dict.fromkeys((torch.softmax, torch.Tensor.softmax), _make_softmax_handler(_compute_softmax, 2)),
    **dict.fromkeys(
        (torch.log_softmax, torch.Tensor.log_softmax), _make_softmax_handler(compute_log_softmax, 2)
    ),
}
