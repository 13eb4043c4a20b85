"""Gather several weights sharded over one mesh dim with one collective, and reduce-scatter their gradients.

A weight that is sharded over the dim of the batch is gathered when its layer computes. Gathered one by one, each weight
needs a collective. Concatenated, the weights of a block need one collective in each pass.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from layoutmap.core.errors import format_message
from layoutmap.engines.torch.backward import Ctx, TypedAutogradFunction
from layoutmap.engines.torch.modes import skip_function_modes
from layoutmap.engines.torch.placing import redistribute_tensor
from layoutmap.engines.torch.specs import (
    DTensorSpec,
    copy_spec_with_placement,
    copy_spec_with_placements,
    get_axis,
    get_local,
    get_meta,
    get_spec,
    has_even_shards,
    make_dtensor,
)


def can_gather_by_concatenation(tensor: DTensor, mesh_dim: int) -> bool:
    """Return whether the shards along a mesh dim, concatenated, are the tensor unsharded over that dim.

    That is so if this dim is the last one that splits its axis: the last such dim of the mesh, or by a strided shard.
    Shards must have equal sizes.
    """
    placement, mesh = tensor.placements[mesh_dim], tensor.device_mesh
    if placement.is_replicate() or placement.is_partial() or not has_even_shards(get_spec(tensor)):
        return False
    shards_before = 1  # number of shards of the same axis over later mesh dims
    for number, each in enumerate(tensor.placements):
        if number == mesh_dim or each.is_replicate():
            continue
        if type(each) is not Shard:
            return False
        if number > mesh_dim and get_axis(each) == get_axis(placement):
            shards_before *= mesh.size(number)
    return shards_before == getattr(placement, "split_factor", 1)


class GatheredTensors:
    """Tensors that are gathered along a mesh dim by one collective, which the constructor runs.

    Args:
        tensors: DTensors on one mesh, of one element type, each of which `can_gather_by_concatenation`.
        mesh_dim: The number of the mesh dim.
        dtype: Their element type when they are gathered; `None`: their own.
        reduce_dtype: The dtype in which gradients are summed up; `None`: their own.
    """

    def __init__(
        self,
        tensors: Sequence[DTensor],
        mesh_dim: int,
        dtype: torch.dtype | None = None,
        reduce_dtype: torch.dtype | None = None,
    ) -> None:
        self.tensors, self.mesh_dim, self.reduce_dtype = tensors, mesh_dim, reduce_dtype
        self.layouts = [_GatheredTensorSpec(tensor, mesh_dim) for tensor in tensors]
        mesh = tensors[0].device_mesh
        flat = torch.cat([get_local(tensor).detach().reshape(-1) for tensor in tensors])
        if flat.device.type != mesh.device_type:  # the weights were offloaded to the CPU, so move them back
            flat = flat.to(mesh.device_type)
        flat = flat.to(dtype)
        self._rows = flat.new_empty(mesh.size(mesh_dim), flat.numel())
        dist.all_gather_single(self._rows.view(-1), flat, mesh.get_group(mesh_dim))  # pyright: ignore[reportUnknownMemberType]

    def make_gathered_tensors(self) -> list[DTensor]:
        """Return the gathered tensors. Backward reduce-scatters their gradients over the mesh dim. Call this once."""
        return list(_AllGatherFunction.apply(self, *self.tensors))

    def pop_gathered_rows(self) -> torch.Tensor:
        """Return the gathered elements, one row per device, and release them."""
        rows, self._rows = self._rows, torch.empty(0)
        return rows


class _AllGatherFunction(TypedAutogradFunction):
    @staticmethod
    def forward(ctx: Ctx, gather: GatheredTensors, *tensors: torch.Tensor) -> tuple[DTensor, ...]:
        # By default, torch passes zeros that are not DTensors as gradients of unused outputs, so turn that off.
        ctx.set_materialize_grads(False)
        ctx.gather = gather
        sizes = [layout.local_size for layout in gather.layouts]
        columns = torch.split(gather.pop_gathered_rows(), sizes, dim=1)
        return tuple(
            layout.assemble_tensor(part) for layout, part in zip(gather.layouts, columns, strict=True)
        )

    @staticmethod
    @skip_function_modes
    def backward(ctx: Ctx, *upstream: torch.Tensor) -> object:
        return None, *_ReduceScatterFunction.apply(ctx.gather, *upstream)


class _ReduceScatterFunction(TypedAutogradFunction):
    """Reduce-scatter the gradients of gathered tensors over the mesh dim."""

    @staticmethod
    def forward(ctx: Ctx, gather: GatheredTensors, *gradients: DTensor | None) -> tuple[DTensor | None, ...]:
        layouts, mesh_dim = gather.layouts, gather.mesh_dim
        ctx.set_materialize_grads(False)
        ctx.gather, ctx.dtypes = gather, [None if each is None else each.dtype for each in gradients]
        partial_sums = [
            (layout, convert_to_partial_sum(gradient, layout.spec, mesh_dim))
            for layout, gradient in zip(layouts, gradients, strict=True)
            if gradient is not None
        ]
        results: dict[int, DTensor] = {}
        # One collective reduces the gradients of one dtype, so all processes must iterate over the dtypes in the same
        # order.
        for dtype in dict.fromkeys(gradient.dtype for _, gradient in partial_sums):
            some = [(layout, gradient) for layout, gradient in partial_sums if gradient.dtype == dtype]
            mesh = some[0][1].device_mesh
            flat = torch.cat(
                [layout.split_gradient_by_device(gradient) for layout, gradient in some], dim=1
            ).reshape(-1)
            # A mixed-precision policy may request sums in float32, because sums in bfloat16 lose digits.
            flat = flat.to(gather.reduce_dtype)
            mine = flat.new_empty(flat.numel() // mesh.size(mesh_dim))
            # One collective for all weights is faster than one for each.
            dist.reduce_scatter_single(mine, flat, group=mesh.get_group(mesh_dim))  # pyright: ignore[reportUnknownMemberType]
            parts = torch.split(mine, [layout.local_size for layout, _ in some])
            results |= {
                id(layout): layout.make_sharded_gradient(part)
                for (layout, _), part in zip(some, parts, strict=True)
            }
        return tuple(results.get(id(layout)) for layout in layouts)

    @staticmethod
    @skip_function_modes
    def backward(ctx: Ctx, *upstream: DTensor) -> object:
        # A dict keeps the order of insertion, so all processes start the collectives of groups in the same order, and
        # none waits forever.
        groups: dict[tuple[torch.dtype, ...], list[int]] = {}
        for number, each in enumerate(upstream):
            if each is not None:  # pyright: ignore[reportUnnecessaryComparison]
                groups.setdefault((ctx.dtypes[number], each.dtype), []).append(number)
        results: list[DTensor | None] = [None] * len(upstream)
        for (dtype, _), numbers in groups.items():
            some = [redistribute_tensor(upstream[n], ctx.gather.layouts[n].spec.placements) for n in numbers]
            gathered = GatheredTensors(some, ctx.gather.mesh_dim, dtype).make_gathered_tensors()
            for number, each in zip(numbers, gathered, strict=True):
                results[number] = each
        return None, *results


class CastDTensorFunction(TypedAutogradFunction):
    """Convert a DTensor to another dtype. The gradient is converted back before it is reduced."""

    @staticmethod
    def forward(ctx: Ctx, tensor: torch.Tensor, dtype: torch.dtype) -> DTensor:
        """Return the DTensor in `dtype`."""
        ctx.dtype = tensor.dtype
        return _cast_local_tensor(tensor, dtype)

    @staticmethod
    @skip_function_modes
    def backward(ctx: Ctx, *upstream: torch.Tensor) -> object:
        """Return the gradient in the DTensor's own dtype."""
        return CastDTensorFunction.apply(upstream[0], ctx.dtype), None


def _cast_local_tensor(tensor: torch.Tensor, dtype: torch.dtype) -> DTensor:
    spec = get_spec(tensor)
    return make_dtensor(get_local(tensor).to(dtype), copy_spec_with_placements(spec, spec.placements, dtype))


class _GatheredTensorSpec:
    """Shapes and spec of one gathered tensor, to convert between its shards and the gathered elements."""

    def __init__(self, tensor: torch.Tensor, mesh_dim: int) -> None:
        self.spec, self.mesh_dim = get_spec(tensor), mesh_dim
        self.axis = get_axis(self.spec.placements[mesh_dim])
        self.num_devices = self.spec.mesh.size(mesh_dim)
        self.local_shape = tuple(get_local(tensor).shape)
        self.local_size, self.device = get_local(tensor).numel(), get_local(tensor).device

    def assemble_tensor(self, rows: torch.Tensor) -> DTensor:
        """Return the gathered tensor, from one row of elements for each device along the mesh dim."""
        apart = rows.reshape(self.num_devices, *self.local_shape)
        joined = [n * self.num_devices if i == self.axis else n for i, n in enumerate(self.local_shape)]
        local = apart.movedim(0, self.axis).reshape(joined).contiguous()
        return make_dtensor(
            local, copy_spec_with_placement(self.spec, self.mesh_dim, Replicate(), local.dtype)
        )

    def split_gradient_by_device(self, gradient: DTensor) -> torch.Tensor:
        """Return the elements of a gathered tensor's gradient, one row for each device along the mesh dim."""
        before, after = self.local_shape[: self.axis], self.local_shape[self.axis :]
        apart = get_local(gradient).reshape([*before, self.num_devices, *after])
        return apart.movedim(self.axis, 0).reshape(self.num_devices, -1)

    def make_sharded_gradient(self, elements: torch.Tensor) -> DTensor:
        """Return the gradient of the sharded tensor, from the elements of this device's shard."""
        elements = elements.to(self.device, get_meta(self.spec).dtype)
        return make_dtensor(elements.reshape(self.local_shape), self.spec)


def convert_to_partial_sum(gradient: DTensor, spec: DTensorSpec, mesh_dim: int) -> DTensor:
    """Return a gradient as a partial sum over a mesh dim, in the placements of `spec` on the other dims.

    A gradient that is already summed, as for a batch that is not sharded, is divided by the number of devices.
    """
    is_sum = gradient.placements[mesh_dim].is_partial("sum")
    wanted = copy_spec_with_placement(spec, mesh_dim, Partial() if is_sum else Replicate(), gradient.dtype)
    if gradient.placements != wanted.placements:
        gradient = redistribute_tensor(gradient, wanted.placements)
    if is_sum:
        return gradient
    part = get_local(gradient) / wanted.mesh.size(mesh_dim)
    return make_dtensor(part, copy_spec_with_placement(spec, mesh_dim, Partial(), part.dtype))


def format_weight_changed_message(name: str, shape: tuple[int, ...]) -> str:
    """Return the error message for a parameter that was changed between the forward pass and the backward pass."""
    return format_message(
        f"{name} was changed in place before the backward pass",
        {"shape": shape},
        "it is sharded over the batch's dim, and the backward pass would gather its new values",
        "call backward() first, and change weights (as optimizer.step() does) after it",
    )
