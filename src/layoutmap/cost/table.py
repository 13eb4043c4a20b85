"""Define the cost of a training step on each device: collectives, operations, and memory.

All sizes are in bytes and those of one device. Time is not in here: it depends on the machine.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from layoutmap.core.mesh import Mesh

CollectiveKind = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "permute"]
Phase = Literal["forward", "backward", "optimizer", ""]
PeakTensorKind = Literal["gathered weights", "gradients", "activations", "batch", "optimizer's update"]

FUSED_ATTENTION = "attention is one fused kernel (flash attention), which keeps no scores in memory"
SCORED_ATTENTION = (
    "attention keeps its scores in memory, since the model calls no fused kernel (flash attention): one would not "
    "keep them"
)
"""The assumption about calls of attention."""

PARTITIONED, ESTIMATE, COMPILED = "an estimate by XLA's partitioner", "estimate", "compiled by XLA for "
"""How the figures of a step are known."""


@dataclass(frozen=True, slots=True)
class Collective:
    """Equal collectives of a step: of one kind, over the same mesh dims, with one cause."""

    kind: CollectiveKind
    dims: tuple[str, ...]  # major dim first
    calls: int  # per step
    tensor_bytes: (
        int  # largest tensor of one call per device: an all-gather's result, or the operand of others
    )
    cause: str = ""  # path of the weight or layer, with `*` for numbers of repeated layers; empty: unknown
    phase: Phase = ""  # empty: unknown
    group: int = 0  # devices that exchange; 0: all along the dims

    def count_sent_bytes(self, mesh: Mesh) -> int:
        """Return the bytes that a device sends in a step for all calls, as rings send them."""
        size = self.group or math.prod(map(mesh.dim_size, self.dims))
        if self.kind == "permute":
            return self.calls * self.tensor_bytes if self.dims else 0
        one = self.tensor_bytes * (size - 1) // size
        return self.calls * one * (2 if self.kind == "all_reduce" else 1)


@dataclass(frozen=True, slots=True)
class PeakTensors:
    """Tensors of one kind and shape on a device at the peak of a step, except the step's arguments."""

    kind: PeakTensorKind
    path: str  # of the weight or layer, with `*` for numbers of repeated blocks; empty: unknown
    shape: tuple[int, ...]  # of one of them on a device
    dtype: str
    num_bytes: int  # of all of them


@dataclass(frozen=True)
class StepCost:
    """Collectives, operations, and memory of one training step on each device.

    Args:
        mesh: The mesh.
        collectives: What travels between devices.
        flops: Floating-point operations of matrix products and convolutions, by the element type of their operands.
        traffic_bytes: What is read from and written to the device's own memory.
        argument_bytes: What the step is given: weights, state, slots and the batch.
        peak_bytes: What the device holds at most at one time, arguments included, where memory is plenty; as an
            estimate by XLA's partitioner, it is at least what XLA needs.
        notes: What the figures assume, in sentences.
        least_peak_bytes: The same where memory is short, and XLA makes each gradient as soon as it can; 0: not known.
        held: What it holds at the peak beside what the step is given, the largest first, by an estimate, so that it may
            be less than all where XLA has compiled the step; empty: not known.
        known_by: How the figures are known, as a cost says it: by XLA's compiler, its partitioner, or an estimate.
    """

    mesh: Mesh
    collectives: tuple[Collective, ...]
    flops: Mapping[str, int]
    traffic_bytes: int
    argument_bytes: int
    peak_bytes: int
    notes: tuple[str, ...] = field(default=())
    least_peak_bytes: int = field(default=0, compare=False)
    held: tuple[PeakTensors, ...] = ()
    known_by: str = ESTIMATE

    def on(self, memory_bytes: int) -> StepCost:
        """Return the cost on a device with `memory_bytes` of memory."""
        # Limit of XLA's scheduler: 0.95 * (0.8 * device memory - bytes of arguments).
        room = self.argument_bytes + int(0.95 * max(0.0, 0.8 * memory_bytes - self.argument_bytes))
        least = self.least_peak_bytes or self.peak_bytes
        return replace(self, peak_bytes=max(least, min(self.peak_bytes, room)))

    @property
    def sent_bytes(self) -> int:
        """Bytes that each device sends in a step."""
        return sum(each.count_sent_bytes(self.mesh) for each in self.collectives)
