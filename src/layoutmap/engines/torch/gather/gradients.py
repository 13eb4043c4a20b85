"""Gradients that are partial sums are reduced over the mesh together, at the end of each backward pass.

Where the batch is sharded over a mesh dim, each device has the gradients of its own examples. DTensor leaves it to
whoever reads them to make the sum: to each operation of the optimizer, for each parameter. Here they are laid end to
end and summed up together, so that optimizers, clipping and reads find each gradient in the layout of its parameter.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.utils.hooks import RemovableHandle, unserializable_hook  # pyright: ignore[reportUnknownVariableType]

from layoutmap.engines.torch import simulation
from layoutmap.engines.torch.backward import at_end_of_backward, backward_pass
from layoutmap.engines.torch.modes import plainly
from layoutmap.engines.torch.placing import redistributed, summed_over
from layoutmap.engines.torch.specs import dtensor, local_of, placed_over, spec_of

_MAX_BYTES = 256 << 20  # of gradients that are copied to be summed up in one collective


class Gradients:
    """From now on, gives the gradient of each parameter that is a `DTensor` the parameter's layout.

    A pass adds to gradients that exist already, as always. Gradients that `torch.autograd.grad` returns are left as
    they are.

    Args:
        parameters: The parameters of a model; plain tensors, and what has no gradient, are passed over.
        refer_to: Gives a function that gives a parameter, without keeping it. Torch does not convert parameters that
            have weak references, as by `model.to(dtype)`, so a model's are better reached through the model.
    """

    def __init__(
        self,
        parameters: Iterable[torch.Tensor],
        refer_to: Callable[[DTensor], Callable[[], torch.Tensor | None]] = weakref.ref,
    ) -> None:
        self._refer_to = refer_to
        self._passes: dict[int, list[tuple[DTensor, torch.Tensor | None]]] = {}
        self._hooks: list[RemovableHandle] = []
        for parameter in parameters:
            if isinstance(parameter, DTensor) and parameter.requires_grad:
                self._hooks += self._watch(parameter)

    def remove(self) -> None:
        """Leave gradients as they come."""
        while self._hooks:
            self._hooks.pop().remove()

    def _watch(self, parameter: DTensor) -> tuple[RemovableHandle, RemovableHandle]:
        earlier: dict[int, torch.Tensor] = {}  # by pass, so that one that fails leaves nothing for the next
        parameter_of = self._refer_to(parameter)

        @unserializable_hook
        def before(gradient: torch.Tensor) -> None:
            # Kept apart from the gradient that exists: DTensor would all-reduce this one by itself in order to add it.
            parameter = parameter_of()
            if parameter is not None and parameter.grad is not None and _is_partial(gradient):
                earlier.clear()
                earlier[backward_pass()] = parameter.grad
                parameter.grad = None

        def after(parameter: DTensor) -> None:
            added = earlier.pop(backward_pass(), None)
            if added is not None or _differs(parameter):
                self._note(parameter, added)

        return parameter.register_hook(before), parameter.register_post_accumulate_grad_hook(after)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]

    def _note(self, parameter: DTensor, earlier: torch.Tensor | None) -> None:
        """Remember a parameter until the pass that runs now ends."""
        number = backward_pass()
        if number not in self._passes:
            self._passes.clear()  # those of passes that failed
            self._passes[number] = []
            at_end_of_backward(lambda: self._finish(number))
        self._passes[number].append((parameter, earlier))

    @plainly
    @torch.no_grad()
    def _finish(self, number: int) -> None:
        noted = self._passes.pop(number, [])
        for parameter, _ in noted:
            _redistribute(parameter)
        parameters = [parameter for parameter, _ in noted]
        for mesh in {parameter.device_mesh for parameter in parameters}:
            with simulation.on_mesh(mesh):
                for dim in range(mesh.ndim):
                    _sum_up([each for each in parameters if each.device_mesh == mesh], dim)
        for parameter, earlier in noted:
            if earlier is not None and parameter.grad is not None:
                parameter.grad = earlier.add_(parameter.grad)


def _is_partial(gradient: torch.Tensor) -> bool:
    return isinstance(gradient, DTensor) and any(p.is_partial() for p in gradient.placements)


def _differs(parameter: DTensor) -> bool:
    gradient = parameter.grad
    return isinstance(gradient, DTensor) and gradient.placements != parameter.placements


def _redistribute(parameter: DTensor) -> None:
    """Redistribute a gradient whose placements differ from its parameter's by more than partial sums to replicate."""
    gradient = parameter.grad
    if not isinstance(gradient, DTensor):
        return
    closer = [
        have if type(have) is Partial and want.is_replicate() else want
        for have, want in zip(gradient.placements, parameter.placements, strict=True)
    ]
    if tuple(closer) != tuple(gradient.placements):
        parameter.grad = redistributed(gradient, closer)


def _sum_up(parameters: list[DTensor], dim: int) -> None:
    """All-reduce, in few tensors, the gradients of parameters that are partial over a mesh dim."""
    alike: dict[tuple[Any, torch.dtype], list[DTensor]] = {}
    for parameter in parameters:
        gradient = parameter.grad
        if isinstance(gradient, DTensor) and gradient.placements[dim].is_partial():
            alike.setdefault((gradient.placements[dim], gradient.dtype), []).append(parameter)
    for (partial, _), waiting in alike.items():
        for some in _batches(waiting):
            _sum_up_at_once(some, dim, partial.reduce_op)


def _batches(parameters: list[DTensor]) -> Iterable[list[DTensor]]:
    some: list[DTensor] = []
    size = 0
    for parameter in parameters:
        more = local_of(parameter.grad).nbytes
        if some and size + more > _MAX_BYTES:
            yield some
            some, size = [], 0
        some.append(parameter)
        size += more
    yield some


def _sum_up_at_once(parameters: list[DTensor], dim: int, reduce_op: str) -> None:
    pieces = [local_of(parameter.grad) for parameter in parameters]
    joined = torch.cat([each.reshape(-1) for each in pieces])  # one large takes less time
    joined = summed_over(joined, parameters[0].device_mesh, dim, reduce_op)
    sizes = [each.numel() for each in pieces]
    for parameter, piece, part in zip(parameters, pieces, torch.split(joined, sizes), strict=True):
        spec = spec_of(parameter.grad)
        # A DTensor that begins inside of a storage cannot be copied.
        parameter.grad = dtensor(
            part.clone().view(piece.shape), placed_over(spec, dim, Replicate(), part.dtype)
        )
