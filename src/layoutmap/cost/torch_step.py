"""Count a training step of a torch module on each device, with tensors that have no values.

The step runs once as process 0 of a program of as many processes as the mesh has devices, in a process group whose
other processes do not exist: each operation that DTensor carries out on this process's pieces is seen, and none is
computed. Nothing of it is left afterwards.
"""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils.flop_counter import flop_registry

from layoutmap.core.errors import LayoutMapError, ScopeError
from layoutmap.core.layout import Layout
from layoutmap.core.mesh import Mesh
from layoutmap.core.policy import LayoutPolicy
from layoutmap.core.steps import TrainingStep
from layoutmap.core.variables import Assignment, VariableSpec
from layoutmap.cost.table import FUSED_ATTENTION, Collective, CollectiveKind, Phase, StepCost
from layoutmap.engines.patches import set_temporarily
from layoutmap.engines.torch import simulation
from layoutmap.engines.torch.arrays import convert_layout, record_layout
from layoutmap.engines.torch.deferred_init import FakeTensorMode
from layoutmap.engines.torch.devices import forget_process_group
from layoutmap.engines.torch.element_types import find_torch_dtype, format_dtype
from layoutmap.engines.torch.engine import TorchEngine, engine
from layoutmap.engines.torch.modes import TorchDispatchMode
from layoutmap.engines.torch.operators import Args, Kwargs, OpOverload, can_return_view
from layoutmap.engines.torch.simulation import FakeStore
from layoutmap.engines.torch.specs import clear_sharding_caches, get_local, make_dtensor, make_tensor_spec
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
_COMMUNICATING = ("c10d", "_c10d_functional")
_SILENT = ("wait_tensor", "_wrap_tensor_autograd")
# Operators whose result is still the same weight or gradient.
_COPIES = {"cat", "clone", "_to_copy", "div", "mul", "neg", "copy_", "wait_tensor", "add", "add_"}
_EAGER = "each operation reads what it takes and writes what it returns, as without torch.compile"
_ACCUMULATED = "weights of a block are gathered together, under the name of the first of them"


# A formula is wrong where layouts conflict, so the step runs on fake tensors and is counted (decisions/0156).
class LoweredStep:
    """Training step of a torch module, which can be counted in any layouts."""

    def __init__(self, step: TrainingStep):
        self._step = step

    def count(
        self, assignments: Sequence[Assignment], policy: LayoutPolicy, *, with_held: bool = False
    ) -> StepCost:
        """Count the step's collectives, operations, and memory in given layouts. `with_held` is ignored."""
        with ExitStack() as stack:
            stack.enter_context(_simulate_process_group(policy.mesh.size))
            groups = _list_groups(policy.mesh)  # real values, because torch reads those of a device mesh
            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
            counting: Any = _OperationCounter(policy, groups)
            values = {a.variable.key: _make_fake_dtensor(a) for a in assignments}
            batch = [torch.empty(b.shape, dtype=find_torch_dtype(b.dtype, b.name)) for b in self._step.batch]
            given = sum(
                Assignment(
                    VariableSpec(b.name, b.shape, b.dtype), policy.derive_batch_layout(b.shape)
                ).shard_bytes
                for b in self._step.batch
            )
            given += sum(a.shard_bytes for a in assignments)
            for key, value in values.items():
                counting.name_shard(get_local(value), key[1])
            for each in batch:  # count only this device's part
                counting.name_shard(each, "")
            with _explain_failures(self._step):
                self._step.run(counting, values, batch)
            made = tuple(counting.list_collectives())
        return StepCost(
            policy.mesh,
            made,
            {name: number for name, number in counting.flops.items() if number},
            counting.traffic,
            given + counting.kept,
            given + counting.kept + counting.peak,
            (_EAGER, _ACCUMULATED, *[FUSED_ATTENTION] * counting.fuses, *self._step.notes),
        )


@contextmanager
def _simulate_process_group(num_processes: int) -> Generator[None]:
    """Act as process 0 of a group without the other processes, until the block ends."""
    if simulation.has_process_group():
        raise ScopeError(
            "the cost of a step cannot be counted in this process",
            facts={"process group": dist.get_backend(simulation.get_group())},
            why="counting needs its own default process group, and torch has only one per process",
            fix="plan in a process without a scope and without a process group, as layoutmap plan --on does",
        )
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=num_processes)
    group = dist.group.WORLD
    try:
        yield
    finally:
        forget_process_group(group)
        dist.destroy_process_group()
        clear_sharding_caches()  # cache keys reference meshes of that group


@contextmanager
def _explain_failures(step: TrainingStep) -> Generator[None]:
    try:
        yield
    except LayoutMapError:
        raise
    except Exception as error:
        inputs = ", ".join(f"{each.name}: {each.dtype}{list(each.shape)}" for each in step.batch)
        raise ScopeError(
            f"{step.name}: its training step fails with tensors that have no values",
            facts={"inputs": inputs, type(error).__name__: str(error).strip().partition("\n")[0]},
            why="the step is run with shapes, to count its cost",
            fix="pass inputs= with the shapes and dtypes of the module's inputs, and call the module "
            "with them in a test",
        ) from error


def _make_fake_dtensor(assignment: Assignment) -> object:
    """Return a DTensor in its layout, without values."""
    variable, layout = assignment.variable, assignment.layout
    native, placements = convert_layout(layout)
    dtype = find_torch_dtype(variable.dtype, variable.path)
    local = torch.empty(assignment.shard_shape, dtype=dtype, device=native.device_type)
    return record_layout(
        make_dtensor(local, make_tensor_spec(native, placements, torch.Size(variable.shape), dtype)), layout
    )


@dataclass(frozen=True, slots=True)
class _Source:
    """Origin of a tensor's values.

    Args:
        path: Path of the weight that it copies; empty: it was computed.
        layer: The layer that computed it. A partial sum is reduced later, in another layer.
        number: Number of the computation; 0: none.
        causes: Causes of the collectives that it went through, which are renamed if it turns out to be a gradient.
    """

    path: str = ""
    layer: str = ""
    number: int = 0
    causes: tuple[list[str], ...] = ()


def _count_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


class _OperationCounter(TorchDispatchMode):
    """Counter of the operations on this process's shards, while it is open."""

    def __init__(self, policy: LayoutPolicy, groups: Mapping[str, tuple[str, ...]]):
        super().__init__()  # pyright: ignore[reportUnknownMemberType]
        self.policy = policy
        self._groups = groups
        self.engine: TorchEngine = engine()
        self.flops: dict[str, int] = {}
        self.traffic = self.kept = self.peak = self._held = 0
        self._calls: list[tuple[CollectiveKind, tuple[str, ...], int, list[str], Phase]] = []
        self._storages: dict[Any, tuple[int, _Source]] = {}
        self._num_computed = 0
        self._named: dict[Any, str] = {}
        self._phase: Phase = "forward"
        self.layers: list[str] = []
        self.last_layer = ""
        self.nodes: set[object] = set()
        self.fuses = False  # whether a fused attention call was seen

    # -- called by the step

    def name_shard(self, local: torch.Tensor, path: str) -> None:
        """Set the path of a variable's shard."""
        self._named[get_storage_key(local)] = path

    def open_phase(self, name: Phase) -> AbstractContextManager[None]:
        """Set the phase of the step until the block ends."""
        return set_temporarily(self, "_phase", name)

    def open_update(self) -> AbstractContextManager[None]:
        """Set the phase to the optimizer's update until the block ends."""
        return self.open_phase("optimizer")

    def forget(self) -> None:
        """Reset the counts, and treat memory in use now as kept between steps."""
        self.flops.clear()
        self._calls.clear()
        self.nodes.clear()
        self.layers.clear()
        self.kept, self.traffic, self.peak = self._held, 0, 0

    def name_gradient(self, gradient: torch.Tensor, path: str) -> None:
        """Record the weight of a gradient as the cause of its collectives."""
        _, source = self._storages.get(get_storage_key(get_local(gradient)), (0, _Source()))
        for cause in source.causes:
            cause[0] = path

    def list_collectives(self) -> Iterator[Collective]:
        """Yield the collectives, with equal ones merged."""
        counts = Counter[Any]((*call[:3], *call[3], call[4]) for call in self._calls)
        for (kind, dims, num_bytes, cause, phase), number in counts.items():
            yield Collective(kind, dims, number, num_bytes, cause, phase)

    # -- called by torch

    def __torch_dispatch__(
        self, func: OpOverload[..., Any], types: Any, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        kwargs = kwargs or {}  # torch may pass None
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # torch calls again with the pieces
        result = func(*args, **kwargs)
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        name = func.overloadpacket.__name__
        is_copy = name in _COPIES or name in _KINDS
        source = self._find_source(inputs, name, args) if is_copy else None
        self.fuses |= name.startswith("_scaled_dot_product") and "math" not in name
        if func.namespace in _COMMUNICATING and name not in _SILENT:
            source = self._add_collective(name, args, kwargs, inputs, source or _Source())
            outputs = outputs or inputs[:1]
        elif func.namespace == "aten" and not can_return_view(func):  # views move no bytes
            self.traffic += sum(map(_count_bytes, (*inputs, *outputs)))
            if func.overloadpacket in flop_registry and inputs:
                dtype = format_dtype(inputs[0].dtype)
                number = flop_registry[func.overloadpacket](*args, **kwargs, out_val=result)
                self.flops[dtype] = self.flops.get(dtype, 0) + int(number)
        if source is None:
            self._num_computed += 1
        computed = _Source("", self._current_layer, self._num_computed)
        for output in outputs:
            self._track_memory(output, source, computed)
        return result

    @property
    def _current_layer(self) -> str:
        """The layer that computes. Code without a layer and the loss belong to the last one."""
        return (self.layers[-1] if self.layers else "") or self.last_layer

    def _find_source(self, inputs: Sequence[torch.Tensor], name: str, args: Args) -> _Source:
        """Return the source of a result that copies its inputs, or adds them."""
        # DTensor divides a replicated tensor by the size of a mesh dim to add it to partial sums.
        if name == "div" and len(args) > 1 and args[1] in self.policy.mesh.shape:
            return _Source()
        found: list[_Source] = []
        for each in inputs:
            key = get_storage_key(each)
            if self._named.get(key):
                found.append(_Source(self._named[key]))
            elif key in self._storages:
                found.append(self._storages[key][1])
        first = next((each for each in found if each.path or each.causes), _Source())
        last = max(found, key=lambda each: each.number, default=first)
        # Gradients are joined to be reduced together.
        return replace(last, path=first.path, causes=() if name == "cat" else first.causes)

    def _add_collective(
        self, name: str, args: Args, kwargs: Kwargs, inputs: Sequence[torch.Tensor], source: _Source
    ) -> _Source:
        kind = _KINDS.get(name)
        dims, size = self._find_dims([*args, *kwargs.values()])
        if kind is None or not dims:
            return _Source()
        # The layer that computed partial sums causes their reduction, and the one that reads a tensor its gathering.
        layer = source.layer if "reduce" in kind else ""
        cause = [source.path or layer or self._current_layer]
        num_bytes = max(map(_count_bytes, inputs))
        if name == "all_gather_into_tensor":
            num_bytes *= size
        self._calls.append((kind, dims, num_bytes, cause, self._phase))
        return replace(source, causes=(*source.causes, cause))

    def _find_dims(self, args: Args) -> tuple[tuple[str, ...], int]:
        """Return the mesh dims of a collective, and the number of its devices."""
        mesh = self.policy.mesh
        for each in args:
            # The group comes first, the kind of reduction second.
            is_group = isinstance(each, torch.ScriptObject)
            name = dist.ProcessGroup.unbox(each).group_name if is_group else each
            if isinstance(name, str) and name in self._groups:
                dims = self._groups[name]
                return dims, math.prod(map(mesh.dim_size, dims))
            if is_group:
                break  # a mesh of one device
        return (), 1

    def _track_memory(self, tensor: torch.Tensor, source: _Source | None, computed: _Source) -> None:
        """Count a tensor's memory until it is freed, and store its source, which is `computed` if it is no copy."""
        key = get_storage_key(tensor)
        if key in self._named:
            return
        if key in self._storages:
            if source is not None:
                self._storages[key] = (self._storages[key][0], source)
            return
        storage = tensor.untyped_storage()
        num_bytes = storage.nbytes()
        self._storages[key] = num_bytes, source or computed
        self._held += num_bytes
        self.peak = max(self.peak, self._held - self.kept)
        # Finalize the storage, because views keep it alive.
        weakref.finalize(storage, self._release_memory, key)

    def _release_memory(self, key: object) -> None:
        self._held -= self._storages.pop(key)[0]


def _list_groups(mesh: Mesh) -> dict[str, tuple[str, ...]]:
    """Return the mesh dims of each process group of a mesh, by the group's name."""
    native = convert_layout(Layout.replicated(mesh, 0))[0]
    simulation.list_ranks(native)  # torch caches the list
    return {
        native.get_group(i).group_name: (dim,)
        for i, dim in enumerate(mesh.dim_names)
        if mesh.dim_size(dim) > 1
    }
