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
"""Notes of a `StepCost` on its calls of attention."""

PARTITIONED, ESTIMATE, COMPILED = "an estimate by XLA's partitioner", "estimate", "compiled by XLA for "
"""Values of `StepCost.known_by`: how the cost is known. `COMPILED` precedes the name of a device."""


@dataclass(frozen=True, slots=True)
class Collective:
    """Collectives of one kind in a step that exchange equal sizes over the same mesh dims for one cause."""

    kind: CollectiveKind
    dims: tuple[str, ...]  # mesh dims over which it communicates, the major one first
    calls: int  # number of calls per step
    # bytes on a device in one call: of the result of an all-gather, or of the operand of any other collective
    tensor_bytes: int
    cause: str = ""  # path of the weight or layer, with `*` for numbers of repeated layers; empty: unknown
    phase: Phase = ""  # phase of the step; empty: unknown
    group: int = 0  # number of devices that exchange data; 0: all devices along the dims

    def count_sent_bytes(self, mesh: Mesh) -> int:
        """Return the bytes that a device sends in a step for all calls, if collectives use ring algorithms."""
        size = self.group or math.prod(map(mesh.dim_size, self.dims))
        if self.kind == "permute":
            return self.calls * self.tensor_bytes if self.dims else 0
        one = self.tensor_bytes * (size - 1) // size
        return self.calls * one * (2 if self.kind == "all_reduce" else 1)


@dataclass(frozen=True, slots=True)
class PeakTensors:
    """Tensors of one kind and shape on a device at the peak of a step, without the step's arguments."""

    kind: PeakTensorKind
    path: str  # path of the weight or layer, with `*` for numbers of repeated blocks; empty: unknown
    shape: tuple[int, ...]  # shape of one tensor on a device
    dtype: str
    num_bytes: int  # bytes of all tensors together


@dataclass(frozen=True)
class StepCost:
    """Collectives, operations, and memory of one training step on each device.

    Args:
        mesh: The mesh.
        collectives: Collectives between devices.
        flops: Floating-point operations of matrix products and convolutions, by the element type of their operands.
        traffic_bytes: Bytes that are read from and written to the device's own memory.
        argument_bytes: Bytes of the step's arguments: weights, state, slots, and the batch.
        peak_bytes: Most bytes in the device's memory at one time, with the arguments, if memory is plentiful. An
            estimate by XLA's partitioner is an upper bound of what XLA needs.
        notes: Assumptions on which the cost is based, in sentences.
        least_peak_bytes: The peak if memory is short, so that XLA computes each gradient as soon as it can; 0: unknown.
        held: Estimated tensors at the peak without the arguments, the largest first. If XLA has compiled the step, they
            may be fewer than all. Empty: unknown.
        known_by: How the cost is known: from XLA's compiler, its partitioner, or an estimate.
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

    def cap_peak_for_memory(self, memory_bytes: int) -> StepCost:
        """Return the cost on a device with `memory_bytes`. If memory is short, XLA schedules for a lower peak."""
        # XLA's scheduler lowers the peak to 0.95 * (0.8 * device memory - bytes of arguments), if it can.
        room = self.argument_bytes + int(0.95 * max(0.0, 0.8 * memory_bytes - self.argument_bytes))
        least = self.least_peak_bytes or self.peak_bytes
        return replace(self, peak_bytes=max(least, min(self.peak_bytes, room)))

    @property
    def sent_bytes(self) -> int:
        """Bytes that each device sends in a step."""
        return sum(each.count_sent_bytes(self.mesh) for each in self.collectives)
