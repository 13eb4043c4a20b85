"""A function of plain tensors computed by each device on its own pieces of DTensors.

That is right wherever the function treats the positions of an axis apart from each other: images of a batch, heads of
an attention. What is cut along other axes is put together first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from layoutmap.engines.torch.dtensor_ops.whole import everywhere, placed, settled


def mesh_of(tensors: Iterable[Any]) -> Any:
    """The mesh of the first DTensor."""
    return next(tensor.device_mesh for tensor in tensors if isinstance(tensor, DTensor))


def cut_axis(tensor: Any, dim: int) -> int | None:
    """The axis of a DTensor that a mesh dim, by its number, cuts; `None`: none, or not in the mesh's order."""
    if not isinstance(tensor, DTensor):
        return None
    placement = tensor.placements[dim]
    return placement.dim if type(placement) is Shard else None


def divides(tensor: Any, axis: int, dims: Iterable[int], mesh: Any) -> bool:
    """Whether an axis can be cut evenly over mesh dims."""
    parts = 1
    for dim in dims:
        parts *= mesh.size(dim)
    return tensor.shape[axis] % parts == 0


def piece(tensor: Any, mesh: Any, placements: Sequence[Any], apart: Iterable[int]) -> Any:
    """The piece of this device, after the tensor was brought into placements.

    Args:
        tensor: A DTensor, or a plain tensor that is the same in all processes.
        mesh: The mesh.
        placements: The placements, none of them partial.
        apart: The mesh dims over which devices compute different things. A tensor that is whole there has a share of
            its gradient on each.
    """
    if not isinstance(tensor, DTensor):
        tensor = everywhere(tensor, mesh)
    apart = set(apart)
    gradient = [
        Partial() if dim in apart and placement.is_replicate() else placement
        for dim, placement in enumerate(placements)
    ]
    return _ContiguousGradient.apply(placed(settled(tensor), placements).to_local(grad_placements=gradient))


class _ContiguousGradient(torch.autograd.Function):
    # DTensor keeps the strides of a gradient that it gathers, and not the order of its memory.

    @staticmethod
    def forward(ctx: Any, local: Any) -> Any:
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> Any:
        return upstream[0].contiguous()


def join(local: Any, mesh: Any, placements: Sequence[Any]) -> Any:
    """The DTensor of all devices' pieces, which are of equal size."""
    return DTensor.from_local(local, mesh, placements, run_check=False)


@dataclass(frozen=True, slots=True)
class Apart:
    """How to compute a function whose first tensors have axes that it treats position by position.

    Args:
        free: The axes of the first tensor, given its rank, that may stay cut. The result is cut along the same.
        tensors: The names of the function's parameters that have these axes, in order, the first ones of the function.
    """

    free: Callable[[int], Sequence[int]]
    tensors: tuple[str, ...] = ("input",)

    def __call__(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Compute it."""
        values: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
        names = [i if i < len(args) else name for i, name in enumerate(self.tensors)]
        along = {name for name in names if isinstance(values.get(name), torch.Tensor)}
        mesh = mesh_of(values.values())
        kept = self._kept([values[name] for name in names if name in along], mesh)
        pieces = {
            name: piece(value, mesh, _placements(mesh, kept if name in along else {}), kept)
            if isinstance(value, torch.Tensor)
            else value
            for name, value in values.items()
        }
        local = function(*(pieces[i] for i in range(len(args))), **{name: pieces[name] for name in kwargs})
        placements = _placements(mesh, kept)
        if isinstance(local, (tuple, list)):
            return type(local)(join(each, mesh, placements) for each in local)
        return join(local, mesh, placements)

    def _kept(self, tensors: Sequence[Any], mesh: Any) -> dict[int, int]:
        """The axis that stays cut over each mesh dim where one does."""
        kept: dict[int, int] = {}
        free = set(self.free(tensors[0].ndim))
        for dim in range(mesh.ndim):
            axis = next((a for a in (cut_axis(each, dim) for each in tensors) if a is not None), None)
            if axis not in free:
                continue
            assert axis is not None
            dims = [other for other, cut in kept.items() if cut == axis] + [dim]
            if all(each.shape[axis] > 1 and divides(each, axis, dims, mesh) for each in tensors):
                kept[dim] = axis
        return kept


def _placements(mesh: Any, kept: Mapping[int, int]) -> list[Any]:
    return [Shard(kept[dim]) if dim in kept else Replicate() for dim in range(mesh.ndim)]
