"""Replace DTensor's `to_local`, `full_tensor`, `redistribute`, and constructors on layoutmap's meshes.

In a model's call, function modes would take the local tensors inside of torch's own methods for global tensors. These
replacements run without modes, wait for collectives, and support simulated devices. `local_values` tracks the tensors
that a program computes from local tensors.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from layoutmap.core.errors import EngineError
from layoutmap.engines.torch import simulation
from layoutmap.engines.torch.backward import Ctx
from layoutmap.engines.torch.changes import meshes
from layoutmap.engines.torch.dtensor_ops.local_values import record_if_local_tensor_is_shard
from layoutmap.engines.torch.dtensor_ops.memories import check_no_slice_is_outdated
from layoutmap.engines.torch.modes import skip_function_modes
from layoutmap.engines.torch.operators import Function
from layoutmap.engines.torch.placing import (
    SkippableAutogradFunction,
    is_replicated,
    make_replicated_placements,
    redistribute_if_needed,
    redistribute_tensor,
    replace_partial_placements,
    replicate_gradient,
    replicate_tensor,
    restore_memory_axis_order,
)
from layoutmap.engines.torch.specs import (
    DTensorSpec,
    copy_spec_with_placements,
    get_axis,
    get_local,
    get_spec,
    make_dtensor,
    make_spec_from_shard,
)


@skip_function_modes
def to_local(
    original: Function, tensor: DTensor, *, grad_placements: Sequence[Placement] | None = None
) -> torch.Tensor:
    """Replace `tensor.to_local()`: return the local tensor, marked if it differs between devices."""
    if tensor.device_mesh not in meshes:
        return original(tensor, grad_placements=grad_placements)
    check_no_slice_is_outdated("to_local", tensor)
    local = _ToLocalFunction.compute_with_optional_gradient(
        tensor, _GradientPlacements(tensor.placements, grad_placements)
    )
    if getattr(tensor, "_is_param", False):  # return the shard of a parameter as a parameter, as torch does
        local._is_param = True
    return record_if_local_tensor_is_shard(local, tensor.placements)


@skip_function_modes
def full_tensor(
    original: Function, tensor: DTensor, *, grad_placements: Sequence[Placement] | None = None
) -> torch.Tensor:
    """Replace `tensor.full_tensor()`: return one unsharded tensor, also if devices are simulated."""
    if tensor.device_mesh not in meshes:
        return original(tensor, grad_placements=grad_placements)
    check_no_slice_is_outdated("full_tensor", tensor)
    whole = redistribute_if_needed(tensor, make_replicated_placements(tensor.device_mesh))
    local = _ToLocalFunction.compute_with_optional_gradient(
        whole, _GradientPlacements(whole.placements, grad_placements)
    )
    if simulation.is_simulated():
        local = extract_first_rank_tensor(local)
        if is_replicated(tensor):
            local = local.clone()  # the result must not share memory with a simulated device
    return record_if_local_tensor_is_shard(local, whole.placements)


@skip_function_modes
def redistribute(
    original: Function,
    tensor: DTensor,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    *,
    async_op: bool = False,
    forward_dtype: torch.dtype | None = None,
    backward_dtype: torch.dtype | None = None,
) -> DTensor:
    """Replace `tensor.redistribute()`: wait for the collectives before returning, unless `async_op` is true."""
    options = {"async_op": async_op, "forward_dtype": forward_dtype, "backward_dtype": backward_dtype}
    mesh = tensor.device_mesh
    if mesh not in meshes:
        return original(tensor, device_mesh, placements, **options)
    check_no_slice_is_outdated("redistribute", tensor)
    if device_mesh is not None and device_mesh != mesh:
        raise EngineError(
            "cannot redistribute: the target is on another mesh",
            facts={"from": str(mesh), "to": str(device_mesh)},
            why="DTensor redistributes only on the tensor's own mesh, and would ignore another mesh",
            fix="use layoutmap.dtensor.relayout(tensor, layout), or the tensor's own mesh",
        )
    with simulation.simulate_ranks_of_mesh(mesh):
        if placements is None or any(p.is_partial() for p in placements) or any(options.values()):
            return original(tensor, mesh, placements, **options)
        return _redistribute_with_negative_axes(tensor, placements)


def _redistribute_with_negative_axes(tensor: DTensor, placements: Sequence[Placement]) -> DTensor:
    """Redistribute a DTensor to placements, also with negative axes, and return it."""
    return redistribute_tensor(tensor, [_normalize_placement_axis(each, tensor.ndim) for each in placements])


def _normalize_placement_axis(placement: Any, rank: int) -> Placement:
    """Return a placement with a non-negative axis."""
    if getattr(placement, "dim", 0) >= 0:
        return placement
    if type(placement) is Shard:
        return Shard(get_axis(placement) + rank)
    return type(placement)(placement.dim + rank, split_factor=placement.split_factor)


@skip_function_modes
def from_local(
    original: Function,
    local_tensor: torch.Tensor,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    *,
    run_check: bool = False,
    shape: torch.Size | None = None,
    stride: tuple[int, ...] | None = None,
    grad_placements: Sequence[Placement] | None = None,
) -> DTensor:
    """Replace `DTensor.from_local()`: also accept a replicated DTensor, which results from a model's call."""
    original = functools.partial(
        original, run_check=run_check, shape=shape, stride=stride, grad_placements=grad_placements
    )
    if device_mesh is None or device_mesh not in meshes or _is_composite_tensor(local_tensor):
        return original(local_tensor, device_mesh, placements)
    local = local_tensor
    with simulation.simulate_ranks_of_mesh(device_mesh):
        placements = make_replicated_placements(device_mesh) if placements is None else placements
        wanted = tuple(_normalize_placement_axis(each, local.ndim) for each in placements)
        if isinstance(local, DTensor):
            if not is_replicated(local):
                raise EngineError(
                    "DTensor.from_local got a sharded DTensor instead of a local tensor",
                    facts={"shape": tuple(local.shape), "layout": str(local.placements)},
                    why="from_local takes the local tensor of one device, which is only a part of this tensor",
                    fix="pass tensor.to_local(), or call tensor.redistribute(placements=...)",
                )
            local = _ToLocalFunction.compute_with_optional_gradient(
                local, _GradientPlacements(local.placements)
            )
        _record_partial_gradient(local, wanted)
        if run_check or grad_placements is not None:
            return original(local, device_mesh, wanted)
        if shape is None or stride is None:
            if any(isinstance(size, torch.SymInt) for size in (*local.shape, *local.stride())):
                raise EngineError(
                    "DTensor.from_local got shards of different sizes, and no shape",
                    facts={"shard": str(tuple(local.shape)), "placements": str(wanted)},
                    why="without a shape, torch assumes equal shards, but here an axis is split unevenly",
                    fix="pass DTensor.from_local(..., shape=tensor.shape, stride=tensor.stride())",
                )
            spec = make_spec_from_shard(device_mesh, wanted, local.shape, local.stride(), local.dtype)
        else:
            spec = copy_spec_with_placements(
                make_spec_from_shard(
                    device_mesh, tuple(make_replicated_placements(device_mesh)), shape, stride, local.dtype
                ),
                wanted,
                local.dtype,
            )
        return _FromLocalFunction.compute_with_optional_gradient(local, spec)


def _is_composite_tensor(local: torch.Tensor) -> bool:
    """Return whether a tensor is of a class from outside torch that consists of several tensors."""
    if isinstance(local, DTensor):
        return False
    kind = type(simulation.get_first_local_tensor(local))
    return hasattr(kind, "__tensor_flatten__") and not kind.__module__.startswith("torch.")


@skip_function_modes
def distribute_tensor(
    original: Function,
    tensor: torch.Tensor,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    *,
    src_data_rank: int | None = 0,
) -> DTensor:
    """Replace `distribute_tensor()`: also accept a replicated DTensor, which results from a model's call."""
    if device_mesh is None or device_mesh not in meshes:
        return original(tensor, device_mesh, placements, src_data_rank=src_data_rank)
    wanted = make_replicated_placements(device_mesh) if placements is None else list(placements)
    with simulation.simulate_ranks_of_mesh(device_mesh), simulation.set_simulated_default_group_temporarily():
        if isinstance(tensor, DTensor):
            if not (tensor.device_mesh == device_mesh and is_replicated(tensor) and tensor.is_leaf):
                return original(tensor, device_mesh, wanted, src_data_rank=src_data_rank)
            made: Any = _redistribute_with_negative_axes(tensor, wanted).detach()
            return made.requires_grad_(tensor.requires_grad)
        if simulation.is_simulated() and simulation.get_first_local_tensor(tensor) is tensor:
            ranks = simulation.list_ranks(device_mesh)
            tensor = simulation.copy_to_ranks(tensor, ranks).requires_grad_(tensor.requires_grad)
        if type(simulation.get_first_local_tensor(tensor)) not in (torch.Tensor, torch.nn.Parameter):
            # While a graph is recorded, tensors have no values, and torch's implementation, which sends values, would
            # fail.
            return _redistribute_with_negative_axes(replicate_tensor(tensor.detach(), device_mesh), wanted)
        return original(tensor, device_mesh, wanted, src_data_rank=src_data_rank)


# Each device may use a different part of its local tensor, so the gradients of all devices are summed (decisions/0151).
class _GradientPlacements:
    """Determine the placements of the gradient that `to_local` passes back."""

    def __init__(self, placements: Sequence[Placement], requested: Sequence[Placement] | None = None) -> None:
        self._placements, self._requested = tuple(placements), None if requested is None else tuple(requested)
        self.summed = set[int]()  # mesh dims over which devices use different parts of the tensor

    def find_gradient_placements(self) -> tuple[Placement, ...]:
        """Return the placements of the gradient that `to_local` gets. They may change until the forward pass ends."""
        if self._requested is not None:
            return self._requested
        return tuple(
            Replicate()
            if each.is_partial()
            else Partial()
            if each.is_replicate() and dim in self.summed
            else each
            for dim, each in enumerate(self._placements)
        )


def _record_partial_gradient(local: torch.Tensor, placements: Sequence[Placement]) -> None:
    """Record that devices use a local tensor as different shards or summands, so its gradient is a partial sum."""
    dims = {dim for dim, each in enumerate(placements) if not each.is_replicate()}
    nodes, seen = [local.grad_fn] if dims else [], set[object]()
    while nodes:
        node: Any = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(gradient := getattr(node, "gradient", None), _GradientPlacements):
            gradient.summed.update(dims)
        else:
            nodes += [inner for inner, _ in node.next_functions]


def extract_first_rank_tensor(local: torch.Tensor) -> torch.Tensor:
    """Return the first simulated rank's tensor. A tensor that is not simulated is returned unchanged.

    All ranks must have equal tensors. The gradient is copied to all ranks.
    """
    return (
        local
        if simulation.get_first_local_tensor(local) is local
        else _ExtractFirstRankFunction.compute_with_optional_gradient(local)
    )


class _ToLocalFunction(SkippableAutogradFunction):
    @staticmethod
    def forward(ctx: Ctx, tensor: DTensor, gradient: _GradientPlacements) -> torch.Tensor:
        ctx.spec, ctx.gradient = get_spec(tensor), gradient
        local = get_local(tensor)
        return local.view_as(local)  # return a new tensor, because autograd attaches it to this function

    @staticmethod
    def list_unchangeable_tensors(tensor: torch.Tensor, result: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return ()

    @staticmethod
    def backward(ctx: Ctx, *upstream: torch.Tensor) -> object:
        spec = copy_spec_with_placements(ctx.spec, ctx.gradient.find_gradient_placements(), upstream[0].dtype)
        gradient = upstream[0].contiguous()  # an expanded gradient has zero strides, unlike its spec
        return _FromLocalFunction.compute_with_optional_gradient(gradient, spec), None


class _FromLocalFunction(SkippableAutogradFunction):
    @staticmethod
    def forward(ctx: Ctx, local: torch.Tensor, spec: DTensorSpec) -> DTensor:
        ctx.spec, ctx.is_one = (
            spec,
            simulation.is_simulated() and simulation.get_first_local_tensor(local) is local,
        )
        if ctx.is_one:
            local = simulation.copy_to_ranks(local, simulation.list_ranks(spec.mesh))
        return make_dtensor(restore_memory_axis_order(local.detach(), spec), spec)

    @staticmethod
    def list_unchangeable_tensors(tensor: torch.Tensor, result: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return ()

    @staticmethod
    def backward(ctx: Ctx, *upstream: torch.Tensor) -> object:
        wanted = replace_partial_placements(ctx.spec.placements)
        gradient = redistribute_if_needed(replicate_gradient(upstream[0], ctx.spec.mesh), wanted)
        local = _ToLocalFunction.compute_with_optional_gradient(
            gradient, _GradientPlacements(ctx.spec.placements)
        )
        is_same = ctx.is_one and all(each.is_replicate() for each in wanted)
        return extract_first_rank_tensor(local) if is_same else local, None


class _ExtractFirstRankFunction(SkippableAutogradFunction):
    @staticmethod
    def forward(ctx: Ctx, local: torch.Tensor) -> torch.Tensor:
        ctx.ranks = tuple(simulation.get_tensors_by_rank(local))
        one = simulation.get_first_local_tensor(local)
        return one.view_as(one)

    @staticmethod
    def backward(ctx: Ctx, *upstream: torch.Tensor) -> object:
        gradient = upstream[0]
        is_one = simulation.get_first_local_tensor(gradient) is gradient
        return simulation.copy_to_ranks(gradient, ctx.ranks) if is_one else gradient
