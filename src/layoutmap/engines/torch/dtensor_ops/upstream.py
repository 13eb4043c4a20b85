"""Faults of DTensor that this package computes around, and the issues in which torch's developers know of them.

`tests/engines/torch/test_upstream.py` tries each of these on DTensors alone, and fails with "no longer needed" once
torch computes it right. `docs/torch-operators.md` shows them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Correction:
    """One thing that DTensor does not do right by itself.

    Attributes:
        module: The module of `engines.torch` that does it.
        wrong: What DTensor does.
        upstream: The issue or pull request of pytorch/pytorch; empty if none was found.
        seen_on: The version of torch that it was last seen on.
    """

    module: str
    wrong: str
    upstream: str = ""
    seen_on: str = "2.13.0"


CORRECTIONS = {  # why: decisions/0088
    "means of losses": Correction(
        "dtensor_ops.losses", "gradients of a mean are divided by the size of a shard, not of the tensor"
    ),
    "losses of classes": Correction(
        "dtensor_ops.class_losses",
        "a mean with weights or ignored labels is the mean of the shards' means",
        "#185167",
    ),
    "batch norm": Correction("dtensor_ops.norms", "statistics are those of a shard of the batch"),
    "instance norm": Correction("dtensor_ops.norms", "running statistics are those of a shard of the batch"),
    "group norm": Correction(
        "dtensor_ops.norms", "the backward pass fails on shards of the batch", "#184825"
    ),
    "attention": Correction("dtensor_ops.attention", "no rule for the operator of CPUs"),
    "multi-head attention": Correction(
        "dtensor_ops.attention", "its projections are split along a sharded axis, and fail"
    ),
    "convolutions": Correction(
        "dtensor_ops.convolutions", "a sharded weight meets an input of other channels, and fails", "#186129"
    ),
    "recurrent layers": Correction("dtensor_ops.recurrent", "no rule; steps along a sharded batch fail"),
    "random numbers": Correction(
        "dtensor_ops.randomness", "each device draws its own, so they differ between meshes", "#168058"
    ),
    "activations": Correction("dtensor_ops.rows", "no rule for some gradients, as that of hardtanh"),
    "pooling": Correction("dtensor_ops.rows", "no rule for some gradients, as that of avg_pool2d", "#182526"),
    "padding": Correction("dtensor_ops.rows", "no rule for what is not constant"),
    "windows": Correction("dtensor_ops.rows", "no rule for unfold and fold"),
    "embeddings": Correction(
        "dtensor_ops.lookups", "a sum over a table sharded along its rows can be made only once"
    ),
    "embeddings by frequency": Correction(
        "dtensor_ops.lookups", "tokens are counted in a shard of the batch only"
    ),
    "indices out of range": Correction(
        "dtensor_ops.lookups",
        "embedding, gather and one_hot take zero where there is no such row, without an error",
    ),
    "lookups that are partial sums": Correction(
        "dtensor_ops.lookups", "of two gathers along a sharded axis, the second leaves out what the first did"
    ),
    "joins with an empty tensor": Correction(
        "dtensor_ops.joining", "a tensor of shape (0,) is to have the axis along which the others are joined"
    ),
    "assignments": Correction("dtensor_ops.slices", "x[...] = y is lost along a sharded axis", "#139735"),
    "changes of views": Correction(
        "dtensor_ops.memories",
        "a view along a sharded axis is a copy: a change of it is lost, and so is one of its tensor",
        "#147570",
    ),
    "gradients of changed views": Correction(
        "dtensor_ops.slices", "a gradient that comes in another layout is not that of the view"
    ),
    "values that are read": Correction(
        "dtensor_ops.gathered", "item() gives the value of this device", "#166638"
    ),
    "quantiles": Correction("dtensor_ops.gathered", "the gradient has a wrong shape"),
    "plain tensors": Correction(
        "placing", "replicated in the forward pass only: backward passes fail", "#118461"
    ),
    "sums through operators": Correction(
        "dtensor_ops.guard",
        "some operators are applied to each summand, as lerp backwards, where that is not the same",
    ),
    "changes of shape": Correction(
        "dtensor_ops.guard",
        "some views of a tensor that is sharded along a later axis mix up rows",
        "#179502",
    ),
    "views without elements": Correction("dtensor_ops.guard", "the search for a view's axes never ends"),
    "axes from the end": Correction(
        "dtensor_ops.guard",
        "cumsum along axis -1 sums up each shard by itself, where that axis is sharded; argmax fails",
    ),
    "narrow indices": Correction(
        "dtensor_ops.guard", "gather shards an index and a tensor whose sizes differ, and takes other numbers"
    ),
    "changes at an index": Correction("dtensor_ops.guard", "in place, indices along a sharded axis fail"),
    "gradients of the largest": Correction(
        "dtensor_ops.guard", "amax and the infinity norm: each device divides by the count in its shard"
    ),
    "truths along a sharded axis": Correction(
        "dtensor_ops.guard", "any and all of it are a pending `or`, and a product with numbers sums them"
    ),
    "data of a tensor": Correction(
        "dtensor_ops.outside", "tensor.data = value changes no value that it computes with"
    ),
    "placements of views": Correction(
        "placing", "what is redistributed as a flattened tensor is gathered in another order of its elements"
    ),
    "orders of mesh dims": Correction(
        "arrays",
        "distribute_tensor: two dims on an axis, in another order than the mesh's, give other values",
    ),
}
