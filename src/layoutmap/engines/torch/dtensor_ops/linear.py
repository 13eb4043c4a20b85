"""Compute `linear` of DTensors on local shards, if that needs no gather.

DTensor composes it of seven operators in forward and nine in backward, and plans, wraps, and records each of them. If
no argument needs another layout, one local product in forward and two in backward are enough.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.nn import functional as F

from layoutmap.engines.torch.backward import Ctx, TypedAutogradFunction
from layoutmap.engines.torch.operators import Args, Function, Kwargs
from layoutmap.engines.torch.placing import (
    redistribute_tensor,
    reduce_if_partial,
    replace_partial_placements,
    replicate_gradient,
)
from layoutmap.engines.torch.specs import (
    DTensorSpec,
    cache_while_meshes_exist,
    get_local,
    get_meta,
    get_spec,
    make_dtensor,
    make_row_major_spec,
)


# DTensor's dispatcher is slow, so skip it for `linear` if no operand must be redistributed (decisions/0057).
def _compute_linear(function: Function, args: Args, kwargs: Kwargs) -> torch.Tensor:
    """Compute `linear` on local shards, or by DTensor if an argument would have to be redistributed."""
    given = {**dict(zip(("input", "weight", "bias"), args, strict=False)), **kwargs}
    # DTensor would gather the weight to multiply a partial sum, so add up the sum first.
    tensors: list[Any] = [*map(reduce_if_partial, (given["input"], given["weight"], given.get("bias")))]
    plan = None
    # Under autocast, torch must first convert the arguments, so leave the product to torch.
    if not any(map(torch.is_autocast_enabled, {each.device.type for each in tensors[:2]})):
        of_bias = None if tensors[2] is None else get_spec(tensors[2])
        plan = _plan_local_product(get_spec(tensors[0]), get_spec(tensors[1]), of_bias)
    # For a vector, torch would use `squeeze_`, which DTensor can refuse, so pass a matrix of one row.
    if plan is None and tensors[0].ndim == 1:
        result = _compute_linear(function, (tensors[0].unsqueeze(0), tensors[1]), {}).squeeze(0)
        return result if tensors[2] is None else result + tensors[2]
    if plan is None:
        result = function(*tensors)
        return result if result.ndim else reduce_if_partial(result)
    return _LinearFunction.apply(*tensors, plan)


class _ProductPlan(NamedTuple):
    """The layouts of a product's result and of its gradients.

    Attributes:
        result: The spec of the result.
        upstream: The placements in which the result's gradient is needed.
        gradients: The specs of the gradients of input, weight and bias.
        num_summands: Number of devices whose results are summed.
    """

    result: DTensorSpec
    upstream: tuple[Placement, ...]
    gradients: Sequence[DTensorSpec | None]
    num_summands: int


@cache_while_meshes_exist
def _plan_local_product(x: DTensorSpec, weight: DTensorSpec, bias: DTensorSpec | None) -> _ProductPlan | None:
    """Return the plan to multiply local shards, or None if an argument needs a different layout, rank, or dtype."""
    mesh, last = x.mesh, len(x.shape) - 1
    dtypes = {get_meta(each).dtype for each in (x, weight, bias) if each is not None}
    ranks = len(weight.shape), 1 if bias is None else len(bias.shape)
    if ranks != (2, 1) or last < 0 or len(dtypes) > 1:
        return None
    of_result: list[Placement] = []
    of_gradients: list[list[Placement]] = [[], [], []]
    num_summands = 1
    for dim in range(mesh.ndim):
        placed = x.placements[dim], weight.placements[dim]
        match placed:
            case Replicate(), Replicate():
                made = Replicate(), Replicate(), Replicate(), Replicate()
            case Shard(dim=axis), Replicate() if axis < last:  # x is sharded by rows  # pyright: ignore[reportUnknownVariableType]
                made = Shard(axis), Shard(axis), Partial(), Partial()
            case Replicate(), Shard(dim=0):  # the result is sharded by columns
                made = Shard(last), Partial(), Shard(0), Shard(0)
            case Shard(dim=axis), Shard(dim=1) if axis == last:  # each device has summands  # pyright: ignore[reportUnknownVariableType]
                made = Partial(), Shard(last), Shard(1), Replicate()
                num_summands *= mesh.size(dim)
            case _:
                return None
        if bias is not None and bias.placements[dim] != (Shard(0) if placed[1].is_shard(0) else Replicate()):  # pyright: ignore[reportUnknownMemberType]
            return None
        of_result.append(made[0])
        for gradient, each in zip(of_gradients, made[1:], strict=True):
            gradient.append(each)
    (dtype,) = dtypes
    shape = torch.Size((*x.shape[:-1], weight.shape[0]))
    specs = [
        None if of is None else make_row_major_spec(mesh, tuple(placements), of.shape, dtype)
        for of, placements in zip((x, weight, bias), of_gradients, strict=True)
    ]
    return _ProductPlan(
        make_row_major_spec(mesh, tuple(of_result), shape, dtype),
        replace_partial_placements(of_result),
        specs,
        num_summands,
    )


class _LinearFunction(TypedAutogradFunction):
    @staticmethod
    def forward(
        ctx: Ctx, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, plan: _ProductPlan
    ) -> DTensor:
        ctx.plan = plan
        ctx.save_for_backward(x, weight)
        of_bias = None if bias is None else get_local(bias)
        if of_bias is not None and plan.num_summands > 1:
            of_bias = of_bias / plan.num_summands  # divide, because each partial sum contains the bias
        return make_dtensor(F.linear(get_local(x), get_local(weight), of_bias), plan.result)

    @staticmethod
    def backward(ctx: Ctx, *upstream: torch.Tensor) -> object:
        x, weight = ctx.saved_tensors
        plan: _ProductPlan = ctx.plan
        given = redistribute_tensor(replicate_gradient(upstream[0], plan.result.mesh), plan.upstream)
        if torch.is_grad_enabled():  # for second derivatives, use operators that autograd records
            return (*_compute_linear_gradients(given, x, weight, ctx.needs_input_grad), None)
        gradient = get_local(given)
        rows = _flatten_to_matrix(gradient)
        results: list[torch.Tensor | None] = [None, None, None, None]
        if ctx.needs_input_grad[0]:
            results[0] = gradient @ get_local(weight)
        if ctx.needs_input_grad[1]:
            local = get_local(x)
            results[1] = rows.t() @ _flatten_to_matrix(local)
        if ctx.needs_input_grad[2]:
            results[2] = rows.sum(0)
        return tuple(
            None if result is None or spec is None else make_dtensor(result, spec)
            for result, spec in zip(results, (*plan.gradients, None), strict=True)
        )


def _flatten_to_matrix(x: torch.Tensor) -> torch.Tensor:
    """Flatten all axes of a tensor except the last one, and return the matrix."""
    # Compute the number of rows, because torch cannot infer it for -1 if the last axis of a shard is empty.
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def _compute_linear_gradients(
    gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, needs_gradient: Sequence[bool]
) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients of input, weight, and bias by operations that autograd can differentiate, too."""
    rows = _flatten_to_matrix(gradient)
    return (
        gradient @ weight if needs_gradient[0] else None,
        rows.t() @ _flatten_to_matrix(x) if needs_gradient[1] else None,
        rows.sum(0) if needs_gradient[2] else None,
    )


def _compute_matmul(function: Function, args: Args, kwargs: Kwargs) -> object:
    """Compute `matmul`. A vector times a matrix becomes a matrix of one row, and a scalar result is reduced."""
    # For a vector, torch would use `squeeze_`, which DTensor can refuse, so pass one row.
    if len(args) == 2 and args[0].ndim == 1 and args[1].ndim == 2:
        return function(args[0].unsqueeze(0), args[1]).squeeze(0)
    result = function(*args, **kwargs)
    return result if result.ndim else reduce_if_partial(result)


_MATMUL = (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__)
LINEAR = {F.linear: _compute_linear, **dict.fromkeys(_MATMUL, _compute_matmul)}
