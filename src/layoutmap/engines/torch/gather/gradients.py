"""Reduce partial gradients together at the end of each backward pass.

If the batch is sharded over a mesh dim, each device has the gradients of its own examples. DTensor reduces each of them
where it is read, for example in each operation of the optimizer. Here gradients are concatenated and reduced together,
so that optimizers, clipping, and reads find each gradient in the layout of its parameter.

A program's own hooks of a parameter read its gradient during the pass, so that gradient is reduced before they run.
"""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.utils.hooks import RemovableHandle

from layoutmap.engines.patches import AttributePatch, PatchGroup
from layoutmap.engines.torch import simulation
from layoutmap.engines.torch.backward import call_after_backward, get_backward_pass_id
from layoutmap.engines.torch.modes import skip_function_modes
from layoutmap.engines.torch.modules import has_hooks_of_others, prepend_gradient_hooks
from layoutmap.engines.torch.placing import redistribute_tensor, reduce_over_devices
from layoutmap.engines.torch.specs import (
    compute_largest_shard_shape,
    copy_spec_with_placement,
    get_local,
    get_meta,
    get_spec,
    has_even_shards,
    make_dtensor,
)

V = TypeVar("V")
_MAX_BYTES_PER_COLLECTIVE = 256 << 20  # largest number of bytes of gradients in one collective


# A hook of the program must get the full sum, so the gradient is reduced before the hook runs (decisions/0017).
class GradientReducer:
    """Hooks that redistribute the gradient of each DTensor parameter to the placements of the parameter.

    A pass adds to gradients that exist already, as always. Gradients that `torch.autograd.grad` returns are left as
    they are, unless the program has hooks on the parameter.

    Args:
        parameters: The parameters of a model. Plain tensors and parameters without a gradient are ignored.
        make_reference: Returns a function that returns a parameter without keeping it alive. Torch cannot swap
            parameters that have weak references, so adapters look them up in the model.
    """

    def __init__(
        self,
        parameters: Iterable[torch.Tensor],
        make_reference: Callable[[DTensor], Callable[[], torch.Tensor | None]] = weakref.ref,
    ) -> None:
        self._refer_to = make_reference
        # A strong reference would keep the parameters of a failed pass in memory, so only autograd keeps a pass alive,
        # until it ends or fails.
        self._passes: weakref.WeakValueDictionary[int, _BackwardPass] = weakref.WeakValueDictionary()
        self._hooks: list[RemovableHandle] = []
        for parameter in parameters:
            if isinstance(parameter, DTensor) and parameter.requires_grad:
                self._hooks += self._register_gradient_hooks(parameter)

    def remove(self) -> None:
        """Remove the hooks, so that gradients are no longer reduced."""
        while self._hooks:
            self._hooks.pop().remove()

    def _register_gradient_hooks(self, parameter: DTensor) -> tuple[RemovableHandle, RemovableHandle]:
        parameter_of = self._refer_to(parameter)

        @skip_function_modes
        def redistribute_before_accumulation(gradient: torch.Tensor) -> torch.Tensor | None:
            parameter = parameter_of()
            if not isinstance(parameter, DTensor) or not isinstance(gradient, DTensor):
                return None
            if has_hooks_of_others(parameter):
                if (waiting := self._passes.get(get_backward_pass_id())) is not None:
                    waiting.reduce_and_restore_gradients()  # the hook may read other gradients, so complete these
                is_placed = gradient.placements == parameter.placements
                return gradient if is_placed else redistribute_tensor(gradient, parameter.placements)
            if parameter.grad is not None and _has_partial_placement(gradient):
                # DTensor would all-reduce the new gradient before it adds it to `grad`, so set `grad` aside.
                self._get_current_backward_pass().set_gradient_aside(parameter)
            return None

        @skip_function_modes
        def defer_after_accumulation(parameter: DTensor) -> None:
            if has_hooks_of_others(parameter):  # the program's hook may return a partial sum, so redistribute
                gradient = parameter.grad
                if isinstance(gradient, DTensor) and gradient.placements != parameter.placements:
                    parameter.grad = redistribute_tensor(gradient, parameter.placements)
            elif _has_gradient_in_other_placements(parameter):
                self._get_current_backward_pass().defer_reduction(parameter)

        return prepend_gradient_hooks(parameter, redistribute_before_accumulation, defer_after_accumulation)

    def _get_current_backward_pass(self) -> _BackwardPass:
        """Return the pending gradients of the running backward pass, which are reduced at its end."""
        number = get_backward_pass_id()
        current = self._passes.get(number)
        if current is None:
            current = self._passes[number] = _BackwardPass()
            call_after_backward(current.reduce_and_restore_gradients)
        return current


class _BackwardPass:
    """The new gradients of one backward pass, which are reduced at its end.

    Existing gradients are set aside until the new ones are reduced, and then both are added. If the pass fails, the
    existing gradients are restored.
    """

    def __init__(self) -> None:
        self._earlier: dict[int, tuple[DTensor, torch.Tensor]] = {}
        self._waiting: dict[int, DTensor] = {}

    def set_gradient_aside(self, parameter: DTensor) -> None:
        """Move the existing gradient of a parameter aside until the new one is reduced."""
        assert parameter.grad is not None
        self._earlier[id(parameter)] = parameter, parameter.grad
        parameter.grad = None

    def defer_reduction(self, parameter: DTensor) -> None:
        """Defer the reduction of a parameter's new gradient, to reduce it together with other gradients."""
        self._waiting[id(parameter)] = parameter

    @skip_function_modes
    @torch.no_grad()
    def reduce_and_restore_gradients(self) -> None:
        """Reduce the new gradients, and then add the gradients that were set aside."""
        waiting = list(self._waiting.values())
        for parameter in waiting:
            _redistribute_gradient(parameter)
        for mesh in {parameter.device_mesh for parameter in waiting}:
            with simulation.simulate_ranks_of_mesh(mesh):
                for dim in range(mesh.ndim):
                    _reduce_over_mesh_dim([each for each in waiting if each.device_mesh == mesh], dim)
        self._waiting.clear()
        while self._earlier:
            _, (parameter, earlier) = self._earlier.popitem()
            # After `torch.autograd.grad`, `grad` is None, so restore the earlier gradient. Otherwise, add the new one
            # to it.
            parameter.grad = earlier if parameter.grad is None else earlier.add_(parameter.grad)

    @skip_function_modes
    def __del__(self) -> None:
        # The backward pass failed, so other processes may not join a collective: drop the unreduced gradients.
        for parameter in self._waiting.values():
            parameter.grad = None
        for parameter, earlier in self._earlier.values():
            parameter.grad = earlier


def _has_partial_placement(gradient: torch.Tensor) -> bool:
    return isinstance(gradient, DTensor) and any(p.is_partial() for p in gradient.placements)


def _has_gradient_in_other_placements(parameter: DTensor) -> bool:
    gradient = parameter.grad
    return isinstance(gradient, DTensor) and gradient.placements != parameter.placements


def _redistribute_gradient(parameter: DTensor) -> None:
    """Redistribute a gradient to its parameter's placements, but leave partial sums that are reduced later."""
    gradient = parameter.grad
    if not isinstance(gradient, DTensor):
        return
    closer = [
        have if type(have) is Partial and want.is_replicate() else want
        for have, want in zip(gradient.placements, parameter.placements, strict=True)
    ]
    if tuple(closer) != tuple(gradient.placements):
        parameter.grad = redistribute_tensor(gradient, closer)


def _reduce_over_mesh_dim(parameters: list[DTensor], mesh_dim: int) -> None:
    """Reduce gradients that are partial over a mesh dim, by one all-reduce for equal placements and dtypes."""
    alike: dict[tuple[Any, torch.dtype, int], list[DTensor]] = {}
    for parameter in parameters:
        gradient = parameter.grad
        if isinstance(gradient, DTensor) and gradient.placements[mesh_dim].is_partial():
            # The split sizes of an uneven shard differ between simulated ranks, so reduce such a gradient alone.
            is_alone = simulation.is_simulated() and not has_even_shards(get_spec(gradient))
            key = gradient.placements[mesh_dim], gradient.dtype, id(parameter) if is_alone else 0
            alike.setdefault(key, []).append(parameter)
    for (partial, *_), waiting in alike.items():
        for some in split_into_buckets(waiting, _compute_gradient_bytes):
            _reduce_concatenated_gradients(some, mesh_dim, partial.reduce_op)


def split_into_buckets(values: Iterable[V], compute_num_bytes: Callable[[V], int]) -> Iterator[list[V]]:
    """Yield the gradients that one collective reduces: in their order, with a limited number of bytes.

    Args:
        values: The gradients, or objects that stand for them.
        compute_num_bytes: Returns the number of bytes of each on a device.
    """
    some: list[V] = []
    size = 0
    for value in values:
        more = compute_num_bytes(value)
        if some and size + more > _MAX_BYTES_PER_COLLECTIVE:
            yield some
            some, size = [], 0
        some.append(value)
        size += more
    if some:
        yield some


def _compute_gradient_bytes(parameter: DTensor) -> int:
    spec = get_spec(parameter.grad)
    return math.prod(compute_largest_shard_shape(spec)) * get_meta(spec).dtype.itemsize


def reduce_each_gradient_in(
    make_context: Callable[[], AbstractContextManager[object]],
) -> AbstractContextManager[object]:
    """Reduce each gradient on its own, in a context of this kind, until the block ends, so that it can be counted."""

    def wrap_reduction(reduce: Callable[[list[DTensor], int], None]) -> Callable[[list[DTensor], int], None]:
        def reduce_each(parameters: list[DTensor], mesh_dim: int) -> None:
            for parameter in parameters:
                with make_context():
                    reduce([parameter], mesh_dim)

        return reduce_each

    patch = AttributePatch(sys.modules[__name__], _reduce_over_mesh_dim.__name__, wrap_reduction)
    return PatchGroup([patch]).activate()


def _reduce_concatenated_gradients(parameters: list[DTensor], mesh_dim: int, reduce_op: str) -> None:
    """Reduce the gradients of parameters over a mesh dim by one all-reduce of their concatenated elements."""
    pieces = [get_local(parameter.grad) for parameter in parameters]
    # Concatenate the gradients, because one large collective is faster than many small ones.
    joined = torch.cat([each.reshape(-1) for each in pieces])
    joined = reduce_over_devices(joined, parameters[0].device_mesh, mesh_dim, reduce_op)
    parts = [joined] if len(pieces) == 1 else torch.split(joined, [each.numel() for each in pieces])
    for parameter, piece, part in zip(parameters, pieces, parts, strict=True):
        spec = get_spec(parameter.grad)
        # A DTensor with a storage offset cannot be copied, so clone the part.
        parameter.grad = make_dtensor(
            part.clone().view(piece.shape), copy_spec_with_placement(spec, mesh_dim, Replicate(), part.dtype)
        )
