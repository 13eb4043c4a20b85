"""Between DTensors and plain tensors that every device has in full; gradients pass both ways.

What is random, or has no rule in DTensor, is computed on plain tensors: once in a simulation, else alike by all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from layoutmap.engines.torch import simulation
from layoutmap.engines.torch.placing import OwnGradient, attainable_placements, redistributed
from layoutmap.engines.torch.private import dtensor, spec_of_shards


def replicated(mesh: Any) -> list[Any]:
    """The placements of what every device has in full."""
    return [Replicate()] * mesh.ndim


def is_everywhere(tensor: Any) -> bool:
    """Whether every device has a DTensor in full."""
    return all(placement.is_replicate() for placement in tensor.placements)


def placed(tensor: Any, placements: Sequence[Any]) -> Any:
    """A DTensor in other placements on its mesh; itself if it has them."""
    if tuple(placements) == tuple(tensor.placements):
        return tensor
    if not simulation.is_simulated():
        return redistributed(tensor, placements)
    with simulation.on_mesh(tensor.device_mesh):
        return redistributed(tensor, placements)


def reduced(value: Any) -> Any:
    """A DTensor whose sums over the mesh are made; anything else as it is."""
    if not isinstance(value, DTensor) or not any(p.is_partial() for p in value.placements):
        return value
    return _Reduced.of(value)


def full_tensor(value: Any) -> Any:
    """All values of a DTensor, as a plain tensor; anything else as it is."""
    return _FullTensor.of(value) if isinstance(value, DTensor) else value


def everywhere(tensor: torch.Tensor, mesh: Any) -> Any:
    """A plain tensor, the same in all processes, as a replicated DTensor."""
    return _Everywhere.of(tensor, mesh)


def with_gradient(value: torch.Tensor, change: Callable[[Any], Any]) -> Any:
    """The same tensor, whose gradient is changed when it comes back."""
    return _WithGradient.apply(value, change)


def like(tensor: torch.Tensor, other: Any) -> Any:
    """A plain tensor, placed as a DTensor of its shape is; replicated where that one is a sum still to be made."""
    return placed(everywhere(tensor, other.device_mesh), attainable_placements(other))


class _Reduced(OwnGradient):
    # DTensor's own step fails backwards where a mean meets a sum.

    @staticmethod
    def forward(ctx: Any, tensor: Any) -> Any:
        ctx.mesh = tensor.device_mesh
        return placed(tensor, attainable_placements(tensor))

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> Any:
        gradient = upstream[0]
        return reduced(gradient) if isinstance(gradient, DTensor) else everywhere(gradient, ctx.mesh)


class _FullTensor(OwnGradient):
    @staticmethod
    def forward(ctx: Any, tensor: Any) -> Any:
        ctx.mesh, ctx.placements = tensor.device_mesh, attainable_placements(tensor)
        plain = simulation.plain(placed(tensor, replicated(ctx.mesh)).to_local())
        if plain.stride() == tensor.stride() or 0 in tensor.stride() or not plain.numel():
            return plain
        # What is gathered is contiguous; the order of random numbers follows the strides.
        strided = torch.empty_strided(tensor.shape, tensor.stride(), dtype=plain.dtype, device=plain.device)
        return strided.copy_(plain)

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> Any:
        gradient = upstream[0]
        return placed(
            gradient if isinstance(gradient, DTensor) else everywhere(gradient, ctx.mesh), ctx.placements
        )


class _Everywhere(OwnGradient):
    @staticmethod
    def forward(ctx: Any, tensor: Any, mesh: Any) -> Any:
        simulated = simulation.is_simulated()
        local = simulation.every_rank(tensor, simulation.ranks_of(mesh)) if simulated else tensor.detach()
        return dtensor(
            local, spec_of_shards(mesh, tuple(replicated(mesh)), tensor.shape, tensor.stride(), tensor.dtype)
        )

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> Any:
        return full_tensor(upstream[0]), None


class _WithGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Any, change: Callable[[Any], Any]) -> Any:
        ctx.change = change
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> Any:
        return ctx.change(upstream[0]), None
