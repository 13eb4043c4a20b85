"""Weights that the batch's dim shards, gathered by this library itself, those of the next block ahead of time.

In which order a model gathers is learned in each of its calls. While one block computes, what the block behind it
needs is on its way, and in a backward pass what the block before it needs. A guess that was wrong costs a collective,
and no number is wrong: what is on its way is used for just the values that it was asked for with.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor

from layoutmap.adapters.protocol import ScopeContext
from layoutmap.adapters.torch.paths import Holder
from layoutmap.core.errors import EngineError
from layoutmap.core.layout import Layout
from layoutmap.engines.torch.backward import at_end_of_backward, backward_pass, is_checkpoint, saver
from layoutmap.engines.torch.dtensor_ops import note_redistributed
from layoutmap.engines.torch.gather import Cast, Gather, can_gather, changed_too_early, regathered
from layoutmap.engines.torch.modes import plainly
from layoutmap.engines.torch.storages import version_of
from layoutmap.engines.torch.unseen import memory_of


@dataclass(slots=True, eq=False)
class Weight:
    """A parameter that is gathered, or of another element type, when it computes.

    Args:
        place: The module that holds it, and its name there.
        layout: The layout in which it computes.
        path: Its path in the model.
    """

    place: Holder
    layout: Layout
    path: str

    @property
    def held(self) -> torch.Tensor | None:
        """The tensor that the module holds there now; `None`: none, as where the weight was parametrized or pruned."""
        return self.place.held

    @property
    def name(self) -> str:
        """The name of the weight in messages."""
        return f"{type(self.place.module).__name__}.{self.place.name}"


class Order:  # why: decisions/0104
    """In which order the weights of one model are gathered, and what of them is on its way."""

    def __init__(self) -> None:
        self.is_open = False
        self._last: Own | None = None
        self._last_freed: Own | None = None
        self._following: dict[Own, Own] = {}
        self._preceding: dict[Own, Own | None] = {}
        self._asked: dict[Own, _Asked] = {}

    def __deepcopy__(self, memo: dict[int, object]) -> Order:
        return Order()

    @contextmanager
    def call(self) -> Generator[None]:
        """While open, a call of the model is."""
        self.drop()
        self.is_open, self._last, self._last_freed = True, None, None
        try:
            yield
        finally:
            self.is_open = False
            self.drop()

    def take(self, own: Own, held: Sequence[tuple[Weight, torch.Tensor]], context: ScopeContext) -> _Asked:
        """The all-gather that was begun already, if it is of the tensor that is held now; else a new one."""
        asked = self._asked.pop(own, None)
        if asked is not None and asked.is_of(held):
            return asked
        if asked is not None:
            asked.drop()
        return _Asked(own, held, context, is_ahead=False)

    def go_on(self, own: Own, context: ScopeContext, *, is_freed: bool) -> None:
        """Ask for what comes behind what was just gathered, in the pass that runs now.

        Args:
            own: What was gathered.
            context: The scope.
            is_freed: Whether a backward pass has to gather it once more.
        """
        if not context.across:
            return
        if backward_pass() >= 0:
            self._ask(self._preceding.get(own), context)
        elif self.is_open:
            if self._last is not None:
                self._following[self._last] = own
            self._last = own
            if is_freed:
                self._preceding[own], self._last_freed = self._last_freed, own
            self._ask(self._following.get(own), context)

    def watch(self, results: Sequence[torch.Tensor], context: ScopeContext) -> None:
        """Have a backward pass that begins with what the model returns ask for what it needs first."""
        last = self._last_freed
        if last is not None and torch.is_grad_enabled():

            @plainly
            def begin(_: object) -> None:
                self._ask(last, context)

            for each in results:
                if each.grad_fn is not None:
                    each.register_hook(begin)  # pyright: ignore[reportUnknownMemberType]

    def _ask(self, own: Own | None, context: ScopeContext) -> None:
        if own is not None and own not in self._asked:
            self._asked[own] = _Asked(own, own.held(), context, is_ahead=True)
            if backward_pass() >= 0:
                at_end_of_backward(self.drop)  # the pass may not come to what was asked for

    def drop(self) -> None:
        """Wait for the all-gathers that are running, and free their results."""
        while self._asked:
            self._asked.popitem()[1].drop()


class Own:
    """Weights that are gathered together when a module is called.

    Args:
        weights: The weights.
        order: That of their model.
        policy: In which element types they compute: a `MixedPrecisionPolicy` of torch; `None`: in their own.
        is_kept: Whether they are not freed between the forward pass and the backward pass.
    """

    def __init__(self, weights: Sequence[Weight], order: Order, policy: object, *, is_kept: bool) -> None:
        self._weights, self._order, self._is_kept = weights, order, is_kept
        self.dtype = getattr(policy, "param_dtype", None)
        self.reduce_dtype = getattr(policy, "reduce_dtype", None)

    def held(self) -> list[tuple[Weight, torch.Tensor]]:
        """Each weight, with what its module holds."""
        return [(weight, held) for weight in self._weights if (held := weight.held) is not None]

    @contextmanager
    def gathered(self, context: ScopeContext) -> Generator[None]:
        """While open, modules hold the weights as they compute."""
        asked, together = self._gather(context)
        if not together:  # the model's own call has gathered them
            yield
            return
        held = [(weight, each, together[id(each)]) for weight, each in asked.held if id(each) in together]
        for _, stored, tensor in held:
            note_redistributed(stored, tensor)  # a module may change it, as spectral norms do
        memories = [memory_of(tensor) for _, _, tensor in held]
        keys = () if self._is_kept else asked.keys  # what stays gathered needs not be gathered again
        versions = {id(tensor): version_of(tensor) for _, tensor in asked.held}

        def again() -> list[DTensor]:
            for weight, tensor in asked.held:
                if version_of(tensor) != versions[id(tensor)]:
                    raise RuntimeError(changed_too_early(weight.name, tuple(tensor.shape)))  # as torch does
            anew = self._order.take(self, asked.held, context).tensors()
            self._order.go_on(self, context, is_freed=True)
            return [anew[key] for key in keys]

        is_again = not torch.is_grad_enabled() or is_checkpoint(saver())
        with (
            held_in_place([(weight.place, old, new) for weight, old, new in held]),
            regathered([together[key] for key in keys], again) as is_freed,
        ):
            plainly(self._order.go_on)(self, context, is_freed=bool(keys) and (is_freed or is_again))
            yield
            for (weight, _, tensor), memory in zip(held, memories, strict=True):
                if memory_of(tensor) is not memory:
                    raise _data_replaced(weight.name)

    @plainly
    def _gather(self, context: ScopeContext) -> tuple[_Asked, dict[int, DTensor]]:
        asked = self._order.take(self, self.held(), context)
        return asked, asked.tensors()


def _data_replaced(name: str) -> EngineError:
    return EngineError(
        f"{name}: its `.data` was replaced in a call of the model",
        why="it is sharded over the batch's dim, and a call holds it gathered: the new values would be lost with that",
        fix="change it in place: weight.data.copy_(values)",
    )


class _Asked:
    """Weights that are on their way to the layouts in which they compute: by one collective for all of one kind."""

    def __init__(
        self, own: Own, held: Sequence[tuple[Weight, torch.Tensor]], context: ScopeContext, *, is_ahead: bool
    ) -> None:
        self.held, self._context, self._dtype = held, context, own.dtype
        self._versions: dict[int, int] = {}
        self._gathers: list[Gather] = []
        self._relaid: list[tuple[DTensor, Layout]] = []
        self._cast: list[DTensor] = []
        groups: dict[tuple[int, bool, torch.dtype, bool], list[DTensor]] = {}
        for weight, tensor in held:
            if not isinstance(tensor, DTensor) or id(tensor) in self._versions:
                continue
            self._versions[id(tensor)] = version_of(tensor)
            mesh, placements = context.engine.native(weight.layout, tensor.ndim)
            if tensor.device_mesh != mesh:
                continue  # it was laid out anew, and computes as it is
            differ = [i for i, (a, b) in enumerate(zip(tensor.placements, placements, strict=True)) if a != b]
            is_number = tensor.is_floating_point()
            if len(differ) == 1 and placements[differ[0]].is_replicate() and can_gather(tensor, differ[0]):
                groups.setdefault((differ[0], is_number, tensor.dtype, tensor.requires_grad), []).append(
                    tensor
                )
                continue
            if differ:
                self._relaid.append((tensor, weight.layout))
            if own.dtype is not None and is_number and tensor.dtype != own.dtype:
                self._cast.append(tensor)
        for (mesh_dim, is_number, *_), tensors in groups.items():
            dtype, reduce_dtype = (own.dtype, own.reduce_dtype) if is_number else (None, None)
            self._gathers.append(
                Gather(tensors, mesh_dim, dtype, reduce_dtype, is_asynchronous=is_ahead and context.across)
            )

    def is_of(self, held: Sequence[tuple[Weight, torch.Tensor]]) -> bool:
        """Whether these are the weights that were asked for, with the values that they had."""
        return len(held) == len(self.held) and all(
            now is tensor and version_of(now) == self._versions.get(id(now), version_of(now))
            for (_, now), (_, tensor) in zip(held, self.held, strict=True)
        )

    @property
    def keys(self) -> list[int]:
        """The ids of those that are sharded further than they compute."""
        gathered = [id(tensor) for gather in self._gathers for tensor in gather.tensors]
        return [*(id(tensor) for tensor, _ in self._relaid), *gathered]

    def tensors(self) -> dict[int, DTensor]:
        """The weights as they compute, by the ids of what modules hold; what computes as it is is left out."""
        together = {
            id(tensor): self._context.engine.relayout(tensor, layout) for tensor, layout in self._relaid
        }
        for gather in self._gathers:
            together |= zip(map(id, gather.tensors), gather.gathered(), strict=True)
        for tensor in self._cast:
            together[id(tensor)] = Cast.apply(together.get(id(tensor), tensor), self._dtype)
        return together

    def drop(self) -> None:
        """Wait for the all-gathers that are running, and free their results."""
        for gather in self._gathers:
            gather.rows()


@contextmanager
def held_in_place(changes: Sequence[tuple[Holder, torch.Tensor | None, torch.Tensor]]) -> Generator[None]:
    """While open, modules hold other tensors than before: where, what before, and what meanwhile."""
    try:
        for place, _, tensor in changes:
            place.put(tensor)
        yield
    finally:
        for place, tensor, _ in changes:
            place.put(tensor)
