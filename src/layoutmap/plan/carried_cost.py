"""Define the cost of a training step as plans use it, and import the package that computes it.

`layoutmap.cost` is a package above plans and scopes, so that both can be understood without it. It is imported only if
a plan has a cost, or a cost is requested.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import Any, Protocol, Self

from layoutmap.core.specs import BatchDim
from layoutmap.plan.advice import Advice


class PeakTensors(Protocol):
    """Tensors of one kind, path, and shape that a device stores when a step needs most memory."""

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
    """The part of the interface of `layoutmap.cost.cost.Cost`, the cost of a step on a machine, that plans use."""

    @property
    def line(self) -> str:
        """A summary of the cost in one line."""
        ...

    @property
    def batch_dim(self) -> BatchDim | None:
        """The mesh dim over which batches are sharded."""
        ...

    @property
    def peak_bytes(self) -> int:
        """The memory in bytes that a device needs at the peak of a step."""
        ...

    @property
    def memory_bytes(self) -> int:
        """The memory in bytes that a device of the machine has."""
        ...

    @property
    def peak_tensors(self) -> Sequence[PeakTensors]:
        """The tensors on a device at the peak of a step, without the variables and the batch."""
        ...

    @property
    def tried(self) -> tuple[Advice, ...]:
        """Changes of the plan that need less memory, with their computed costs, or () if the plan itself fits."""
        ...

    @property
    def untried(self) -> tuple[str, ...]:
        """The names of changes of the plan with unknown cost, because computing it would take too long."""
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
        """The numbers that XLA's compiler gives, a `layoutmap.cost.verified.Verified`, or None if it was not run."""
        ...

    @property
    def fits(self) -> bool:
        """Whether the peak of a step fits into the memory of a device."""
        ...

    @property
    def step_seconds(self) -> float:
        """The duration of a step in seconds if the collectives of weights overlap with computation."""
        ...

    @property
    def serial_seconds(self) -> float:
        """The duration of a step in seconds if no collective overlaps with computation."""
        ...

    def on_memory(self, num_bytes: int) -> Self:
        """Return the cost of the same step on a machine with devices that have this much memory."""
        ...

    def with_weight_paths(self, paths: frozenset[str]) -> Self:
        """Return this cost, in which collectives of the weights at these paths are marked as such."""
        ...

    def format_collectives(self, paths: Iterable[str]) -> list[str]:
        """Return a line of text for each collective that the variables or layers at these paths cause."""
        ...

    def to_text(self, width: int | None = None) -> str:
        """Return the text that `print` shows, with lines of at most `width` characters."""
        ...

    def to_html(self) -> str:
        """Return the cost as tables for a notebook."""
        ...


def load_cost_package() -> Any:
    """Import and return `layoutmap.cost.entry`, the module with the functions of `layoutmap.cost` that plans call."""
    return import_module("layoutmap.cost.entry")
