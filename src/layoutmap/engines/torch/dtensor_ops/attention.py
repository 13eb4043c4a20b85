"""Attention of DTensors: each device attends for its own part of the batch and its own heads, without a gather.

Attention over an axis that is sharded otherwise, along the sequence or inside a head, gathers that axis first.
"""

from __future__ import annotations

import functools
import inspect
import math
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from layoutmap.engines.torch.dtensor_ops.masks import sharded_mask
from layoutmap.engines.torch.dtensor_ops.shards import join, kept_axes, local_shard, mesh_in, shard_placements
from layoutmap.engines.torch.dtensor_ops.unwrap_python import unwrapped
from layoutmap.engines.torch.operators import Args, Function, Kwargs
from layoutmap.engines.torch.specs import local_of

_NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")


def _attend(draw: Function, function: Function, args: Args, kwargs: Kwargs) -> object:
    given = {**dict(zip(_NAMES, args, strict=False)), **kwargs}
    tensors = [given.pop(name) for name in _NAMES[:3]]
    mask = given.pop("attn_mask", None)
    dropout_p = given.pop("dropout_p", 0.0)
    mesh = mesh_in((*tensors, mask))
    rank = tensors[0].ndim
    is_alike = all(each.ndim == rank for each in tensors)
    kept = kept_axes(tensors, mesh, range(rank - 2) if is_alike else (), broadcast=True)
    shards = [local_shard(each, mesh, _of(each, kept, rank), kept) for each in tensors]
    if mask is not None:
        # It may be broadcast along the batch or the heads.
        mask = local_shard(mask, mesh, _of(mask, kept, rank), kept)
    if dropout_p > 0:
        query, key = tensors[:2]
        leading = query.shape[:-2]
        if not given.get("enable_gqa", False):
            leading = torch.broadcast_shapes(leading, key.shape[:-2])  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        shape = (*leading, query.shape[-2], key.shape[-2])  # pyright: ignore[reportUnknownVariableType]
        drawn = draw(shape, _wide(query.dtype), query.device, dropout_p, mesh, kept)
        local = _with_mask(shards, mask, drawn, **given)
    else:
        local = function(*shards, mask, **given)
    return join(local, mesh, kept)


def _of(tensor: torch.Tensor, kept: dict[int, int], rank: int) -> dict[int, int]:
    """An argument's sharded axes: it lines up with the scores from the last axis on, and an axis of size 1 fits all."""
    missing = rank - tensor.ndim
    return {
        dim: axis - missing
        for dim, axis in kept.items()
        if axis >= missing and tensor.shape[axis - missing] > 1
    }


def _draw(
    shape: tuple[int, ...], dtype: torch.dtype, device: Any, p: float, mesh: Any, kept: dict[int, int]
) -> torch.Tensor:
    """The factors of dropout for this device's weights: those of all weights are drawn."""
    drawn = torch.dropout(torch.ones(shape, dtype=dtype, device=device), p, True)
    return local_shard(drawn, mesh, kept, kept)


def _draw_by_shards(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    p: float,
    mesh: DeviceMesh,
    kept: dict[int, int],
) -> torch.Tensor:
    """The same, of which each device draws its part."""
    if p > 1:  # an error of torch
        return _draw(shape, dtype, device, p, mesh, kept)
    placements = shard_placements(mesh, kept)
    return local_of(sharded_mask(shape, dtype, device, p, mesh, placements, over=1 - p))


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The type in which weights are computed where no kernel does it in one."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _with_mask(
    shards: list[torch.Tensor],
    mask: torch.Tensor | None,
    drawn: torch.Tensor,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Attention whose dropout has been drawn, as torch computes it where no kernel does it in one."""
    dtype = shards[0].dtype
    query, key, value = (each.to(_wide(dtype)) for each in shards)
    # Both sides get the root, as in torch: products of rows that are not scaled yet may overflow.
    factor = math.sqrt(1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if enable_gqa:
        repeats = query.shape[-3] // key.shape[-3]
        key, value = (each.repeat_interleave(repeats, -3) for each in (key, value))
    scores = (query * factor) @ (key * factor).transpose(-2, -1)
    if is_causal:
        kept = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~kept, -math.inf)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    # A row of which all is masked gives zeros, as torch's kernels do, and not NaN.
    nothing = torch.isneginf(scores).all(-1, keepdim=True)
    weights = torch.softmax(scores.masked_fill(nothing, 0), -1).masked_fill(nothing, 0)
    return ((weights * drawn) @ value).to(dtype)


def _attend_with_projections(draw: Function, function: Function, args: Args, kwargs: Kwargs) -> object:
    """Attention with all its projections: each device has its part of the batch, and the weights are gathered."""
    given = _SIGNATURE.bind(*args, **kwargs)
    given.apply_defaults()
    given = given.arguments
    query = given["query"]
    tensors = {name: each for name, each in given.items() if isinstance(each, torch.Tensor)}
    mesh = mesh_in(tensors.values())
    batched = [tensors[name] for name in ("query", "key", "value")] if query.ndim == 3 else []
    kept = kept_axes(batched, mesh, [1])  # heads are split inside of the function, of all of the embedding
    of_weights = dict.fromkeys(kept, 0)  # their first axis is that of the batch, with or without the heads
    drops = given["training"] and given["dropout_p"] > 0
    mask = draw(*_weights_of(given), given["dropout_p"], mesh, of_weights) if drops else None
    # One for what is given twice: attention to oneself is projected at once.
    shards: dict[int, torch.Tensor] = {}
    for name, each in tensors.items():
        if id(each) not in shards:
            axes = dict.fromkeys(kept, _batch_axis(name, each))
            shards[id(each)] = local_shard(each, mesh, axes, kept)
        given[name] = shards[id(each)]
    if mask is not None:

        def attended(q: Any, k: Any, v: Any, bias: Any, p: float, causal: bool) -> torch.Tensor:
            return _with_mask([q, k, v], bias, mask, is_causal=causal)

        def dropped(weights: torch.Tensor, p: float) -> torch.Tensor:
            return weights * mask

        attend = unwrapped(function, dropout=dropped, scaled_dot_product_attention=attended)
    else:
        attend = function
    output, weights = attend(**given)
    return join(output, mesh, kept), None if weights is None else join(weights, mesh, of_weights)


def _batch_axis(name: str, tensor: torch.Tensor) -> int | None:
    """The axis of an argument along which examples of the batch are, alone or with their heads."""
    if name in ("query", "key", "value"):
        return 1
    if name in ("key_padding_mask", "static_k", "static_v") or (name == "attn_mask" and tensor.ndim == 3):
        return 0
    return None


def _weights_of(given: Kwargs) -> tuple[tuple[int, ...], torch.dtype, torch.device]:
    """The shape, element type and device of the weights that dropout drops some of."""
    query, key = given["query"], given["key"]
    batch, heads = (query.shape[1] if query.ndim == 3 else 1), given["num_heads"]
    source = key.shape[0] if given["static_k"] is None else given["static_k"].shape[1]
    source += (given["bias_k"] is not None) + given["add_zero_attn"]
    shape = (query.shape[0], source)
    if given["need_weights"]:
        return (batch * heads, *shape), query.dtype, query.device
    return (batch, heads, *shape), _wide(query.dtype), query.device


_SIGNATURE = inspect.signature(F.multi_head_attention_forward)

_HOW = {F.scaled_dot_product_attention: _attend, F.multi_head_attention_forward: _attend_with_projections}
ATTENTION = {function: functools.partial(attend, _draw) for function, attend in _HOW.items()}
ATTENTION_BY_SHARDS = {
    function: functools.partial(attend, _draw_by_shards) for function, attend in _HOW.items()
}
