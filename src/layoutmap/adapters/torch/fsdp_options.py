"""The options of torch's `fully_shard` that a scope passes on: which there are, and where they cannot work."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from layoutmap.core.errors import ScopeError, listed

_DECIDED = ("mesh", "dp_mesh_dims", "shard_placement_fn", "ignored_params")


def check_fully_shard(options: Mapping[str, Any]) -> None:
    """Refuse options that cannot be passed on.

    Raises:
        ScopeError: One is decided by the layout map, unknown, of another type, or cannot work on DTensors or here.
    """
    # Late: it takes a tenth of a second to load.
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

    kinds: dict[str, Any] = {
        "mp_policy": MixedPrecisionPolicy,
        "offload_policy": OffloadPolicy,
        "reshard_after_forward": bool,
    }
    for name, value in options.items():
        if name not in kinds:
            raise ScopeError(
                f"fully_shard: {name!r} is no option that a scope passes on",
                facts={"options": listed([repr(each) for each in kinds])},
                why="rules and batch_dim decide which weights are sharded, and over which dim"
                if name in _DECIDED
                else "torch's fully_shard takes these",
                fix="leave it out" if name in _DECIDED else "use one of these",
            )
        if name == "reshard_after_forward" and type(value) is int:
            raise ScopeError(
                f"fully_shard: reshard_after_forward={value}: a number of devices cannot be chosen",
                why="torch's fully_shard shards DTensors over all devices of the batch's dim again, or over none",
                fix="pass True or False",
            )
        if not isinstance(value, kinds[name]):
            raise ScopeError(
                f"fully_shard: {name}={value!r} has the wrong type",
                facts={"type": type(value).__name__},
                why="the value is passed on to torch's fully_shard",
                fix=f"pass a {kinds[name].__name__}",
            )
    offload = options.get("offload_policy")
    if isinstance(offload, CPUOffloadPolicy) and offload.pin_memory and not torch.accelerator.is_available():
        raise ScopeError(
            "fully_shard: weights cannot be moved to pinned memory",
            facts={"offload_policy": repr(offload)},
            why="memory is pinned for an accelerator, and torch finds none here",
            fix="leave offload_policy out, or pass CPUOffloadPolicy(pin_memory=False), which changes nothing on CPUs",
        )
