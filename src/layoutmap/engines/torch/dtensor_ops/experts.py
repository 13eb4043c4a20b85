"""Divide a layer of experts into the parts of each process, and combine their results.

The layer treats its tokens independently, and adds up the results of its experts. So each process can compute its
tokens and its experts alone, where mesh dims shard them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Shard

from layoutmap.engines.torch.dtensor_ops.lookups import convert_to_local_rows, sum_local_tensors_to_dtensor
from layoutmap.engines.torch.dtensor_ops.outside import install_patches_for_mesh
from layoutmap.engines.torch.dtensor_ops.shards import (
    find_axes_that_stay_sharded,
    redistribute_to_local_shard,
)
from layoutmap.engines.torch.modes import skip_function_modes
from layoutmap.engines.torch.placing import (
    extract_shard,
    gather_if_sharded,
    make_dtensor_from_shards,
    make_replicated_placements,
)
from layoutmap.engines.torch.specs import DTensorSpec, cache_while_meshes_exist, get_axis, get_spec


@dataclass(frozen=True, slots=True)
class DividedExperts:
    """The division of a layer of experts among processes.

    Args:
        token_axes: A dict from the position of each mesh dim that shards the tokens to their axis, 0.
        expert_dims: The positions of the mesh dims that shard the weights by expert.
        other_dims: The positions of the mesh dims that shard the weights along other axes.
        num_experts: The number of experts in the layer; `None`: they are not divided.
        num_local_experts: The number of experts in this process.
    """

    token_axes: Mapping[int, int]
    expert_dims: tuple[int, ...]
    other_dims: tuple[int, ...]
    num_experts: int | None
    num_local_experts: int

    @skip_function_modes
    def take_tensors(self, tensors: Sequence[DTensor]) -> list[torch.Tensor]:
        """Return this process's part of the layer's arguments, as plain tensors, or as DTensors on the other dims.

        Experts of other processes get the number `num_local_experts`, and weight 0.
        """
        mesh = tensors[0].device_mesh
        shards = [
            redistribute_to_local_shard(each, mesh, self.token_axes, self.expert_dims) for each in tensors
        ]
        if self.expert_dims and self.num_experts is not None:
            numbers, is_here = convert_to_local_rows(shards[1], self.num_experts, mesh, self.expert_dims)
            shards[1] = numbers.masked_fill(~is_here, self.num_local_experts)
            shards[2] = shards[2].masked_fill(~is_here, 0)
        return [self._wrap_on_other_dims(each, mesh, make_replicated_placements(mesh)) for each in shards]

    @skip_function_modes
    def take_weight(self, weight: DTensor) -> torch.Tensor:
        """Return this process's part of a weight, as `take_tensors`. Its gradient is summed over the tokens' dims."""
        spec = get_spec(weight)
        gradient = [Partial() if dim in self.token_axes else each for dim, each in enumerate(spec.placements)]
        shape = (self.num_local_experts, *weight.shape[1:]) if self.expert_dims else weight.shape
        return self._wrap_on_other_dims(extract_shard(weight, gradient), spec.mesh, spec.placements, shape)

    @skip_function_modes
    def combine_results(self, result: torch.Tensor, tokens: DTensor) -> DTensor:
        """Return the results of all processes as one DTensor, summed over experts."""
        mesh, shape = tokens.device_mesh, (tokens.shape[0], *result.shape[1:])
        local = gather_if_sharded(result)
        return sum_local_tensors_to_dtensor(local, mesh, self.token_axes, self.expert_dims, shape)

    def _wrap_on_other_dims(
        self,
        local: torch.Tensor,
        mesh: DeviceMesh,
        placements: Sequence[Placement],
        shape: Sequence[int] | None = None,
    ) -> torch.Tensor:
        # On a mesh of the other dims alone, no operator can communicate over the dims of tokens and experts.
        if not self.other_dims:
            return local
        inner = _slice_device_mesh(mesh, self.other_dims)
        install_patches_for_mesh(inner)  # also if the slice is cached, because patches may have been removed
        return make_dtensor_from_shards(local, inner, [placements[dim] for dim in self.other_dims], shape)


@skip_function_modes
def divide_experts(
    tensors: Sequence[DTensor], weights: Sequence[DTensor], num_experts: int | None
) -> DividedExperts | None:
    """Return how processes divide a layer of experts, or None if each must compute the whole layer.

    Args:
        tensors: The tokens (tokens, width), and the numbers and weights of the experts of each (tokens, experts).
        weights: The weights of the layer.
        num_experts: The number of experts; `None`: each process must compute all of them.
    """
    mesh, specs = tensors[0].device_mesh, [get_spec(each) for each in weights]
    is_on_mesh = mesh.get_coordinate() is not None and all(each.mesh == mesh for each in specs)
    if not is_on_mesh or any(each.ndim != 2 for each in tensors) or not tensors[0].shape[0]:
        return None
    sharded = _list_sharded_dims(specs)
    token_axes = find_axes_that_stay_sharded(tensors, mesh, {0}, excluded_mesh_dims=sharded)
    expert_dims, num_local_experts = _find_expert_dims(specs, sharded, num_experts)
    other_dims = tuple(dim for dim in sharded if dim not in expert_dims)
    if not token_axes and not expert_dims:
        return None
    return DividedExperts(token_axes, expert_dims, other_dims, num_experts, num_local_experts)


def compute_share_of_experts(weights: Sequence[DTensor], num_experts: int) -> float:
    """Return the share of a layer's experts that this process computes."""
    specs = [get_spec(each) for each in weights]
    return _find_expert_dims(specs, _list_sharded_dims(specs), num_experts)[1] / num_experts


@cache_while_meshes_exist
def _slice_device_mesh(device_mesh: DeviceMesh, dims: tuple[int, ...]) -> DeviceMesh:
    """Return the part of a mesh along the dims at some positions that contains this process."""
    names = device_mesh.mesh_dim_names
    assert names is not None, "the meshes of layouts have names"
    return device_mesh[tuple(names[dim] for dim in dims)]


def _list_sharded_dims(specs: Sequence[DTensorSpec]) -> list[int]:
    by_dim = enumerate(zip(*(each.placements for each in specs), strict=True))
    return [dim for dim, placements in by_dim if not all(each.is_replicate() for each in placements)]


def _find_expert_dims(
    specs: Sequence[DTensorSpec], sharded_dims: Sequence[int], num_experts: int | None
) -> tuple[tuple[int, ...], int]:
    """Return the mesh dims that shard all weights evenly by expert, and the number of experts in a shard."""
    dims: list[int] = []
    if num_experts is None or any(each.shape[0] != num_experts for each in specs):
        return (), num_experts or 0
    for dim in sharded_dims:
        placements = [each.placements[dim] for each in specs]
        size = specs[0].mesh.size(dim)
        if num_experts % size == 0 and all(type(p) is Shard and get_axis(p) == 0 for p in placements):
            dims.append(dim)
            num_experts //= size
    return tuple(dims), num_experts
