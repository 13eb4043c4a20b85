"""Compute the cost of a training step of a torch module on each device, with tensors that have no values.

The step runs as process 0 of a process group with as many processes as the mesh has devices. The other processes do not
exist. Each operation that DTensor runs on this process's shards is counted and not computed. Afterwards, the process
group is removed.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from layoutmap.adapters.torch.boundary import map_tensors
from layoutmap.core.errors import LayoutMapError, ScopeError
from layoutmap.core.layout import Layout
from layoutmap.core.mesh import Mesh
from layoutmap.core.policy import LayoutPolicy
from layoutmap.core.steps import TrainingStep
from layoutmap.core.users_line import find_line_of_error
from layoutmap.core.variables import Assignment, VariableSpec
from layoutmap.cost.equal_blocks import BlockCallChecker, BlockDiffersFromFirstError
from layoutmap.cost.extrapolation import (
    BlockExtrapolation,
    StepCounts,
    cancel_negative_counts,
    find_block_path,
    merge_collectives_of_repeated_layers,
)
from layoutmap.cost.table import FUSED_ATTENTION, Collective, StepCost
from layoutmap.cost.torch_operations import OperationCounter
from layoutmap.engines.torch import simulation
from layoutmap.engines.torch.arrays import convert_to_native_layout, record_layout
from layoutmap.engines.torch.deferred_init import (
    UNSUPPORTED_ERRORS,
    FakeTensorMode,
)
from layoutmap.engines.torch.devices import discard_meshes_of_group
from layoutmap.engines.torch.dtensor_ops import compute_global_shapes_in
from layoutmap.engines.torch.element_types import find_torch_dtype
from layoutmap.engines.torch.fake_products import allow_fake_grouped_products
from layoutmap.engines.torch.gather import reduce_each_gradient_in, split_into_buckets
from layoutmap.engines.torch.local_tensors import compute_strided_shards_in
from layoutmap.engines.torch.simulation import FakeStore
from layoutmap.engines.torch.specs import clear_sharding_caches, get_local, make_dtensor, make_row_major_spec

_EAGER = "each operation reads its operands from memory and writes its results, as without torch.compile"
_ACCUMULATED = "the weights of a block are gathered together, under the name of the first weight"
_EVEN_ROUTING = "all experts get equally many tokens"


# Formulas are wrong if layouts conflict, so count operations while the step runs on fake tensors (decisions/0156).
class StepCostCounter:
    """Counter that computes the cost of a torch module's training step in any layouts."""

    def __init__(self, step: TrainingStep):
        self._step = step
        self._blocks = BlockExtrapolation(step)
        self._layer_paths: set[str] = set()  # paths of the layers that ran
        self._has_fused_attention = self._divides_experts = False

    def compute_cost(
        self, assignments: Sequence[Assignment], policy: LayoutPolicy, *, with_peak_tensors: bool = False
    ) -> StepCost:
        """Return the cost of the step in these layouts. `with_peak_tensors` has no effect."""
        batch = [
            Assignment(VariableSpec(b.name, b.shape, b.dtype), policy.derive_batch_layout(b.shape))
            for b in self._step.batch
        ]
        layouts = {a.variable.key: a.layout for a in assignments}
        with _simulate_process_group(policy.mesh.size):
            # Torch reads values when it makes a device mesh, so make it before tensors become fake.
            groups = _map_groups_to_dims(policy.mesh)
            with FakeTensorMode(allow_non_fake_inputs=True), allow_fake_grouped_products():
                counts = self._blocks.compute_counts(
                    layouts,
                    policy,
                    lambda skipped: self._run_step(assignments, policy, groups, skipped),
                    lambda: self._layer_paths,
                    lambda counts: counts,
                )
        collectives = [replace(c, calls=number) for c, number in cancel_negative_counts(counts.collectives)]
        combined = _combine_gradient_collectives(counts.gradients)
        collectives = merge_collectives_of_repeated_layers([*collectives, *combined])
        argument_bytes = sum(a.shard_bytes for a in (*assignments, *batch)) + counts.resident
        return StepCost(
            policy.mesh,
            tuple(collectives),
            {name: number for name, number in counts.flops.items() if number},
            counts.traffic,
            argument_bytes,
            argument_bytes + _find_peak_bytes(counts, combined),
            (
                _EAGER,
                _ACCUMULATED,
                *[FUSED_ATTENTION] * self._has_fused_attention,
                *[_EVEN_ROUTING] * self._divides_experts,
                *self._step.notes,
            ),
        )

    def _run_step(
        self,
        assignments: Sequence[Assignment],
        policy: LayoutPolicy,
        groups: Mapping[str, tuple[str, ...]],
        skipped: Mapping[str, str],
    ) -> StepCounts:
        """Run the step without the `skipped` blocks, and return its counts."""
        blocks = BlockCallChecker(skipped, _describe_structure)
        counter: Any = OperationCounter(policy, groups, blocks)
        with (
            compute_global_shapes_in(counter.pause),
            compute_strided_shards_in(counter.pause_with_values),
            reduce_each_gradient_in(counter.mark_gradient_reduction),
            _translate_run_errors(self._step, blocks),
        ):
            variables = [a for a in assignments if find_block_path(a.variable.path, skipped) is None]
            values = {a.variable.key: _make_fake_dtensor(a) for a in variables}
            batch = [torch.empty(b.shape, dtype=find_torch_dtype(b.dtype, b.name)) for b in self._step.batch]
            for key, value in values.items():
                counter.record_shard_path(get_local(value), key[1])
            for each in batch:  # do not count its memory, because the step's arguments contain its shard
                counter.record_shard_path(each, "")
            self._step.run(counter, values, batch)
            blocks.check_all_calls()
        self._has_fused_attention |= counter.has_fused_attention
        self._divides_experts |= counter.divides_experts
        self._layer_paths |= counter.layer_paths
        return counter.make_step_counts()


def _combine_gradient_collectives(gradients: Mapping[Collective, int]) -> list[Collective]:
    """Return the all-reduces of concatenated gradients. The cause of each is its largest gradient."""
    # Gradients of equal blocks are counted as those of one block, several times, so repeat them block by block.
    runs = itertools.groupby(gradients.items(), key=lambda pair: pair[1])
    ordered = (each for number, run in runs for each in [gradient for gradient, _ in run] * number)
    groups: dict[object, list[Collective]] = {}
    for each in ordered:
        groups.setdefault((each.kind, each.dims, each.phase), []).append(each)
    buckets = (
        bucket
        for group in groups.values()
        for bucket in split_into_buckets(group, lambda each: each.tensor_bytes)
    )
    combined = Counter(
        replace(
            max(bucket, key=lambda each: each.tensor_bytes),
            tensor_bytes=sum(each.tensor_bytes for each in bucket),
        )
        for bucket in buckets
    )
    return [replace(each, calls=number) for each, number in combined.items()]


def _find_peak_bytes(counts: StepCounts, combined: Sequence[Collective]) -> int:
    """Return the bytes at the peak of a step without its arguments.

    The reduction of concatenated gradients needs two copies of them, and that of a single gradient two copies of it.
    """
    largest, largest_combined = (
        max((each.tensor_bytes for each in found), default=0) for found in (counts.gradients, combined)
    )
    more = 2 * (largest_combined - largest)
    return max((n + more * is_reduction for (*_, is_reduction), n in counts.peaks.items()), default=0)


@contextmanager
def _simulate_process_group(num_processes: int) -> Generator[None]:
    """Make this process number 0 of a process group until the block ends. Its other processes do not exist."""
    if simulation.has_process_group():
        raise ScopeError(
            "the cost of a step cannot be computed in this process",
            facts={"process group": dist.get_backend(simulation.get_global_group())},
            why="to compute it, torch needs another default process group, and a process has only one",
            fix="plan in a process without a scope and without a process group, as layoutmap plan --on does",
        )
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=num_processes)
    group = dist.group.WORLD
    try:
        yield
    finally:
        discard_meshes_of_group(group)
        dist.destroy_process_group()
        clear_sharding_caches()  # the keys of these caches keep meshes of the destroyed group in memory


@contextmanager
def _translate_run_errors(step: TrainingStep, blocks: BlockCallChecker) -> Generator[None]:
    try:
        yield
    except Exception as error:
        # Skipping may have caused any error, for example if other layers read a block's weights, so run all blocks.
        if blocks.skipped:
            raise BlockDiffersFromFirstError(blocks.differing_path or next(iter(blocks.skipped))) from error
        if isinstance(error, LayoutMapError):
            raise
        inputs = ", ".join(f"{each.name}: {each.dtype}{list(each.shape)}" for each in step.batch)
        name, line = type(error).__name__, find_line_of_error(error, {"torch", "functools"})
        fix = "pass inputs= with the shapes and dtypes of the module's inputs, and call the module with them in a test"
        if isinstance(error, UNSUPPORTED_ERRORS):
            fix = "pass inputs= with which the line reads no values, such as an attention_mask, or change the line"
        raise ScopeError(
            f"{step.name}: the training step fails with tensors that have no values",
            facts={"inputs": inputs, "line": line, name: str(error).strip().partition("\n")[0]},
            why="to compute the cost, the step is run with shapes instead of values",
            fix=fix,
        ) from error


def _make_fake_dtensor(assignment: Assignment) -> object:
    """Return a DTensor for a variable in its layout, without values."""
    variable, layout = assignment.variable, assignment.layout
    native, placements = convert_to_native_layout(layout)
    dtype = find_torch_dtype(variable.dtype, variable.path)
    local = torch.empty(assignment.shard_shape, dtype=dtype, device=native.device_type)
    return record_layout(
        make_dtensor(local, make_row_major_spec(native, placements, torch.Size(variable.shape), dtype)),
        layout,
    )


def _describe_structure(values: object) -> object:
    """Return nested values with each tensor as its shape and dtype, to compare the calls of blocks."""
    return map_tensors(lambda tensor: (tuple(tensor.shape), tensor.dtype), values)


def _map_groups_to_dims(mesh: Mesh) -> dict[str, tuple[str, ...]]:
    """Return a dict from the name of each process group of a mesh to its mesh dims."""
    native = convert_to_native_layout(Layout.replicated(mesh, 0))[0]
    return {
        native.get_group(i).group_name: (dim,)
        for i, dim in enumerate(mesh.dim_names)
        if mesh.dim_size(dim) > 1
    }
