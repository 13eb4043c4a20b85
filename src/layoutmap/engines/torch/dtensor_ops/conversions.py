"""Replace DTensor's `to_local`, `full_tensor`, `redistribute`, and constructors on this library's meshes.

Torch's own are called like any program inside of a model's call: the modes there take the local tensors, and those that
a collective has not filled yet, for global ones. These convert outside of all modes, and wait for collectives. Devices
may be simulated. `local_values` tracks what a program computes with local tensors.
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
from layoutmap.engines.torch.dtensor_ops.local_values import mark_local
from layoutmap.engines.torch.dtensor_ops.memories import refuse_outdated
from layoutmap.engines.torch.modes import skip_function_modes
from layoutmap.engines.torch.operators import Function
from layoutmap.engines.torch.placing import (
    OwnGradient,
    is_replicated,
    make_replicated_placements,
    move_to_placements,
    redistribute_tensor,
    reduce_placements,
    replicate_gradient,
    replicate_tensor,
    restore_axis_order,
)
from layoutmap.engines.torch.specs import (
    DTensorSpec,
    get_axis,
    get_local,
    get_spec,
    make_dtensor,
    make_shard_spec,
    replace_placements,
)


@skip_function_modes
def to_local(
    own: Function, tensor: DTensor, *, grad_placements: Sequence[Placement] | None = None
) -> torch.Tensor:
    """Replace `tensor.to_local()`: return the local tensor, marked as such."""
    if tensor.device_mesh not in meshes:
        return own(tensor, grad_placements=grad_placements)
    refuse_outdated("to_local", tensor)
    local = _ToLocal.run(tensor, _GradientLayout(tensor.placements, grad_placements))
    if getattr(tensor, "_is_param", False):  # like torch, return a parameter's shard as a parameter
        local._is_param = True
    return mark_local(local, tensor.placements)


@skip_function_modes
def full_tensor(
    own: Function, tensor: DTensor, *, grad_placements: Sequence[Placement] | None = None
) -> torch.Tensor:
    """Replace `tensor.full_tensor()`: return one unsharded tensor, also of simulated devices."""
    if tensor.device_mesh not in meshes:
        return own(tensor, grad_placements=grad_placements)
    refuse_outdated("full_tensor", tensor)
    whole = move_to_placements(tensor, make_replicated_placements(tensor.device_mesh))
    local = _ToLocal.run(whole, _GradientLayout(whole.placements, grad_placements))
    if simulation.is_simulated():
        local = take_one_rank(local)
        if is_replicated(tensor):
            local = local.clone()  # do not alias one simulated device's memory
    return mark_local(local, whole.placements)


@skip_function_modes
def redistribute(
    own: Function,
    tensor: DTensor,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    *,
    async_op: bool = False,
    forward_dtype: torch.dtype | None = None,
    backward_dtype: torch.dtype | None = None,
) -> DTensor:
    """Replace `tensor.redistribute()`: wait for the values, unless the call is asynchronous."""
    options = {"async_op": async_op, "forward_dtype": forward_dtype, "backward_dtype": backward_dtype}
    mesh = tensor.device_mesh
    if mesh not in meshes:
        return own(tensor, device_mesh, placements, **options)
    refuse_outdated("redistribute", tensor)
    if device_mesh is not None and device_mesh != mesh:
        raise EngineError(
            "redistribute: to another mesh",
            facts={"from": str(mesh), "to": str(device_mesh)},
            why="DTensor redistributes on one mesh, and would ignore the other",
            fix="use layoutmap.dtensor.relayout(tensor, layout), or the tensor's own mesh",
        )
    with simulation.simulate_mesh(mesh):
        if placements is None or any(p.is_partial() for p in placements) or any(options.values()):
            return own(tensor, mesh, placements, **options)
        return _redistribute_normalized(tensor, placements)


def _redistribute_normalized(tensor: DTensor, placements: Sequence[Placement]) -> DTensor:
    """Redistribute a DTensor to placements that may have negative axes."""
    return redistribute_tensor(tensor, [_normalize_axis(each, tensor.ndim) for each in placements])


def _normalize_axis(placement: Any, rank: int) -> Placement:
    """Return a placement with a non-negative axis."""
    if getattr(placement, "dim", 0) >= 0:
        return placement
    if type(placement) is Shard:
        return Shard(get_axis(placement) + rank)
    return type(placement)(placement.dim + rank, split_factor=placement.split_factor)


@skip_function_modes
def from_local(
    own: Function,
    local_tensor: torch.Tensor,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    *,
    run_check: bool = False,
    shape: torch.Size | None = None,
    stride: tuple[int, ...] | None = None,
    grad_placements: Sequence[Placement] | None = None,
) -> DTensor:
    """Replace `DTensor.from_local()`: also accept a replicated DTensor, as a model's call creates them."""
    own = functools.partial(
        own, run_check=run_check, shape=shape, stride=stride, grad_placements=grad_placements
    )
    if device_mesh is None or device_mesh not in meshes or _is_composed(local_tensor):
        return own(local_tensor, device_mesh, placements)
    local = local_tensor
    with simulation.simulate_mesh(device_mesh):
        placements = make_replicated_placements(device_mesh) if placements is None else placements
        wanted = tuple(_normalize_axis(each, local.ndim) for each in placements)
        if isinstance(local, DTensor):
            if not is_replicated(local):
                raise EngineError(
                    "DTensor.from_local: of a tensor on the mesh",
                    facts={"shape": tuple(local.shape), "layout": str(local.placements)},
                    why="its devices hold parts of it, and from_local takes the part of one device",
                    fix="pass tensor.to_local(), or call tensor.redistribute(placements=...)",
                )
            local = _ToLocal.run(local, _GradientLayout(local.placements))
        _note_parts(local, wanted)
        if run_check or grad_placements is not None:
            return own(local, device_mesh, wanted)
        if shape is None or stride is None:
            spec = make_shard_spec(device_mesh, wanted, local.shape, local.stride(), local.dtype)
        else:
            spec = replace_placements(
                make_shard_spec(
                    device_mesh, tuple(make_replicated_placements(device_mesh)), shape, stride, local.dtype
                ),
                wanted,
                local.dtype,
            )
        return _FromLocal.run(local, spec)


def _is_composed(local: torch.Tensor) -> bool:
    """Return whether a tensor subclass from outside torch consists of several tensors."""
    if isinstance(local, DTensor):
        return False
    kind = type(simulation.get_first_piece(local))
    return hasattr(kind, "__tensor_flatten__") and not kind.__module__.startswith("torch.")


@skip_function_modes
def distribute_tensor(
    own: Function,
    tensor: torch.Tensor,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    *,
    src_data_rank: int | None = 0,
) -> DTensor:
    """Replace `distribute_tensor()`: also accept a replicated DTensor, as a model's call creates them."""
    if device_mesh is None or device_mesh not in meshes:
        return own(tensor, device_mesh, placements, src_data_rank=src_data_rank)
    wanted = make_replicated_placements(device_mesh) if placements is None else list(placements)
    with simulation.simulate_mesh(device_mesh), simulation.use_own_group():
        if isinstance(tensor, DTensor):
            if not (tensor.device_mesh == device_mesh and is_replicated(tensor) and tensor.is_leaf):
                return own(tensor, device_mesh, wanted, src_data_rank=src_data_rank)
            made: Any = _redistribute_normalized(tensor, wanted).detach()
            return made.requires_grad_(tensor.requires_grad)
        if simulation.is_simulated() and simulation.get_first_piece(tensor) is tensor:
            ranks = simulation.list_ranks(device_mesh)
            tensor = simulation.copy_to_ranks(tensor, ranks).requires_grad_(tensor.requires_grad)
        if type(simulation.get_first_piece(tensor)) not in (torch.Tensor, torch.nn.Parameter):
            # torch's own implementation would send tensors without values during graph recording.
            return _redistribute_normalized(replicate_tensor(tensor.detach(), device_mesh), wanted)
        return own(tensor, device_mesh, wanted, src_data_rank=src_data_rank)


# Devices may compute with different parts of a local tensor, so its gradient is summed (decisions/0151).
class _GradientLayout:
    """Determine the placements of a DTensor's gradient."""

    def __init__(self, placements: Sequence[Placement], named: Sequence[Placement] | None = None) -> None:
        self._placements, self._named = tuple(placements), None if named is None else tuple(named)
        self.summed = set[int]()  # mesh dims over which the local computations differ

    def find_placements(self) -> tuple[Placement, ...]:
        """Return the gradient's placements, which are known after the forward pass."""
        if self._named is not None:
            return self._named
        return tuple(
            Replicate()
            if each.is_partial()
            else Partial()
            if each.is_replicate() and dim in self.summed
            else each
            for dim, each in enumerate(self._placements)
        )


def _note_parts(local: torch.Tensor, placements: Sequence[Placement]) -> None:
    """Record that devices use their tensors as shards or summands, so that the source's gradient is partial."""
    dims = {dim for dim, each in enumerate(placements) if not each.is_replicate()}
    nodes, seen = [local.grad_fn] if dims else [], set[object]()
    while nodes:
        node: Any = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(gradient := getattr(node, "gradient", None), _GradientLayout):
            gradient.summed.update(dims)
        else:
            nodes += [inner for inner, _ in node.next_functions]


def take_one_rank(local: torch.Tensor) -> torch.Tensor:
    """Return one simulated rank's tensor if all ranks have the same. Other tensors are returned unchanged."""
    return local if simulation.get_first_piece(local) is local else _TakeOneRank.run(local)


class _ToLocal(OwnGradient):
    @staticmethod
    def forward(ctx: Ctx, tensor: DTensor, gradient: _GradientLayout) -> torch.Tensor:
        ctx.spec, ctx.gradient = get_spec(tensor), gradient
        local = get_local(tensor)
        return local.view_as(local)  # a new tensor, because autograd attaches the result to this function

    @staticmethod
    def list_checked(tensor: torch.Tensor, result: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return ()

    @staticmethod
    def backward(ctx: Ctx, *upstream: torch.Tensor) -> object:
        spec = replace_placements(ctx.spec, ctx.gradient.find_placements(), upstream[0].dtype)
        return _FromLocal.run(upstream[0].contiguous(), spec), None  # expanded gradients have zero strides


class _FromLocal(OwnGradient):
    @staticmethod
    def forward(ctx: Ctx, local: torch.Tensor, spec: DTensorSpec) -> DTensor:
        ctx.spec, ctx.is_one = spec, simulation.is_simulated() and simulation.get_first_piece(local) is local
        if ctx.is_one:
            local = simulation.copy_to_ranks(local, simulation.list_ranks(spec.mesh))
        return make_dtensor(restore_axis_order(local.detach(), spec), spec)

    @staticmethod
    def list_checked(tensor: torch.Tensor, result: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return ()

    @staticmethod
    def backward(ctx: Ctx, *upstream: torch.Tensor) -> object:
        wanted = reduce_placements(ctx.spec.placements)
        gradient = move_to_placements(replicate_gradient(upstream[0], ctx.spec.mesh), wanted)
        local = _ToLocal.run(gradient, _GradientLayout(ctx.spec.placements))
        is_same = ctx.is_one and all(each.is_replicate() for each in wanted)
        return take_one_rank(local) if is_same else local, None


class _TakeOneRank(OwnGradient):
    @staticmethod
    def forward(ctx: Ctx, local: torch.Tensor) -> torch.Tensor:
        ctx.ranks = tuple(simulation.get_pieces(local))
        one = simulation.get_first_piece(local)
        return one.view_as(one)

    @staticmethod
    def backward(ctx: Ctx, *upstream: torch.Tensor) -> object:
        gradient = upstream[0]
        is_one = simulation.get_first_piece(gradient) is gradient
        return simulation.copy_to_ranks(gradient, ctx.ranks) if is_one else gradient
