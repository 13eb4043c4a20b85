"""Normalization over a sharded batch: mean, variance and running statistics are those of the global batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from layoutmap.engines.torch.dtensor_ops.conversions import everywhere, full_tensor, reduced
from layoutmap.engines.torch.dtensor_ops.gathered import on_gathered
from layoutmap.engines.torch.dtensor_ops.shards import apart, mesh_of


def _batch_norm(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    names = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    x = given["input"]
    if x.ndim < 2:  # it has no channels
        return on_gathered(function, args, kwargs)
    running = [given.get("running_mean"), given.get("running_var")]
    mesh = mesh_of((x, *running, given.get("weight"), given.get("bias")))
    for name in ("input", "weight", "bias"):
        value = given.get(name)
        if value is not None and not isinstance(value, DTensor):
            given[name] = everywhere(value, mesh)
    x = given["input"]
    wide = torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype
    axes = [axis for axis in range(x.ndim) if axis != 1]
    shape = [1, -1] + [1] * (x.ndim - 2)
    y = x.to(wide)
    if given.get("training", False) or running[0] is None:
        count = x.numel() // x.shape[1]
        if count == 1:
            raise ValueError(
                f"Expected more than 1 value per channel when training, got input size {x.size()}"
            )
        mean = reduced(y.mean(axes))
        y = y - mean.view(shape)
        variance = reduced((y * y).mean(axes))
        _track(running[0], mean, given.get("momentum", 0.1))
        _track(running[1], variance * (count / (count - 1)), given.get("momentum", 0.1))
    else:
        mean, variance = (
            (each if isinstance(each, DTensor) else everywhere(each, mesh)).to(wide)
            for each in running
            if each is not None
        )
        y = y - mean.view(shape)
    y = y * torch.rsqrt(variance + given.get("eps", 1e-5)).view(shape)
    weight, bias = given.get("weight"), given.get("bias")
    if weight is not None:
        y = y * weight.view(shape)
    if bias is not None:
        y = y + bias.view(shape)
    return y.to(x.dtype)


@torch.no_grad()
def _track(running: Any, value: Any, momentum: float) -> None:
    """Move a running statistic towards the value of a batch."""
    if running is None:
        return
    value = value.detach()
    earlier = running if isinstance(running, DTensor) else everywhere(running, value.device_mesh)
    running.copy_(full_tensor(momentum * value.to(running.dtype) + (1 - momentum) * reduced(earlier)))


def _instance_norm(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    names = ("input", "running_mean", "running_var", "weight", "bias", "use_input_stats", "momentum", "eps")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    x, use_input_stats = given.pop("input"), given.get("use_input_stats", True)
    if use_input_stats:
        running = [given.pop(name, None) for name in names[1:3]]
        with torch.no_grad():
            if running[0] is not None:
                y = x if isinstance(x, DTensor) else everywhere(x, mesh_of(running))
                axes, count = list(range(2, y.ndim)), y[0, 0].numel()
                mean = reduced(y.mean(axes, keepdim=True))
                variance = reduced(((y - mean) ** 2).mean(axes)) * (count / (count - 1))
                for each, value in zip(running, (mean.flatten(1), variance), strict=True):
                    _track(each, reduced(value.mean(0)), given.get("momentum", 0.1))
    return _EACH(function, (x,), given)


_EACH = apart(lambda rank: range(1))
NORMS = {F.batch_norm: _batch_norm, F.group_norm: _EACH, F.instance_norm: _instance_norm}
