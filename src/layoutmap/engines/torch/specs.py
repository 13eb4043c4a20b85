"""DTensors and their specs, made and read without a step of autograd, and without DTensor's checks.

A spec has the mesh, placements, shape, strides and element type of a `DTensor`. Making one takes longer than computing
a small product, so they are remembered.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, ParamSpec, TypeVar

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard

from layoutmap.engines.tested import Needed, check_names

with Needed("torch"):
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache  # pyright: ignore[reportPrivateUsage]

check_names("torch", (DTensor, "_local_tensor _spec"))

P = ParamSpec("P")
R = TypeVar("R")

get_local = attrgetter("_local_tensor")
"""The local tensor of a `DTensor`, without a step of autograd."""

get_spec = attrgetter("_spec")
"""The mesh, placements, shape and element type of a `DTensor`."""

get_meta = attrgetter("tensor_meta")
"""The shape, strides and element type of a spec."""

get_axis: Callable[[Placement], int] = attrgetter("dim")
"""The axis along which a placement shards."""


def set_pieces(array: DTensor, local: torch.Tensor, spec: DTensorSpec) -> None:
    """Have a `DTensor` hold another local tensor, placed as a spec says."""
    array._local_tensor, array._spec = local, spec  # pyright: ignore[reportPrivateUsage]


def make_dtensor(local: torch.Tensor, spec: DTensorSpec) -> DTensor:
    """Return a DTensor of a local tensor, outside of autograd and without the checks of `from_local`."""
    make: Any = DTensor.__new__  # faster than the constructor, which does nothing more
    return make(DTensor, local, spec, requires_grad=False)


def cache_by_mesh(function: Callable[P, R]) -> Callable[P, R]:
    """Return the function with a cache that is cleared when DTensor is to forget its meshes."""
    # Bounded, because sequence lengths vary without limit.
    cached: Any = functools.lru_cache(maxsize=4096)(function)
    _of_meshes.append(cached)
    return cached


_of_meshes: list[Any] = []


def clear_sharding_caches() -> None:
    """Have DTensor forget how operations on device meshes come out, and with that the meshes."""
    _clear_sharding_prop_cache()  # cache keys reference meshes, which reference the process group
    for each in _of_meshes:
        each.cache_clear()


@cache_by_mesh
def replace_placements(
    spec: DTensorSpec, placements: tuple[Placement, ...], dtype: torch.dtype
) -> DTensorSpec:
    """Return a spec with other placements and another dtype."""
    keeps: dict[str, Any] = {_MEANING: False} if placements == spec.placements and is_view_spec(spec) else {}
    return DTensorSpec(spec.mesh, placements, tensor_meta=get_meta(spec)._replace(dtype=dtype), **keeps)


_MEANING = "use_strided_shard_as_shard_order"


def is_view_spec(spec: DTensorSpec) -> bool:
    """Return whether a spec has strided shards that only views have. Nothing can be redistributed to them.

    `redistribute` takes what it is asked for to be in another order of mesh dims, as those of layouts are.
    """
    return not getattr(spec, _MEANING, True) and any(
        type(each) is not Shard and not each.is_replicate() and not each.is_partial()
        for each in spec.placements
    )


def mark_view_spec(spec: Any, order: object) -> None:
    """Mark the strided shards of a spec as those of a view, with this `shard_order`."""
    spec.shard_order = order
    setattr(spec, _MEANING, False)


def replace_placement(
    spec: DTensorSpec, mesh_dim: int, placement: Placement, dtype: torch.dtype
) -> DTensorSpec:
    """Return a spec with another placement on one mesh dim, and another dtype."""
    placements = [placement if i == mesh_dim else each for i, each in enumerate(spec.placements)]
    return replace_placements(spec, tuple(placements), dtype)


def has_even_shards(spec: DTensorSpec) -> bool:
    """Return whether all devices have shards of equal size."""
    return not any(size % count for size, count in zip(spec.shape, _count_shards(spec), strict=True))


def compute_largest_shard(spec: DTensorSpec) -> list[int]:
    """Return the shape of the largest shard."""
    return [-(-size // count) for size, count in zip(spec.shape, _count_shards(spec), strict=True)]


def _count_shards(spec: DTensorSpec) -> list[int]:
    counts = [1] * len(spec.shape)
    for dim, placement in enumerate(spec.placements):
        if placement.is_shard():
            counts[get_axis(placement)] *= spec.mesh.size(dim)
    return counts


@cache_by_mesh
def make_shard_spec(
    mesh: DeviceMesh,
    placements: tuple[Placement, ...],
    shape: Sequence[int],
    strides: Sequence[int],
    dtype: torch.dtype,
) -> DTensorSpec:
    """Return the spec of a DTensor, from the shape and strides of each device's shard."""
    for dim, placement in enumerate(placements):
        if placement.is_shard():
            axis, number = get_axis(placement), mesh.size(dim)
            # Among axes of equal stride and size 1, the first one is major.
            is_above = [
                step > strides[axis] or (step == strides[axis] and (i < axis or shape[i] > 1))
                for i, step in enumerate(strides)
            ]
            strides = [
                step * number if i != axis and above else step
                for i, (step, above) in enumerate(zip(strides, is_above, strict=True))
            ]
            shape = [size * number if i == axis else size for i, size in enumerate(shape)]
    return DTensorSpec(mesh, placements, tensor_meta=TensorMeta(torch.Size(shape), tuple(strides), dtype))


@cache_by_mesh
def make_tensor_spec(
    mesh: DeviceMesh, placements: tuple[Placement, ...], shape: Sequence[int], dtype: torch.dtype
) -> DTensorSpec:
    """Return the spec of a DTensor with its axes in row-major order in memory."""
    strides = tuple(math.prod(max(size, 1) for size in shape[axis + 1 :]) for axis in range(len(shape)))
    return DTensorSpec(mesh, placements, tensor_meta=TensorMeta(torch.Size(shape), strides, dtype))
