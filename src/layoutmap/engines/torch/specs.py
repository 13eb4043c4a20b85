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

local_of = attrgetter("_local_tensor")
"""The local tensor of a `DTensor`, without a step of autograd."""

spec_of = attrgetter("_spec")
"""The mesh, placements, shape and element type of a `DTensor`."""

meta_of = attrgetter("tensor_meta")
"""The shape, strides and element type of a spec."""

axis_of: Callable[[Placement], int] = attrgetter("dim")
"""The axis along which a placement shards."""


def set_pieces(array: DTensor, local: torch.Tensor, spec: DTensorSpec) -> None:
    """Have a `DTensor` hold another local tensor, placed as a spec says."""
    array._local_tensor, array._spec = local, spec  # pyright: ignore[reportPrivateUsage]


def dtensor(local: torch.Tensor, spec: DTensorSpec) -> DTensor:
    """A `DTensor` of a piece of this process, outside of autograd: `from_local` without its checks."""
    make: Any = DTensor.__new__  # what __init__ does takes longer, and is nothing
    return make(DTensor, local, spec, requires_grad=False)


def cached_by_mesh(function: Callable[P, R]) -> Callable[P, R]:
    """A function that remembers what it returned, until DTensor is to forget its meshes."""
    cached: Any = functools.lru_cache(maxsize=4096)(function)  # lengths of sequences vary without end
    _of_meshes.append(cached)
    return cached


_of_meshes: list[Any] = []


def clear_sharding_caches() -> None:
    """Have DTensor forget how operations on device meshes come out, and with that the meshes."""
    _clear_sharding_prop_cache()  # its keys hold device meshes, and these the process group
    for each in _of_meshes:
        each.cache_clear()


@cached_by_mesh
def placed_as(spec: DTensorSpec, placements: tuple[Placement, ...], dtype: torch.dtype) -> DTensorSpec:
    """A spec with other placements, of another element type."""
    keeps: dict[str, Any] = {_MEANING: False} if placements == spec.placements and is_of_view(spec) else {}
    return DTensorSpec(spec.mesh, placements, tensor_meta=meta_of(spec)._replace(dtype=dtype), **keeps)


_MEANING = "use_strided_shard_as_shard_order"


def is_of_view(spec: DTensorSpec) -> bool:
    """Whether the strided shards of a spec are those that views make, to which no other tensor can be redistributed.

    `redistribute` takes what it is asked for to be in another order of mesh dims, as those of layouts are.
    """
    return not getattr(spec, _MEANING, True) and any(
        type(each) is not Shard and not each.is_replicate() and not each.is_partial()
        for each in spec.placements
    )


def make_of_view(spec: Any, order: object) -> None:
    """Have the strided shards of a spec be those that views make; `order` is its `shard_order`."""
    spec.shard_order = order
    setattr(spec, _MEANING, False)


def placed_over(spec: DTensorSpec, mesh_dim: int, placement: Placement, dtype: torch.dtype) -> DTensorSpec:
    """A spec with another placement for one mesh dim, of another element type."""
    placements = [placement if i == mesh_dim else each for i, each in enumerate(spec.placements)]
    return placed_as(spec, tuple(placements), dtype)


@cached_by_mesh
def spec_of_shards(
    mesh: DeviceMesh,
    placements: tuple[Placement, ...],
    shape: Sequence[int],
    strides: Sequence[int],
    dtype: torch.dtype,
) -> DTensorSpec:
    """The spec of a DTensor of which each device has a shard of a shape, whose axes are in memory as strides say."""
    for dim, placement in enumerate(placements):
        if placement.is_shard():
            axis, number = axis_of(placement), mesh.size(dim)
            # Of axes with one stride and one element the first is major.
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


@cached_by_mesh
def spec_of_tensor(
    mesh: DeviceMesh, placements: tuple[Placement, ...], shape: Sequence[int], dtype: torch.dtype
) -> DTensorSpec:
    """The spec of a DTensor whose axes are in memory in their order."""
    strides = tuple(math.prod(max(size, 1) for size in shape[axis + 1 :]) for axis in range(len(shape)))
    return DTensorSpec(mesh, placements, tensor_meta=TensorMeta(torch.Size(shape), strides, dtype))
