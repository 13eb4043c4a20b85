"""Make and read DTensors and their specs without autograd and without DTensor's checks.

A spec has the mesh, placements, shape, strides and element type of a `DTensor`. Making one takes longer than computing
a small product, so specs are cached.
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

from layoutmap.engines.tested import ImportErrorConverter, check_names_exist

with ImportErrorConverter("torch"):
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache  # pyright: ignore[reportPrivateUsage]

check_names_exist("torch", (DTensor, "_local_tensor _spec"))

P = ParamSpec("P")
R = TypeVar("R")

get_local = attrgetter("_local_tensor")
"""Return the local tensor of a `DTensor`, without autograd."""

get_spec = attrgetter("_spec")
"""Return the spec of a `DTensor`: its mesh, placements, shape, strides, and dtype."""

get_meta = attrgetter("tensor_meta")
"""Return the shape, strides, and dtype of a spec."""

get_axis: Callable[[Placement], int] = attrgetter("dim")
"""Return the axis that a placement shards."""


def set_local_tensor(array: DTensor, local: torch.Tensor, spec: DTensorSpec) -> None:
    """Replace the local tensor and the spec of a DTensor in place."""
    array._local_tensor, array._spec = local, spec  # pyright: ignore[reportPrivateUsage]


def make_dtensor(local: torch.Tensor, spec: DTensorSpec) -> DTensor:
    """Return a DTensor of a local tensor and a spec, without autograd and without the checks of `from_local`."""
    make: Any = DTensor.__new__  # faster than the constructor, which would only call this
    return make(DTensor, local, spec, requires_grad=False)


def cache_while_meshes_exist(function: Callable[P, R]) -> Callable[P, R]:
    """Return a function that caches results until `clear_sharding_caches` is called."""
    # The cache is bounded, because a program may use any number of sequence lengths.
    cached: Any = functools.lru_cache(maxsize=4096)(function)
    _cached_functions.append(cached)
    return cached


_cached_functions: list[Any] = []


def clear_sharding_caches() -> None:
    """Clear DTensor's cache of shardings and this module's caches, because they keep device meshes alive."""
    # The keys of DTensor's caches keep meshes alive, and meshes keep the process group alive, so clear the caches.
    _clear_sharding_prop_cache()
    for each in _cached_functions:
        each.cache_clear()


@cache_while_meshes_exist
def copy_spec_with_placements(
    spec: DTensorSpec, placements: tuple[Placement, ...], dtype: torch.dtype
) -> DTensorSpec:
    """Return a copy of a spec with the given placements and dtype."""
    keeps: dict[str, Any] = (
        {_FLAG: False} if placements == spec.placements and has_strided_shards_of_view(spec) else {}
    )
    return DTensorSpec(spec.mesh, placements, tensor_meta=get_meta(spec)._replace(dtype=dtype), **keeps)


_FLAG = "use_strided_shard_as_shard_order"


def has_strided_shards_of_view(spec: DTensorSpec) -> bool:
    """Return whether a spec has strided shards that only a view can have. Nothing can be redistributed to them.

    `redistribute` takes strided shards for axes that are sharded over mesh dims in another order, as layouts have them.
    """
    return not getattr(spec, _FLAG, True) and any(
        type(each) is not Shard and not each.is_replicate() and not each.is_partial()
        for each in spec.placements
    )


def mark_strided_shards_of_view(spec: Any, order: object) -> None:
    """Mark the strided shards of a spec as those of a view, and set its `shard_order`."""
    spec.shard_order = order
    setattr(spec, _FLAG, False)


def copy_spec_with_placement(
    spec: DTensorSpec, mesh_dim: int, placement: Placement, dtype: torch.dtype
) -> DTensorSpec:
    """Return a copy of a spec with the given placement on one mesh dim, and with the given dtype."""
    placements = [placement if i == mesh_dim else each for i, each in enumerate(spec.placements)]
    return copy_spec_with_placements(spec, tuple(placements), dtype)


def has_even_shards(spec: DTensorSpec) -> bool:
    """Return whether all devices have shards of equal size."""
    return not any(size % count for size, count in zip(spec.shape, _count_shards_per_axis(spec), strict=True))


def compute_largest_shard_shape(spec: DTensorSpec) -> list[int]:
    """Return the shape of the largest shard."""
    return [-(-size // count) for size, count in zip(spec.shape, _count_shards_per_axis(spec), strict=True)]


def _count_shards_per_axis(spec: DTensorSpec) -> list[int]:
    counts = [1] * len(spec.shape)
    for dim, placement in enumerate(spec.placements):
        if placement.is_shard():
            counts[get_axis(placement)] *= spec.mesh.size(dim)
    return counts


@cache_while_meshes_exist
def make_spec_from_shard(
    mesh: DeviceMesh,
    placements: tuple[Placement, ...],
    shape: Sequence[int],
    strides: Sequence[int],
    dtype: torch.dtype,
) -> DTensorSpec:
    """Return the spec of a DTensor with equal shards of this shape and these strides."""
    for dim, placement in enumerate(placements):
        if placement.is_shard():
            axis, number = get_axis(placement), mesh.size(dim)
            # If strides are equal, count an axis as slower in memory if it is an earlier one, or has several elements.
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


@cache_while_meshes_exist
def make_row_major_spec(
    mesh: DeviceMesh, placements: tuple[Placement, ...], shape: Sequence[int], dtype: torch.dtype
) -> DTensorSpec:
    """Return the spec of a DTensor with its axes in row-major order in memory."""
    strides = tuple(math.prod(max(size, 1) for size in shape[axis + 1 :]) for axis in range(len(shape)))
    return DTensorSpec(mesh, placements, tensor_meta=TensorMeta(torch.Size(shape), strides, dtype))
