"""Gather weights ahead of time, and reduce gradients, with torch's own `fully_shard`.

`fully_shard` is applied to helper modules that have only parameters, one for each set that is gathered together. The
program's own modules get no hooks and no state, and have the sharded parameters whenever none of their calls runs.

In a backward pass, parameters are gathered when they are needed: when a tensor that autograd saved is unpacked, or when
the gradient of a parameter arrives. So it does not matter how a loss depends on the weights.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from layoutmap.core.errors import format_message
from layoutmap.engines.tested import ImportErrorConverter
from layoutmap.engines.torch.backward import (
    Ctx,
    TypedAutogradFunction,
    get_backward_pass_id,
    get_saved_tensor_hooks,
    is_activation_checkpoint,
)
from layoutmap.engines.torch.gather.fsdp import convert_to_partial_sum, format_weight_changed_message
from layoutmap.engines.torch.gather.fsdp_saved import can_be_shard_of_weight, copy_without_autograd_node
from layoutmap.engines.torch.gather.fully_sharded import FullyShardState
from layoutmap.engines.torch.modes import skip_function_modes
from layoutmap.engines.torch.modules import has_hooks_of_others
from layoutmap.engines.torch.specs import (
    DTensorSpec,
    copy_spec_with_placement,
    get_axis,
    get_local,
    get_spec,
    make_dtensor,
)
from layoutmap.engines.torch.storages import get_storage_key, get_tensor_version

with ImportErrorConverter("torch"):
    from torch._C import _will_engine_execute_node as will_be_reached  # pyright: ignore[reportPrivateUsage]


@dataclass(slots=True)
class _UnitCallOrder:
    """The order in which the units of a model were last called."""

    outermost: GatherUnit | None = None
    last: GatherUnit | None = None
    following: dict[GatherUnit, GatherUnit] = field(default_factory=dict["GatherUnit", "GatherUnit"])
    prefetched: set[GatherUnit] = field(default_factory=set["GatherUnit"])


# `fully_shard` changes a module's class and hooks, so apply it to helper modules, not the user's (decisions/0017).
class GatherUnit(torch.nn.Module):
    """Parameters that `fully_shard` gathers together.

    Args:
        parameters: Names and DTensors of one element type. `can_gather_by_concatenation` is true for each.
        mesh: Their mesh.
        mesh_dim: The number of the dim.
        options: The options of `fully_shard`, except those that follow from the layouts.
        is_kept: Whether gathered parameters are kept from the forward pass to the backward pass.
        below: If this unit is the outermost one, the units that are called within its calls; otherwise `None`.
    """

    def __init__(
        self,
        parameters: Sequence[tuple[str, DTensor]],
        mesh: DeviceMesh,
        mesh_dim: int,
        options: Mapping[str, Any],
        *,
        is_kept: bool,
        below: Sequence[GatherUnit] | None = None,
    ) -> None:
        super().__init__()
        offload: Any = options.get("offload_policy")
        # The base class of policies has no `pin_memory`, and does not offload, so move nothing.
        for _, each in parameters if hasattr(offload, "pin_memory") else ():
            _move_to_cpu(each, is_pinned=offload.pin_memory)
        self._names = [name for name, _ in parameters]
        self._sharded = [(each, get_local(each)) for _, each in parameters]
        self._mesh_dim = mesh_dim
        self._is_kept = is_kept
        self.order = _UnitCallOrder()
        self._storages: frozenset[int] = frozenset()
        self._watched: set[int] = set()
        self._below = list(below or ())
        for index, unit in enumerate(self._below):
            self.add_module(f"unit {index}", unit)
            unit.order = self.order
        self._apply_fully_shard([each for _, each in parameters], mesh, options)
        # On GPUs, gathers overlap by streams, so only CPUs need asynchronous gathers.
        self.state = FullyShardState(self, is_asynchronous=mesh.device_type == "cpu")
        self.state.call_before_reducing_gradients(self._redistribute_gradients)
        if below is not None:
            self.order.outermost = self
            self.state.initialize_before_first_call()

    def _apply_fully_shard(self, parameters: Sequence[Any], mesh: Any, options: Mapping[str, Any]) -> None:
        """Apply `fully_shard` to placeholders, and then replace them by the parameters."""
        # The import is slow, so it is in this function.
        from torch.distributed.fsdp import DataParallelMeshDims, fully_shard

        axes: dict[int, Shard] = {}
        for index, each in enumerate(parameters):
            placeholder = _make_placeholder(each, mesh, self._mesh_dim)
            axes[id(placeholder)] = Shard(get_axis(each.placements[self._mesh_dim]))
            self.register_parameter(f"weight {index}", placeholder)
        given: dict[str, Any] = {**options, "reshard_after_forward": not self._is_kept}
        made = fully_shard(
            self,
            mesh=mesh,
            dp_mesh_dims=DataParallelMeshDims(shard=mesh.mesh_dim_names[self._mesh_dim]),
            shard_placement_fn=lambda each: axes[id(each)],
            **given,
        )
        for index, each in enumerate(parameters):
            self._parameters[f"weight {index}"] = each
        made.set_gradient_divide_factor(1.0)  # gradients are partial sums, so do not divide them
        made.set_force_sum_reduction_for_comms(True)  # gloo supports only sums

    def can_be_reused_for(self, parameters: Sequence[torch.Tensor | None]) -> bool:
        """Return whether `parameters` are the unit's unchanged parameters, without hooks of other code."""
        hooks = get_saved_tensor_hooks()
        if not (hooks is None or isinstance(hooks, _GatherUnitCall) or is_activation_checkpoint(hooks)):
            return False
        return all(
            each is parameter and get_local(each) is local and not has_hooks_of_others(parameter)
            for each, (parameter, local) in zip(parameters, self._sharded, strict=True)
        )

    @contextmanager
    def gather_parameters_temporarily(self, inputs: Sequence[torch.Tensor]) -> Generator[Sequence[DTensor]]:
        """Gather the parameters for a call of their modules while the `with` block runs.

        Args:
            inputs: The tensors that the module of these parameters is called with.

        Yields:
            The gathered parameters.
        """
        self._begin_call(inputs)
        hooks = get_saved_tensor_hooks()
        try:
            if torch.is_grad_enabled() and not is_activation_checkpoint(hooks):
                versions = [get_tensor_version(each) for each, _ in self._sharded]
                call = _GatherUnitCall(self, versions, self._storages, hooks)
                with torch.autograd.graph.saved_tensors_hooks(call.pack, call.unpack):
                    yield self._get_parameters_with_gradient_check()
            else:
                yield self._get_parameters_with_gradient_check()
        finally:
            self._end_call()

    @skip_function_modes
    def _begin_call(self, inputs: Sequence[torch.Tensor]) -> None:
        """Gather the parameters, and register the hooks that begin and end the backward pass of this unit."""
        if get_backward_pass_id() >= 0:  # in a backward pass, so a checkpoint recomputes this call
            if not self.state.is_in_backward:
                self.state.gather_for_backward()
        else:
            if not self.state.is_call_running and self.state.has_failed_backward:
                self.state.reset_after_failed_backward()
            if self.state.is_gathered:
                self.state.free_gathered_parameters()  # the weights may have changed since they were gathered
            self._record_call_order()
        self.state.gather_for_forward()
        if not self._storages:
            # Read the storages once, because torch only resizes them, and does not replace them.
            self._storages = frozenset(
                get_storage_key(get_local(each)) for each in self.state.gathered_parameters
            )
        if torch.is_grad_enabled():
            for index, each in enumerate(self.state.gathered_parameters):
                if each.requires_grad and index not in self._watched:
                    self._watched.add(index)
                    convert = partial(self._convert_gradient_to_partial_sum, index)
                    each.register_hook(skip_function_modes(convert))  # pyright: ignore[reportUnknownMemberType]
            for each in inputs if self._sharded else ():
                if each.grad_fn is not None:
                    each.register_hook(self._end_backward)  # pyright: ignore[reportUnknownMemberType]

    @skip_function_modes
    def _get_parameters_with_gradient_check(self) -> list[DTensor]:
        """Return the gathered parameters. If some are trained, one passes through an `_UnsupportedGradientCheck`."""
        gathered = self.state.gathered_parameters
        trained = [index for index, each in enumerate(gathered) if each.requires_grad]
        if trained and torch.is_grad_enabled():
            first = gathered[trained[0]]
            node = torch.autograd.graph.get_gradient_edge(first).node
            sharded = [self._sharded[index][0] for index in trained]
            gathered[trained[0]] = _UnsupportedGradientCheck.apply(node, first, *sharded)
        return gathered

    def _record_call_order(self) -> None:
        """Record that this unit follows the unit called before, so that the earlier unit's calls prefetch it."""
        before, self.order.last = self.order.last, self
        if before is not None and self.order.following.get(before) is not self:
            self.order.following[before] = self
            this: Any = before
            this.set_modules_to_forward_prefetch([self])
        self.order.prefetched.discard(self)  # this call uses it, so `_end_call` must not free it
        if self in self.order.following:
            self.order.prefetched.add(self.order.following[self])

    @skip_function_modes
    def _end_call(self) -> None:
        """Free parameters that the backward pass does not reuse, and prefetched parameters that no call used."""
        self.state.finish_forward()
        if self._is_kept and not torch.is_grad_enabled():
            self.state.free_gathered_parameters()
        if get_backward_pass_id() < 0 and not self.state.is_call_running:
            for unit in self.order.prefetched:  # units that were prefetched, but not called
                unit.state.free_gathered_parameters()
            self.order.prefetched.clear()
            self.order.last = None
            if not torch.is_grad_enabled():
                self.state.forget_call_order()

    @skip_function_modes
    def gather_for_backward(self) -> None:
        """Gather the parameters for a backward pass, if that is not done yet."""
        if self.state.is_in_backward:
            return
        if torch.is_grad_enabled():
            raise RuntimeError(_SECOND_DERIVATIVE)
        first = self.order.outermost
        if first is not None and first is not self and first.state.is_gathered:
            first.gather_for_backward()
        self.state.gather_for_backward()

    def check_parameters_unchanged(self, versions: Sequence[int]) -> None:
        """Raise if a parameter was changed since the forward pass, which recorded `versions`."""
        for name, (each, _), version in zip(self._names, self._sharded, versions, strict=True):
            if get_tensor_version(each) != version:
                raise RuntimeError(format_weight_changed_message(name, tuple(each.shape)))

    def _convert_gradient_to_partial_sum(self, index: int, gradient: DTensor) -> object:
        """Return the gradient of a gathered parameter as a partial sum, because `fully_shard` reduces it later."""
        self.gather_for_backward()
        spec = get_spec(self.state.gathered_parameters[index])
        # Autograd keeps a contiguous gradient. It would copy any other gradient into a replicated DTensor, which sums
        # over processes, and then `fully_shard` would sum a second time.
        part = get_local(convert_to_partial_sum(gradient, spec, self._mesh_dim)).contiguous()
        return make_dtensor(part, copy_spec_with_placement(spec, self._mesh_dim, Partial(), part.dtype))

    def _redistribute_gradients(self) -> None:
        """Redistribute gradients of parameters used without a gather, because `fully_shard` adds to them."""
        for sharded, _ in self._sharded:
            gradient = sharded.grad
            if isinstance(gradient, DTensor) and gradient.placements != sharded.placements:
                sharded.grad = gradient.redistribute(sharded.device_mesh, sharded.placements)

    @skip_function_modes
    def _end_backward(self, _: object) -> None:
        """Reduce the unit's gradients. They are complete, because the gradient of the unit's input exists."""
        if self.state.is_in_backward:
            self.state.reduce_gradients()


class _UnsupportedGradientCheck(TypedAutogradFunction):
    """Pass a gathered parameter through, and refuse gradients that `fully_shard` cannot compute."""

    @staticmethod
    def forward(ctx: Ctx, node: object, gathered: DTensor, *sharded: DTensor) -> torch.Tensor:
        ctx.node, ctx.sharded = node, sharded
        return gathered.view_as(gathered)

    @staticmethod
    def backward(ctx: Ctx, *upstream: torch.Tensor) -> object:
        if not will_be_reached(ctx.node):
            raise RuntimeError(_GRADIENTS_BY_WEIGHTS)
        # Autograd would call hooks of the program without a gradient, so raise if there are any.
        if any(map(has_hooks_of_others, ctx.sharded)):
            raise RuntimeError(_HOOKS_REGISTERED_TOO_LATE)
        return None, *upstream, *[None] * len(ctx.sharded)


class _GatherUnitCall:
    """Saved-tensor hooks of one call of a unit. They gather the unit's parameters when they unpack one of them."""

    def __init__(
        self, unit: GatherUnit, versions: Sequence[int], storages: frozenset[int], hooks: Any
    ) -> None:
        self._unit = unit
        self._versions = versions
        self._seen = -1  # number of the last backward pass that used this call
        self.calls: dict[int, _GatherUnitCall] = {} if hooks is None else dict(hooks.calls)
        self.calls.update(dict.fromkeys(storages, self))

    def pack(self, tensor: torch.Tensor) -> torch.Tensor | _SavedTensorReference:
        call = None
        if isinstance(tensor, DTensor) or can_be_shard_of_weight(tensor):
            local = get_local(tensor) if isinstance(tensor, DTensor) else tensor
            call = self.calls.get(get_storage_key(local))
        return copy_without_autograd_node(tensor) if call is None else _SavedTensorReference(tensor, call)

    def unpack(self, packed: torch.Tensor | _SavedTensorReference) -> torch.Tensor:
        if not isinstance(packed, _SavedTensorReference):
            return packed
        packed.call.gather_for_backward()
        return packed.tensor

    def gather_for_backward(self) -> None:
        """Gather the unit's parameters, after a check in each new backward pass that they are unchanged."""
        if self._seen != get_backward_pass_id():
            self._seen = get_backward_pass_id()
            self._unit.check_parameters_unchanged(self._versions)
        self._unit.gather_for_backward()


@dataclass(slots=True, eq=False)
class _SavedTensorReference:
    tensor: torch.Tensor
    call: _GatherUnitCall


_GRADIENTS_BY_WEIGHTS = format_message(
    "gradients of some weights were asked for (torch.autograd.grad, or backward(inputs=...))",
    {},
    "torch's fully_shard computes gradients only of all weights together, in loss.backward()",
    'call loss.backward(), or open the scope with gather="own"',
)
_HOOKS_REGISTERED_TOO_LATE = format_message(
    "a weight was given a hook on its gradient between the forward pass and the backward pass",
    {},
    "torch's fully_shard has gathered it for a backward pass without hooks",
    'register the hook before the model is called, or open the scope with gather="own"',
)
_SECOND_DERIVATIVE = format_message(
    "gradients of gradients were asked for (create_graph=True)",
    {},
    "torch's fully_shard frees gathered weights after the first backward pass",
    'open the scope with gather="own"',
)


def _move_to_cpu(parameter: torch.Tensor, *, is_pinned: bool) -> None:
    """Move a parameter's shard to CPU memory in place."""
    local = get_local(parameter).cpu()
    local = local.pin_memory() if is_pinned else local
    made = torch.nn.Parameter(make_dtensor(local, get_spec(parameter)), requires_grad=parameter.requires_grad)
    vars(made).update(vars(parameter))
    made.grad = parameter.grad
    torch.utils.swap_tensors(parameter, made)  # pyright: ignore[reportUnknownMemberType]


def _make_placeholder(parameter: DTensor, mesh: DeviceMesh, mesh_dim: int) -> torch.nn.Parameter:
    """Return a meta parameter with the shape and placements that a parameter has when it is gathered."""
    axis, size = get_axis(parameter.placements[mesh_dim]), mesh.size(mesh_dim)
    shape = [n * size if i == axis else n for i, n in enumerate(get_local(parameter).shape)]
    placements = [Replicate() if i == mesh_dim else each for i, each in enumerate(parameter.placements)]
    spec = DTensorSpec(mesh, tuple(placements), tensor_meta=get_spec(parameter).tensor_meta)
    local = torch.empty(shape, dtype=parameter.dtype, device="meta")
    return torch.nn.Parameter(make_dtensor(local, spec), requires_grad=parameter.requires_grad)
