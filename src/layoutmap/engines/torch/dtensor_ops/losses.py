"""Losses of DTensors: what DTensor divides by the size of a shard is divided by the size of the global tensor.

The mean of a loss is the mean of its elements, or its sum by what counts. DTensor 2.13 takes both from the shard of one
device: the gradients of some means come out times the number of shards, and labels to be ignored count wrongly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from layoutmap.engines.torch.dtensor_ops.conversions import everywhere, placed, replicated


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
    x, target, weight = given["input"], given["target"], given.get("weight")
    if isinstance(weight, DTensor):
        given["weight"] = weight = placed(weight, replicated(weight.device_mesh))
    if reduction != "mean":
        return function(**given, reduction=reduction)
    total = function(**given, reduction="sum")
    if x.shape == target.shape:  # probabilities
        return total / (x.numel() // x.shape[0 if x.ndim == 1 else 1])
    ignore_index = given.get("ignore_index", -100)
    counts = target != ignore_index
    if weight is not None:
        if isinstance(weight, DTensor) and not isinstance(target, DTensor):
            target, counts = (everywhere(each, weight.device_mesh) for each in (target, counts))
        counts = F.embedding(target.masked_fill(~counts, 0), weight[:, None])[..., 0] * counts
    return total / counts.sum()


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
