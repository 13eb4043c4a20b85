"""Describe a training step on shapes without values. Adapters describe the step, and engines compute its cost."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from layoutmap.core.errors import ScopeError
from layoutmap.core.variables import VariableSpec

Key = tuple[str, str]
"""A variable's model and path."""


class StepTracer(Protocol):
    """Interface to which a training step reports its layer calls and its optimizer update while it is traced.

    Attributes:
        unread: Placeholders of the variables of skipped blocks. The step must not read these variables.
    """

    unread: Mapping[Key, Any]

    def call_layer(
        self, path: str, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Call a layer and return its output. Instead of calling a skipped block, return its first argument.

        Args:
            path: The layer's path.
            function: Calls the layer.
            args: Its positional arguments. The first argument of a block in a stack is the output of the block before.
            kwargs: Its keyword arguments.
        """
        ...

    def should_recompute(self, path: str) -> bool:
        """Return whether the backward pass recomputes a layer's activations from the layer's input.

        Args:
            path: The layer's path. It is false for layers inside of a layer for which it is true.
        """
        ...

    def mark_optimizer_update(self) -> AbstractContextManager[None]:
        """Return a context manager in which the step computes the optimizer's update of the variables."""
        ...


@dataclass(frozen=True)
class BatchArraySpec:
    """Describe one array of a batch by name, shape, and dtype.

    Args:
        name: The name of the array.
        shape: Its global shape.
        dtype: The name of its element type.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class TrainingStep:
    """Describe a training step: loss, gradients, and the optimizer's update.

    Args:
        name: The model's name.
        variables: The variables that it reads or changes, in the order of the model.
        batch: The arrays of a batch, in their order.
        blocks: For each stack of equal layers, the paths of the layers in order.
        run: Computes the step. It takes a tracer, the values of variables, and a batch, and returns new values. No
            values are passed for the variables of skipped blocks.
        notes: The assumptions of the step, in sentences.
        how_to_recompute: How a user makes the library recompute a layer's activations in the backward pass; empty: the
            library has no layers.
    """

    name: str
    variables: Sequence[VariableSpec]
    batch: Sequence[BatchArraySpec]
    blocks: Sequence[Sequence[str]]
    run: Callable[[StepTracer, Mapping[Key, Any], Sequence[Any]], Mapping[Key, Any]]
    notes: Sequence[str] = ()
    how_to_recompute: str = ""

    def __post_init__(self) -> None:
        """Refuse a batch without rows, because its step costs nothing.

        Raises:
            ScopeError: The batch has no rows.
        """
        for array in self.batch:
            if array.shape[:1] == (0,):
                raise ScopeError(
                    f"{self.name}: the batch has no rows",
                    facts={array.name: f"{array.dtype}{list(array.shape)}"},
                    why="the communication, computation, and memory of a step depend on the number of rows",
                    fix="pass inputs= whose first axis is the rows of the global batch",
                )
