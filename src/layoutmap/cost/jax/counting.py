"""The count of a lowered step on each device in given layouts, and which weight or layer a collective is for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from layoutmap.core.paths import replace_numbers
from layoutmap.cost.jax.graph import Block, Op, Value, operand_of, results_of
from layoutmap.cost.jax.memory import COLLECTIVE_NAMES, memory_of, recomputes
from layoutmap.cost.jax.rewrites import MOVES
from layoutmap.cost.table import Collective, HeldKind, Phase


@dataclass(frozen=True)
class Counts:
    """The counted numbers of one step and one device.

    Args:
        collectives: How often each is called; their own `calls` is 1.
        flops: Operations of matrix products by element type.
        traffic: Bytes that are read and written.
        peaks: The most bytes beside the arguments, by the order of `memory_of`, the layer that computes, and the phase.
        held: What these bytes are: the same keys, and what `Causes.describe` says; empty if nobody asked.
        compiled_bytes: The most bytes beside the arguments, by XLA's compiler; 0: it was not asked.
        recomputes: Whether activations are computed again, outside of loops.
    """

    collectives: Mapping[Collective, int] = field(default_factory=dict[Collective, int])
    flops: Mapping[str, int] = field(default_factory=dict[str, int])
    traffic: int = 0
    peaks: Mapping[Any, int] = field(default_factory=dict[Any, int])
    held: Mapping[Any, int] = field(default_factory=dict[Any, int])
    compiled_bytes: int = 0
    recomputes: bool = False

    def __sub__(self, other: Counts) -> Counts:
        return self.plus(other, -1)

    def plus(self, other: Counts, times: int) -> Counts:
        """Return these and those of another so many times."""
        return Counts(
            _sum(self.collectives, other.collectives, times),
            _sum(self.flops, other.flops, times),
            self.traffic + other.traffic * times,
            _sum(self.peaks, other.peaks, times),
            _sum(self.held, other.held, times),
            self.compiled_bytes + other.compiled_bytes * times,
            self.recomputes,
        )


def _sum(first: Mapping[Any, int], second: Mapping[Any, int], times: int) -> dict[Any, int]:
    return {key: first.get(key, 0) + second.get(key, 0) * times for key in {**first, **second}}


def count(
    block: Block, names: Sequence[str], donated: Mapping[int, int], *, with_held: bool = False
) -> Counts:
    """Count what the operations of a step do.

    Args:
        block: The step, partitioned.
        names: The path of each argument.
        donated: For each result that takes the place of an argument, the number of that.
        with_held: Whether to say what is held at the peaks.
    """
    causes = Causes(block, names, len(donated))
    memories = memory_of(block, donated, causes.describe if with_held else None)
    peaks = {(n, *key): peak for n, memory in enumerate(memories) for key, peak in memory.peaks.items()}
    held = {
        (n, *key, what): num_bytes
        for n, memory in enumerate(memories)
        for key, found in memory.held.items()
        for what, num_bytes in found.items()
    }
    counts = _collectives(block, causes), flops_of(block), memories[0].traffic, peaks, held
    return Counts(*counts, recomputes=any(map(recomputes, block.ops)))


def flops_of(block: Block) -> Mapping[str, int]:
    """Return the operations of a step's matrix products and convolutions, by the element type of their operands."""
    flops = Counter[str]()
    for op, times in _called(block):
        if op.flops:
            flops[op.operands[0].dtype] += op.flops * times
    return flops


def collectives_of(block: Block, names: Sequence[str], num_weights: int) -> Mapping[Collective, int]:
    """Return how often each collective of a step is called; see `Causes`."""
    return _collectives(block, Causes(block, names, num_weights))


def _collectives(block: Block, causes: Causes) -> Mapping[Collective, int]:
    found = Counter[Collective]()
    for op, times in _called(block):
        if op.name in COLLECTIVE_NAMES and op.dims:
            kind: Any = op.name
            size = max(sum(value.num_bytes for value in values) for values in (op.operands, op.results))
            found[Collective(kind, op.dims, 1, size, causes.of(op), _phase(op), op.group)] += times
    return found


def _called(block: Block, times: int = 1) -> Iterator[tuple[Op, int]]:
    """All operations, and how often a step runs each."""
    for op in block.ops:
        yield op, times
        for inner in op.blocks:
            yield from _called(inner, times * op.trips)


def _phase(op: Op) -> Phase:
    return "optimizer" if op.is_update else "backward" if op.is_backward else "forward"


_STEPS = 64
_PASSED = MOVES | {
    "slice",
    "dynamic_slice",
    "all_gather",
    "all_to_all",
    "permute",
    "all_reduce",
    "reduce_scatter",
}
_PASSED_FORWARD = _PASSED | {"multiply", "divide", "dynamic_update_slice", "negate"}


class Causes:
    """Finds the causes of a step's collectives.

    Args:
        block: The step.
        names: The path of each of its arguments: weights, then the batch.
        num_weights: How many of them are weights.
    """

    def __init__(self, block: Block, names: Sequence[str], num_weights: int):
        self._batch = {*names[num_weights:]}
        self._described: dict[int, tuple[HeldKind, str, tuple[int, ...], str]] = {}
        self._names = {id(value): name for value, name in zip(block.arguments, names, strict=True)}
        self._given: dict[int, Value] = {}
        self._returned: dict[tuple[int, int], Value] = {}
        for op in block.walk():
            if op.name == "while":
                body = op.blocks[1]
                for inner, outer in zip(body.arguments, op.operands, strict=True):
                    self._given[id(inner)] = outer
                for number, result in enumerate(op.results):
                    self._returned[id(body.ops[-1]), number] = result

    def of(self, op: Op) -> str:
        """Return the path of a weight that is gathered or whose gradient is reduced, or else of the layer."""
        if op.name in ("all_reduce", "reduce_scatter"):
            return self._weight_of_gradient(op.results[0]) or op.where
        return self._argument_behind(op.operands[0]) or op.where

    def describe(self, value: Value) -> tuple[HeldKind, str, tuple[int, ...], str]:
        """Return what a value is that is held: its kind, its weight or layer, its shape and its element type."""
        if id(value) not in self._described:
            self._described[id(value)] = (*self._kind(value), value.shape, value.dtype)
        return self._described[id(value)]

    def _kind(self, value: Value) -> tuple[HeldKind, str]:
        if name := self._argument_behind(value):
            return "batch" if name in self._batch else "gathered weights", replace_numbers(name)
        maker = value.maker
        if maker is None:
            return "activations", ""
        if maker.is_backward and (name := self._weight_of_gradient(value)):
            return "gradients", replace_numbers(name)
        return "optimizer's update" if maker.is_update else "activations", replace_numbers(maker.where)

    def _argument_behind(self, value: Value) -> str:
        for _ in range(_STEPS):
            if id(value) in self._names:
                return self._names[id(value)]
            if id(value) in self._given:
                value = self._given[id(value)]
            elif value.maker is not None and value.maker.name in _PASSED:
                value = operand_of(value)
            else:
                return ""
        return ""

    def _weight_of_gradient(self, value: Value) -> str:
        todo, seen = [value], {id(value)}
        for _ in range(_STEPS):
            if not todo:
                return ""
            value = todo.pop(0)
            for op in value.uses:
                # Along axes of one element, as the gradient of a bias is.
                is_sum_of_one = op.name == "reduce" and op.operands[0].size == op.results[0].size
                if op.name == "return":
                    results = [
                        self._returned[id(op), number]
                        for number, each in enumerate(op.operands)
                        if each is value and (id(op), number) in self._returned
                    ]
                elif op.is_update and (name := self._updated(op, value)):
                    return name
                elif op.name in _PASSED_FORWARD or op.is_update or is_sum_of_one:
                    results = results_of(op, value)
                else:
                    continue
                for result in results:
                    if id(result) not in seen:
                        seen.add(id(result))
                        todo.append(result)
        return ""

    def _updated(self, op: Op, gradient: Value) -> str:
        """The variable that a gradient is combined with: not a number that was broadcast to its size."""
        for other in op.operands:
            is_number = other.maker is not None and other.maker.name == "broadcast_in_dim"
            fits = other is not gradient and other.size == gradient.size and not is_number
            if fits and (name := self._argument_behind(other)):
                return name
        return ""
