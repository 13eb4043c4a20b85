"""Compute `cross_entropy` and `nll_loss` with each device handling its rows and classes.

Their mean is the sum of losses divided by the weight of all counted labels. Before torch 2.14, DTensor divides by the
weight of one device's labels (pytorch/pytorch#185167). A language model's logits are its largest tensor, and often
sharded along the vocabulary, so DTensor gathers them. Here devices exchange two numbers per row: the largest logit, and
the sum of exponentials.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial
from torch.nn import functional as F

from layoutmap.engines.torch.backward import Ctx
from layoutmap.engines.torch.dtensor_ops.gathered import compute_on_gathered_tensors
from layoutmap.engines.torch.dtensor_ops.lookups import (
    check_index_range,
    convert_to_local_rows,
    list_local_indices_of_axis,
    sum_local_tensors_to_dtensor,
)
from layoutmap.engines.torch.dtensor_ops.losses import pop_reduction
from layoutmap.engines.torch.dtensor_ops.shards import (
    find_axes_that_stay_sharded,
    find_device_mesh,
    redistribute_to_local_shard,
    wrap_shards_as_dtensor,
)
from layoutmap.engines.torch.dtensor_ops.softmax import compute_log_softmax
from layoutmap.engines.torch.operators import Args, Function, Kwargs
from layoutmap.engines.torch.placing import (
    SkippableAutogradFunction,
    extract_shard,
    make_replicated_placements,
    redistribute_tensor,
    reduce_over_devices,
    replicate_gradient,
)
from layoutmap.engines.torch.specs import make_dtensor, make_spec_from_shard

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
        # The labels are invalid, so let torch raise its error.
        return compute_on_gathered_tensors(function, args, kwargs)
    mesh = find_device_mesh((x, target, weight))
    kept = find_axes_that_stay_sharded([x], mesh, [each for each in range(x.ndim) if each != axis])
    class_mesh_dims = (
        find_axes_that_stay_sharded([x], mesh, {axis}, excluded_mesh_dims=kept, uneven_axes={axis})
        if has_labels or function is F.cross_entropy
        else {}
    )
    shards, of_rows = {**kept, **class_mesh_dims}, {dim: each - (each > axis) for dim, each in kept.items()}
    local = redistribute_to_local_shard(x, mesh, shards, shards)
    labels = redistribute_to_local_shard(target, mesh, of_rows if has_labels else shards, shards)
    is_counted = None
    if has_labels:
        labels = labels.long()  # `cross_entropy` accepts uint8 labels, but `gather` needs int64
        is_counted = labels != given.get("ignore_index", -100)
    weights = None if weight is None else redistribute_to_local_shard(weight, mesh, {}, shards)
    if class_mesh_dims:
        _check_loss_options(function, x, target, weight, given)  # the shards would not detect invalid options
        classes = _ShardedClassLoss(axis, x.shape[axis], mesh, class_mesh_dims)
        if function is F.cross_entropy:
            local = compute_log_softmax(local, axis, mesh, class_mesh_dims)
        smoothing = given.get("label_smoothing", 0.0)
        if is_counted is None:
            losses = classes.compute_probability_losses(local, labels, weights, smoothing)
        else:
            check_index_range(labels.masked_fill(~is_counted, 0), x.shape[axis], function.__name__, axis)
            losses, is_counted = classes.compute_label_losses(local, labels, is_counted, weights, smoothing)
        losses = losses.to(x.dtype)
        if reduction == "none":
            return sum_local_tensors_to_dtensor(losses, mesh, of_rows, class_mesh_dims)
        total = losses.sum()
    elif reduction == "none" or not kept:
        return wrap_shards_as_dtensor(
            function(local, labels, weights, reduction=reduction, **given), mesh, of_rows
        )
    else:
        total = function(local, labels, weights, reduction="sum", **given)
    number = None
    if reduction == "mean" and is_counted is not None:
        number = (is_counted if weights is None else _select_label_weights(weights, labels, is_counted)).sum()
    elif reduction == "mean":
        total = total / (x.numel() // x.shape[axis])
    return _MeanOverDevicesFunction.compute_with_optional_gradient(total, number, mesh, shards)


def _check_loss_options(function: Function, x: Any, target: Any, weight: Any, options: Kwargs) -> None:
    """Raise torch's own error for invalid arguments, by a call of the loss on meta tensors."""
    labels = target.dtype if target.shape == x.shape else torch.int64
    types = {"input": (x, x.dtype), "target": (target, labels), "weight": (weight, x.dtype)}
    on_meta = {
        name: torch.empty(each.shape, dtype=dtype, device="meta")
        for name, (each, dtype) in types.items()
        if each is not None
    }
    function(**on_meta, **options)


def _select_label_weights(
    weights: torch.Tensor, labels: torch.Tensor, is_counted: torch.Tensor
) -> torch.Tensor:
    """Return the class weight of each row's label, and zero for rows with an ignored label."""
    return weights.detach().take(labels.masked_fill(~is_counted, 0)).where(is_counted, 0)


class _ShardedClassLoss:
    """Compute this device's part of losses for classes that are sharded over some mesh dims."""

    def __init__(self, axis: int, size: int, mesh: DeviceMesh, class_mesh_dims: Collection[int]) -> None:
        self._axis, self._size, self._mesh, self._class_mesh_dims = axis, size, mesh, class_mesh_dims

    def compute_label_losses(
        self, logs: torch.Tensor, labels: torch.Tensor, is_counted: Any, weights: Any, smoothing: float
    ) -> tuple[torch.Tensor, Any]:
        """Return this device's part of each row's loss, and a mask of the counted rows with a label in its shard."""
        numbers, is_here = convert_to_local_rows(labels, self._size, self._mesh, self._class_mesh_dims)
        is_here = is_here & is_counted
        losses = -logs.gather(self._axis, numbers.unsqueeze(self._axis)).squeeze(self._axis)
        if weights is not None:
            losses = losses * _select_label_weights(weights, labels, is_counted)
        losses = losses.where(is_here, 0)
        if smoothing:
            shared = self._sum_over_local_classes(-logs, weights).where(is_counted, 0)
            losses = (1 - smoothing) * losses + smoothing / self._size * shared
        return losses, is_here

    def compute_probability_losses(
        self, logs: torch.Tensor, probabilities: torch.Tensor, weights: torch.Tensor | None, smoothing: float
    ) -> torch.Tensor:
        """Return this device's part of each row's loss, if targets are class probabilities."""
        if smoothing:
            probabilities = probabilities * (1 - smoothing) + smoothing / self._size
        return self._sum_over_local_classes(-logs * probabilities, weights)

    def _sum_over_local_classes(self, values: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
        if weights is not None:
            here = list_local_indices_of_axis(self._size, self._mesh, self._class_mesh_dims, values.device)
            shape = [1] * values.ndim
            shape[self._axis] = -1
            values = values * weights[here].view(shape)
        return values.sum(self._axis)


class _MeanOverDevicesFunction(SkippableAutogradFunction):
    """Sum local totals over mesh dims, and divide by the sum of their counts (if any), with one all-reduce per dim."""

    @staticmethod
    def forward(ctx: Ctx, total: Any, counts: Any, mesh: DeviceMesh, mesh_dims: Iterable[int]) -> Any:
        ctx.mesh, ctx.mesh_dims = mesh, list(mesh_dims)
        wide = torch.promote_types(total.dtype, torch.float32)
        sums = total.to(wide) if counts is None else torch.stack((total.to(wide), counts.to(wide)))
        for dim in ctx.mesh_dims:
            sums = reduce_over_devices(sums, mesh, dim, "sum")
        ctx.by = None
        if counts is not None:
            sums, ctx.by = sums.unbind()
            sums = sums / ctx.by
        made = sums.to(total.dtype)
        return make_dtensor(
            made, make_spec_from_shard(mesh, tuple(make_replicated_placements(mesh)), (), (), made.dtype)
        )

    @staticmethod
    def backward(ctx: Ctx, *upstream: torch.Tensor) -> object:
        # Each device uses the mean for its own part of the batch, so the gradient of the mean is the sum of all
        # devices' gradients.
        of_gradient = make_replicated_placements(ctx.mesh)
        for dim in ctx.mesh_dims:
            of_gradient[dim] = Partial()
        gradient = extract_shard(
            redistribute_tensor(
                replicate_gradient(upstream[0], ctx.mesh), make_replicated_placements(ctx.mesh)
            ),
            of_gradient,
        )
        return gradient if ctx.by is None else (gradient / ctx.by).to(gradient.dtype), None, None, None


CLASS_LOSSES: dict[object, Function] = {F.nll_loss: _compute_class_loss, F.cross_entropy: _compute_class_loss}
