"""DTensors made from shards, taken apart into shards, and redistributed.

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
from layoutmap.engines.protocol import Unplaced
from layoutmap.engines.torch import simulation
from layoutmap.engines.torch.backward import AutogradFunction, Ctx
from layoutmap.engines.torch.devices import (
    bound_mesh,
    device_mesh,
    device_of,
    layout_of_placements,
    placements_of,
)
from layoutmap.engines.torch.dtensor_ops import refuse_outdated
from layoutmap.engines.torch.element_types import to_numpy
from layoutmap.engines.torch.placing import redistributed
from layoutmap.engines.torch.specs import dtensor, local_of, placed_as, spec_of, spec_of_tensor

_LAYOUT = "_layoutmap_layout"
T = TypeVar("T", bound=torch.Tensor)


# -- layouts


def native_of(layout: Layout) -> tuple[DeviceMesh, tuple[Placement, ...]]:
    """The `(DeviceMesh, placements)` of a layout."""
    native = device_mesh(layout.mesh)
    return native, placements_of(layout, native)


def check_placed(
    layout: Layout, shape: tuple[int, ...], name: str = "layout"
) -> tuple[DeviceMesh, tuple[Placement, ...]]:
    """The native form of a layout that fits a shape.

    Raises:
        LayoutError: It does not fit.
    """
    layout.check_fits(shape, name)
    return native_of(layout)


def layout_of(array: torch.Tensor) -> Layout | None:
    """The layout of a DTensor, or `None` if it is on no mesh of named dims, or is a sum that is still to be reduced."""
    if not isinstance(array, DTensor):
        return None
    noted = getattr(array, _LAYOUT, None)
    if noted is not None and native_of(noted) == (array.device_mesh, array.placements):
        return noted
    return layout_of_placements(array.device_mesh, array.placements, array.ndim)


def found(array: torch.Tensor, meshes: Sequence[Mesh] = ()) -> Layout | Unplaced:
    """The layout of a tensor that any program has made, or how it is held otherwise; see `Engine.found`."""
    if not isinstance(array, DTensor):
        return _plain(array)
    placements = ", ".join(map(str, array.placements))
    try:
        layout = layout_of(array)
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


def _plain(array: torch.Tensor) -> Unplaced:
    """How a tensor is held that is no DTensor; where there are several processes, each has its own."""
    if array.is_meta:
        return Unplaced("a tensor without values, on the meta device", is_copied=True)
    kind = _kind(array.device)
    if simulation.is_simulated():
        return Unplaced(f"a plain tensor on {kind}", (f"{kind}:{array.device.index or 0}",), is_copied=True)
    ranks = tuple(f"{kind}:{each}" for each in range(simulation.world_size()))
    return Unplaced("a plain tensor: each process has its own", ranks, is_copied=True)


def mark(tensor: T, layout: Layout) -> T:
    """Note on a DTensor the layout it was made in: placements do not distinguish dims of size 1."""
    setattr(tensor, _LAYOUT, layout)
    return tensor


# -- pieces


def from_blocks(
    shape: tuple[int, ...], dtype: torch.dtype, layout: Layout, read: Callable[[Index], torch.Tensor]
) -> DTensor:
    """A DTensor from blocks; each different one that this process holds is read once.

    Args:
        shape: The global shape.
        dtype: The element type.
        layout: The layout, which fits.
        read: Gives the block at an index, with memory of its own.
    """
    native, placements = native_of(layout)
    ranks = simulation.ranks_of(native)
    device = device_of(native)
    pieces: dict[int, torch.Tensor] = {}
    for index, (first, *others) in find_distinct_shards(layout, shape, _places_here(ranks)).values():
        piece = pieces[ranks[first]] = read(index).to(device)
        # An update in place is to happen once to each.
        pieces |= {ranks[other]: piece.clone() for other in others}
    with simulation.on_mesh(native), torch.no_grad():
        local = simulation.join(dict(sorted(pieces.items())), dtype)
        made = dtensor(local, spec_of_tensor(native, placements, torch.Size(shape), dtype))
    return mark(made, layout)


def _places_here(ranks: Sequence[int]) -> list[int]:
    """The places, among the ranks of a mesh, of those whose shards this process holds."""
    here = set(simulation.ranks_here(ranks))
    return [place for place, rank in enumerate(ranks) if rank in here]


def shards_of(array: torch.Tensor, *, copy: bool = True) -> Iterator[tuple[Index, NumpyArray]]:
    """The shards that this process holds, each index once; see `Engine.to_shards`."""
    for index, piece in _pieces(array):
        yield index, to_numpy(piece) if copy else _shared(piece)


def own_memory(array: torch.Tensor) -> list[tuple[Index, NumpyArray]]:
    """The memory of the shards that this process holds; see `Engine.own_memory`. Simulated replicas have several."""
    pieces = [(index, _own(piece)) for index, piece in _pieces(array)]
    has_all = not (simulation.is_simulated() and isinstance(array, DTensor)) or len(pieces) == len(
        simulation.ranks_of(array.device_mesh)
    )
    found = [(index, memory) for index, memory in pieces if memory is not None]
    return found if has_all and len(found) == len(pieces) else []


def _shared(tensor: torch.Tensor) -> NumpyArray:
    """The values of a plain tensor in its own memory; a copy where numpy cannot reach that, which is read-only."""
    if (own := _own(tensor)) is not None:
        return own
    values = to_numpy(tensor)
    values.flags.writeable = False
    return values


def _own(tensor: torch.Tensor) -> NumpyArray | None:
    """The memory of a plain tensor; `None` if numpy does not reach it."""
    plain = tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())
    if tensor.device.type != "cpu" or not plain or tensor.numel() <= 1:
        return None  # the strides of one element may be anything
    dtype = to_numpy(tensor.new_empty(0)).dtype
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().view(dtype).reshape(tensor.shape)


def _pieces(array: torch.Tensor) -> Iterator[tuple[Index, torch.Tensor]]:
    """The different pieces that this process holds, without a copy."""
    if not isinstance(array, DTensor):
        yield make_full_index(array.shape), array.detach()
        return
    layout = layout_of(array)
    if layout is None:
        raise EngineError(
            "the DTensor has no layout",
            facts={"placements": str(array.placements)},
            why="it is a partial sum over the mesh, or its mesh has no names",
            fix="give it one: relayout(tensor, layout)",
        )
    refuse_outdated("values of a tensor", array)
    ranks = simulation.ranks_of(array.device_mesh)
    detached = array.detach()
    held = simulation.pieces_of(local_of(detached))
    for index, places in find_distinct_shards(layout, tuple(array.shape), _places_here(ranks)).values():
        yield index, held[ranks[places[0]]]


def by_device(array: torch.Tensor) -> Iterator[tuple[str, NumpyArray]]:
    """The values that each rank of this process holds, with the name of its device."""
    if array.is_meta:
        return
    kind = _kind(array.device)
    if not isinstance(array, DTensor):
        yield f"{kind}:{simulation.rank()}", to_numpy(array.detach())
        return
    refuse_outdated("values of a tensor", array)
    detached = array.detach()
    held = simulation.pieces_of(local_of(detached))
    for rank in simulation.ranks_here(simulation.ranks_of(array.device_mesh)):
        yield f"{kind}:{rank}", to_numpy(held[rank])


def _kind(device: torch.device) -> str:
    """The name of a type of devices, as those of meshes have it."""
    return {"cuda": "GPU"}.get(device.type, device.type.upper())


def shard(tensor: torch.Tensor, layout: Layout) -> DTensor:
    """Return a plain tensor in a layout, which fits; gradients pass."""
    check_placed(layout, tuple(tensor.shape))
    if tensor.requires_grad and torch.is_grad_enabled():
        return mark(_ShardTensor.apply(tensor, layout), layout)
    return from_blocks(
        tuple(tensor.shape), tensor.dtype, layout, lambda index: tensor.detach()[index].clone()
    )


class _ShardTensor(AutogradFunction):
    """Sharding a plain tensor: its gradient is gathered."""

    @staticmethod
    def forward(ctx: Ctx, tensor: torch.Tensor, layout: Layout) -> DTensor:
        return shard(tensor.detach(), layout)

    @staticmethod
    def backward(ctx: Ctx, *upstream: DTensor) -> object:
        return gather(upstream[0]), None


def gather(array: Any) -> torch.Tensor:
    """All values of a tensor as a plain one, without a step of autograd; all processes that hold some must ask."""
    if not isinstance(array, DTensor):
        return array.detach()
    refuse_outdated("values of a tensor", array)
    array = array.detach()
    ranks = simulation.ranks_of(array.device_mesh)
    if layout_of(array) is None:
        with simulation.on_ranks(ranks):
            array = redistributed(array, [Replicate()] * array.device_mesh.ndim)
    if not simulation.is_simulated():
        return local_of(_redistributed(array, [Replicate()] * array.device_mesh.ndim))
    pieces = list(_pieces(array))
    if len(pieces) == 1:  # no second copy of all of it
        return pieces[0][1].clone()
    made = torch.empty(array.shape, dtype=array.dtype, device=pieces[0][1].device)
    for index, piece in pieces:
        made[index] = piece
    return made


# -- between layouts


def move(array: DTensor, layout: Layout) -> torch.Tensor:
    """A DTensor in another layout, which fits; gradients pass where the mesh stays."""
    native, placements = check_placed(layout, tuple(array.shape))
    refuse_outdated("values of a tensor", array)
    # Simulated ranks have collectives only on meshes that rank 0 is on.
    if array.device_mesh == native and not (
        simulation.is_simulated() and 0 not in simulation.ranks_of(native)
    ):
        with simulation.on_mesh(native):
            moved = _redistributed(array, placements)
            # It may be the very tensor, on which another layout is noted.
            return mark(moved.view_as(moved) if moved is array else moved, layout)
    if layout_of(array) is None:
        return shard(gather(array), layout)  # its placements have no layout: pieces cannot be told
    return _moved_by_pieces(array, layout)


# Element types that collectives do not know -> those of as many bits that they do.
_CARRIERS = {
    torch.bool: torch.uint8,
    torch.uint16: torch.int16,
    torch.uint32: torch.int32,
    torch.uint64: torch.int64,
    torch.float8_e4m3fn: torch.uint8,
    torch.float8_e5m2: torch.uint8,
}


def _redistributed(array: DTensor, placements: tuple[Placement, ...]) -> DTensor:
    carrier = _CARRIERS.get(array.dtype)
    if carrier is None:
        return redistributed(array, placements)
    with torch.no_grad():
        spec = spec_of(array)
        carried = dtensor(local_of(array).view(carrier), placed_as(spec, spec.placements, carrier))
        bits = local_of(redistributed(carried, placements)).view(array.dtype)
        return dtensor(bits, placed_as(spec, tuple(placements), array.dtype))


def _moved_by_pieces(array: DTensor, layout: Layout) -> DTensor:
    """A DTensor on any mesh: each different piece is shown to all processes, which keep what is theirs."""
    shape, dtype = tuple(array.shape), array.dtype
    wanted = layout_indices(layout, shape)
    made: dict[Ends, torch.Tensor] = {}
    device = device_of(native_of(layout)[0])
    for ends, index in wanted.items():
        made[ends] = torch.empty([part.stop - part.start for part in index], dtype=dtype, device=device)
    for index, piece in _all_pieces(array):
        for ends, target in wanted.items():
            both = intersect_blocks(index, target) if shape else ()  # a scalar is one block, without axes
            if both is not None:
                made[ends][make_relative_index(both, target)] = piece[make_relative_index(both, index)].to(
                    device
                )
    return from_blocks(shape, dtype, layout, lambda index: made[get_slice_ends(index)])


def layout_indices(layout: Layout, shape: tuple[int, ...]) -> dict[Ends, Index]:
    """The different indices that this process holds in a layout."""
    here = bound_mesh(layout.mesh).local_device_ids
    return {ends: index for ends, (index, _) in find_distinct_shards(layout, shape, here).items()}


def _all_pieces(array: DTensor) -> Iterator[tuple[Index, torch.Tensor]]:
    """Every different piece of a DTensor, in every process, one at a time."""
    if simulation.is_simulated():
        yield from _pieces(array)
        return
    layout = layout_of(array)
    assert layout is not None
    ranks, shape = simulation.ranks_of(array.device_mesh), tuple(array.shape)
    for index, places in find_distinct_shards(layout, shape, range(len(ranks))).values():
        owner = ranks[places[0]]
        if owner == simulation.rank():
            piece = local_of(array.detach()).contiguous()
        else:
            piece = torch.empty(
                [part.stop - part.start for part in index], dtype=array.dtype, device=array.device
            )
        if piece.numel():
            # As bytes: collectives do not know every element type.
            dist.broadcast(piece.view(-1).view(torch.uint8), src=owner)
        yield index, piece
