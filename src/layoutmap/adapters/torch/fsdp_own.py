"""Gather weights that the batch dim shards while their block computes, without torch's `fully_shard`."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor

from layoutmap.adapters.protocol import ScopeContext
from layoutmap.adapters.torch.paths import TensorAttribute
from layoutmap.core.errors import EngineError
from layoutmap.core.layout import Layout
from layoutmap.engines.tested import check_names_exist
from layoutmap.engines.torch.backward import call_after_backward, get_backward_pass_id
from layoutmap.engines.torch.dtensor_ops import record_copy
from layoutmap.engines.torch.gather import (
    CastDTensorFunction,
    GatheredTensors,
    can_gather_by_concatenation,
    format_weight_changed_message,
    save_tensors_as_references,
)
from layoutmap.engines.torch.modes import skip_function_modes
from layoutmap.engines.torch.storages import get_tensor_version
from layoutmap.engines.torch.unseen import get_storage

check_names_exist("torch", (torch.nn.RNNBase, "_flat_weights"))


@dataclass(slots=True, eq=False)
class GatheredWeight:
    """A parameter that is gathered or cast while its layer computes.

    Args:
        attribute: The attribute of a module that stores it.
        layout: The layout that it has while its layer computes.
        path: Its path in the model.
    """

    attribute: TensorAttribute
    layout: Layout
    path: str

    @property
    def tensor(self) -> torch.Tensor | None:
        """Return the tensor that the module stores under this name now, or None if it was parametrized or pruned."""
        return self.attribute.tensor

    @property
    def name(self) -> str:
        """The name of the weight in messages."""
        return f"{type(self.attribute.module).__name__}.{self.attribute.name}"


class ModelCallState:
    """Track whether a call of one model is running."""

    def __init__(self) -> None:
        self.is_running = False

    def __deepcopy__(self, memo: dict[int, object]) -> ModelCallState:
        return ModelCallState()

    @contextmanager
    def mark_running_temporarily(self) -> Generator[None]:
        """Mark the model's call as running until the block ends."""
        self.is_running = True
        try:
            yield
        finally:
            self.is_running = False


# `fully_shard` does not support all layouts, so weights in other layouts are gathered here (decisions/0017).
class WeightGatherer:
    """Gather the weights of a module with few collectives while the module computes.

    Args:
        weights: The weights.
        policy: The element types to compute in, as torch's `MixedPrecisionPolicy`; `None`: those of the weights.
        is_kept: Whether gathered weights stay in memory between the forward pass and the backward pass.
    """

    def __init__(self, weights: Sequence[GatheredWeight], policy: object, *, is_kept: bool) -> None:
        self._weights, self._is_kept = weights, is_kept
        self.dtype = getattr(policy, "param_dtype", None)
        self.reduce_dtype = getattr(policy, "reduce_dtype", None)
        self._gathered_in_backward: tuple[object, dict[int, DTensor]] = (), {}

    @contextmanager
    def gather_into_modules_temporarily(self, context: ScopeContext) -> Generator[None]:
        """Replace the weights in their modules by gathered ones until the block ends."""
        weights = [(weight, tensor) for weight in self._weights if (tensor := weight.tensor) is not None]
        stored = _StoredWeights(self, weights, context)
        gathered = skip_function_modes(self._gather_once_per_backward)(stored)
        if not gathered:  # nothing changes, for example if the model's call has gathered them already
            yield
            return
        replaced = [(weight, each, gathered[id(each)]) for weight, each in weights if id(each) in gathered]
        for _, original, tensor in replaced:
            record_copy(original, tensor)  # so that in-place changes, as by spectral norm, are written back
        storages = [get_storage(tensor) for _, _, tensor in replaced]
        gathered_ids = () if self._is_kept else stored.gathered_ids  # kept weights need not be gathered again
        # The autograd graph keeps `gather_again`, which must not keep modules alive, so store names of weights only.
        versions = [(weight.name, tensor, get_tensor_version(tensor)) for weight, tensor in weights]

        def gather_again() -> list[DTensor]:
            for name, tensor, version in versions:
                if get_tensor_version(tensor) != version:
                    # torch raises this error for unsharded weights, so raise it for gathered ones, too.
                    raise RuntimeError(format_weight_changed_message(name, tuple(tensor.shape)))
            regathered = stored.gather_and_cast()
            return [regathered[key] for key in gathered_ids]

        with (
            swap_tensors_temporarily([(weight.attribute, old, new) for weight, old, new in replaced]),
            save_tensors_as_references([gathered[key] for key in gathered_ids], gather_again),
        ):
            yield
            for (weight, _, tensor), storage in zip(replaced, storages, strict=True):
                if get_storage(tensor) is not storage:
                    raise _make_replaced_data_error(weight.name)

    def _gather_once_per_backward(self, stored: _StoredWeights) -> dict[int, DTensor]:
        """Return a dict from ids of stored weights to gathered ones, which a backward pass's checkpoints share."""
        if get_backward_pass_id() < 0 or not self._is_kept or not stored.gathered_ids:
            return stored.gather_and_cast()
        key = get_backward_pass_id(), torch.is_grad_enabled(), stored.gathered_ids
        if self._gathered_in_backward[0] != key:
            self._gathered_in_backward = key, stored.gather_and_cast()
            call_after_backward(self._free_weights_gathered_in_backward)
        return self._gathered_in_backward[1]

    def _free_weights_gathered_in_backward(self) -> None:
        self._gathered_in_backward = (), {}


def _make_replaced_data_error(name: str) -> EngineError:
    return EngineError(
        f"{name}: its `.data` was replaced in a call of the model",
        why="it is sharded over the batch dim and gathered during a call, so the new values would be "
        "lost after it",
        fix="change it in place: weight.data.copy_(values)",
    )


class _StoredWeights:
    """The stored weights of modules, grouped so that one collective gathers each group."""

    def __init__(
        self,
        owner: WeightGatherer,
        weights: Sequence[tuple[GatheredWeight, torch.Tensor]],
        context: ScopeContext,
    ) -> None:
        self._engine, self._dtypes = context.engine, (owner.dtype, owner.reduce_dtype)
        self._to_relayout: list[tuple[DTensor, Layout]] = []
        self._to_cast: list[DTensor] = []
        self._groups: dict[tuple[int, bool, torch.dtype, bool], list[DTensor]] = {}
        for tensor, weight in {id(tensor): (tensor, weight) for weight, tensor in weights}.values():
            if not isinstance(tensor, DTensor):
                continue
            mesh, placements = context.engine.make_native_layout(weight.layout, tensor.ndim)
            if tensor.device_mesh != mesh:
                continue  # a second `apply` moved it to a different mesh, so it is not gathered here
            pairs = zip(tensor.placements, placements, strict=True)
            differing = [dim for dim, (stored, computing) in enumerate(pairs) if stored != computing]
            is_floating = tensor.is_floating_point()
            dim = differing[0] if len(differing) == 1 else None
            if (
                dim is not None
                and placements[dim].is_replicate()
                and can_gather_by_concatenation(tensor, dim)
            ):
                group = (dim, is_floating, tensor.dtype, tensor.requires_grad)
                self._groups.setdefault(group, []).append(tensor)
                continue
            if differing:
                self._to_relayout.append((tensor, weight.layout))
            if owner.dtype is not None and is_floating and tensor.dtype != owner.dtype:
                self._to_cast.append(tensor)

    @property
    def gathered_ids(self) -> list[int]:
        """The ids of the stored weights that get a different sharding. Weights that are only cast are not included."""
        gathered = [id(tensor) for tensors in self._groups.values() for tensor in tensors]
        return [*(id(tensor) for tensor, _ in self._to_relayout), *gathered]

    def gather_and_cast(self) -> dict[int, DTensor]:
        """Gather and cast the weights. Return a dict from ids of stored tensors that change to the new tensors."""
        gathered = {
            id(tensor): self._engine.relayout(tensor, layout, pad=True)
            for tensor, layout in self._to_relayout
        }
        for (mesh_dim, is_floating, *_), tensors in self._groups.items():
            dtypes = self._dtypes if is_floating else (None, None)
            gathered |= zip(
                map(id, tensors),
                GatheredTensors(tensors, mesh_dim, *dtypes).make_gathered_tensors(),
                strict=True,
            )
        for tensor in self._to_cast:
            gathered[id(tensor)] = CastDTensorFunction.apply(
                gathered.get(id(tensor), tensor), self._dtypes[0]
            )
        return gathered


@contextmanager
def swap_tensors_temporarily(
    changes: Sequence[tuple[TensorAttribute, torch.Tensor | None, torch.Tensor]],
) -> Generator[None]:
    """Store new tensors in modules until the block ends. Each change is (attribute, old tensor, new tensor)."""
    # A recurrent layer caches its weights in each call, so restore the cache afterwards.
    recurrent = {at.module for at, *_ in changes if isinstance(at.module, torch.nn.RNNBase)}
    lists = [(module, module._flat_weights) for module in recurrent]  # pyright: ignore[reportPrivateUsage]
    try:
        for at, _, tensor in changes:
            at.set_tensor(tensor)
        yield
    finally:
        for at, tensor, _ in changes:
            at.set_tensor(tensor)
        for module, weights in lists:
            module._flat_weights = weights  # pyright: ignore[reportPrivateUsage]
