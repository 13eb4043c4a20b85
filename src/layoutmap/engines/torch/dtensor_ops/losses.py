"""Losses of DTensors: what DTensor divides by the size of a shard is divided by the size of the global tensor.

The mean of a loss is the mean of its elements, or its sum by what counts. DTensor 2.13 takes both from the shard of one
device: the gradients of some means come out times the number of shards, and labels to be ignored count wrongly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.distributed.tensor import Partial
from torch.nn import functional as F

from layoutmap.engines.torch.dtensor_ops.conversions import replicated
from layoutmap.engines.torch.dtensor_ops.gathered import on_gathered
from layoutmap.engines.torch.dtensor_ops.shards import join, kept_axes, local_shard, mesh_of
from layoutmap.engines.torch.placing import OwnGradient, redistributed, shard_of
from layoutmap.engines.torch.private import dtensor, spec_of_shards, summed_over


def _by_element(names: str) -> Callable[..., Any]:
    """A loss whose mean and sum are those of its elements.

    Args:
        names: The parameters of the function, in order.
    """
    parameters = names.split()

    def loss(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        given = {**dict(zip(parameters, args, strict=False)), **kwargs}
        reduction = _reduction(given)
        if given.get("weight") is not None and "cross_entropy" not in function.__name__:
            return function(**given, reduction=reduction)  # torch composes it of sums
        elements = function(**given, reduction="none")
        return elements if reduction == "none" else getattr(elements, reduction)()

    return loss


def _reduction(given: dict[str, Any]) -> str:
    """The reduction that was asked for, in the new or the old way; taken out of the arguments."""
    size_average, reduce = given.pop("size_average", None), given.pop("reduce", None)
    reduction = given.pop("reduction", "mean")
    if size_average is None and reduce is None:
        return reduction
    if reduce is False:
        return "none"
    return "sum" if size_average is False else "mean"


def _of_classes(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """`cross_entropy` and `nll_loss`: their mean is the sum by the weight of the labels that count."""
    given = {**dict(zip(_CLASSES, args, strict=False)), **kwargs}
    reduction = _reduction(given)
    x, target, weight = (given.pop(name, None) for name in _CLASSES[:3])
    classes = 0 if x.ndim == 1 else 1
    has_labels = x.shape != target.shape
    if has_labels and target.shape != x.shape[:classes] + x.shape[classes + 1 :]:  # an error, of torch
        return on_gathered(function, args, kwargs)
    mesh = mesh_of((x, target, weight))
    kept = kept_axes([x], mesh, [axis for axis in range(x.ndim) if axis != classes])
    of_rows = {dim: axis - (axis > classes) for dim, axis in kept.items()}
    local, labels = (
        local_shard(x, mesh, kept, kept),
        local_shard(target, mesh, of_rows if has_labels else kept, kept),
    )
    if weight is not None:
        weight = given["weight"] = local_shard(weight, mesh, {}, kept)
    if reduction == "none" or not kept:
        return join(function(local, labels, reduction=reduction, **given), mesh, of_rows)
    result, counts = function(local, labels, reduction="sum", **given), None
    if reduction == "mean" and has_labels:
        counts = labels != given.get("ignore_index", -100)
        if weight is not None:
            counts = weight.detach()[labels.masked_fill(~counts, 0)] * counts
        counts = counts.sum()
    elif reduction == "mean":
        result = result / (x.numel() // x.shape[classes])
    return _Summed.of(result, counts, mesh, kept)


class _Summed(OwnGradient):
    """The sum of what devices have along some mesh dims, by the sum of what they count, in one collective."""

    @staticmethod
    def forward(ctx: Any, total: Any, counts: Any, mesh: Any, dims: Iterable[int]) -> Any:
        ctx.mesh, ctx.dims = mesh, list(dims)
        wide = torch.promote_types(total.dtype, torch.float32)
        sums = total.to(wide) if counts is None else torch.stack((total.to(wide), counts.to(wide)))
        for dim in ctx.dims:
            sums = summed_over(sums, mesh, dim, "sum")
        ctx.by = None
        if counts is not None:
            sums, ctx.by = sums.unbind()
            sums = sums / ctx.by
        made = sums.to(total.dtype)
        return dtensor(made, spec_of_shards(mesh, tuple(replicated(mesh)), (), (), made.dtype))

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> Any:
        # Each device goes on with it for its own rows: the gradient of it is the sum of theirs.
        of_gradient = replicated(ctx.mesh)
        for dim in ctx.dims:
            of_gradient[dim] = Partial()
        gradient = shard_of(redistributed(upstream[0], replicated(ctx.mesh)), of_gradient)
        return gradient if ctx.by is None else (gradient / ctx.by).to(gradient.dtype), None, None, None


_CLASSES = (
    *("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction"),
    "label_smoothing",
)
_TWO = "input target size_average reduce reduction"

LOSSES = {
    F.mse_loss: _by_element(f"{_TWO} weight"),
    F.smooth_l1_loss: _by_element(f"{_TWO} beta"),
    F.huber_loss: _by_element("input target reduction delta weight"),
    F.soft_margin_loss: _by_element(_TWO),
    F.binary_cross_entropy: _by_element("input target weight size_average reduce reduction"),
    F.binary_cross_entropy_with_logits: _by_element(
        "input target weight size_average reduce reduction pos_weight"
    ),
    F.nll_loss: _of_classes,
    F.cross_entropy: _of_classes,
}
