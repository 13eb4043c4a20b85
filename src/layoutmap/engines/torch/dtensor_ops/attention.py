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
    find_axes_that_stay_sharded,
    find_device_mesh,
    make_placements,
    redistribute_to_local_shard,
    wrap_shards_as_dtensor,
)
from layoutmap.engines.torch.dtensor_ops.unwrap_python import copy_without_override_check
from layoutmap.engines.torch.operators import Args, Function, Kwargs
from layoutmap.engines.torch.specs import get_local

_NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")


def _compute_attention(draw_mask: Function, function: Function, args: Args, kwargs: Kwargs) -> object:
    """Compute `scaled_dot_product_attention` on each device's part of the batch and heads."""
    given = {**dict(zip(_NAMES, args, strict=False)), **kwargs}
    tensors = [given.pop(name) for name in _NAMES[:3]]
    mask = given.pop("attn_mask", None)
    dropout_p = given.pop("dropout_p", 0.0)
    mesh = find_device_mesh((*tensors, mask))
    rank = tensors[0].ndim
    is_alike = all(each.ndim == rank for each in tensors)
    kept = find_axes_that_stay_sharded(
        tensors, mesh, range(rank - 2) if is_alike else (), allows_broadcast=True
    )
    shards = [
        redistribute_to_local_shard(each, mesh, _align_axes_with_scores(each, kept, rank), kept)
        for each in tensors
    ]
    if mask is not None:
        # The mask may broadcast along the batch or the heads, so its axes are aligned with the scores.
        mask = redistribute_to_local_shard(mask, mesh, _align_axes_with_scores(mask, kept, rank), kept)
    if dropout_p > 0:
        query, key = tensors[:2]
        leading = query.shape[:-2]
        if not given.get("enable_gqa", False):
            leading = torch.broadcast_shapes(leading, key.shape[:-2])  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        shape = (*leading, query.shape[-2], key.shape[-2])  # pyright: ignore[reportUnknownVariableType]
        drawn = draw_mask(shape, _promote_attention_dtype(query.dtype), query.device, dropout_p, mesh, kept)
        local = _attend_with_dropout_mask(shards, mask, drawn, **given)
    else:
        local = function(*shards, mask, **given)
    return wrap_shards_as_dtensor(local, mesh, kept)


def _align_axes_with_scores(
    tensor: torch.Tensor, axes_by_mesh_dim: dict[int, int], rank: int
) -> dict[int, int]:
    """Return a dict from mesh dim to the argument's axis that broadcasts to axis `axes_by_mesh_dim[dim]` of the scores.

    Axes that the argument lacks, or that have size 1, are left out.
    """
    missing = rank - tensor.ndim
    return {
        dim: axis - missing
        for dim, axis in axes_by_mesh_dim.items()
        if axis >= missing and tensor.shape[axis - missing] > 1
    }


def _draw_global_mask(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: Any,
    p: float,
    mesh: Any,
    axes_by_mesh_dim: dict[int, int],
) -> torch.Tensor:
    """Draw a dropout mask for all attention weights, and return this device's shard of the mask."""
    drawn = torch.dropout(torch.ones(shape, dtype=dtype, device=device), p, True)
    return redistribute_to_local_shard(drawn, mesh, axes_by_mesh_dim, axes_by_mesh_dim)


def _draw_local_mask(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    p: float,
    mesh: DeviceMesh,
    axes_by_mesh_dim: dict[int, int],
) -> torch.Tensor:
    """Draw only this device's shard of a dropout mask, and return it."""
    if p > 1:  # the probability is invalid, so let torch raise its error
        return _draw_global_mask(shape, dtype, device, p, mesh, axes_by_mesh_dim)
    placements = make_placements(mesh, axes_by_mesh_dim)
    return get_local(draw_sharded_mask(shape, dtype, device, p, mesh, placements, divisor=1 - p))


def _promote_attention_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which torch computes attention weights without a fused kernel."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _attend_with_dropout_mask(
    shards: list[torch.Tensor],
    mask: torch.Tensor | None,
    dropout_mask: torch.Tensor,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Return attention with a drawn dropout mask, computed as torch does without a fused kernel."""
    dtype = shards[0].dtype
    query, key, value = (each.to(_promote_attention_dtype(dtype)) for each in shards)
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
    # Return zeros for a fully masked row, as torch's kernels do. The softmax would be NaN.
    nothing = torch.isneginf(scores).all(-1, keepdim=True)
    weights = torch.softmax(scores.masked_fill(nothing, 0), -1).masked_fill(nothing, 0)
    return ((weights * dropout_mask) @ value).to(dtype)


def _compute_multi_head_attention(
    draw_mask: Function, function: Function, args: Args, kwargs: Kwargs
) -> object:
    """Compute `multi_head_attention_forward` on each device's part of the batch, with gathered weights."""
    given = _SIGNATURE.bind(*args, **kwargs)
    given.apply_defaults()
    given = given.arguments
    query = given["query"]
    tensors = {name: each for name, each in given.items() if isinstance(each, torch.Tensor)}
    mesh = find_device_mesh(tensors.values())
    batched = [tensors[name] for name in ("query", "key", "value")] if query.ndim == 3 else []
    # Gather the embedding axis, because the function splits it into heads.
    kept = find_axes_that_stay_sharded(batched, mesh, [1])
    of_weights = dict.fromkeys(kept, 0)  # the batch is the first axis of the attention weights
    p = given["dropout_p"] if given["training"] else 0.0
    mask = draw_mask(*_find_weights_shape_and_dtype(given), p, mesh, of_weights) if p > 0 else None
    # Use one shard if arguments are the same tensor, because self-attention then projects them together.
    shards: dict[int, torch.Tensor] = {}
    for name, each in tensors.items():
        if id(each) not in shards:
            axes = dict.fromkeys(kept, _find_batch_axis(name, each))
            shards[id(each)] = redistribute_to_local_shard(each, mesh, axes, kept)
        given[name] = shards[id(each)]
    if mask is not None:

        def attend_with_dropout(q: Any, k: Any, v: Any, bias: Any, p: float, causal: bool) -> torch.Tensor:
            return _attend_with_dropout_mask([q, k, v], bias, mask, is_causal=causal)

        def apply_dropout_mask(weights: torch.Tensor, p: float) -> torch.Tensor:
            return weights * mask

        attend = copy_without_override_check(
            function, dropout=apply_dropout_mask, scaled_dot_product_attention=attend_with_dropout
        )
    else:
        attend = function
    output, weights = attend(**given)
    return wrap_shards_as_dtensor(output, mesh, kept), None if weights is None else wrap_shards_as_dtensor(
        weights, mesh, of_weights
    )


def _find_batch_axis(name: str, tensor: torch.Tensor) -> int | None:
    """Return the axis of an argument that contains the batch, or None if no axis does."""
    if name in ("query", "key", "value"):
        return 1
    if name in ("key_padding_mask", "static_k", "static_v") or (name == "attn_mask" and tensor.ndim == 3):
        return 0
    return None


def _find_weights_shape_and_dtype(arguments: Kwargs) -> tuple[tuple[int, ...], torch.dtype, torch.device]:
    """Return the shape, dtype, and device of the attention weights that dropout applies to."""
    query, key = arguments["query"], arguments["key"]
    batch, heads = (query.shape[1] if query.ndim == 3 else 1), arguments["num_heads"]
    source = key.shape[0] if arguments["static_k"] is None else arguments["static_k"].shape[1]
    source += (arguments["bias_k"] is not None) + arguments["add_zero_attn"]
    shape = (query.shape[0], source)
    if arguments["need_weights"]:
        return (batch * heads, *shape), query.dtype, query.device
    return (batch, heads, *shape), _promote_attention_dtype(query.dtype), query.device


_SIGNATURE = inspect.signature(F.multi_head_attention_forward)

_HANDLERS = {
    F.scaled_dot_product_attention: _compute_attention,
    F.multi_head_attention_forward: _compute_multi_head_attention,
}
ATTENTION = {function: functools.partial(attend, _draw_global_mask) for function, attend in _HANDLERS.items()}
ATTENTION_BY_SHARDS = {
    function: functools.partial(attend, _draw_local_mask) for function, attend in _HANDLERS.items()
}
