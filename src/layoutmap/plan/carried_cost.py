"""Define the part of a training step's cost that plans use, and import the package that counts it.

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
    """Tensors of one kind and shape on a device at the peak of a step. See `layoutmap.cost.table.PeakTensors`."""

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
    """Cost of a training step on a machine, as plans use it. See `layoutmap.cost.cost.Cost`."""

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
        """Tensors on a device at the peak, except the variables and the batch."""
        ...

    @property
    def tried(self) -> tuple[Advice, ...]:
        """Other ways to train the model, counted if the step does not fit."""
        ...

    @property
    def untried(self) -> tuple[str, ...]:
        """Names of ways that were not counted for lack of time."""
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
        """Figures of XLA's compiler, a `layoutmap.cost.verified.Verified`, or None if it compiled nothing."""
        ...

    @property
    def fits(self) -> bool:
        """Whether a device has the memory."""
        ...

    @property
    def step_seconds(self) -> float:
        """Seconds of a step, where the collectives of weights overlap with computing."""
        ...

    @property
    def serial_seconds(self) -> float:
        """Seconds of a step without overlap."""
        ...

    def on_memory(self, num_bytes: int) -> Self:
        """Return the same cost on devices with another memory."""
        ...

    def mark_weight_collectives(self, paths: frozenset[str]) -> Self:
        """Return the same cost with the collectives of weights told apart from those of activations."""
        ...

    def describe_collectives(self, paths: Iterable[str]) -> list[str]:
        """Return a text for each collective that some variables or layers cause."""
        ...

    def to_text(self, width: int | None = None) -> str:
        """Return the text that `print` shows."""
        ...

    def to_html(self) -> str:
        """Return the cost as tables for a notebook."""
        ...


def load_cost_package() -> Any:
    """Import the one module of `layoutmap.cost` that the packages below it use."""
    return import_module("layoutmap.cost.entry")
