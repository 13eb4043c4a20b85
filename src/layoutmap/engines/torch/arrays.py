"""Create DTensors from shards, read their shards, and redistribute them.

Tensors are sharded and placed here, by the layout's own arithmetic: torch's `distribute_tensor` needs process groups,
and is silently wrong for some layouts of simulated ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate

from layoutmap.core.blocks import (
    Ends,
    Index,
    NumpyArray,
    get_starts_and_stops,
    group_devices_by_shard,
    intersect_blocks,
    make_full_index,
    make_relative_index,
)
from layoutmap.core.errors import EngineError, MeshError
from layoutmap.core.layout import Layout
from layoutmap.core.mesh import Mesh
from layoutmap.engines.checks import refuse_layout_in_host_memory
from layoutmap.engines.protocol import PlacementWithoutLayout
from layoutmap.engines.torch import simulation
from layoutmap.engines.torch.backward import Ctx, TypedAutogradFunction
from layoutmap.engines.torch.devices import (
    bind_mesh,
    convert_layout_to_placements,
    explain_why_padding_is_impossible,
    find_layout_of_placements,
    get_local_device,
    make_device_mesh,
)
from layoutmap.engines.torch.dtensor_ops import check_no_slice_is_outdated
from layoutmap.engines.torch.element_types import to_numpy
from layoutmap.engines.torch.placing import redistribute_tensor
from layoutmap.engines.torch.specs import (
    copy_spec_with_placements,
    get_local,
    get_spec,
    make_dtensor,
    make_row_major_spec,
)

_LAYOUT = "_layoutmap_layout"
T = TypeVar("T", bound=torch.Tensor)


# -- layouts


def convert_to_native_layout(layout: Layout) -> tuple[DeviceMesh, tuple[Placement, ...]]:
    """Return the `(DeviceMesh, placements)` of a layout."""
    check_layout_not_in_host_memory(layout)
    native = make_device_mesh(layout.mesh)
    return native, convert_layout_to_placements(layout, native)


def check_layout_not_in_host_memory(layout: Layout) -> None:
    """Raise for a layout in host memory. In torch, only `fully_shard` keeps weights there (decisions/0310)."""
    refuse_layout_in_host_memory(
        layout,
        "torch",
        "a DTensor has its shards on the devices of its mesh",
        ', or offload all weights that fully_shard gathers: scope(fully_shard={"offload_policy": CPUOffloadPolicy()})',
    )


def check_and_convert_layout(
    layout: Layout, shape: tuple[int, ...], name: str = "layout", *, pad: bool = False
) -> tuple[DeviceMesh, tuple[Placement, ...]]:
    """Return the `(DeviceMesh, placements)` of a layout, after a check that the layout fits a shape.

    Raises:
        LayoutError: The layout does not fit. With `pad`, axes may have uneven shards.
    """
    layout.check_rank(shape, name)
    if not pad or explain_why_padding_is_impossible(layout, shape):
        layout.check_fits(shape, name)
    return convert_to_native_layout(layout)


def get_layout(array: torch.Tensor) -> Layout | None:
    """Return the layout of a DTensor, or None for a plain tensor or a DTensor that no layout describes."""
    if not isinstance(array, DTensor):
        return None
    noted = getattr(array, _LAYOUT, None)
    if noted is not None and convert_to_native_layout(noted) == (array.device_mesh, array.placements):
        return noted
    return find_layout_of_placements(array.device_mesh, array.placements, array.ndim)


def find_placement(array: torch.Tensor, meshes: Sequence[Mesh] = ()) -> Layout | PlacementWithoutLayout:
    """Return the layout of a tensor, or a `PlacementWithoutLayout` that describes where its values are."""
    if not isinstance(array, DTensor):
        return _describe_unsharded_placement(array)
    placements = ", ".join(map(str, array.placements))
    try:
        layout = get_layout(array)
    except MeshError as error:
        return PlacementWithoutLayout(f"({placements}) on a mesh that layoutmap cannot express: {error.what}")
    if layout is not None:
        return layout
    if any(placement.is_partial() for placement in array.placements):
        return PlacementWithoutLayout(
            f"({placements}): each device has a summand of it, and the sum is pending"
        )
    if array.device_mesh.mesh_dim_names is None:
        return PlacementWithoutLayout(
            f"({placements}) on a mesh of {array.device_mesh.size()} devices, whose dims have no names"
        )
    return PlacementWithoutLayout(f"({placements}): no order of mesh dims on an axis gives these shards")


def _describe_unsharded_placement(array: torch.Tensor) -> PlacementWithoutLayout:
    """Return the `PlacementWithoutLayout` that tells where the values of a plain tensor are."""
    if array.is_meta:
        return PlacementWithoutLayout("a tensor without values, on the meta device", is_copied=True)
    kind = _format_device_type(array.device)
    if simulation.is_simulated():
        return PlacementWithoutLayout(
            f"a plain tensor on {kind}", (f"{kind}:{array.device.index or 0}",), is_copied=True
        )
    ranks = tuple(f"{kind}:{each}" for each in range(simulation.get_world_size()))
    return PlacementWithoutLayout("a plain tensor: each process has its own", ranks, is_copied=True)


def record_layout(tensor: T, layout: Layout) -> T:
    """Store a DTensor's layout in an attribute, because placements lack dims of size 1. Return the DTensor."""
    setattr(tensor, _LAYOUT, layout)
    return tensor


# -- shards


def create_from_blocks(
    shape: tuple[int, ...], dtype: torch.dtype, layout: Layout, read_block: Callable[[Index], torch.Tensor]
) -> DTensor:
    """Create a DTensor from blocks. `read_block` is called once for each distinct block of this process.

    Args:
        shape: The global shape.
        dtype: The element type.
        layout: The layout, which fits the shape.
        read_block: Returns the block at an index, in memory that nothing else uses.
    """
    native, placements = convert_to_native_layout(layout)
    ranks = simulation.list_ranks(native)
    device = get_local_device(native)
    pieces: dict[int, torch.Tensor] = {}
    for index, (first, *others) in _group_local_ranks_by_shard(layout, shape, ranks):
        piece = pieces[ranks[first]] = read_block(index).to(device)
        # An in-place update must affect each rank once, so replicas need their own memory.
        pieces |= {ranks[other]: piece.clone() for other in others}
    with simulation.simulate_ranks_of_mesh(native), torch.no_grad():
        local = simulation.make_local_tensor(dict(sorted(pieces.items())), dtype)
        made = make_dtensor(local, make_row_major_spec(native, placements, torch.Size(shape), dtype))
    return record_layout(made, layout)


def _group_local_ranks_by_shard(
    layout: Layout, shape: tuple[int, ...], ranks: Sequence[int]
) -> Iterable[tuple[Index, list[int]]]:
    """Return the index of each distinct shard of this process, with the positions in `ranks` of ranks that store it."""
    here = set(simulation.filter_local_ranks(ranks))
    local = [position for position, rank in enumerate(ranks) if rank in here]
    return group_devices_by_shard(layout, shape, local).values()


def iterate_shards(array: torch.Tensor, *, copy: bool = True) -> Iterator[tuple[Index, NumpyArray]]:
    """Yield each distinct shard of this process once, as its index and a numpy array. See `Engine.iterate_shards`."""
    for index, piece in _iterate_local_shards(array):
        yield index, to_numpy(piece) if copy else _view_or_copy_as_numpy(piece)


def get_writable_memory(array: torch.Tensor) -> list[tuple[Index, NumpyArray]]:
    """Return the index and a writable numpy array of each shard of this process.

    Return an empty list if numpy cannot use the memory of a shard, or if several simulated ranks have copies of one
    shard.
    """
    pieces = [(index, _view_as_numpy(piece)) for index, piece in _iterate_local_shards(array)]
    has_all = not (simulation.is_simulated() and isinstance(array, DTensor)) or len(pieces) == len(
        simulation.list_ranks(array.device_mesh)
    )
    found = [(index, memory) for index, memory in pieces if memory is not None]
    return found if has_all and len(found) == len(pieces) else []


def _view_or_copy_as_numpy(tensor: torch.Tensor) -> NumpyArray:
    """Return a numpy array that shares a tensor's memory, or a read-only copy if numpy cannot use that memory."""
    if (own := _view_as_numpy(tensor)) is not None:
        return own
    values = to_numpy(tensor)
    values.flags.writeable = False
    return values


def _view_as_numpy(tensor: torch.Tensor) -> NumpyArray | None:
    """Return a numpy array that shares a local tensor's memory, or None if numpy cannot use that memory."""
    plain = tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())
    if tensor.device.type != "cpu" or not plain or tensor.numel() <= 1:
        return None  # a single element may have any strides, and numpy could refuse them
    dtype = to_numpy(tensor.new_empty(0)).dtype
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().view(dtype).reshape(tensor.shape)


def _iterate_local_shards(array: torch.Tensor) -> Iterator[tuple[Index, torch.Tensor]]:
    """Yield the index and values of each distinct shard of this process, without copies."""
    if not isinstance(array, DTensor):
        yield make_full_index(array.shape), array.detach()
        return
    layout = get_layout(array)
    if layout is None:
        raise EngineError(
            "the DTensor has no layout",
            facts={"placements": str(array.placements)},
            why="the tensor is a partial sum, its mesh has no dim names, or no order of mesh dims gives its shards",
            fix="give the tensor a layout: layoutmap.dtensor.relayout(tensor, layout)",
        )
    check_no_slice_is_outdated("reading a tensor", array)
    ranks = simulation.list_ranks(array.device_mesh)
    detached = array.detach()
    held = simulation.get_tensors_by_rank(get_local(detached))
    for index, positions in _group_local_ranks_by_shard(layout, tuple(array.shape), ranks):
        yield index, held[ranks[positions[0]]]


def iterate_device_values(array: torch.Tensor) -> Iterator[tuple[str, NumpyArray]]:
    """Yield the device name and values of each rank of this process, or nothing for a meta tensor."""
    if array.is_meta:
        return
    kind = _format_device_type(array.device)
    if not isinstance(array, DTensor):
        yield f"{kind}:{simulation.get_rank()}", to_numpy(array.detach())
        return
    check_no_slice_is_outdated("reading a tensor", array)
    detached = array.detach()
    held = simulation.get_tensors_by_rank(get_local(detached))
    for rank in simulation.filter_local_ranks(simulation.list_ranks(array.device_mesh)):
        yield f"{kind}:{rank}", to_numpy(held[rank])


def _format_device_type(device: torch.device) -> str:
    """Return the type of a device as it is written in meshes, such as `"GPU"` for `cuda`."""
    return {"cuda": "GPU"}.get(device.type, device.type.upper())


def shard_tensor(tensor: torch.Tensor, layout: Layout, *, pad: bool = False) -> DTensor:
    """Shard a plain tensor (see `check_and_convert_layout`), and return the DTensor. Gradients flow back."""
    check_and_convert_layout(layout, tuple(tensor.shape), pad=pad)
    if tensor.requires_grad and torch.is_grad_enabled():
        return record_layout(_ShardTensorFunction.apply(tensor, layout), layout)
    return create_from_blocks(
        tuple(tensor.shape), tensor.dtype, layout, lambda index: tensor.detach()[index].clone()
    )


class _ShardTensorFunction(TypedAutogradFunction):
    """Shard an unsharded tensor. Backward gathers the gradient."""

    @staticmethod
    def forward(ctx: Ctx, tensor: torch.Tensor, layout: Layout) -> DTensor:
        return shard_tensor(tensor.detach(), layout, pad=True)

    @staticmethod
    def backward(ctx: Ctx, *upstream: DTensor) -> object:
        return gather_tensor(upstream[0]), None


def gather_tensor(array: Any) -> torch.Tensor:
    """Return all values of a tensor as a plain tensor without autograd. All processes with shards must call this."""
    if not isinstance(array, DTensor):
        return array.detach()
    check_no_slice_is_outdated("reading a tensor", array)
    array = array.detach()
    ranks = simulation.list_ranks(array.device_mesh)
    if get_layout(array) is None:
        with simulation.simulate_ranks(ranks):
            array = redistribute_tensor(array, [Replicate()] * array.device_mesh.ndim)
    if not simulation.is_simulated():
        return get_local(_redistribute_tensor_of_any_dtype(array, [Replicate()] * array.device_mesh.ndim))
    pieces = list(_iterate_local_shards(array))
    if len(pieces) == 1:  # the only piece is the full value, so copy it only once
        return pieces[0][1].clone()
    made = torch.empty(array.shape, dtype=array.dtype, device=pieces[0][1].device)
    for index, piece in pieces:
        made[index] = piece
    return made


# -- relayout


def relayout_dtensor(array: DTensor, layout: Layout, *, pad: bool = False) -> torch.Tensor:
    """Relayout a DTensor (see `check_and_convert_layout`). Gradients flow back if the mesh stays the same."""
    native, placements = check_and_convert_layout(layout, tuple(array.shape), pad=pad)
    check_no_slice_is_outdated("reading a tensor", array)
    # Simulated collectives fail on a mesh without rank 0, so use `_relayout_by_broadcasts` for such a mesh.
    if array.device_mesh == native and not (
        simulation.is_simulated() and 0 not in simulation.list_ranks(native)
    ):
        with simulation.simulate_ranks_of_mesh(native):
            moved = _redistribute_tensor_of_any_dtype(array, placements)
            # `moved` may be `array` itself, which keeps its recorded layout, so record the new layout on a view.
            return record_layout(moved.view_as(moved) if moved is array else moved, layout)
    if get_layout(array) is None:
        # If no layout describes the array's placements, gather the array first.
        return shard_tensor(gather_tensor(array), layout, pad=pad)
    return _relayout_by_broadcasts(array, layout)


# Collectives do not support the dtypes on the left, so send the bits in a dtype of the same width.
_CARRIERS = {
    torch.bool: torch.uint8,
    torch.uint16: torch.int16,
    torch.uint32: torch.int32,
    torch.uint64: torch.int64,
    torch.float8_e4m3fn: torch.uint8,
    torch.float8_e5m2: torch.uint8,
}


def _redistribute_tensor_of_any_dtype(array: DTensor, placements: tuple[Placement, ...]) -> DTensor:
    """Redistribute a DTensor, even if collectives do not support its dtype."""
    carrier = _CARRIERS.get(array.dtype)
    if carrier is None:
        return redistribute_tensor(array, placements)
    with torch.no_grad():
        spec = get_spec(array)
        carried = make_dtensor(
            get_local(array).view(carrier), copy_spec_with_placements(spec, spec.placements, carrier)
        )
        bits = get_local(redistribute_tensor(carried, placements)).view(array.dtype)
        return make_dtensor(bits, copy_spec_with_placements(spec, tuple(placements), array.dtype))


def _relayout_by_broadcasts(array: DTensor, layout: Layout) -> DTensor:
    """Convert a DTensor to a layout on any mesh, by a broadcast of each shard to all processes."""
    shape, dtype = tuple(array.shape), array.dtype
    wanted = find_local_shard_indices(layout, shape)
    made: dict[Ends, torch.Tensor] = {}
    device = get_local_device(convert_to_native_layout(layout)[0])
    for ends, index in wanted.items():
        made[ends] = torch.empty([part.stop - part.start for part in index], dtype=dtype, device=device)
    for index, piece in _iterate_broadcast_shards(array):
        for ends, target in wanted.items():
            both = intersect_blocks(index, target) if shape else ()  # a scalar has no axes to intersect
            if both is not None:
                made[ends][make_relative_index(both, target)] = piece[make_relative_index(both, index)].to(
                    device
                )
    return create_from_blocks(shape, dtype, layout, lambda index: made[get_starts_and_stops(index)])


def find_local_shard_indices(layout: Layout, shape: tuple[int, ...]) -> dict[Ends, Index]:
    """Return the index of each distinct shard of this process in a layout. The keys are its starts and stops."""
    here = bind_mesh(layout.mesh).local_device_ids
    return {ends: index for ends, (index, _) in group_devices_by_shard(layout, shape, here).items()}


def _iterate_broadcast_shards(array: DTensor) -> Iterator[tuple[Index, torch.Tensor]]:
    """Send each distinct shard from one process to all processes, and yield the shard's index and values."""
    if simulation.is_simulated():
        yield from _iterate_local_shards(array)
        return
    layout = get_layout(array)
    assert layout is not None
    ranks, shape = simulation.list_ranks(array.device_mesh), tuple(array.shape)
    for index, positions in group_devices_by_shard(layout, shape, range(len(ranks))).values():
        owner = ranks[positions[0]]
        if owner == simulation.get_rank():
            piece = get_local(array.detach()).contiguous()
        else:
            piece = torch.empty(
                [part.stop - part.start for part in index], dtype=array.dtype, device=array.device
            )
        if piece.numel():
            # Collectives do not support every dtype, so send bytes.
            dist.broadcast(piece.view(-1).view(torch.uint8), src=owner)
        yield index, piece
