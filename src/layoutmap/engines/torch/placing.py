"""DTensors in other placements on their mesh, and between DTensors, what each device holds of them, and plain tensors.

It is what `DTensor.redistribute`, `to_local` and `from_local` do, with a way of its own for what a training step does
most: a sum over one mesh dim, and a gradient that is placed right already. DTensor takes seven times the CPU time.
What is random, or has no rule in DTensor, is computed on plain tensors: once in a simulation, else alike by all.
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

from layoutmap.engines.tested import check_names
from layoutmap.engines.torch import simulation, unseen
from layoutmap.engines.torch.backward import AutogradFunction, Ctx
from layoutmap.engines.torch.modes import plainly
from layoutmap.engines.torch.specs import (
    DTensorSpec,
    axis_of,
    dtensor,
    is_of_view,
    local_of,
    meta_of,
    placed_as,
    spec_of,
    spec_of_shards,
)

check_names(
    "torch", (torch._C, "_AutoDispatchBelowAutograd"), (torch.ops._c10d_functional, "all_reduce wait_tensor")
)

R = TypeVar("R")
_redistribute_by_torch = DTensor.redistribute  # before `dtensor_ops` replaces it


def redistributed(tensor: DTensor, placements: Sequence[Placement]) -> DTensor:
    """A DTensor in other placements; gradients pass, and come back in the placements that it had."""
    return _Redistributed.of(tensor, tuple(placements))


def shard_of(tensor: DTensor, of_gradient: Sequence[Placement]) -> torch.Tensor:
    """This device's shard of a DTensor; its gradient is a DTensor in the placements given, in the order of axes."""
    return _Shard.of(tensor, tuple(of_gradient))


def from_shards(local: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """The DTensor of all devices' shards, which are of equal size, or summands; gradients pass."""
    return _FromShards.of(local, mesh, tuple(placements))


def sum_of_devices(local: torch.Tensor, mesh: DeviceMesh, dims: Collection[int]) -> torch.Tensor:
    """The sum of what devices have along some mesh dims, of which each computes something else; gradients pass."""
    return _Sum.of(local, mesh, dims)


@plainly
def largest_of_devices(local: torch.Tensor, mesh: DeviceMesh, dims: Collection[int]) -> torch.Tensor:
    """The largest of what devices have along some mesh dims, by element; without a gradient."""
    for dim in dims:
        local = summed_over(local.detach(), mesh, dim, "max")
    return local


def summed_over(local: torch.Tensor, mesh: DeviceMesh, mesh_dim: int, reduce_op: str) -> torch.Tensor:
    """The shards of the devices along a mesh dim, summed up or reduced in another way, on each of them."""
    operators = torch.ops._c10d_functional
    with torch._C._AutoDispatchBelowAutograd():  # which is Python for these, and has nothing to do
        made = operators.all_reduce.default(local, reduce_op, mesh.get_group(mesh_dim).group_name)
        return operators.wait_tensor.default(made)


def replicated(mesh: DeviceMesh) -> list[Placement]:
    """The placements of what every device has in full."""
    return [Replicate()] * mesh.ndim


def is_everywhere(tensor: DTensor) -> bool:
    """Whether every device has a DTensor in full."""
    return all(placement.is_replicate() for placement in tensor.placements)


def placed_in(tensor: DTensor, placements: Sequence[Placement]) -> DTensor:
    """A DTensor in other placements on its mesh; itself if it has them."""
    if tuple(placements) == tuple(tensor.placements):
        return tensor
    if not simulation.is_simulated():  # simulated ranks have groups inside of their simulation
        return redistributed(tensor, placements)
    with simulation.on_mesh(tensor.device_mesh):
        return redistributed(tensor, placements)


def reduced(value: R) -> R:
    """A DTensor whose sums over the mesh are made; anything else as it is."""
    if not isinstance(value, DTensor) or not any(p.is_partial() for p in value.placements):
        return value
    return _Reduced.of(value)


def full_tensor(value: object) -> Any:
    """All values of a DTensor, as a plain tensor; anything else as it is."""
    return _FullTensor.of(value) if isinstance(value, DTensor) else value


def everywhere(tensor: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    """A plain tensor, the same in all processes, as a replicated DTensor; backward, too: pytorch/pytorch#118461."""
    return _Everywhere.of(tensor, mesh)


def on_mesh(gradient: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    """A gradient as a DTensor; a formula of the program's own may have computed it plainly, alike in all processes."""
    return gradient if isinstance(gradient, DTensor) else everywhere(gradient, mesh)


def with_gradient(value: torch.Tensor, change: Callable[[torch.Tensor], object]) -> torch.Tensor:
    """The same tensor, whose gradient is changed when it comes back."""
    return _WithGradient.apply(value, change)


def like(tensor: torch.Tensor, other: DTensor) -> DTensor:
    """A plain tensor, placed as a DTensor of its shape is; replicated where that one is a sum still to be made."""
    return placed_in(everywhere(tensor, other.device_mesh), attainable_placements(other))


def summed_placements(placements: Sequence[Placement]) -> tuple[Placement, ...]:
    """Placements without a sum that is still to be made."""
    return tuple(Replicate() if each.is_partial() else each for each in placements)


def attainable_placements(tensor: torch.Tensor) -> tuple[Placement, ...]:
    """Placements to which a DTensor can be redistributed: no partial sums, and no shards that only views make."""
    spec = spec_of(tensor)
    placements = summed_placements(spec.placements)
    if is_of_view(spec):
        placements = tuple(each if type(each) is Shard else Replicate() for each in placements)
    return placements


class OwnGradient(AutogradFunction):
    """A function of a tensor with a gradient of its own, of which torch hears only where there is to be one.

    No function mode sees what it calls, forwards or backwards.
    """

    def __init_subclass__(cls) -> None:
        own = plainly(cls.backward)

        def backward(ctx: Ctx, *upstream: torch.Tensor) -> object:
            unseen.check(ctx.numbers)  # of what `tensor.data` changed, autograd counts no version
            return own(ctx, *upstream)

        cls.backward = staticmethod(backward)

    @classmethod
    @plainly
    def of(cls, tensor: torch.Tensor, *others: object) -> Any:
        """The function's result."""
        if tensor.requires_grad and torch.is_grad_enabled():
            result = cls.apply(tensor, *others)
            result.grad_fn.numbers = unseen.numbers_of(*cls.needed(tensor, result))
            return result
        return cls.forward(SimpleNamespace(), tensor, *others)  # `apply` takes longer, and makes nothing else

    @staticmethod
    def needed(tensor: torch.Tensor, result: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The tensors in whose place a backward pass may have other ones."""
        return tensor, result


class _Sum(OwnGradient):
    @staticmethod
    def forward(ctx: Ctx, local: torch.Tensor, mesh: DeviceMesh, dims: Collection[int]) -> torch.Tensor:
        ctx.mesh, ctx.dims = mesh, dims
        for dim in dims:
            local = summed_over(local, mesh, dim, "sum")
        return local

    @staticmethod
    def backward(ctx: Ctx, *upstream: torch.Tensor) -> object:
        return _Sum.of(upstream[0], ctx.mesh, ctx.dims), None, None


class _Redistributed(OwnGradient):
    @staticmethod
    def forward(ctx: Ctx, tensor: DTensor, placements: tuple[Placement, ...]) -> DTensor:
        now, attainable = spec_of(tensor).placements, attainable_placements(tensor)
        ctx.before = tuple(p if p.is_partial() else a for p, a in zip(now, attainable, strict=True))
        ctx.mesh = tensor.device_mesh
        return _redistributed(tensor, placements)

    @staticmethod
    def backward(ctx: Ctx, *upstream: torch.Tensor) -> object:
        # What was a sum to be made gets a gradient that is made, or one that is to be made alike.
        gradient = on_mesh(upstream[0], ctx.mesh)
        have = gradient.placements
        wanted = [
            Replicate() if before.is_partial() and now != before else before
            for now, before in zip(have, ctx.before, strict=True)
        ]
        return redistributed(gradient, wanted), None


class _Shard(OwnGradient):
    @staticmethod
    def forward(ctx: Ctx, tensor: torch.Tensor, of_gradient: object) -> torch.Tensor:
        ctx.mesh, ctx.placements = spec_of(tensor).mesh, of_gradient
        local = local_of(tensor)
        return local.view_as(local)  # another object: autograd ties what is returned to this step

    @staticmethod
    def backward(ctx: Ctx, *upstream: torch.Tensor) -> object:
        # An expanded one has strides of 0.
        return from_shards(upstream[0].contiguous(), ctx.mesh, ctx.placements), None


class _FromShards(OwnGradient):
    @staticmethod
    def forward(
        ctx: Ctx, local: torch.Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...]
    ) -> DTensor:
        ctx.mesh, ctx.placements = mesh, placements
        spec = spec_of_shards(mesh, placements, local.shape, local.stride(), local.dtype)
        return dtensor(local.detach(), spec)

    @staticmethod
    def backward(ctx: Ctx, *upstream: torch.Tensor) -> object:
        # A summand's gradient is the sum's; what devices make of it differs, and so does what comes back from that.
        gradient, wanted = on_mesh(upstream[0], ctx.mesh), summed_placements(ctx.placements)
        if gradient.placements != wanted:
            gradient = redistributed(gradient, wanted)
        return shard_of(gradient, ctx.placements), None, None


class _Reduced(OwnGradient):
    # DTensor's own step fails backwards where a mean meets a sum.

    @staticmethod
    def forward(ctx: Ctx, tensor: DTensor) -> DTensor:
        ctx.mesh = tensor.device_mesh
        return placed_in(tensor, attainable_placements(tensor))

    @staticmethod
    def needed(tensor: DTensor, result: torch.Tensor) -> tuple[torch.Tensor, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        # No gradient of a sum needs the sum; that of a maximum, or of a norm, does.
        pending = [p for p in tensor.placements if p.is_partial()]
        is_sum = all(type(p) is Partial and p.reduce_op in ("sum", "avg") for p in pending)  # pyright: ignore[reportUnknownMemberType]
        return (tensor,) if is_sum else (tensor, result)

    @staticmethod
    def backward(ctx: Ctx, *upstream: DTensor) -> object:
        return reduced(on_mesh(upstream[0], ctx.mesh))


class _FullTensor(OwnGradient):
    @staticmethod
    def forward(ctx: Ctx, tensor: DTensor) -> torch.Tensor:
        ctx.mesh, ctx.placements = tensor.device_mesh, attainable_placements(tensor)
        plain = simulation.plain(local_of(placed_in(tensor, replicated(ctx.mesh))))
        if plain.stride() == tensor.stride() or 0 in tensor.stride() or not plain.numel():
            return plain
        # What is gathered is contiguous; the order of random numbers follows the strides.
        strided = torch.empty_strided(tensor.shape, tensor.stride(), dtype=plain.dtype, device=plain.device)
        return strided.copy_(plain)

    @staticmethod
    def backward(ctx: Ctx, *upstream: torch.Tensor) -> object:
        return placed_in(on_mesh(upstream[0], ctx.mesh), ctx.placements)


class _Everywhere(OwnGradient):
    @staticmethod
    def forward(ctx: Ctx, tensor: torch.Tensor, mesh: DeviceMesh) -> DTensor:
        simulated = simulation.is_simulated()
        local = simulation.every_rank(tensor, simulation.ranks_of(mesh)) if simulated else tensor.detach()
        return dtensor(
            local, spec_of_shards(mesh, tuple(replicated(mesh)), tensor.shape, tensor.stride(), tensor.dtype)
        )

    @staticmethod
    def backward(ctx: Ctx, *upstream: DTensor) -> object:
        return full_tensor(upstream[0]), None


class _WithGradient(AutogradFunction):
    @staticmethod
    def forward(ctx: Ctx, value: torch.Tensor, change: Callable[[torch.Tensor], object]) -> torch.Tensor:
        ctx.change = change
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Ctx, *upstream: torch.Tensor) -> object:
        return ctx.change(upstream[0]), None


def _redistributed(tensor: DTensor, placements: tuple[Placement, ...]) -> DTensor:
    local, spec = local_of(tensor), spec_of(tensor)
    changed = [dim for dim, (a, b) in enumerate(zip(spec.placements, placements, strict=True)) if a != b]
    if not changed:
        return dtensor(local, spec)
    moves = [(spec.placements[dim], placements[dim]) for dim in changed]
    if len(changed) == 1 and type(moves[0][0]) is Partial and moves[0][1].is_replicate():
        dim = changed[0]
        is_sum = spec.mesh.size(dim) > 1
        local = summed_over(local, spec.mesh, dim, moves[0][0].reduce_op) if is_sum else local.detach()  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]
    elif not simulation.is_simulated() and _is_taken_apart(spec, placements, moves):
        coordinates = spec.mesh.get_coordinate()
        for dim, (_, shard) in zip(changed, moves, strict=True):
            local = local.chunk(spec.mesh.size(dim), axis_of(shard))[coordinates[dim]]
        local = local.clone(memory_format=torch.contiguous_format)  # a view would keep all of it alive
    else:
        moved = _redistribute_by_torch(
            tensor, spec.mesh, placements
        )  # what is rare in a step is left to DTensor
        return dtensor(in_order(local_of(moved), spec_of(moved)), spec_of(moved))
    spec = placed_as(spec, placements, local.dtype)
    return dtensor(in_order(local, spec), spec)


def in_order(local: torch.Tensor, spec: DTensorSpec) -> torch.Tensor:
    """The shards of a DTensor with their axes in the order in memory that they have on one device; copied if need be.

    Redistributing leaves them in the order of the shape. DTensor goes by the strides of one device, from which autograd
    tells what can be viewed: such views of shards in another order fail.
    """
    strides = meta_of(spec).stride
    order = sorted(range(len(strides)), key=lambda axis: -strides[axis])  # of equals the first
    if local.is_contiguous() and order == list(range(len(order))):  # usually
        return local
    permuted = local.permute(order)
    if permuted.is_contiguous() or not has_no_gaps(spec.shape, strides):
        return local
    return permuted.contiguous().permute(sorted(range(len(order)), key=order.__getitem__))


def has_no_gaps(shape: Sequence[int], strides: tuple[int, ...]) -> bool:
    """Whether strides are those of a tensor that fills its memory, in any order of its axes."""
    on_meta = torch.empty_strided(tuple(shape), strides, device="meta")
    return torch.empty_like(on_meta).stride() == strides


def _is_taken_apart(
    spec: DTensorSpec, placements: tuple[Placement, ...], moves: Sequence[tuple[Placement, Placement]]
) -> bool:
    """Whether each device keeps an even part of what it has, along axes that are not sharded yet."""
    if spec.mesh.get_coordinate() is None:  # this process is not on the mesh
        return False
    if not all(before.is_replicate() and type(after) is Shard for before, after in moves):
        return False
    axes = {axis_of(after) for _, after in moves}
    if any(not p.is_replicate() and (type(p) is not Shard or axis_of(p) in axes) for p in spec.placements):
        return False
    return all(
        spec.shape[axis]
        % math.prod(
            spec.mesh.size(dim) for dim, placement in enumerate(placements) if placement.is_shard(axis)
        )
        == 0
        for axis in axes
    )
