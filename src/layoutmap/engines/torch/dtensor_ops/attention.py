"""Compute attention of DTensors: each device handles its part of the batch and its heads, without a gather.

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

from layoutmap.engines.torch.dtensor_ops.masks import draw_sharded_mask
from layoutmap.engines.torch.dtensor_ops.shards import (
    find_kept_axes,
    find_mesh,
    join_shards,
    make_placements,
    take_local_shard,
)
from layoutmap.engines.torch.dtensor_ops.unwrap_python import unwrap_function
from layoutmap.engines.torch.operators import Args, Function, Kwargs
from layoutmap.engines.torch.specs import get_local

_NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")


def _compute_attention(draw: Function, function: Function, args: Args, kwargs: Kwargs) -> object:
    given = {**dict(zip(_NAMES, args, strict=False)), **kwargs}
    tensors = [given.pop(name) for name in _NAMES[:3]]
    mask = given.pop("attn_mask", None)
    dropout_p = given.pop("dropout_p", 0.0)
    mesh = find_mesh((*tensors, mask))
    rank = tensors[0].ndim
    is_alike = all(each.ndim == rank for each in tensors)
    kept = find_kept_axes(tensors, mesh, range(rank - 2) if is_alike else (), broadcast=True)
    shards = [take_local_shard(each, mesh, _align_sharded_axes(each, kept, rank), kept) for each in tensors]
    if mask is not None:
        # The mask may broadcast along the batch or the heads.
        mask = take_local_shard(mask, mesh, _align_sharded_axes(mask, kept, rank), kept)
    if dropout_p > 0:
        query, key = tensors[:2]
        leading = query.shape[:-2]
        if not given.get("enable_gqa", False):
            leading = torch.broadcast_shapes(leading, key.shape[:-2])  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        shape = (*leading, query.shape[-2], key.shape[-2])  # pyright: ignore[reportUnknownVariableType]
        drawn = draw(shape, _promote_dtype(query.dtype), query.device, dropout_p, mesh, kept)
        local = _attend_with_mask(shards, mask, drawn, **given)
    else:
        local = function(*shards, mask, **given)
    return join_shards(local, mesh, kept)


def _align_sharded_axes(tensor: torch.Tensor, kept: dict[int, int], rank: int) -> dict[int, int]:
    """Return an argument's sharded axes, aligned with the scores from the last axis, without axes of size 1."""
    missing = rank - tensor.ndim
    return {
        dim: axis - missing
        for dim, axis in kept.items()
        if axis >= missing and tensor.shape[axis - missing] > 1
    }


def _draw_mask(
    shape: tuple[int, ...], dtype: torch.dtype, device: Any, p: float, mesh: Any, kept: dict[int, int]
) -> torch.Tensor:
    """Return this device's shard of dropout factors that are drawn for all attention weights."""
    drawn = torch.dropout(torch.ones(shape, dtype=dtype, device=device), p, True)
    return take_local_shard(drawn, mesh, kept, kept)


def _draw_mask_by_shards(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    p: float,
    mesh: DeviceMesh,
    kept: dict[int, int],
) -> torch.Tensor:
    """Return this device's shard of dropout factors, drawn for this shard only."""
    if p > 1:  # torch itself raises the error
        return _draw_mask(shape, dtype, device, p, mesh, kept)
    placements = make_placements(mesh, kept)
    return get_local(draw_sharded_mask(shape, dtype, device, p, mesh, placements, over=1 - p))


def _promote_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which torch computes attention weights without a fused kernel."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _attend_with_mask(
    shards: list[torch.Tensor],
    mask: torch.Tensor | None,
    drawn: torch.Tensor,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Return attention with a given dropout mask, as torch computes it without a fused kernel."""
    dtype = shards[0].dtype
    query, key, value = (each.to(_promote_dtype(dtype)) for each in shards)
    # Scale both operands by the root, as torch does, because unscaled products may overflow.
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
    # As in torch's kernels, fully masked rows give zeros, not NaN.
    nothing = torch.isneginf(scores).all(-1, keepdim=True)
    weights = torch.softmax(scores.masked_fill(nothing, 0), -1).masked_fill(nothing, 0)
    return ((weights * drawn) @ value).to(dtype)


def _attend_with_projections(draw: Function, function: Function, args: Args, kwargs: Kwargs) -> object:
    """Compute multi-head attention on this device's part of the batch, with gathered weights."""
    given = _SIGNATURE.bind(*args, **kwargs)
    given.apply_defaults()
    given = given.arguments
    query = given["query"]
    tensors = {name: each for name, each in given.items() if isinstance(each, torch.Tensor)}
    mesh = find_mesh(tensors.values())
    batched = [tensors[name] for name in ("query", "key", "value")] if query.ndim == 3 else []
    # Gather the embedding axis, because the function splits it into heads.
    kept = find_kept_axes(batched, mesh, [1])
    of_weights = dict.fromkeys(kept, 0)  # the first axis is the batch, with or without heads
    drops = given["training"] and given["dropout_p"] > 0
    mask = draw(*_describe_weights(given), given["dropout_p"], mesh, of_weights) if drops else None
    # Reuse one shard for equal arguments, because self-attention projects them together.
    shards: dict[int, torch.Tensor] = {}
    for name, each in tensors.items():
        if id(each) not in shards:
            axes = dict.fromkeys(kept, _find_batch_axis(name, each))
            shards[id(each)] = take_local_shard(each, mesh, axes, kept)
        given[name] = shards[id(each)]
    if mask is not None:

        def attend_masked(q: Any, k: Any, v: Any, bias: Any, p: float, causal: bool) -> torch.Tensor:
            return _attend_with_mask([q, k, v], bias, mask, is_causal=causal)

        def drop_weights(weights: torch.Tensor, p: float) -> torch.Tensor:
            return weights * mask

        attend = unwrap_function(function, dropout=drop_weights, scaled_dot_product_attention=attend_masked)
    else:
        attend = function
    output, weights = attend(**given)
    return join_shards(output, mesh, kept), None if weights is None else join_shards(
        weights, mesh, of_weights
    )


def _find_batch_axis(name: str, tensor: torch.Tensor) -> int | None:
    """Return the batch axis of an argument, which may include its heads, or None."""
    if name in ("query", "key", "value"):
        return 1
    if name in ("key_padding_mask", "static_k", "static_v") or (name == "attn_mask" and tensor.ndim == 3):
        return 0
    return None


def _describe_weights(given: Kwargs) -> tuple[tuple[int, ...], torch.dtype, torch.device]:
    """Return the shape, dtype, and device of the attention weights that dropout applies to."""
    query, key = given["query"], given["key"]
    batch, heads = (query.shape[1] if query.ndim == 3 else 1), given["num_heads"]
    source = key.shape[0] if given["static_k"] is None else given["static_k"].shape[1]
    source += (given["bias_k"] is not None) + given["add_zero_attn"]
    shape = (query.shape[0], source)
    if given["need_weights"]:
        return (batch * heads, *shape), query.dtype, query.device
    return (batch, heads, *shape), _promote_dtype(query.dtype), query.device


_SIGNATURE = inspect.signature(F.multi_head_attention_forward)

_HANDLERS = {
    F.scaled_dot_product_attention: _compute_attention,
    F.multi_head_attention_forward: _attend_with_projections,
}
ATTENTION = {function: functools.partial(attend, _draw_mask) for function, attend in _HANDLERS.items()}
ATTENTION_BY_SHARDS = {
    function: functools.partial(attend, _draw_mask_by_shards) for function, attend in _HANDLERS.items()
}
