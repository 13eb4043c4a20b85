"""Create DTensors from shards, read their shards, and redistribute them.

Tensors are sharded and placed here, by the layout's own arithmetic: torch's `distribute_tensor` needs process groups,
and is silently wrong for some layouts of simulated ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate

from layoutmap.core.blocks import (
    Ends,
    Index,
    NumpyArray,
    find_distinct_shards,
    get_slice_ends,
    intersect_blocks,
    make_full_index,
    make_relative_index,
)
from layoutmap.core.errors import EngineError, MeshError
from layoutmap.core.layout import Layout
from layoutmap.core.mesh import Mesh
from layoutmap.engines.checks import check_device_memory
from layoutmap.engines.protocol import Unplaced
from layoutmap.engines.torch import simulation
from layoutmap.engines.torch.backward import AutogradFunction, Ctx
from layoutmap.engines.torch.devices import (
    bind_mesh,
    convert_placements,
    explain_no_padding,
    get_device,
    make_device_mesh,
    make_placements,
)
from layoutmap.engines.torch.dtensor_ops import refuse_outdated
from layoutmap.engines.torch.element_types import to_numpy
from layoutmap.engines.torch.placing import redistribute_tensor
from layoutmap.engines.torch.specs import (
    get_local,
    get_spec,
    make_dtensor,
    make_tensor_spec,
    replace_placements,
)

_LAYOUT = "_layoutmap_layout"
T = TypeVar("T", bound=torch.Tensor)


# -- layouts


def convert_layout(layout: Layout) -> tuple[DeviceMesh, tuple[Placement, ...]]:
    """Convert a layout to `(DeviceMesh, placements)`."""
    check_memory(layout)
    native = make_device_mesh(layout.mesh)
    return native, make_placements(layout, native)


def check_memory(layout: Layout) -> None:
    """Refuse a layout in host memory: `fully_shard` offloads all weights that it gathers (decisions/0310)."""
    check_device_memory(
        layout,
        "torch",
        "a DTensor has its shards on the devices of its mesh",
        ', or offload all weights that fully_shard gathers: scope(fully_shard={"offload_policy": CPUOffloadPolicy()})',
    )


def fit_layout(
    layout: Layout, shape: tuple[int, ...], name: str = "layout", *, pad: bool = False
) -> tuple[DeviceMesh, tuple[Placement, ...]]:
    """Convert a layout to `(DeviceMesh, placements)`, or raise if it does not fit a shape.

    Raises:
        LayoutError: It does not fit. With `pad`, axes need not divide.
    """
    layout.check_rank(shape, name)
    if not pad or explain_no_padding(layout, shape):
        layout.check_fits(shape, name)
    return convert_layout(layout)


def get_layout(array: torch.Tensor) -> Layout | None:
    """Return the layout of a DTensor, or `None` if its mesh has no named dims or it is a partial sum."""
    if not isinstance(array, DTensor):
        return None
    noted = getattr(array, _LAYOUT, None)
    if noted is not None and convert_layout(noted) == (array.device_mesh, array.placements):
        return noted
    return convert_placements(array.device_mesh, array.placements, array.ndim)


def describe_placement(array: torch.Tensor, meshes: Sequence[Mesh] = ()) -> Layout | Unplaced:
    """Return the layout of a tensor from any program, or its placement without one."""
    if not isinstance(array, DTensor):
        return _describe_unsharded(array)
    placements = ", ".join(map(str, array.placements))
    try:
        layout = get_layout(array)
    except MeshError as error:
        return Unplaced(f"({placements}) on a mesh that has no form here: {error.what}")
    if layout is not None:
        return layout
    if any(placement.is_partial() for placement in array.placements):
        return Unplaced(f"({placements}): each device has a summand of it, and the sum is pending")
    if array.device_mesh.mesh_dim_names is None:
        return Unplaced(
            f"({placements}) on a mesh of {array.device_mesh.size()} devices, whose dims have no names"
        )
    return Unplaced(f"({placements}), which is no order of mesh dims on an axis")


def _describe_unsharded(array: torch.Tensor) -> Unplaced:
    """Describe a tensor that is not a DTensor. Each process has its own."""
    if array.is_meta:
        return Unplaced("a tensor without values, on the meta device", is_copied=True)
    kind = _format_device_type(array.device)
    if simulation.is_simulated():
        return Unplaced(f"a plain tensor on {kind}", (f"{kind}:{array.device.index or 0}",), is_copied=True)
    ranks = tuple(f"{kind}:{each}" for each in range(simulation.get_world_size()))
    return Unplaced("a plain tensor: each process has its own", ranks, is_copied=True)


def record_layout(tensor: T, layout: Layout) -> T:
    """Record the layout in which a DTensor was created, because placements ignore dims of size 1."""
    setattr(tensor, _LAYOUT, layout)
    return tensor


# -- shards


def from_blocks(
    shape: tuple[int, ...], dtype: torch.dtype, layout: Layout, read: Callable[[Index], torch.Tensor]
) -> DTensor:
    """Create a DTensor from blocks. Each distinct block of this process is read once.

    Args:
        shape: The global shape.
        dtype: The element type.
        layout: The layout, which fits.
        read: Gives the block at an index, with memory of its own.
    """
    native, placements = convert_layout(layout)
    ranks = simulation.list_ranks(native)
    device = get_device(native)
    pieces: dict[int, torch.Tensor] = {}
    for index, (first, *others) in find_distinct_shards(layout, shape, _find_local_places(ranks)).values():
        piece = pieces[ranks[first]] = read(index).to(device)
        # An in-place update must affect each rank once, so replicas need their own memory.
        pieces |= {ranks[other]: piece.clone() for other in others}
    with simulation.simulate_mesh(native), torch.no_grad():
        local = simulation.join_pieces(dict(sorted(pieces.items())), dtype)
        made = make_dtensor(local, make_tensor_spec(native, placements, torch.Size(shape), dtype))
    return record_layout(made, layout)


def _find_local_places(ranks: Sequence[int]) -> list[int]:
    """Return the positions of this process's ranks in the ranks of a mesh."""
    here = set(simulation.filter_local_ranks(ranks))
    return [place for place, rank in enumerate(ranks) if rank in here]


def iterate_shards(array: torch.Tensor, *, copy: bool = True) -> Iterator[tuple[Index, NumpyArray]]:
    """Yield the shards of this process, each index once. See `Engine.to_shards`."""
    for index, piece in _iterate_pieces(array):
        yield index, to_numpy(piece) if copy else _share_memory(piece)


def get_writable_memory(array: torch.Tensor) -> list[tuple[Index, NumpyArray]]:
    """Return the memory of this process's shards (see `Engine.get_writable_memory`), with each simulated replica."""
    pieces = [(index, _get_numpy_memory(piece)) for index, piece in _iterate_pieces(array)]
    has_all = not (simulation.is_simulated() and isinstance(array, DTensor)) or len(pieces) == len(
        simulation.list_ranks(array.device_mesh)
    )
    found = [(index, memory) for index, memory in pieces if memory is not None]
    return found if has_all and len(found) == len(pieces) else []


def _share_memory(tensor: torch.Tensor) -> NumpyArray:
    """View a tensor's memory as a numpy array, or make a read-only copy if that is impossible."""
    if (own := _get_numpy_memory(tensor)) is not None:
        return own
    values = to_numpy(tensor)
    values.flags.writeable = False
    return values


def _get_numpy_memory(tensor: torch.Tensor) -> NumpyArray | None:
    """View a local tensor's memory as a numpy array, or return None if that is impossible."""
    plain = tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())
    if tensor.device.type != "cpu" or not plain or tensor.numel() <= 1:
        return None  # strides of a single element are arbitrary
    dtype = to_numpy(tensor.new_empty(0)).dtype
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().view(dtype).reshape(tensor.shape)


def _iterate_pieces(array: torch.Tensor) -> Iterator[tuple[Index, torch.Tensor]]:
    """Yield the distinct pieces of this process, without copies."""
    if not isinstance(array, DTensor):
        yield make_full_index(array.shape), array.detach()
        return
    layout = get_layout(array)
    if layout is None:
        raise EngineError(
            "the DTensor has no layout",
            facts={"placements": str(array.placements)},
            why="it is a partial sum over the mesh, or its mesh has no dim names",
            fix="give it one: relayout(tensor, layout)",
        )
    refuse_outdated("values of a tensor", array)
    ranks = simulation.list_ranks(array.device_mesh)
    detached = array.detach()
    held = simulation.get_pieces(get_local(detached))
    for index, places in find_distinct_shards(layout, tuple(array.shape), _find_local_places(ranks)).values():
        yield index, held[ranks[places[0]]]


def iterate_by_device(array: torch.Tensor) -> Iterator[tuple[str, NumpyArray]]:
    """Yield the values on each rank of this process, with the name of its device."""
    if array.is_meta:
        return
    kind = _format_device_type(array.device)
    if not isinstance(array, DTensor):
        yield f"{kind}:{simulation.get_rank()}", to_numpy(array.detach())
        return
    refuse_outdated("values of a tensor", array)
    detached = array.detach()
    held = simulation.get_pieces(get_local(detached))
    for rank in simulation.filter_local_ranks(simulation.list_ranks(array.device_mesh)):
        yield f"{kind}:{rank}", to_numpy(held[rank])


def _format_device_type(device: torch.device) -> str:
    """Return the type of a device as meshes name it."""
    return {"cuda": "GPU"}.get(device.type, device.type.upper())


def shard_tensor(tensor: torch.Tensor, layout: Layout, *, pad: bool = False) -> DTensor:
    """Shard an unsharded tensor (see `fit_layout`). Gradients pass."""
    fit_layout(layout, tuple(tensor.shape), pad=pad)
    if tensor.requires_grad and torch.is_grad_enabled():
        return record_layout(_ShardTensor.apply(tensor, layout), layout)
    return from_blocks(
        tuple(tensor.shape), tensor.dtype, layout, lambda index: tensor.detach()[index].clone()
    )


class _ShardTensor(AutogradFunction):
    """Shard an unsharded tensor. Backward gathers the gradient."""

    @staticmethod
    def forward(ctx: Ctx, tensor: torch.Tensor, layout: Layout) -> DTensor:
        return shard_tensor(tensor.detach(), layout, pad=True)

    @staticmethod
    def backward(ctx: Ctx, *upstream: DTensor) -> object:
        return gather_tensor(upstream[0]), None


def gather_tensor(array: Any) -> torch.Tensor:
    """Gather all values of a tensor, without autograd. All processes with shards must call this."""
    if not isinstance(array, DTensor):
        return array.detach()
    refuse_outdated("values of a tensor", array)
    array = array.detach()
    ranks = simulation.list_ranks(array.device_mesh)
    if get_layout(array) is None:
        with simulation.simulate_ranks(ranks):
            array = redistribute_tensor(array, [Replicate()] * array.device_mesh.ndim)
    if not simulation.is_simulated():
        return get_local(_redistribute_bits(array, [Replicate()] * array.device_mesh.ndim))
    pieces = list(_iterate_pieces(array))
    if len(pieces) == 1:  # avoid a second copy of the full value
        return pieces[0][1].clone()
    made = torch.empty(array.shape, dtype=array.dtype, device=pieces[0][1].device)
    for index, piece in pieces:
        made[index] = piece
    return made


# -- relayout


def move_tensor(array: DTensor, layout: Layout, *, pad: bool = False) -> torch.Tensor:
    """Move a DTensor to another layout (see `fit_layout`). Gradients pass if the mesh is the same."""
    native, placements = fit_layout(layout, tuple(array.shape), pad=pad)
    refuse_outdated("values of a tensor", array)
    # Simulated collectives need rank 0 in the mesh.
    if array.device_mesh == native and not (
        simulation.is_simulated() and 0 not in simulation.list_ranks(native)
    ):
        with simulation.simulate_mesh(native):
            moved = _redistribute_bits(array, placements)
            # `moved` may be the same tensor with another recorded layout, so record it on a view.
            return record_layout(moved.view_as(moved) if moved is array else moved, layout)
    if get_layout(array) is None:
        # Its placements have no equivalent layout, so gather first.
        return shard_tensor(gather_tensor(array), layout, pad=pad)
    return _move_by_pieces(array, layout)


# Collectives do not support these dtypes, so send the bits in a dtype of the same width.
_CARRIERS = {
    torch.bool: torch.uint8,
    torch.uint16: torch.int16,
    torch.uint32: torch.int32,
    torch.uint64: torch.int64,
    torch.float8_e4m3fn: torch.uint8,
    torch.float8_e5m2: torch.uint8,
}


def _redistribute_bits(array: DTensor, placements: tuple[Placement, ...]) -> DTensor:
    carrier = _CARRIERS.get(array.dtype)
    if carrier is None:
        return redistribute_tensor(array, placements)
    with torch.no_grad():
        spec = get_spec(array)
        carried = make_dtensor(
            get_local(array).view(carrier), replace_placements(spec, spec.placements, carrier)
        )
        bits = get_local(redistribute_tensor(carried, placements)).view(array.dtype)
        return make_dtensor(bits, replace_placements(spec, tuple(placements), array.dtype))


def _move_by_pieces(array: DTensor, layout: Layout) -> DTensor:
    """Move a DTensor to any mesh: broadcast each distinct piece, and keep the needed parts."""
    shape, dtype = tuple(array.shape), array.dtype
    wanted = list_local_indices(layout, shape)
    made: dict[Ends, torch.Tensor] = {}
    device = get_device(convert_layout(layout)[0])
    for ends, index in wanted.items():
        made[ends] = torch.empty([part.stop - part.start for part in index], dtype=dtype, device=device)
    for index, piece in _iterate_all_pieces(array):
        for ends, target in wanted.items():
            both = intersect_blocks(index, target) if shape else ()  # a scalar has one block, without axes
            if both is not None:
                made[ends][make_relative_index(both, target)] = piece[make_relative_index(both, index)].to(
                    device
                )
    return from_blocks(shape, dtype, layout, lambda index: made[get_slice_ends(index)])


def list_local_indices(layout: Layout, shape: tuple[int, ...]) -> dict[Ends, Index]:
    """Return the distinct indices that this process stores in a layout."""
    here = bind_mesh(layout.mesh).local_device_ids
    return {ends: index for ends, (index, _) in find_distinct_shards(layout, shape, here).items()}


def _iterate_all_pieces(array: DTensor) -> Iterator[tuple[Index, torch.Tensor]]:
    """Yield each distinct piece of a DTensor in every process, one at a time."""
    if simulation.is_simulated():
        yield from _iterate_pieces(array)
        return
    layout = get_layout(array)
    assert layout is not None
    ranks, shape = simulation.list_ranks(array.device_mesh), tuple(array.shape)
    for index, places in find_distinct_shards(layout, shape, range(len(ranks))).values():
        owner = ranks[places[0]]
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
