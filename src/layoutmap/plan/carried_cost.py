"""Define the cost of a training step as plans use it, and import the package that counts it.

`layoutmap.cost` lies above plans and scopes, so that both can be understood without it. It is imported where a plan has
a cost, or one is asked for, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import Any, Protocol, Self

from layoutmap.core.specs import BatchDim
from layoutmap.plan.advice import Advice


class PeakTensors(Protocol):
    """Tensors of one kind and shape that a device stores at the peak of a step."""

    @property
    def kind(self) -> str: ...  # noqa: D102
    @property
    def path(self) -> str: ...  # noqa: D102
    @property
    def shape(self) -> tuple[int, ...]: ...  # noqa: D102
    @property
    def dtype(self) -> str: ...  # noqa: D102
    @property
    def num_bytes(self) -> int: ...  # noqa: D102


class PlanCost(Protocol):
    """Define the cost of a training step on a machine, as plans use it."""

    @property
    def line(self) -> str:
        """The cost in one line."""
        ...

    @property
    def batch_dim(self) -> BatchDim | None:
        """The mesh dim over which batches are sharded."""
        ...

    @property
    def peak_bytes(self) -> int:
        """Bytes on a device at the peak of a step."""
        ...

    @property
    def memory_bytes(self) -> int:
        """Memory of a device in bytes."""
        ...

    @property
    def held(self) -> Sequence[PeakTensors]:
        """Tensors on a device at the peak, without the variables and the batch."""
        ...

    @property
    def tried(self) -> tuple[Advice, ...]:
        """Other ways to train the model, counted if the step does not fit into memory."""
        ...

    @property
    def untried(self) -> tuple[str, ...]:
        """Names of alternatives that were not counted for lack of time."""
        ...

    @property
    def step(self) -> Any:
        """Collectives, operations, and bytes of the step, a `layoutmap.StepCost`."""
        ...

    @property
    def machine(self) -> Any:
        """The machine, a `layoutmap.cost.machine.Machine`."""
        ...

    @property
    def verified(self) -> Any:
        """Figures of XLA's compiler, a `layoutmap.cost.verified.Verified`, or None if XLA compiled nothing."""
        ...

    @property
    def fits(self) -> bool:
        """Whether the step fits into a device's memory."""
        ...

    @property
    def step_seconds(self) -> float:
        """Seconds per step if weight collectives overlap with computation."""
        ...

    @property
    def serial_seconds(self) -> float:
        """Seconds per step without overlap."""
        ...

    def on_memory(self, num_bytes: int) -> Self:
        """Return this cost for devices with another memory size."""
        ...

    def mark_weight_collectives(self, paths: frozenset[str]) -> Self:
        """Return this cost with collectives of weights separated from those of activations."""
        ...

    def describe_collectives(self, paths: Iterable[str]) -> list[str]:
        """Describe each collective that some variables or layers cause."""
        ...

    def to_text(self, width: int | None = None) -> str:
        """Return the text that `print` shows."""
        ...

    def to_html(self) -> str:
        """Return the cost as tables for a notebook."""
        ...


def load_cost_package() -> Any:
    """Import the module of `layoutmap.cost` that lower packages use, only when a cost is needed."""
    return import_module("layoutmap.cost.entry")
