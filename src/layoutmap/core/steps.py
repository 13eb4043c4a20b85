"""Describe a training step on shapes without values. Adapters describe the step, and engines count its cost."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from layoutmap.core.errors import ScopeError
from layoutmap.core.variables import VariableSpec

Key = tuple[str, str]
"""The model and the path of a variable."""


class Tracer(Protocol):
    """The listener of a step while it is traced.

    Attributes:
        unread: The values of variables of blocks that are left out: a model has them, and nothing should read them.
    """

    unread: Mapping[Key, Any]

    def call(
        self, path: str, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Return the output of a layer. An engine may call the function with other inputs.

        Args:
            path: The layer's path.
            function: Calls the layer.
            args: Its arguments; a block of a stack has what the block before it returned as the first one.
            kwargs: Its arguments by name.
        """
        ...

    def should_recompute(self, path: str) -> bool:
        """Return whether a layer stores only its input for the backward pass, and recomputes the rest.

        Args:
            path: The layer's path. Layers inside of one that does so do not.
        """
        ...

    def open_update(self) -> AbstractContextManager[None]:
        """Return a context in which the optimizer updates the variables."""
        ...


@dataclass(frozen=True)
class Shape:
    """An array of a batch.

    Args:
        name: What it is called.
        shape: Its global shape.
        dtype: The name of its element type.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class TrainingStep:
    """A training step: loss, gradients and the optimizer's update.

    Args:
        name: What the model is called.
        variables: What it changes or reads, in the order of the model.
        batch: The arrays of a batch, in their order.
        blocks: Paths of layers that are equal, one list for each stack, in their order.
        run: Called with a tracer, the values of variables and a batch, returns new values; variables that are not
            given are those of blocks that were left out.
        notes: What it assumes, in sentences.
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
        """Refuse a batch without rows, which costs nothing.

        Raises:
            ScopeError: It has none.
        """
        for each in self.batch:
            if each.shape[:1] == (0,):
                raise ScopeError(
                    f"{self.name}: the batch has no rows",
                    facts={each.name: f"{each.dtype}{list(each.shape)}"},
                    why="what a step sends, computes and holds depends on how many rows it is given",
                    fix="pass inputs= whose first axis is the rows of the global batch",
                )
