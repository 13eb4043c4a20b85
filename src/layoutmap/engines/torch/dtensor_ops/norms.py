"""Compute normalizations over a sharded batch with the statistics of the global batch."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from layoutmap.engines.torch.dtensor_ops.gathered import compute_on_gathered_tensors
from layoutmap.engines.torch.dtensor_ops.shards import (
    find_axes_that_stay_sharded,
    find_device_mesh,
    make_shard_handler,
    redistribute_to_local_shard,
    wrap_shards_as_dtensor,
)
from layoutmap.engines.torch.operators import Args, Function, Kwargs
from layoutmap.engines.torch.placing import (
    extract_shard,
    gather_if_sharded,
    make_dtensor_from_shards,
    redistribute_if_needed,
    reduce_if_partial,
    replicate_tensor,
    sum_over_devices,
)
from layoutmap.engines.torch.specs import get_local


def _compute_batch_norm(function: Function, args: Args, kwargs: Kwargs) -> object:
    """Compute `batch_norm` with statistics of the global batch, which may be sharded."""
    names = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    x = given["input"]
    if x.ndim < 2:  # the input has no channel axis, which the code below needs
        return compute_on_gathered_tensors(function, args, kwargs)
    of_channels = {name: given[name] for name in names[1:5] if given.get(name) is not None}
    mesh = find_device_mesh((x, *of_channels.values()))
    kept = find_axes_that_stay_sharded([x], mesh, range(x.ndim))
    channels = {dim: 0 for dim, axis in kept.items() if axis == 1}
    local = {
        name: redistribute_to_local_shard(each, mesh, channels, kept) for name, each in of_channels.items()
    }
    y, eps = redistribute_to_local_shard(x, mesh, kept, kept), given.get("eps", 1e-5)
    if not given.get("training", False) and "running_mean" in local:  # evaluation needs no sums over devices
        return wrap_shards_as_dtensor(function(y, **local, eps=eps), mesh, kept)
    count = x.numel() // x.shape[1]
    if count == 1:  # with one value per channel in the global batch, raise the same error as torch
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {x.size()}")
    summed = [dim for dim in kept if dim not in channels]
    axes = [axis for axis in range(x.ndim) if axis != 1]
    # Sum in float32 as torch's kernels do, because bfloat16 sums lose digits.
    y = y.to(torch.promote_types(x.dtype, torch.float32))
    mean = sum_over_devices(y.sum(axes, keepdim=True), mesh, summed) / count
    y = y - mean
    variance = sum_over_devices((y * y).sum(axes, keepdim=True), mesh, summed) / count
    # The running variance is the unbiased one, so multiply the variance by count / (count - 1).
    for name, value in (("running_mean", mean), ("running_var", variance * (count / (count - 1)))):
        value = wrap_shards_as_dtensor(value.detach().flatten(), mesh, channels)
        _update_running_statistic(given.get(name), value, given.get("momentum", 0.1))
    y = y * torch.rsqrt(variance + eps)
    if "weight" in local:
        y = y * local["weight"].view(mean.shape)
    if "bias" in local:
        y = y + local["bias"].view(mean.shape)
    return wrap_shards_as_dtensor(y.to(x.dtype), mesh, kept)


@torch.no_grad()
def _update_running_statistic(running: torch.Tensor | None, value: Any, momentum: float) -> None:
    """Update a running statistic with the value of a batch, in place."""
    if running is None:
        return
    mesh, placements = value.device_mesh, value.placements
    earlier = running if isinstance(running, DTensor) else replicate_tensor(running, mesh)
    shard = extract_shard(redistribute_if_needed(reduce_if_partial(earlier), placements), placements)
    new = momentum * get_local(value).to(running.dtype) + (1 - momentum) * shard
    new = make_dtensor_from_shards(new, mesh, placements)
    running.copy_(new if isinstance(running, DTensor) else gather_if_sharded(new))


def _compute_instance_norm(function: Function, args: Args, kwargs: Kwargs) -> object:
    """Compute `instance_norm` on each device's part of the batch, with global running statistics."""
    names = ("input", "running_mean", "running_var", "weight", "bias", "use_input_stats", "momentum", "eps")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    x, use_input_stats = given.pop("input"), given.get("use_input_stats", True)
    if use_input_stats:
        running = [given.pop(name, None) for name in names[1:3]]
        with torch.no_grad():
            if running[0] is not None:
                y = x if isinstance(x, DTensor) else replicate_tensor(x, find_device_mesh(running))
                axes, count = list(range(2, y.ndim)), y[0, 0].numel()
                mean = reduce_if_partial(y.mean(axes, keepdim=True))
                variance = reduce_if_partial(((y - mean) ** 2).mean(axes)) * (count / (count - 1))
                for each, value in zip(running, (mean.flatten(1), variance), strict=True):
                    _update_running_statistic(
                        each, reduce_if_partial(value.mean(0)), given.get("momentum", 0.1)
                    )
    return _COMPUTE_BY_EXAMPLE(function, (x,), given)


def _compute_group_norm(
    function: Function, args: Args, kwargs: Kwargs
) -> object:  # DTensor's backward pass fails (pytorch/pytorch#184825), so compute on shards
    given = {**dict(zip(("input", "num_groups", "weight", "bias", "eps"), args, strict=False)), **kwargs}
    x = given.pop("input")
    # Let torch check the options on the global shape.
    function(torch.empty(x.shape, device="meta"), **{**given, "weight": None, "bias": None})
    return _COMPUTE_BY_EXAMPLE(torch.group_norm, (x,), given)


_COMPUTE_BY_EXAMPLE = make_shard_handler(lambda rank: range(1))
NORMS = {
    F.batch_norm: _compute_batch_norm,
    F.group_norm: _compute_group_norm,
    F.instance_norm: _compute_instance_norm,
}
