"""Read the values of a model as a source, gathering one variable at a time: `ModelSource`."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from layoutmap.adapters import Keeping, get_model_adapter, require_capability
from layoutmap.checkpoint.name_tables import NameTable, make_model_table, read_names
from layoutmap.checkpoint.renamed_source import rename_source
from layoutmap.checkpoint.source import SavedVariable, Source
from layoutmap.core.blocks import Index, NumpyArray
from layoutmap.core.errors import CheckpointError
from layoutmap.core.variables import Kind
from layoutmap.engines import get_engine

Names = str | os.PathLike[str] | Mapping[str, Any] | None

_WRITTEN, _FAILED, _AWAIT_REQUEST = -1, -2, -3


class ModelSource(Source):
    """Read the values of a model as a source, gathering one variable at a time.

    In several processes the first one announces the number of each variable that it reads, and all gather it.

    Args:
        model: The model.
        verb: The caller, for messages.

    Attributes:
        adapter: Adapter of the model.
        is_first: Whether this process reads. The others call `follow_first`.
    """

    def __init__(self, model: object, verb: str):
        self.adapter = require_capability(get_model_adapter(model), Keeping, verb)
        self._verb = verb
        self._engine = get_engine(self.adapter.engine_name)
        self._arrays: dict[str, Any] = {}
        self._last: tuple[str, NumpyArray] | None = None
        self._gather: Callable[[NumpyArray], NumpyArray] | None = None
        self.is_first = True
        super().__init__(type(model).__name__, {})
        for stored in self.adapter.list_stored_variables(model, None):
            variable = stored.variable
            layout = self._engine.get_layout(stored.array)
            if layout is not None:
                mesh = self._engine.bind(layout.mesh)
                if len(mesh.local_device_ids) < mesh.size and self._gather is None:
                    self._gather = functools.partial(self._engine.all_gather, mesh=mesh)
                    self.is_first = 0 in mesh.local_device_ids
            self._arrays[variable.path] = stored.array
            self.variables[variable.path] = SavedVariable(
                variable.path, variable.shape, variable.dtype, variable.kind, variable.aliases
            )
        self._numbers = {path: number for number, path in enumerate(self._arrays)}

    def read_in_all(self) -> None:
        """Read in every process from now on. All processes must read the same variables in the same order."""
        self._gather = None

    def finish(self, *, is_complete: bool) -> None:
        """End `follow_first` in the other processes."""
        self._announce(_WRITTEN if is_complete else _FAILED)

    def follow_first(self) -> None:
        """Gather each variable that process 0 reads, until it has finished."""
        arrays = [*self._arrays.values()]
        while (number := self._announce(_AWAIT_REQUEST)) >= 0:
            self._engine.to_numpy(arrays[number])
        if number == _FAILED:
            raise CheckpointError(
                f"{self._verb}: the first process could not read or write all values",
                why="its error states the cause",
                fix="correct the error of the first process",
            )

    def _read(self, variable: SavedVariable, wanted: Index) -> NumpyArray:
        path = variable.path
        if self._last is None or self._last[0] != path:
            self._last = None
            self._announce(self._numbers[path])
            self._last = path, self._engine.to_numpy(self._arrays[path])
        return self._last[1][wanted]

    def _announce(self, number: int) -> int:
        """Broadcast a number from process 0: the variable to gather, or the end."""
        return number if self._gather is None else int(self._gather(np.array(number)).max())


def read_table(names: Names, model: object, adapter: Keeping) -> NameTable | None:
    """Read the name table for a model, or return `None` if its variables keep their paths.

    Args:
        names: A table (see `load`), `"checkpoint"`, or `None`.
        model: The model.
        adapter: Its adapter.

    Raises:
        CheckpointError: It is `"checkpoint"`, and the model's library has no checkpoint format.
        RuleError: The table cannot be read.
    """
    if names == "checkpoint":
        return make_model_table(
            f"the checkpoint of {type(model).__name__}", adapter.list_checkpoint_names(model)
        )
    return None if names is None else read_names(names)


def select_weights(source: Source, table: NameTable | None) -> tuple[Source, list[SavedVariable]]:
    """Return a source under the names of a table, with its weights and moving statistics."""
    if table is not None:
        source = rename_source(source, table)
    return source, [v for v in source.variables.values() if v.kind in (Kind.WEIGHT, Kind.STATE)]
