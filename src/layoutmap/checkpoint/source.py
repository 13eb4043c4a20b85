"""What values can be read from: a step of a checkpoint, or files that others have written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from layoutmap.core.blocks import Index, NumpyArray
from layoutmap.core.variables import Kind

Specs = tuple[str | tuple[str, ...] | None, ...]
"""Sharding specs as JSON has them: `None` for an unsharded axis."""


@dataclass(frozen=True, slots=True)
class SavedVariable:
    """A variable as a checkpoint knows it.

    Args:
        path: Its path.
        shape: Its global shape.
        dtype: The name of its element type, as in `"bfloat16"`.
        kind: What it is for.
        aliases: Its other paths.
        layout: How its axes were sharded when it was saved; `None`: it was on no mesh, or it is not known.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    kind: Kind = Kind.WEIGHT
    aliases: tuple[str, ...] = ()
    layout: Specs | None = None


class Source(Protocol):
    """Variables whose values can be read, block by block."""

    where: str
    """The file or folder, as messages name it."""

    @property
    def variables(self) -> Mapping[str, SavedVariable]:
        """The variables by path."""
        ...

    @property
    def states(self) -> Mapping[str, Any]:
        """States beside the variables, by name, as `checkpoint.states.decode` returns them; empty if there are none."""
        ...

    def read(self, path: str, index: Index | None = None) -> NumpyArray:
        """Return the values of a variable at an index (`None`: all), in memory of the caller's own.

        Raises:
            CheckpointError: They cannot be read, or are not those that were saved.
        """
        ...

    def check(self, path: str, index: Index | None = None) -> None:
        """Raise what `read` would raise."""
        ...
