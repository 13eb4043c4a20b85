"""Compute convolutions of DTensors sharded along the batch or the output channels.

A sharded weight meets an input of other channels in DTensor: pytorch/pytorch#186129.
"""

from __future__ import annotations

import torch

from layoutmap.engines.torch.dtensor_ops.shards import (
    find_kept_axes,
    find_mesh,
    join_shards,
    take_local_shard,
)
from layoutmap.engines.torch.operators import Args, Function, Kwargs


def _convolve(function: Function, args: Args, kwargs: Kwargs) -> object:
    names = ("input", "weight", "bias", "stride", "padding", *_REST[function])
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    x, weight, bias = given.pop("input"), given.pop("weight"), given.pop("bias", None)
    mesh = find_mesh((x, weight, bias))
    batched = x.ndim == weight.ndim  # an input without a batch axis
    out_axis = 1 if "output_padding" in names else 0  # output channel axis of the weight
    batch = find_kept_axes([x], mesh, [0] if batched else [])
    # Grouped convolutions read parts of the input channels, so these stay replicated.
    channels = find_kept_axes([weight], mesh, [out_axis] if given.get("groups", 1) == 1 else [], taken=batch)
    of_bias = dict.fromkeys(channels, 0)
    apart = {**batch, **channels}
    local = function(
        take_local_shard(x, mesh, batch, apart),
        take_local_shard(weight, mesh, channels, apart),
        None if bias is None else take_local_shard(bias, mesh, of_bias, apart),
        **given,
    )
    return join_shards(local, mesh, {**batch, **dict.fromkeys(channels, 1 if batched else 0)})


_REST = {
    **dict.fromkeys((torch.conv1d, torch.conv2d, torch.conv3d), ("dilation", "groups")),
    **dict.fromkeys(
        (torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d),
        ("output_padding", "groups", "dilation"),
    ),
}
CONVOLUTIONS = dict.fromkeys(_REST, _convolve)
