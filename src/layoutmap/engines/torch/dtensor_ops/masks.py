"""Draw dropout masks for `draws="tiles"`: each device draws its shard of a mask that does not depend on the mesh.

A call takes one number from the generator of the program. An element is kept if a hash of that number plus the
element's place in the global tensor is large enough, so a part of a mask can be computed alone, on any device and in a
graph. The hash is that of SplitMix64, which mixes numbers that follow each other.

References:
    Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, OOPSLA 2014; its mix64variant13.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from layoutmap.engines.torch import simulation
from layoutmap.engines.torch.specs import cache_while_meshes_exist, make_dtensor, make_row_major_spec

# Two rounds of the hash suffice, because a third would change only bits below the precision of the threshold.
_ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_PIECE = 1 << 16  # number of elements to hash at once; so many fit into a CPU cache
_LARGE_PIECE = 1 << 22  # number of elements to hash at once on other devices

AxisIndices = tuple[Sequence[int], ...]  # global positions along each axis


# A mask must not depend on the mesh, so devices compute it by a hash of each element's position (decisions/0102).
def draw_sharded_mask(
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    p: float,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    *,
    divisor: float = 1.0,
) -> DTensor:
    """Return a random mask as a DTensor with elements 0 and 1 / `divisor`. Each device draws only its own shard.

    Args:
        shape: The global shape.
        dtype: The element type.
        device: The device of the mask and of the generator that is used.
        p: The probability of a zero, between 0 and 1.
        mesh: The `DeviceMesh`.
        placements: The placements of the mask, none of them partial.
        divisor: The ones are divided by this number, or by 1 if it is 0.
    """
    size, placements, divisor = torch.Size(shape), tuple(placements), divisor or 1.0
    seed = torch.randint(-(1 << 62), (1 << 62) - 1, (), device=device)
    made: dict[AxisIndices, torch.Tensor] = {}
    pieces: dict[int, torch.Tensor] = {}
    for rank, indices in _find_element_indices_by_rank(size, mesh, placements).items():
        if indices in made:  # a different simulated rank has the same elements of the mask, so copy them
            pieces[rank] = made[indices].clone()
        else:
            pieces[rank] = made[indices] = _draw_mask_block(indices, size, seed, p, dtype, divisor)
    return make_dtensor(
        simulation.make_local_tensor(pieces, dtype), make_row_major_spec(mesh, placements, size, dtype)
    )


@cache_while_meshes_exist
def _find_element_indices_by_rank(
    shape: torch.Size, mesh: DeviceMesh, placements: tuple[Placement, ...]
) -> Mapping[int, AxisIndices]:
    """Return, for each local rank, the global indices of its elements along each axis."""
    ranks = simulation.list_ranks(mesh)
    found: dict[int, AxisIndices] = {}
    for rank in simulation.filter_local_ranks(ranks):
        coordinates = [int(each) for each in np.unravel_index(ranks.index(rank), mesh.shape)]
        found[rank] = tuple(
            _find_axis_indices(axis, size, mesh.shape, placements, coordinates)
            for axis, size in enumerate(shape)
        )
    return found


def _find_axis_indices(
    axis: int,
    size: int,
    mesh_shape: Sequence[int],
    placements: Sequence[Placement],
    coordinates: Sequence[int],
) -> Sequence[int]:
    """Return the global indices along one axis that the rank at some mesh coordinates has."""
    indices: Sequence[int] = range(size)
    for number, placement, coordinate in zip(mesh_shape, placements, coordinates, strict=True):
        if getattr(placement, "dim", None) != axis:
            continue
        strides = getattr(placement, "split_factor", 1)
        parts = [
            _select_chunk(_select_chunk(indices, strides, i), number, coordinate) for i in range(strides)
        ]
        indices = parts[0] if strides == 1 else tuple(place for part in parts for place in part)
    return indices


def _select_chunk(indices: Sequence[int], num_chunks: int, chunk: int) -> Sequence[int]:
    length = -(-len(indices) // num_chunks)
    return indices[chunk * length : (chunk + 1) * length]


def _draw_mask_block(
    indices: AxisIndices, shape: torch.Size, seed: torch.Tensor, p: float, dtype: torch.dtype, divisor: float
) -> torch.Tensor:
    """Return the elements of a mask at some indices along each axis."""
    steps = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    most_dropped = max(int(p * 2.0**64) - 1, 0) - (1 << 63)
    # While a graph is recorded, hash all elements at once, because the graph's compiler splits the loop.
    if type(seed) is not torch.Tensor:
        return (_hash_element_indices(seed, indices, steps) > most_dropped).to(dtype).div_(divisor)
    mask = torch.empty([len(each) for each in indices], dtype=dtype, device=seed.device)
    piece = _PIECE if seed.device.type == "cpu" else _LARGE_PIECE

    def fill_block(block: torch.Tensor, indices: AxisIndices) -> None:
        if block.numel() <= piece:
            block.copy_(_hash_element_indices(seed, indices, steps) > most_dropped).div_(divisor)
            return
        axis = next(axis for axis, each in enumerate(indices) if len(each) > 1)
        half = len(indices[axis]) // 2
        for chosen, length in ((slice(half), half), (slice(half, None), len(indices[axis]) - half)):
            inner = (*indices[:axis], indices[axis][chosen], *indices[axis + 1 :])
            fill_block(block.narrow(axis, chosen.start or 0, length), inner)

    fill_block(mask, indices)
    return mask


def _hash_element_indices(seed: torch.Tensor, indices: AxisIndices, steps: Sequence[int]) -> torch.Tensor:
    """Return a hash of the seed and of each element's global position, uniform over all int64."""
    # Let nothing overflow before the first round. inductor computes with loop counters, whose overflow is undefined in
    # C++, so the compiler could drop the end of a loop.
    mixed = seed.clone()
    for axis in range(len(indices) - 1, -1, -1):
        along = _convert_indices_to_tensor(indices[axis], seed.device).mul_(steps[axis])
        mixed = mixed + along.view(-1, *[1] * (len(indices) - 1 - axis))
    for shift, factor in _ROUNDS:
        mixed ^= (mixed >> shift).bitwise_and_((1 << (64 - shift)) - 1)
        mixed *= factor - (1 << 64)
    return mixed


def _convert_indices_to_tensor(indices: Sequence[int], device: torch.device) -> torch.Tensor:
    if isinstance(indices, range):
        return torch.arange(indices.start, indices.stop, device=device)
    return torch.tensor(indices, dtype=torch.int64, device=device)
