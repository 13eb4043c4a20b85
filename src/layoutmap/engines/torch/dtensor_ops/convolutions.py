"""Compute convolutions of DTensors sharded along the batch or the output channels.

A sharded weight meets an input of other channels in DTensor: pytorch/pytorch#186129.
"""

from __future__ import annotations

import torch

from layoutmap.engines.torch.dtensor_ops.shards import (
    find_axes_that_stay_sharded,
    find_device_mesh,
    redistribute_to_local_shard,
    wrap_shards_as_dtensor,
)
from layoutmap.engines.torch.operators import Args, Function, Kwargs


def _compute_convolution(function: Function, args: Args, kwargs: Kwargs) -> object:
    names = ("input", "weight", "bias", "stride", "padding", *_REST[function])
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    x, weight, bias = given.pop("input"), given.pop("weight"), given.pop("bias", None)
    mesh = find_device_mesh((x, weight, bias))
    batched = x.ndim == weight.ndim  # False: the input has no batch axis
    out_axis = 1 if "output_padding" in names else 0  # output channel axis of the weight
    batch = find_axes_that_stay_sharded([x], mesh, [0] if batched else [])
    # A grouped convolution reads only a part of the input channels for each output channel, so keep channels
    # replicated.
    channel_axes = [out_axis] if given.get("groups", 1) == 1 else []
    channels = find_axes_that_stay_sharded([weight], mesh, channel_axes, excluded_mesh_dims=batch)
    of_bias = dict.fromkeys(channels, 0)
    apart = {**batch, **channels}
    local = function(
        redistribute_to_local_shard(x, mesh, batch, apart),
        redistribute_to_local_shard(weight, mesh, channels, apart),
        None if bias is None else redistribute_to_local_shard(bias, mesh, of_bias, apart),
        **given,
    )
    return wrap_shards_as_dtensor(local, mesh, {**batch, **dict.fromkeys(channels, 1 if batched else 0)})


_REST = {
    **dict.fromkeys((torch.conv1d, torch.conv2d, torch.conv3d), ("dilation", "groups")),
    **dict.fromkeys(
        (torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d),
        ("output_padding", "groups", "dilation"),
    ),
}
CONVOLUTIONS = dict.fromkeys(_REST, _compute_convolution)
