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
from layoutmap.engines.torch.specs import cache_by_mesh, make_dtensor, make_tensor_spec

# Further rounds change only bits below the threshold's precision.
_ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_PIECE = 1 << 16  # elements to hash at once, which fit into a CPU cache
_LARGE_PIECE = 1 << 22  # elements, on devices other than CPUs

Places = tuple[Sequence[int], ...]  # positions along each axis


# A mask must not depend on the mesh, so devices hash the positions of their elements (decisions/0102).
def draw_sharded_mask(
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    p: float,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    *,
    over: float = 1.0,
) -> DTensor:
    """Return a DTensor of zeros and ones, divided by `over`, of which each device draws its own shard.

    Args:
        shape: The global shape.
        dtype: The element type.
        device: Where it is made, and whose generator gives a number.
        p: The probability of a zero, between 0 and 1.
        mesh: The `DeviceMesh`.
        placements: How it is sharded; none is a sum.
        over: What the ones are divided by, where there are any.
    """
    size, placements, over = torch.Size(shape), tuple(placements), over or 1.0
    seed = torch.randint(-(1 << 62), (1 << 62) - 1, (), device=device)
    made: dict[Places, torch.Tensor] = {}
    pieces: dict[int, torch.Tensor] = {}
    for rank, places in _find_local_places(size, mesh, placements).items():
        if places in made:  # simulated devices with equal parts get separate copies
            pieces[rank] = made[places].clone()
        else:
            pieces[rank] = made[places] = _draw_mask(places, size, seed, p, dtype, over)
    return make_dtensor(
        simulation.join_pieces(pieces, dtype), make_tensor_spec(mesh, placements, size, dtype)
    )


@cache_by_mesh
def _find_local_places(
    shape: torch.Size, mesh: DeviceMesh, placements: tuple[Placement, ...]
) -> Mapping[int, Places]:
    """Return the global indices of each local rank's elements along each axis."""
    ranks = simulation.list_ranks(mesh)
    found: dict[int, Places] = {}
    for rank in simulation.filter_local_ranks(ranks):
        coordinates = [int(each) for each in np.unravel_index(ranks.index(rank), mesh.shape)]
        found[rank] = tuple(
            _find_axis_places(axis, size, mesh.shape, placements, coordinates)
            for axis, size in enumerate(shape)
        )
    return found


def _find_axis_places(
    axis: int,
    size: int,
    mesh_shape: Sequence[int],
    placements: Sequence[Placement],
    coordinates: Sequence[int],
) -> Sequence[int]:
    places: Sequence[int] = range(size)
    for number, placement, coordinate in zip(mesh_shape, placements, coordinates, strict=True):
        if getattr(placement, "dim", None) != axis:
            continue
        strides = getattr(placement, "split_factor", 1)
        parts = [_take_part(_take_part(places, strides, each), number, coordinate) for each in range(strides)]
        places = parts[0] if strides == 1 else tuple(place for part in parts for place in part)
    return places


def _take_part(places: Sequence[int], number: int, which: int) -> Sequence[int]:
    length = -(-len(places) // number)
    return places[which * length : (which + 1) * length]


def _draw_mask(
    places: Places, shape: torch.Size, seed: torch.Tensor, p: float, dtype: torch.dtype, over: float
) -> torch.Tensor:
    """Return the elements at some places of a mask."""
    steps = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    most_dropped = max(int(p * 2.0**64) - 1, 0) - (1 << 63)
    if type(seed) is not torch.Tensor:  # the seed is recorded for a graph, whose compiler divides
        return (_hash_places(seed, places, steps) > most_dropped).to(dtype).div_(over)
    mask = torch.empty([len(each) for each in places], dtype=dtype, device=seed.device)
    piece = _PIECE if seed.device.type == "cpu" else _LARGE_PIECE

    def fill(part: torch.Tensor, places: Places) -> None:
        if part.numel() <= piece:
            part.copy_(_hash_places(seed, places, steps) > most_dropped).div_(over)
            return
        axis = next(axis for axis, each in enumerate(places) if len(each) > 1)
        half = len(places[axis]) // 2
        for chosen, length in ((slice(half), half), (slice(half, None), len(places[axis]) - half)):
            inner = (*places[:axis], places[axis][chosen], *places[axis + 1 :])
            fill(part.narrow(axis, chosen.start or 0, length), inner)

    fill(mask, places)
    return mask


def _hash_places(seed: torch.Tensor, places: Places, steps: Sequence[int]) -> torch.Tensor:
    """Return the hash of the seed at some places, evenly distributed over all int64."""
    # Avoid overflow before the first round. inductor computes with loop counters, whose overflow is undefined in
    # C++, so the compiler could drop the end of a loop.
    mixed = seed.clone()
    for axis in range(len(places) - 1, -1, -1):
        along = _convert_places(places[axis], seed.device).mul_(steps[axis])
        mixed = mixed + along.view(-1, *[1] * (len(places) - 1 - axis))
    for shift, factor in _ROUNDS:
        mixed ^= (mixed >> shift).bitwise_and_((1 << (64 - shift)) - 1)
        mixed *= factor - (1 << 64)
    return mixed


def _convert_places(places: Sequence[int], device: torch.device) -> torch.Tensor:
    if isinstance(places, range):
        return torch.arange(places.start, places.stop, device=device)
    return torch.tensor(places, dtype=torch.int64, device=device)
