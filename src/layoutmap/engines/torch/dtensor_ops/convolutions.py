"""Convolutions of DTensors: cut along the batch, or along the output channels, each device convolves its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import Replicate, Shard

from layoutmap.engines.torch.dtensor_ops.pieces import cut_axis, divides, join, mesh_of, piece


def _convolve(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    names = ("input", "weight", "bias", "stride", "padding", *_REST[function])
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    x, weight, bias = given.pop("input"), given.pop("weight"), given.pop("bias", None)
    mesh = mesh_of((x, weight, bias))
    batched = x.ndim == weight.ndim
    out_axis = 1 if "output_padding" in names else 0  # of the weight
    batch_dims: list[int] = []
    channel_dims: list[int] = []
    for dim in range(mesh.ndim):
        if batched and cut_axis(x, dim) == 0 and divides(x, 0, [*batch_dims, dim], mesh):
            batch_dims.append(dim)
        elif (
            cut_axis(weight, dim) == out_axis
            and given.get("groups", 1) == 1
            and divides(weight, out_axis, [*channel_dims, dim], mesh)
        ):
            channel_dims.append(dim)

    def placements(batch: int | None, channels: int | None) -> list[Any]:
        """Which axis is cut over the dims of the batch, and which over those of the channels."""
        axes = {**dict.fromkeys(batch_dims, batch), **dict.fromkeys(channel_dims, channels)}
        return [Replicate() if axes.get(dim) is None else Shard(axes[dim]) for dim in range(mesh.ndim)]

    apart = [*batch_dims, *channel_dims]
    local = function(
        piece(x, mesh, placements(0, None), apart),
        piece(weight, mesh, placements(None, out_axis), apart),
        None if bias is None else piece(bias, mesh, placements(None, 0), apart),
        **given,
    )
    return join(local, mesh, placements(0, 1 if batched else 0))


_REST = {
    **dict.fromkeys((torch.conv1d, torch.conv2d, torch.conv3d), ("dilation", "groups")),
    **dict.fromkeys(
        (torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d),
        ("output_padding", "groups", "dilation"),
    ),
}
CONVOLUTIONS = dict.fromkeys(_REST, _convolve)
