"""Describe a training step on shapes without values. Adapters describe the step, and engines count its cost."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from layoutmap.core.errors import ScopeError
from layoutmap.core.variables import VariableSpec

Key = tuple[str, str]
"""A variable's model and path."""


class Tracer(Protocol):
    """Receive the layers of a step while the step is traced.

    Attributes:
        unread: Placeholders for variables of skipped blocks, which the step must not read.
    """

    unread: Mapping[Key, Any]

    def call(
        self, path: str, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Call a layer and return its output. An engine may call it with other inputs.

        Args:
            path: The layer's path.
            function: Calls the layer.
            args: Its arguments; a block of a stack has what the block before it returned as the first one.
            kwargs: Its arguments by name.
        """
        ...

    def should_recompute(self, path: str) -> bool:
        """Return whether the backward pass recomputes a layer from its input.

        Args:
            path: The layer's path. Layers inside of one that does so do not.
        """
        ...

    def open_update(self) -> AbstractContextManager[None]:
        """Return a context for the optimizer's update of the variables."""
        ...


@dataclass(frozen=True)
class Shape:
    """Describe an array of a batch.

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
        blocks: Paths of layers that are equal, one list for each stack, in their order.
        run: Called with a tracer, the values of variables and a batch, returns new values; variables that are not
            given are those of blocks that were left out.
        notes: Its assumptions, in sentences.
        how_to_recompute: How a person has the library compute what a layer keeps again in the backward pass; empty: the
            library has no layers.
    """

    name: str
    variables: Sequence[VariableSpec]
    batch: Sequence[Shape]
    blocks: Sequence[Sequence[str]]
    run: Callable[[Tracer, Mapping[Key, Any], Sequence[Any]], Mapping[Key, Any]]
    notes: Sequence[str] = ()
    how_to_recompute: str = ""

    def __post_init__(self) -> None:
        """Refuse a batch without rows, because its step costs nothing.

        Raises:
            ScopeError: The batch has no rows.
        """
        for each in self.batch:
            if each.shape[:1] == (0,):
                raise ScopeError(
                    f"{self.name}: the batch has no rows",
                    facts={each.name: f"{each.dtype}{list(each.shape)}"},
                    why="the communication, computation, and memory of a step depend on the number of rows",
                    fix="pass inputs= whose first axis is the rows of the global batch",
                )
