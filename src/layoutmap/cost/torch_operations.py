"""Count the operations of a torch step that runs on tensors without values."""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils.flop_counter import flop_registry

from layoutmap.core.policy import LayoutPolicy
from layoutmap.cost.equal_blocks import BlockCallChecker
from layoutmap.cost.extrapolation import (
    StepCounts,
)
from layoutmap.cost.table import Collective, CollectiveKind, Phase
from layoutmap.engines.patches import set_attribute_temporarily
from layoutmap.engines.torch.deferred_init import (
    unset_fake_temporarily,
)
from layoutmap.engines.torch.element_types import format_dtype
from layoutmap.engines.torch.engine import TorchEngine, engine
from layoutmap.engines.torch.modes import TorchDispatchMode
from layoutmap.engines.torch.operators import Args, Kwargs, OpOverload, can_return_view
from layoutmap.engines.torch.specs import get_local
from layoutmap.engines.torch.storages import get_storage_key
from layoutmap.engines.torch.trees import tree_leaves

_KINDS: Mapping[str, CollectiveKind] = {
    "all_gather_into_tensor": "all_gather",
    "_allgather_base_": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter",
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "allreduce_": "all_reduce",
    "all_to_all_single": "all_to_all",
    "alltoall_base_": "all_to_all",
}
_COMMUNICATION_NAMESPACES = ("c10d", "_c10d_functional")
_LOCAL_OPERATORS = ("wait_tensor", "_wrap_tensor_autograd")
# A result of these operators counts as the same weight or gradient as the operand, so it keeps the operand's source.
_COPIES = {"cat", "clone", "_to_copy", "div", "mul", "neg", "copy_", "wait_tensor", "add", "add_"}


@dataclass(frozen=True, slots=True)
class _ValueSource:
    """Source of a tensor's values: a weight, or a computation.

    Args:
        path: Path of the weight that the tensor copies; empty: it was computed.
        layer: Path of the layer that computed it. A partial sum may be reduced in a later layer.
        number: Number of the computation, counted from 1; 0: none.
        causes: Lists of one text, the cause of each collective that the tensor went through. For a gradient, the
            weight's path replaces the text.
    """

    path: str = ""
    layer: str = ""
    number: int = 0
    causes: tuple[list[str], ...] = ()


def _count_grouped_product_flops(mat_a: torch.Tensor, mat_b: torch.Tensor, *_: object, **__: object) -> int:
    """Return the FLOPs of the products of an expert layer. A 2-D operand has the rows or columns of all groups."""
    num_products = mat_a.shape[0] if mat_a.ndim == mat_b.ndim == 3 else 1
    return 2 * num_products * mat_a.shape[-2] * mat_a.shape[-1] * mat_b.shape[-1]


_FLOP_COUNTERS: Mapping[Any, Any] = {
    **flop_registry,
    torch.ops.aten._grouped_mm: _count_grouped_product_flops,
}


def _compute_num_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


class OperationCounter(TorchDispatchMode):
    """Dispatch mode that counts the operations on this process's shards while it is active."""

    def __init__(self, policy: LayoutPolicy, groups: Mapping[str, tuple[str, ...]], blocks: BlockCallChecker):
        super().__init__()  # pyright: ignore[reportUnknownMemberType]
        self._is_paused = False
        self.policy = policy
        self._groups = groups
        self.blocks = blocks
        self.engine: TorchEngine = engine()
        self.flops: dict[str, int] = {}
        self.traffic_bytes = self.resident_bytes = self._stored_bytes = 0
        # Most bytes, by phase, layer, and whether gradients are reduced.
        self._peaks: dict[tuple[Phase, str, bool], int] = {}
        self._reduces_gradients = False
        self._calls: list[tuple[CollectiveKind, tuple[str, ...], int, list[str], Phase, bool]] = []
        self._storages: dict[Any, tuple[int, _ValueSource]] = {}
        self._num_computed = 0
        self._paths_by_storage: dict[Any, str] = {}
        self._skipped_blocks_by_storage: dict[Any, str] = {}
        self._phase: Phase = "forward"
        self.layers: list[str] = []
        self.last_layer = ""
        self.layer_paths: set[str] = set()
        self.watched_nodes: set[object] = set()
        self.has_fused_attention = False  # whether the step called fused attention
        self.divides_experts = False  # whether this process computes some experts of a layer only
        self._expert_shares: dict[str, float] = {}

    def pause(self) -> AbstractContextManager[None]:
        """Count nothing until the block ends."""
        return set_attribute_temporarily(self, "_is_paused", True)

    @contextmanager
    def pause_with_values(self) -> Generator[None]:
        """Count nothing until the block ends, and compute tensors with values."""
        with self.pause(), unset_fake_temporarily():
            yield

    # -- called by the steps of torch_module_step.py

    def record_shard_path(self, local: torch.Tensor, path: str) -> None:
        """Record the path of the variable to which a shard belongs. The path of a batch is empty."""
        self._paths_by_storage[get_storage_key(local)] = path

    def record_skipped_weight(self, weight: torch.Tensor, block: str) -> None:
        """Record a weight of a skipped block. If an operation reads it, the block cannot be skipped."""
        local = get_local(weight) if isinstance(weight, DTensor) else weight
        self._skipped_blocks_by_storage[get_storage_key(local)] = block

    def record_expert_share(self, path: str, share: float) -> None:
        """Record the share of a layer's experts that this process computes."""
        self._expert_shares[path] = share
        self.divides_experts |= share < 1

    def count_in_phase(self, name: Phase) -> AbstractContextManager[None]:
        """Count operations as those of a phase of the step until the block ends."""
        return set_attribute_temporarily(self, "_phase", name)

    def mark_gradient_reduction(self) -> AbstractContextManager[None]:
        """Count collectives as those of single gradients until the block ends."""
        return set_attribute_temporarily(self, "_reduces_gradients", True)

    def mark_optimizer_update(self) -> AbstractContextManager[None]:
        """Count operations as the optimizer's update until the block ends."""
        return self.count_in_phase("optimizer")

    @contextmanager
    def mark_slot_creation(self) -> Generator[None]:
        """Count memory that is allocated until the block ends, and still in use then, as resident between steps.

        Other counts do not change.
        """
        stored, peaks, traffic = self._stored_bytes, dict(self._peaks), self.traffic_bytes
        flops, num_calls = dict(self.flops), len(self._calls)
        yield
        self.flops, self.traffic_bytes, self._peaks = flops, traffic, peaks
        del self._calls[num_calls:]
        self.resident_bytes += self._stored_bytes - stored

    def record_gradient_path(self, gradient: torch.Tensor, path: str) -> None:
        """Record that a tensor is the gradient of the weight at `path`, which caused the tensor's collectives."""
        _, source = self._storages.get(get_storage_key(get_local(gradient)), (0, _ValueSource()))
        for cause in source.causes:
            cause[0] = path

    def make_step_counts(self) -> StepCounts:
        """Return the counts of the operations so far."""
        collectives, gradients = (
            Counter(
                Collective(kind, dims, 1, num_bytes, cause[0], phase)
                for kind, dims, num_bytes, cause, phase, is_gradient in self._calls
                if is_gradient == is_single
            )
            for is_single in (False, True)
        )
        return StepCounts(
            collectives,
            gradients,
            self.flops,
            self.traffic_bytes,
            self._peaks,
            resident=self.resident_bytes,
        )

    # -- called by torch's dispatcher

    def __torch_dispatch__(
        self, func: OpOverload[..., Any], types: Any, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        kwargs = kwargs or {}  # torch may pass None
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # DTensor then calls the operator on shards, and that call is counted
        result = func(*args, **kwargs)
        if self._is_paused:
            return result
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        for each in inputs if self._skipped_blocks_by_storage else ():
            if (block := self._skipped_blocks_by_storage.get(get_storage_key(each))) is not None:
                self.blocks.differing_path = block  # an exception here would end the process
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        name = func.overloadpacket.__name__
        is_copy = name in _COPIES or name in _KINDS
        source = self._find_value_source(inputs, name, args) if is_copy else None
        self.has_fused_attention |= name.startswith("_scaled_dot_product") and "math" not in name
        if func.namespace in _COMMUNICATION_NAMESPACES and name not in _LOCAL_OPERATORS:
            source = self._add_collective(name, args, kwargs, inputs, source or _ValueSource())
            outputs = outputs or inputs[:1]
        elif func.namespace == "aten" and not can_return_view(func):  # a view reads and writes no bytes
            self.traffic_bytes += sum(map(_compute_num_bytes, (*inputs, *outputs)))
            if (count_flops := _FLOP_COUNTERS.get(func.overloadpacket)) and inputs:
                dtype = format_dtype(inputs[0].dtype)
                number = count_flops(*args, **kwargs, out_val=result)
                if func.overloadpacket is torch.ops.aten._grouped_mm:
                    number *= self._find_expert_share()
                self.flops[dtype] = self.flops.get(dtype, 0) + int(number)
        if source is None:
            self._num_computed += 1
        computed = _ValueSource("", self._current_layer, self._num_computed)
        for output in outputs:
            self._track_storage_memory(output, source, computed)
        return result

    @property
    def _current_layer(self) -> str:
        """Path of the layer that computes now. Code outside of layers, as the loss, belongs to the last layer."""
        return (self.layers[-1] if self.layers else "") or self.last_layer

    def _find_expert_share(self) -> float:
        """Return the share of a grouped product that this process computes, if all experts get as many rows."""
        path = self._current_layer
        while path and path not in self._expert_shares:
            path = path.rpartition(".")[0]
        return self._expert_shares.get(path, 1)

    def _find_value_source(self, inputs: Sequence[torch.Tensor], name: str, args: Args) -> _ValueSource:
        """Return the source of the result of an operator that copies, scales, or adds its inputs."""
        # To add a tensor to partial sums, DTensor divides it by a dim's size. The result is no copy and has no source.
        if name == "div" and len(args) > 1 and isinstance(args[1], int) and args[1] in self.policy.mesh.shape:
            return _ValueSource()
        found: list[_ValueSource] = []
        for each in inputs:
            key = get_storage_key(each)
            if self._paths_by_storage.get(key):
                found.append(_ValueSource(self._paths_by_storage[key]))
            elif key in self._storages:
                found.append(self._storages[key][1])
        first = next((each for each in found if each.path or each.causes), _ValueSource())
        last = max(found, key=lambda each: each.number, default=first)
        return replace(last, path=first.path, causes=first.causes)

    def _add_collective(
        self, name: str, args: Args, kwargs: Kwargs, inputs: Sequence[torch.Tensor], source: _ValueSource
    ) -> _ValueSource:
        kind = _KINDS.get(name)
        dims, size = self._find_collective_dims_and_group_size([*args, *kwargs.values()])
        if kind is None or not dims:
            return _ValueSource()
        # A reduction is caused by the layer that computed the partial sums, other collectives by the current layer.
        layer = source.layer if "reduce" in kind else ""
        cause = [source.path or layer or self._current_layer]
        num_bytes = max(map(_compute_num_bytes, inputs))
        if name == "all_gather_into_tensor":
            num_bytes *= size
        self._calls.append((kind, dims, num_bytes, cause, self._phase, self._reduces_gradients))
        return replace(source, causes=(*source.causes, cause))

    def _find_collective_dims_and_group_size(self, args: Args) -> tuple[tuple[str, ...], int]:
        """Return the mesh dims and the number of devices of a collective, or no dims and 1 if no dim is known."""
        mesh = self.policy.mesh
        for each in args:
            # A c10d collective passes its group as a script object, and the kind of reduction as a later one, so unbox
            # only the first.
            is_group = isinstance(each, torch.ScriptObject)
            name = dist.ProcessGroup.unbox(each).group_name if is_group else each
            if isinstance(name, str) and name in self._groups:
                dims = self._groups[name]
                return dims, math.prod(map(mesh.dim_size, dims))
            if is_group:
                break  # a mesh dim of size 1 has a group that is not in `_groups`, so return no dims
        return (), 1

    def _track_storage_memory(
        self, tensor: torch.Tensor, source: _ValueSource | None, computed: _ValueSource
    ) -> None:
        """Count a tensor's storage as in use until it is freed, and record its source: `source`, or else `computed`."""
        key = get_storage_key(tensor)
        if key in self._paths_by_storage:
            return
        if key in self._storages:
            if source is not None:
                self._storages[key] = (self._storages[key][0], source)
            return
        storage = tensor.untyped_storage()
        num_bytes = storage.nbytes()
        self._storages[key] = num_bytes, source or computed
        self._stored_bytes += num_bytes
        when = self._phase, self._current_layer, self._reduces_gradients
        self._peaks[when] = max(self._peaks.get(when, 0), self._stored_bytes - self.resident_bytes)
        # A view keeps the storage alive, so count the memory until the storage, not the tensor, is freed.
        weakref.finalize(storage, self._release_memory, key)

    def _release_memory(self, key: object) -> None:
        self._stored_bytes -= self._storages.pop(key)[0]
