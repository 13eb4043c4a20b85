"""Redistribute DTensors, and convert between DTensors, local tensors, and unsharded tensors.

It does what `DTensor.redistribute`, `to_local` and `from_local` do, in a seventh of the CPU time for the two most
frequent cases of a training step: a sum over one mesh dim, and a gradient that has the right placements already.
"""

# pyright: reportPrivateUsage=false
from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from layoutmap.engines.tested import check_names_exist
from layoutmap.engines.torch import simulation, unseen
from layoutmap.engines.torch.backward import Ctx, TypedAutogradFunction
from layoutmap.engines.torch.modes import skip_function_modes
from layoutmap.engines.torch.specs import (
    DTensorSpec,
    copy_spec_with_placements,
    get_axis,
    get_local,
    get_meta,
    get_spec,
    has_even_shards,
    has_strided_shards_of_view,
    make_dtensor,
    make_row_major_spec,
    make_spec_from_shard,
)

check_names_exist(
    "torch", (torch._C, "_AutoDispatchBelowAutograd"), (torch.ops._c10d_functional, "all_reduce wait_tensor")
)

R = TypeVar("R")
_redistribute_by_torch = DTensor.redistribute  # saved before `dtensor_ops` replaces it


def redistribute_tensor(tensor: DTensor, placements: Sequence[Placement]) -> DTensor:
    """Redistribute a DTensor to `placements`, and return it. Its gradient is redistributed back."""
    return _RedistributeFunction.compute_with_optional_gradient(tensor, tuple(placements))


def extract_shard(tensor: DTensor, gradient_placements: Sequence[Placement]) -> torch.Tensor:
    """Return this device's shard of a DTensor. The DTensor's gradient then gets `gradient_placements`."""
    return _ExtractShardFunction.compute_with_optional_gradient(tensor, tuple(gradient_placements))


def make_dtensor_from_shards(
    local: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int] | None = None
) -> DTensor:
    """Return the DTensor of all devices' local tensors, which are shards or partial sums. Gradients flow back.

    `shape` is the shape of the DTensor. If it is None, all shards have equal sizes.
    """
    return _WrapShardsFunction.compute_with_optional_gradient(
        local, mesh, tuple(placements), None if shape is None else tuple(shape)
    )


def sum_over_devices(local: torch.Tensor, mesh: DeviceMesh, mesh_dims: Collection[int]) -> torch.Tensor:
    """Return the sum of local tensors over all devices along some mesh dims. Gradients flow back."""
    return _SumOverDevicesFunction.compute_with_optional_gradient(local, mesh, mesh_dims)


@skip_function_modes
def find_maximum_over_devices(
    local: torch.Tensor, mesh: DeviceMesh, mesh_dims: Collection[int]
) -> torch.Tensor:
    """Return the elementwise maximum of local tensors over all devices along some mesh dims. It has no gradient."""
    for dim in mesh_dims:
        local = reduce_over_devices(local.detach(), mesh, dim, "max")
    return local


def reduce_over_devices(local: torch.Tensor, mesh: DeviceMesh, mesh_dim: int, reduce_op: str) -> torch.Tensor:
    """Reduce a local tensor over the devices along a mesh dim, and return the result, which all of them get."""
    operators = torch.ops._c10d_functional
    with torch._C._AutoDispatchBelowAutograd():  # skip autograd, because it has nothing to do here
        made = operators.all_reduce.default(local, reduce_op, mesh.get_group(mesh_dim).group_name)
        return operators.wait_tensor.default(made)


def make_replicated_placements(mesh: DeviceMesh) -> list[Placement]:
    """Return placements that replicate a tensor over all mesh dims."""
    return [Replicate()] * mesh.ndim


def is_replicated(tensor: DTensor) -> bool:
    """Return whether a DTensor is replicated over all mesh dims."""
    return all(placement.is_replicate() for placement in tensor.placements)


def redistribute_if_needed(tensor: DTensor, placements: Sequence[Placement]) -> DTensor:
    """Redistribute a DTensor to some placements, and return it. Return it unchanged if it has them already."""
    if tuple(placements) == tuple(tensor.placements):
        return tensor
    if not simulation.is_simulated():  # with real processes, collectives need no simulation
        return redistribute_tensor(tensor, placements)
    with simulation.simulate_ranks_of_mesh(tensor.device_mesh):
        return redistribute_tensor(tensor, placements)


def reduce_if_partial(value: R) -> R:
    """Return a DTensor with its partial sums reduced. Other values are returned unchanged."""
    if not isinstance(value, DTensor) or not any(p.is_partial() for p in value.placements):
        return value
    return _ReducePartialFunction.compute_with_optional_gradient(value)


def gather_if_sharded(value: object) -> Any:
    """Gather a DTensor, and return the unsharded tensor. Gradients flow back. Other values are returned unchanged."""
    return (
        _GatherWithGradientFunction.compute_with_optional_gradient(value)
        if isinstance(value, DTensor)
        else value
    )


def replicate_tensor(tensor: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    """Return an unsharded tensor, equal in all processes, as a replicated DTensor (pytorch/pytorch#118461)."""
    return _ReplicateFunction.compute_with_optional_gradient(tensor, mesh)


def replicate_gradient(gradient: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    """Return a gradient as a DTensor. Unsharded gradients, as of a program's autograd functions, are replicated."""
    return gradient if isinstance(gradient, DTensor) else replicate_tensor(gradient, mesh)


def transform_gradient_in_backward(
    value: torch.Tensor, transform: Callable[[torch.Tensor], object]
) -> torch.Tensor:
    """Return the same values, and apply `transform` to their gradient in the backward pass."""
    return _TransformGradientFunction.apply(value, transform)


def shard_like(tensor: torch.Tensor, like: DTensor) -> DTensor:
    """Shard an unsharded tensor with a DTensor's placements. Partial sums and shards of views become `Replicate`."""
    return redistribute_if_needed(replicate_tensor(tensor, like.device_mesh), find_reachable_placements(like))


def replace_partial_placements(placements: Sequence[Placement]) -> tuple[Placement, ...]:
    """Return placements with `Replicate` in place of each partial placement."""
    return tuple(Replicate() if each.is_partial() else each for each in placements)


def find_reachable_placements(tensor: torch.Tensor) -> tuple[Placement, ...]:
    """Return placements with `Replicate` in place of partial sums, and of strided shards that only views have."""
    spec = get_spec(tensor)
    placements = replace_partial_placements(spec.placements)
    if has_strided_shards_of_view(spec):
        placements = tuple(each if type(each) is Shard else Replicate() for each in placements)
    return placements


class SkippableAutogradFunction(TypedAutogradFunction):
    """An autograd function that is skipped if its tensor needs no gradient.

    No function mode sees what it calls, forwards or backwards.
    """

    def __init_subclass__(cls) -> None:
        own = skip_function_modes(cls.backward)

        def backward(ctx: Ctx, *upstream: torch.Tensor) -> object:
            # Autograd does not notice writes to `tensor.data`, so check for them here.
            unseen.check_tensor_unchanged(ctx.numbers)
            return own(ctx, *upstream)

        cls.backward = staticmethod(backward)

    @classmethod
    @skip_function_modes
    def compute_with_optional_gradient(cls, tensor: torch.Tensor, *arguments: object) -> Any:
        """Return the result of `forward`, with a gradient by `backward` if the tensor needs one."""
        if tensor.requires_grad and torch.is_grad_enabled():
            result = cls.apply(tensor, *arguments)
            tensors = cls.list_tensors_checked_for_changes(tensor, result)
            result.grad_fn.numbers = unseen.snapshot_change_counters(*tensors)
            return result
        # No graph is recorded, so skip `apply`, which takes longer.
        return cls.forward(SimpleNamespace(), tensor, *arguments)

    @staticmethod
    def list_tensors_checked_for_changes(
        tensor: torch.Tensor, result: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Return the tensors that must not be changed through `tensor.data` before the backward pass."""
        return tensor, result


class _SumOverDevicesFunction(SkippableAutogradFunction):
    @staticmethod
    def forward(ctx: Ctx, local: torch.Tensor, mesh: DeviceMesh, mesh_dims: Collection[int]) -> torch.Tensor:
        ctx.mesh, ctx.mesh_dims = mesh, mesh_dims
        for dim in mesh_dims:
            local = reduce_over_devices(local, mesh, dim, "sum")
        return local

    @staticmethod
    def backward(ctx: Ctx, *upstream: torch.Tensor) -> object:
        return (
            _SumOverDevicesFunction.compute_with_optional_gradient(upstream[0], ctx.mesh, ctx.mesh_dims),
            None,
            None,
        )


class _RedistributeFunction(SkippableAutogradFunction):
    @staticmethod
    def forward(ctx: Ctx, tensor: DTensor, placements: tuple[Placement, ...]) -> DTensor:
        now, attainable = get_spec(tensor).placements, find_reachable_placements(tensor)
        ctx.before = tuple(p if p.is_partial() else a for p, a in zip(now, attainable, strict=True))
        ctx.mesh = tensor.device_mesh
        return _redistribute_without_autograd(tensor, placements)

    @staticmethod
    def backward(ctx: Ctx, *upstream: torch.Tensor) -> object:
        # If the tensor was a partial sum over a mesh dim, its gradient may be a partial sum of the same kind over this
        # dim. Replicate any other gradient over this dim.
        gradient = replicate_gradient(upstream[0], ctx.mesh)
        have = gradient.placements
        wanted = [
            Replicate() if before.is_partial() and now != before else before
            for now, before in zip(have, ctx.before, strict=True)
        ]
        return redistribute_tensor(gradient, wanted), None


class _ExtractShardFunction(SkippableAutogradFunction):
    @staticmethod
    def forward(ctx: Ctx, tensor: torch.Tensor, gradient_placements: object) -> torch.Tensor:
        ctx.mesh, ctx.placements, ctx.shape = get_spec(tensor).mesh, gradient_placements, tuple(tensor.shape)
        local = get_local(tensor)
        return local.view_as(local)  # autograd attaches this function to the result, so return a new tensor

    @staticmethod
    def backward(ctx: Ctx, *upstream: torch.Tensor) -> object:
        # The spec gets the strides of the gradient, and an expanded gradient has zero strides, so make it contiguous.
        return make_dtensor_from_shards(upstream[0].contiguous(), ctx.mesh, ctx.placements, ctx.shape), None


class _WrapShardsFunction(SkippableAutogradFunction):
    @staticmethod
    def forward(
        ctx: Ctx,
        local: torch.Tensor,
        mesh: DeviceMesh,
        placements: tuple[Placement, ...],
        shape: tuple[int, ...] | None,
    ) -> DTensor:
        ctx.mesh, ctx.placements = mesh, placements
        if shape is not None and not has_even_shards(
            spec := make_row_major_spec(mesh, placements, shape, local.dtype)
        ):
            return make_dtensor(local.detach().contiguous(), spec)
        spec = make_spec_from_shard(mesh, placements, local.shape, local.stride(), local.dtype)
        return make_dtensor(local.detach(), spec)

    @staticmethod
    def backward(ctx: Ctx, *upstream: torch.Tensor) -> object:
        # Each device's summand has the gradient of the sum, so replicate this gradient over the devices.
        gradient, wanted = (
            replicate_gradient(upstream[0], ctx.mesh),
            replace_partial_placements(ctx.placements),
        )
        if gradient.placements != wanted:
            gradient = redistribute_tensor(gradient, wanted)
        return extract_shard(gradient, ctx.placements), None, None, None


class _ReducePartialFunction(SkippableAutogradFunction):
    # DTensor's own backward fails if one operand is a mean and another a sum, so this class has its own.

    @staticmethod
    def forward(ctx: Ctx, tensor: DTensor) -> DTensor:
        ctx.mesh = tensor.device_mesh
        return redistribute_if_needed(tensor, find_reachable_placements(tensor))

    @staticmethod
    def list_tensors_checked_for_changes(tensor: DTensor, result: torch.Tensor) -> tuple[torch.Tensor, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        # The backward pass of a maximum or norm needs the reduced value, so check that value. The backward pass of a
        # sum does not.
        pending = [p for p in tensor.placements if p.is_partial()]
        is_sum = all(type(p) is Partial and p.reduce_op in ("sum", "avg") for p in pending)  # pyright: ignore[reportUnknownMemberType]
        return (tensor,) if is_sum else (tensor, result)

    @staticmethod
    def backward(ctx: Ctx, *upstream: DTensor) -> object:
        return reduce_if_partial(replicate_gradient(upstream[0], ctx.mesh))


class _GatherWithGradientFunction(SkippableAutogradFunction):
    @staticmethod
    def forward(ctx: Ctx, tensor: DTensor) -> torch.Tensor:
        ctx.mesh, ctx.placements = tensor.device_mesh, find_reachable_placements(tensor)
        plain = simulation.get_first_local_tensor(
            get_local(redistribute_if_needed(tensor, make_replicated_placements(ctx.mesh)))
        )
        if plain.stride() == tensor.stride() or 0 in tensor.stride() or not plain.numel():
            # It may be the local tensor of `tensor`, to which autograd would add this gradient, so return an alias.
            return plain.detach()
        # A gathered tensor is contiguous, but torch draws random numbers in the order of the strides, so restore the
        # strides.
        strided = torch.empty_strided(tensor.shape, tensor.stride(), dtype=plain.dtype, device=plain.device)
        return strided.copy_(plain)

    @staticmethod
    def backward(ctx: Ctx, *upstream: torch.Tensor) -> object:
        return redistribute_if_needed(replicate_gradient(upstream[0], ctx.mesh), ctx.placements)


class _ReplicateFunction(SkippableAutogradFunction):
    @staticmethod
    def forward(ctx: Ctx, tensor: torch.Tensor, mesh: DeviceMesh) -> DTensor:
        simulated = simulation.is_simulated()
        local = (
            simulation.copy_to_ranks(tensor, simulation.list_ranks(mesh)) if simulated else tensor.detach()
        )
        return make_dtensor(
            local,
            make_spec_from_shard(
                mesh, tuple(make_replicated_placements(mesh)), tensor.shape, tensor.stride(), tensor.dtype
            ),
        )

    @staticmethod
    def backward(ctx: Ctx, *upstream: DTensor) -> object:
        return gather_if_sharded(upstream[0]), None


class _TransformGradientFunction(TypedAutogradFunction):
    @staticmethod
    def forward(ctx: Ctx, value: torch.Tensor, transform: Callable[[torch.Tensor], object]) -> torch.Tensor:
        ctx.transform = transform
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Ctx, *upstream: torch.Tensor) -> object:
        return ctx.transform(upstream[0]), None


def _redistribute_without_autograd(tensor: DTensor, placements: tuple[Placement, ...]) -> DTensor:
    """Redistribute a DTensor without autograd, and return it. Common cases avoid DTensor's slow code."""
    local, spec = get_local(tensor), get_spec(tensor)
    changed = [dim for dim, (a, b) in enumerate(zip(spec.placements, placements, strict=True)) if a != b]
    if not changed:
        return make_dtensor(local, spec)
    moves = [(spec.placements[dim], placements[dim]) for dim in changed]
    if len(changed) == 1 and type(moves[0][0]) is Partial and moves[0][1].is_replicate():
        dim = changed[0]
        is_sum = spec.mesh.size(dim) > 1
        reduce_op = moves[0][0].reduce_op  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        local = reduce_over_devices(local, spec.mesh, dim, reduce_op) if is_sum else local.detach()  # pyright: ignore[reportUnknownArgumentType]
    elif not simulation.is_simulated() and _is_even_local_split(spec, placements, moves):
        coordinates = spec.mesh.get_coordinate()
        for dim, (_, shard) in zip(changed, moves, strict=True):
            local = local.chunk(spec.mesh.size(dim), get_axis(shard))[coordinates[dim]]
        # Copy the shard, because a view would keep the full tensor in memory.
        local = local.clone(memory_format=torch.contiguous_format)
    else:
        # All other cases are rare, so their speed does not matter, and DTensor redistributes.
        moved = _redistribute_by_torch(tensor, spec.mesh, placements)
        return make_dtensor(restore_memory_axis_order(get_local(moved), get_spec(moved)), get_spec(moved))
    spec = copy_spec_with_placements(spec, placements, local.dtype)
    return make_dtensor(restore_memory_axis_order(local, spec), spec)


def restore_memory_axis_order(local: torch.Tensor, spec: DTensorSpec) -> torch.Tensor:
    """Return a local tensor with its axes in the memory order of the unsharded tensor. It is copied if needed.

    Redistributing leaves the axes in the order of the shape. Autograd derives from the unsharded strides which views
    are possible, and these views of shards would fail.
    """
    strides = get_meta(spec).stride
    order = sorted(range(len(strides)), key=lambda axis: -strides[axis])  # equal strides keep their order
    if local.is_contiguous() and order == list(range(len(order))):  # usual case: needs no copy
        return local
    permuted = local.permute(order)
    if permuted.is_contiguous() or not has_no_memory_gaps(spec.shape, strides):
        return local
    return permuted.contiguous().permute(sorted(range(len(order)), key=order.__getitem__))


def has_no_memory_gaps(shape: Sequence[int], strides: tuple[int, ...]) -> bool:
    """Return whether a tensor with these strides uses all of its memory once, in any order of its axes."""
    on_meta = torch.empty_strided(tuple(shape), strides, device="meta")
    return torch.empty_like(on_meta).stride() == strides


def _is_even_local_split(
    spec: DTensorSpec, placements: tuple[Placement, ...], changes: Sequence[tuple[Placement, Placement]]
) -> bool:
    """Return whether a redistribution only splits replicated axes evenly, so that no device needs a collective."""
    if spec.mesh.get_coordinate() is None:  # this rank is not in the mesh, so it stores no shard
        return False
    if not all(before.is_replicate() and type(after) is Shard for before, after in changes):
        return False
    axes = {get_axis(after) for _, after in changes}
    if any(not p.is_replicate() and (type(p) is not Shard or get_axis(p) in axes) for p in spec.placements):
        return False
    return all(
        spec.shape[axis]
        % math.prod(
            spec.mesh.size(dim) for dim, placement in enumerate(placements) if placement.is_shard(axis)
        )
        == 0
        for axis in axes
    )
