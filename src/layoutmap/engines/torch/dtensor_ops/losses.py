"""Losses whose mean is that of their elements; `class_losses` has those of classes.

DTensor 2.13 divides the gradients of some means by the size of a shard, and not by that of the global tensor.
"""

from __future__ import annotations

from typing import Any

from torch.nn import functional as F

from layoutmap.engines.torch.operators import Args, Function, Kwargs


def _by_element(names: str) -> Function:
    """Return the handler of a loss, of the named parameters, whose mean and sum are those of its elements."""
    parameters = names.split()

    def loss(function: Function, args: Args, kwargs: Kwargs) -> object:
        given = {**dict(zip(parameters, args, strict=False)), **kwargs}
        reduction = reduction_of(given)
        if given.get("weight") is not None and "cross_entropy" not in function.__name__:
            return function(**given, reduction=reduction)  # torch composes it of sums
        elements = function(**given, reduction="none")
        return elements if reduction == "none" else getattr(elements, reduction)()

    return loss


def reduction_of(given: dict[str, Any]) -> str:
    """The reduction that was asked for, in the new or the old way; taken out of the arguments."""
    size_average, reduce = given.pop("size_average", None), given.pop("reduce", None)
    reduction = given.pop("reduction", "mean")
    if size_average is None and reduce is None:
        return reduction
    if reduce is False:
        return "none"
    return "sum" if size_average is False else "mean"


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
}
