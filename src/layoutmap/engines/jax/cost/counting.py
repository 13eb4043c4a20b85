"""The count of a lowered step on each device in given layouts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from layoutmap.cost.table import Collective, Phase
from layoutmap.engines.jax.cost.causes import Causes
from layoutmap.engines.jax.cost.graph import Block, Op
from layoutmap.engines.jax.cost.memory import COLLECTIVE_NAMES, memory_of


@dataclass(frozen=True)
class Counts:
    """The counted numbers of one step and one device.

    Args:
        collectives: How often each is called; their own `calls` is 1.
        flops: Operations of matrix products by element type.
        traffic: Bytes that are read and written.
        peaks: The most bytes beside the arguments, by the order of `memory_of`, the layer that computes, and the phase.
        held: What these bytes are: the same keys, and what `Causes.describe` says; empty if nobody asked.
    """

    collectives: Mapping[Collective, int] = field(default_factory=dict[Collective, int])
    flops: Mapping[str, int] = field(default_factory=dict[str, int])
    traffic: int = 0
    peaks: Mapping[Any, int] = field(default_factory=dict[Any, int])
    held: Mapping[Any, int] = field(default_factory=dict[Any, int])

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
    collectives, flops = Counter[Collective](), Counter[str]()

    def look(inner: Block, times: int) -> None:
        for op in inner.ops:
            if op.flops:
                flops[op.operands[0].dtype] += op.flops * times
            if op.name in COLLECTIVE_NAMES and op.dims:
                kind: Any = op.name
                size = max(value.num_bytes for value in (*op.operands, *op.results))
                made = Collective(kind, op.dims, 1, size, causes.of(op), _phase(op), op.group)
                collectives[made] += times
            for block in op.blocks:
                look(block, times * op.trips)

    look(block, 1)
    memories = memory_of(block, donated, causes.describe if with_held else None)
    peaks = {(n, *key): peak for n, memory in enumerate(memories) for key, peak in memory.peaks.items()}
    held = {
        (n, *key, what): num_bytes
        for n, memory in enumerate(memories)
        for key, found in memory.held.items()
        for what, num_bytes in found.items()
    }
    return Counts(collectives, flops, memories[0].traffic, peaks, held)


def _phase(op: Op) -> Phase:
    return "optimizer" if op.is_update else "backward" if op.is_backward else "forward"
