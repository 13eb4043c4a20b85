"""Compute `cross_entropy` and `nll_loss` with each device handling its rows and classes.

Their mean is the sum by the weight of the labels that count, in all rows; before torch 2.14 DTensor takes it from the
shard of one device (pytorch/pytorch#185167). A language model's logits are its largest tensor, and often sharded along
the vocabulary, where DTensor gathers them. Here devices exchange two numbers for each row: the largest logit, and the
sum of exponentials.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial
from torch.nn import functional as F

from layoutmap.engines.torch.backward import Ctx
from layoutmap.engines.torch.dtensor_ops.gathered import compute_gathered
from layoutmap.engines.torch.dtensor_ops.lookups import (
    check_numbers,
    find_local_rows,
    list_local_indices,
    sum_shards,
)
from layoutmap.engines.torch.dtensor_ops.losses import pop_reduction
from layoutmap.engines.torch.dtensor_ops.shards import (
    find_kept_axes,
    find_mesh,
    join_shards,
    take_local_shard,
)
from layoutmap.engines.torch.dtensor_ops.softmax import compute_log_softmax
from layoutmap.engines.torch.operators import Args, Function, Kwargs
from layoutmap.engines.torch.placing import (
    OwnGradient,
    make_replicated_placements,
    redistribute_tensor,
    reduce_over_devices,
    replicate_gradient,
    take_shard,
)
from layoutmap.engines.torch.specs import make_dtensor, make_shard_spec

_NAMES = (
    *("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction"),
    "label_smoothing",
)
_LABELS = (torch.int64, torch.uint8)


# Logits sharded over classes are too large to gather, so the shards compute the loss (decisions/0111).
def _compute_class_loss(function: Function, args: Args, kwargs: Kwargs) -> object:
    given = {**dict(zip(_NAMES, args, strict=False)), **kwargs}
    reduction = pop_reduction(given)
    x, target, weight = (given.pop(name, None) for name in _NAMES[:3])
    axis = 0 if x.ndim == 1 else 1
    has_labels = x.shape != target.shape
    if has_labels and (target.shape != x.shape[:axis] + x.shape[axis + 1 :] or target.dtype not in _LABELS):
        return compute_gathered(function, args, kwargs)  # torch raises the error
    mesh = find_mesh((x, target, weight))
    kept = find_kept_axes([x], mesh, [each for each in range(x.ndim) if each != axis])
    along = (
        find_kept_axes([x], mesh, {axis}, taken=kept, uneven={axis})
        if has_labels or function is F.cross_entropy
        else {}
    )
    shards, of_rows = {**kept, **along}, {dim: each - (each > axis) for dim, each in kept.items()}
    local = take_local_shard(x, mesh, shards, shards)
    labels = take_local_shard(target, mesh, of_rows if has_labels else shards, shards)
    counted = None
    if has_labels:
        labels = labels.long()  # gather needs int64, but cross_entropy also accepts uint8
        counted = labels != given.get("ignore_index", -100)
    weights = None if weight is None else take_local_shard(weight, mesh, {}, shards)
    if along:
        _check_options(function, x, target, weight, given)  # the shards would not detect invalid options
        classes = _Classes(axis, x.shape[axis], mesh, along)
        if function is F.cross_entropy:
            local = compute_log_softmax(local, axis, mesh, along)
        smoothing = given.get("label_smoothing", 0.0)
        if counted is None:
            losses = classes.compute_probability_losses(local, labels, weights, smoothing)
        else:
            check_numbers(labels.masked_fill(~counted, 0), x.shape[axis], function.__name__, axis)
            losses, counted = classes.compute_label_losses(local, labels, counted, weights, smoothing)
        losses = losses.to(x.dtype)
        if reduction == "none":
            return sum_shards(losses, mesh, of_rows, along)
        total = losses.sum()
    elif reduction == "none" or not kept:
        return join_shards(function(local, labels, weights, reduction=reduction, **given), mesh, of_rows)
    else:
        total = function(local, labels, weights, reduction="sum", **given)
    number = None
    if reduction == "mean" and counted is not None:
        number = (counted if weights is None else _select_label_weights(weights, labels, counted)).sum()
    elif reduction == "mean":
        total = total / (x.numel() // x.shape[axis])
    return _DeviceMean.run(total, number, mesh, shards)


def _check_options(function: Function, x: Any, target: Any, weight: Any, given: dict[str, object]) -> None:
    """Raise torch's own error for wrong options, found by a call on meta tensors."""
    labels = target.dtype if target.shape == x.shape else torch.int64
    types = {"input": (x, x.dtype), "target": (target, labels), "weight": (weight, x.dtype)}
    on_meta = {
        name: torch.empty(each.shape, dtype=dtype, device="meta")
        for name, (each, dtype) in types.items()
        if each is not None
    }
    function(**on_meta, **given)


def _select_label_weights(weights: torch.Tensor, labels: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
    """Return the class weight of each row's label, and zero for ignored rows."""
    return weights.detach().take(labels.masked_fill(~counted, 0)).where(counted, 0)


class _Classes:
    """Compute losses over classes that some mesh dims shard."""

    def __init__(self, axis: int, size: int, mesh: DeviceMesh, along: Collection[int]) -> None:
        self._axis, self._size, self._mesh, self._along = axis, size, mesh, along

    def compute_label_losses(
        self, logs: torch.Tensor, labels: torch.Tensor, counted: Any, weights: Any, smoothing: float
    ) -> tuple[torch.Tensor, Any]:
        """Return this device's part of each row's loss, and the rows with their label on this device."""
        numbers, is_here = find_local_rows(labels, self._size, self._mesh, self._along)
        is_here = is_here & counted
        losses = -logs.gather(self._axis, numbers.unsqueeze(self._axis)).squeeze(self._axis)
        if weights is not None:
            losses = losses * _select_label_weights(weights, labels, counted)
        losses = losses.where(is_here, 0)
        if smoothing:
            shared = self._sum_weighted(-logs, weights).where(counted, 0)
            losses = (1 - smoothing) * losses + smoothing / self._size * shared
        return losses, is_here

    def compute_probability_losses(
        self, logs: torch.Tensor, probabilities: torch.Tensor, weights: torch.Tensor | None, smoothing: float
    ) -> torch.Tensor:
        """Return this device's part of each row's loss from class probabilities."""
        if smoothing:
            probabilities = probabilities * (1 - smoothing) + smoothing / self._size
        return self._sum_weighted(-logs * probabilities, weights)

    def _sum_weighted(self, values: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
        if weights is not None:
            here = list_local_indices(self._size, self._mesh, self._along, values.device)
            shape = [1] * values.ndim
            shape[self._axis] = -1
            values = values * weights[here].view(shape)
        return values.sum(self._axis)


class _DeviceMean(OwnGradient):
    """Sum of local tensors over mesh dims, divided by the sum of their counts, in one collective."""

    @staticmethod
    def forward(ctx: Ctx, total: Any, counts: Any, mesh: DeviceMesh, dims: Iterable[int]) -> Any:
        ctx.mesh, ctx.dims = mesh, list(dims)
        wide = torch.promote_types(total.dtype, torch.float32)
        sums = total.to(wide) if counts is None else torch.stack((total.to(wide), counts.to(wide)))
        for dim in ctx.dims:
            sums = reduce_over_devices(sums, mesh, dim, "sum")
        ctx.by = None
        if counts is not None:
            sums, ctx.by = sums.unbind()
            sums = sums / ctx.by
        made = sums.to(total.dtype)
        return make_dtensor(
            made, make_shard_spec(mesh, tuple(make_replicated_placements(mesh)), (), (), made.dtype)
        )

    @staticmethod
    def backward(ctx: Ctx, *upstream: torch.Tensor) -> object:
        # Each device uses the mean for its own part, so sum the gradients.
        of_gradient = make_replicated_placements(ctx.mesh)
        for dim in ctx.dims:
            of_gradient[dim] = Partial()
        gradient = take_shard(
            redistribute_tensor(
                replicate_gradient(upstream[0], ctx.mesh), make_replicated_placements(ctx.mesh)
            ),
            of_gradient,
        )
        return gradient if ctx.by is None else (gradient / ctx.by).to(gradient.dtype), None, None, None


CLASS_LOSSES: dict[object, Function] = {F.nll_loss: _compute_class_loss, F.cross_entropy: _compute_class_loss}
