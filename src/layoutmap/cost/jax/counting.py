"""Count the operations of a partitioned step, and find the weight or layer that causes each collective."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any

from layoutmap.core.paths import replace_numbers_with_stars
from layoutmap.cost.extrapolation import StepCounts
from layoutmap.cost.jax.graph import Block, Op, Value, get_derived_results, get_source_operand
from layoutmap.cost.jax.memory import COLLECTIVE_NAMES, compute_memory_per_order, is_remat_barrier
from layoutmap.cost.jax.rewrites import MOVES
from layoutmap.cost.table import Collective, PeakTensorKind, Phase


def compute_step_counts(
    block: Block,
    paths: Sequence[str],
    argument_by_donated_result: Mapping[int, int],
    *,
    with_peak_tensors: bool = False,
) -> StepCounts:
    """Count the collectives, operations, and memory of a partitioned step.

    `paths` has the arguments' paths. `argument_by_donated_result` maps the
    index of a result to that of the argument that gives it its memory.
    """
    causes = CauseFinder(block, paths, batches={*paths[len(argument_by_donated_result) :]})
    *memories, traffic = compute_memory_per_order(
        block, argument_by_donated_result, causes.describe_value if with_peak_tensors else None
    )
    peaks = {(n, *key): peak for n, memory in enumerate(memories) for key, peak in memory.peaks.items()}
    held = {
        (n, *key, what): num_bytes
        for n, memory in enumerate(memories)
        for key, found in memory.held_bytes.items()
        for what, num_bytes in found.items()
    }
    return StepCounts(
        _count_collectives_by_cause(block, causes),
        flops=count_flops(block),
        traffic=traffic,
        peaks=peaks,
        held=held,
        recomputes=any(map(is_remat_barrier, block.ops)),
    )


def count_flops(block: Block) -> Mapping[str, int]:
    """Return the FLOPs of matrix products and convolutions in a step, by the element type of their operands."""
    flops = Counter[str]()
    for op, times in iterate_ops_with_run_counts(block):
        if op.flops:
            flops[op.operands[0].dtype] += op.flops * times
    return flops


def count_collectives(block: Block, paths: Sequence[str], num_variables: int) -> Mapping[Collective, int]:
    """Return the number of calls of each collective in a step. Collectives with different causes are separate."""
    return _count_collectives_by_cause(block, CauseFinder(block, paths, batches={*paths[num_variables:]}))


def _count_collectives_by_cause(block: Block, finder: CauseFinder) -> Mapping[Collective, int]:
    found = Counter[Collective]()
    for op, times in iterate_ops_with_run_counts(block):
        if op.name in COLLECTIVE_NAMES and op.dims:
            kind: Any = op.name
            phase: Phase = "optimizer" if op.is_update else "backward" if op.is_backward else "forward"
            size = max(sum(value.num_bytes for value in values) for values in (op.operands, op.results))
            found[Collective(kind, op.dims, 1, size, finder.find_cause(op), phase, op.group)] += times
    return found


def iterate_ops_with_run_counts(block: Block, times: int = 1) -> Iterator[tuple[Op, int]]:
    """Yield each operation, also those in loops and branches, with the number of times that a step runs it."""
    for op in block.ops:
        yield op, times
        for inner in op.blocks:
            yield from iterate_ops_with_run_counts(inner, times * op.trips)


_MAX_PASSED_OPS = 64
_PASSED_BACKWARD = MOVES | {
    "slice",
    "dynamic_slice",
    "all_gather",
    "all_to_all",
    "permute",
    "all_reduce",
    "reduce_scatter",
}
_PASSED_FORWARD = _PASSED_BACKWARD | {"multiply", "divide", "dynamic_update_slice", "negate"}


class CauseFinder:
    """Finder of the weight or layer that causes a collective.

    Args:
        block: Operations of the step.
        names: Paths of all arguments.
        batches: Paths of the arguments that are batches.
        is_marked: Whether operations of the optimizer's update are marked. They are not in a step that the user wrote,
            so the first sum or product with an argument counts as the update.
    """

    def __init__(self, block: Block, names: Sequence[str], *, batches: Set[str], is_marked: bool = True):
        self._is_marked, self._batch = is_marked, batches
        self._described: dict[int, tuple[PeakTensorKind, str, tuple[int, ...], str]] = {}
        self._names = {id(value): name for value, name in zip(block.arguments, names, strict=True)}
        self._loop_operands: dict[int, Value] = {}
        self._loop_results: dict[tuple[int, int], Value] = {}
        for op in block.iterate_all_ops():
            if op.name == "while":
                body = op.blocks[1]
                for inner, outer in zip(body.arguments, op.operands, strict=True):
                    self._loop_operands[id(inner)] = outer
                for number, result in enumerate(op.results):
                    self._loop_results[id(body.ops[-1]), number] = result

    def find_cause(self, op: Op) -> str:
        """Return the path of the weight that a collective gathers or reduces the gradient of, else the layer's path."""
        if op.name in ("all_reduce", "reduce_scatter"):
            return self._find_updated_weight_path(op.results[0]) or op.layer_path
        return self._find_copied_argument_path(op.operands[0]) or op.layer_path

    def describe_value(self, value: Value) -> tuple[PeakTensorKind, str, tuple[int, ...], str]:
        """Return a value's kind, the path of its weight or layer, its shape, and its element type."""
        if id(value) not in self._described:
            self._described[id(value)] = (*self._find_kind_and_path(value), value.shape, value.dtype)
        return self._described[id(value)]

    def _find_kind_and_path(self, value: Value) -> tuple[PeakTensorKind, str]:
        if name := self._find_copied_argument_path(value):
            return "batch" if name in self._batch else "gathered weights", replace_numbers_with_stars(name)
        producer = value.producer
        if producer is None:
            return "activations", ""
        if producer.is_backward and (name := self._find_updated_weight_path(value)):
            return "gradients", replace_numbers_with_stars(name)
        kind = "optimizer's update" if producer.is_update else "activations"
        return kind, replace_numbers_with_stars(producer.layer_path)

    def _find_copied_argument_path(self, value: Value, *, broadcasts: bool = True) -> str:
        """Return the path of the argument that a value copies, casts, slices, or gathers, or "" if there is none.

        Without `broadcasts`, it is "" if the value repeats elements of the argument.
        """
        for _ in range(_MAX_PASSED_OPS):
            if id(value) in self._names:
                return self._names[id(value)]
            if id(value) in self._loop_operands:
                value = self._loop_operands[id(value)]
            elif value.producer is not None and value.producer.name in _PASSED_BACKWARD:
                source = get_source_operand(value)
                if not broadcasts and value.producer.name == "broadcast_in_dim" and source.size < value.size:
                    return ""
                value = source
            else:
                return ""
        return ""

    def _find_updated_weight_path(self, value: Value) -> str:
        """Return the path of the weight that an update changes by the gradient `value`, or "" if there is none.

        If updates are not marked, it is the last variable on the way, because slots come before their weight.
        """
        todo, seen, found = [value], {id(value)}, ""
        for _ in range(_MAX_PASSED_OPS):
            if not todo:
                break
            value = todo.pop(0)
            for op in value.uses:
                # A sum over axes of size 1, such as the gradient of a bias, only changes the shape, so continue with
                # its result.
                is_sum_of_one = op.name == "reduce" and op.operands[0].size == op.results[0].size
                if op.name == "return":
                    results = [
                        self._loop_results[id(op), number]
                        for number, each in enumerate(op.operands)
                        if each is value and (id(op), number) in self._loop_results
                    ]
                elif self._is_update(op) and (name := self._find_variable_path_beside_gradient(op, value)):
                    if self._is_marked:
                        return name
                    found, results = name, list(op.results)
                elif op.name in _PASSED_FORWARD or op.is_update or is_sum_of_one:
                    results = get_derived_results(op, value)
                else:
                    continue
                for result in results:
                    if id(result) not in seen:
                        seen.add(id(result))
                        todo.append(result)
        return found

    def _is_update(self, op: Op) -> bool:
        return op.is_update if self._is_marked else op.name in ("add", "subtract", "multiply")

    def _find_variable_path_beside_gradient(self, op: Op, gradient: Value) -> str:
        """Return the path of the variable that an update combines with a gradient, or "" if there is none."""
        for other in op.operands:
            is_number = other.producer is not None and other.producer.name == "broadcast_in_dim"
            if other is gradient or other.size != gradient.size or is_number:
                continue
            scaled = other.producer is not None and other.producer.name == "multiply" and not self._is_marked
            for value in (other, *(other.producer.operands if other.producer is not None and scaled else ())):
                # A weight has as many elements as its gradient. A broadcast variable scales an activation, so skip it.
                name = self._find_copied_argument_path(value, broadcasts=False)
                if name and (self._is_marked or name not in self._batch):
                    return name
        return ""
