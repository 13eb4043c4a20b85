"""Compute losses that average over elements. `class_losses` has those that average over classes.

DTensor 2.13 divides the gradients of some means by the size of a shard, and not by that of the global tensor.
"""

from __future__ import annotations

from typing import Any

from torch.nn import functional as F

from layoutmap.engines.torch.operators import Args, Function, Kwargs


def _make_element_loss_handler(names: str) -> Function:
    """Return the handler of a loss that is averaged or summed over elements. `names` are its parameters."""
    parameters = names.split()

    def compute_loss(function: Function, args: Args, kwargs: Kwargs) -> object:
        given = {**dict(zip(parameters, args, strict=False)), **kwargs}
        reduction = pop_reduction(given)
        if given.get("weight") is not None and "cross_entropy" not in function.__name__:
            # With weights, torch computes the loss by sums, which DTensor computes correctly, so call torch.
            return function(**given, reduction=reduction)
        elements = function(**given, reduction="none")
        return elements if reduction == "none" else getattr(elements, reduction)()

    return compute_loss


def pop_reduction(arguments: dict[str, Any]) -> str:
    """Remove the reduction from a loss's arguments, in its new or its deprecated form, and return it."""
    size_average, reduce = arguments.pop("size_average", None), arguments.pop("reduce", None)
    reduction = arguments.pop("reduction", "mean")
    if size_average is None and reduce is None:
        return reduction
    if reduce is False:
        return "none"
    return "sum" if size_average is False else "mean"


_TWO = "input target size_average reduce reduction"

LOSSES = {
    F.mse_loss: _make_element_loss_handler(f"{_TWO} weight"),
    F.smooth_l1_loss: _make_element_loss_handler(f"{_TWO} beta"),
    F.huber_loss: _make_element_loss_handler("input target reduction delta weight"),
    F.soft_margin_loss: _make_element_loss_handler(_TWO),
    F.binary_cross_entropy: _make_element_loss_handler("input target weight size_average reduce reduction"),
    F.binary_cross_entropy_with_logits: _make_element_loss_handler(
        "input target weight size_average reduce reduction pos_weight"
    ),
}
