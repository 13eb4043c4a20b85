"""What the variables of a plan come to on a device, and what replicated ones among them could save."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from layoutmap.core.variables import Assignment, Kind
from layoutmap.plan.table import Plan

__all__ = ["CouldShard", "Memory", "memory_of"]


@dataclass(frozen=True, slots=True)
class CouldShard:
    """A variable that every device holds whole, and the axis and mesh dim that would save most.

    Args:
        assignment: The variable as it is planned.
        axis: The axis that could be cut.
        dim: The mesh dim over which it divides.
        saved_bytes: Bytes that each device would save.
    """

    assignment: Assignment
    axis: int
    dim: str
    saved_bytes: int


@dataclass(frozen=True, slots=True, repr=False)
class Memory:
    """Bytes that one device holds, by what they are for, and what could be less.

    Gradients lie as their weights do, for as long as they are there; what layers compute is not counted.

    Args:
        weights: Trained weights.
        gradients: A gradient for each of them.
        slots: What the optimizer keeps, as far as it is in the plan.
        state: All else: moving statistics, frozen weights, random states, metrics.
        could_be_sharded: Variables that are replicated and need not be, those that would save most first.
    """

    weights: int
    gradients: int
    slots: int
    state: int
    could_be_sharded: tuple[CouldShard, ...]

    @property
    def total(self) -> int:
        """All of them."""
        return self.weights + self.gradients + self.slots + self.state

    def __str__(self) -> str:
        from layoutmap.report.text import memory_text

        return memory_text(self)

    def __repr__(self) -> str:
        return f"<Memory: {str(self).splitlines()[0]}>"


def memory_of(plan: Plan) -> Memory:
    """Count, by kind; what does not fit its layout is left out."""
    fitting = [a for a in plan.assignments if a.fits]
    weights = sum(a.shard_bytes for a in fitting if a.variable.is_trained)
    slots = sum(a.shard_bytes for a in fitting if a.variable.kind is Kind.SLOT)
    cuts = sorted(_cuts(plan, fitting), key=lambda cut: -cut.saved_bytes)
    return Memory(weights, weights, slots, plan.device_bytes - weights - slots, tuple(cuts))


def _cuts(plan: Plan, fitting: list[Assignment]) -> Iterator[CouldShard]:
    dims = sorted((dim for dim in plan.mesh.mesh_dims if dim.size > 1), key=lambda dim: -dim.size)
    for a in fitting:
        # What follows another variable saves where that does.
        if a.variable.follows or not a.layout.is_fully_replicated():
            continue
        found = next(
            (
                (axis, dim)
                for dim in dims
                for axis, n in enumerate(a.variable.shape)
                if n and n % dim.size == 0
            ),
            None,
        )
        if found is not None:
            axis, dim = found
            yield CouldShard(a, axis, dim.name, a.shard_bytes - a.shard_bytes // dim.size)
