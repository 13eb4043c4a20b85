"""Gather weights that the batch dim shards while their block computes, without torch's `fully_shard`."""

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
from layoutmap.engines.tested import check_names
from layoutmap.engines.torch.backward import call_after_backward, get_backward_pass
from layoutmap.engines.torch.dtensor_ops import note_redistributed
from layoutmap.engines.torch.gather import Cast, Gather, can_gather, describe_early_change, save_references
from layoutmap.engines.torch.modes import skip_function_modes
from layoutmap.engines.torch.storages import get_version
from layoutmap.engines.torch.unseen import get_memory

check_names("torch", (torch.nn.RNNBase, "_flat_weights"))


@dataclass(slots=True, eq=False)
class Weight:
    """A parameter that is gathered, or cast, for the forward and backward pass.

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
        """Return the tensor that the module stores under this name now, or None if it was parametrized or pruned."""
        return self.place.held

    @property
    def name(self) -> str:
        """The name of the weight in messages."""
        return f"{type(self.place.module).__name__}.{self.place.name}"


class ModelCall:
    """Track whether a call of one model is open."""

    def __init__(self) -> None:
        self.is_open = False

    def __deepcopy__(self, memo: dict[int, object]) -> ModelCall:
        return ModelCall()

    @contextmanager
    def mark_open(self) -> Generator[None]:
        """Mark the model's call as open until the block ends."""
        self.is_open = True
        try:
            yield
        finally:
            self.is_open = False


# `fully_shard` does not support all layouts, so gather the other weights here (decisions/0017).
class GatherGroup:
    """Gather weights together when a module is called.

    Args:
        weights: The weights.
        policy: In which element types they compute: a `MixedPrecisionPolicy` of torch; `None`: in their own.
        is_kept: Whether they are not freed between the forward pass and the backward pass.
    """

    def __init__(self, weights: Sequence[Weight], policy: object, *, is_kept: bool) -> None:
        self._weights, self._is_kept = weights, is_kept
        self.dtype = getattr(policy, "param_dtype", None)
        self.reduce_dtype = getattr(policy, "reduce_dtype", None)
        self._made_in_backward: tuple[object, dict[int, DTensor]] = (), {}

    @contextmanager
    def gathered(self, context: ScopeContext) -> Generator[None]:
        """Gather the weights into their modules until the block ends."""
        weights = [(weight, held) for weight in self._weights if (held := weight.held) is not None]
        found = _StoredWeights(self, weights, context)
        together = skip_function_modes(self._gather_tensors)(found)
        if not together:  # the model's call has already gathered them
            yield
            return
        held = [(weight, each, together[id(each)]) for weight, each in weights if id(each) in together]
        for _, stored, tensor in held:
            note_redistributed(stored, tensor)  # modules such as spectral norms write to the weight
        memories = [get_memory(tensor) for _, _, tensor in held]
        keys = () if self._is_kept else found.keys  # kept weights need not be gathered again
        # A graph that references modules would keep them alive, so store their names.
        versions = [(weight.name, tensor, get_version(tensor)) for weight, tensor in weights]

        def gather_again() -> list[DTensor]:
            for name, tensor, version in versions:
                if get_version(tensor) != version:
                    # torch raises the same error for unsharded weights.
                    raise RuntimeError(describe_early_change(name, tuple(tensor.shape)))
            anew = found.tensors()
            return [anew[key] for key in keys]

        with (
            swap_temporarily([(weight.place, old, new) for weight, old, new in held]),
            save_references([together[key] for key in keys], gather_again),
        ):
            yield
            for (weight, _, tensor), memory in zip(held, memories, strict=True):
                if get_memory(tensor) is not memory:
                    raise _make_data_error(weight.name)

    def _gather_tensors(self, found: _StoredWeights) -> dict[int, DTensor]:
        """Gather the weights, but those that are kept once in a backward pass: each checkpoint in it asks for them."""
        if get_backward_pass() < 0 or not self._is_kept or not found.keys:
            return found.tensors()
        key = get_backward_pass(), torch.is_grad_enabled(), found.keys
        if self._made_in_backward[0] != key:
            self._made_in_backward = key, found.tensors()
            call_after_backward(self._drop_gathered)
        return self._made_in_backward[1]

    def _drop_gathered(self) -> None:
        self._made_in_backward = (), {}


def _make_data_error(name: str) -> EngineError:
    return EngineError(
        f"{name}: its `.data` was replaced in a call of the model",
        why="it is sharded over the batch dim and gathered during a call, so the new values would be "
        "lost after it",
        fix="change it in place: weight.data.copy_(values)",
    )


class _StoredWeights:
    """The stored weights of modules, grouped so that one collective gathers each group."""

    def __init__(
        self, own: GatherGroup, held: Sequence[tuple[Weight, torch.Tensor]], context: ScopeContext
    ) -> None:
        self._engine, self._dtypes = context.engine, (own.dtype, own.reduce_dtype)
        self._relaid: list[tuple[DTensor, Layout]] = []
        self._cast: list[DTensor] = []
        self._groups: dict[tuple[int, bool, torch.dtype, bool], list[DTensor]] = {}
        for tensor, weight in {id(tensor): (tensor, weight) for weight, tensor in held}.values():
            if not isinstance(tensor, DTensor):
                continue
            mesh, placements = context.engine.native(weight.layout, tensor.ndim)
            if tensor.device_mesh != mesh:
                continue  # another `apply` gave it another layout, so it is not gathered here
            differ = [i for i, (a, b) in enumerate(zip(tensor.placements, placements, strict=True)) if a != b]
            is_number = tensor.is_floating_point()
            if len(differ) == 1 and placements[differ[0]].is_replicate() and can_gather(tensor, differ[0]):
                group = (differ[0], is_number, tensor.dtype, tensor.requires_grad)
                self._groups.setdefault(group, []).append(tensor)
                continue
            if differ:
                self._relaid.append((tensor, weight.layout))
            if own.dtype is not None and is_number and tensor.dtype != own.dtype:
                self._cast.append(tensor)

    @property
    def keys(self) -> list[int]:
        """The ids of those that are sharded further than they compute."""
        gathered = [id(tensor) for tensors in self._groups.values() for tensor in tensors]
        return [*(id(tensor) for tensor, _ in self._relaid), *gathered]

    def tensors(self) -> dict[int, DTensor]:
        """Gather the weights, and return those that changed by the ids of the stored ones."""
        together = {
            id(tensor): self._engine.relayout(tensor, layout, pad=True) for tensor, layout in self._relaid
        }
        for (mesh_dim, is_number, *_), tensors in self._groups.items():
            dtypes = self._dtypes if is_number else (None, None)
            together |= zip(
                map(id, tensors), Gather(tensors, mesh_dim, *dtypes).gather_tensors(), strict=True
            )
        for tensor in self._cast:
            together[id(tensor)] = Cast.apply(together.get(id(tensor), tensor), self._dtypes[0])
        return together


@contextmanager
def swap_temporarily(changes: Sequence[tuple[Holder, torch.Tensor | None, torch.Tensor]]) -> Generator[None]:
    """Put other tensors into modules until the block ends, given as (place, old tensor, new tensor)."""
    # A recurrent layer caches its weights in each call, so restore the cache afterwards.
    recurrent = {place.module for place, *_ in changes if isinstance(place.module, torch.nn.RNNBase)}
    lists = [(module, module._flat_weights) for module in recurrent]  # pyright: ignore[reportPrivateUsage]
    try:
        for place, _, tensor in changes:
            place.put(tensor)
        yield
    finally:
        for place, tensor, _ in changes:
            place.put(tensor)
        for module, weights in lists:
            module._flat_weights = weights  # pyright: ignore[reportPrivateUsage]
