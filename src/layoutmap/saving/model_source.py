"""Read the values of a model as a source, gathering one variable at a time: `ModelSource`."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from layoutmap.adapters import CheckpointAdapter, get_model_adapter, require_capability
from layoutmap.checkpoint.name_tables import NameTable, make_name_table_of_model, read_name_table
from layoutmap.checkpoint.renamed_source import make_renamed_source
from layoutmap.checkpoint.source import SavedVariable, Source
from layoutmap.core.blocks import Index, NumpyArray
from layoutmap.core.errors import CheckpointError
from layoutmap.core.variables import Kind
from layoutmap.engines import get_engine

Names = str | os.PathLike[str] | Mapping[str, Any] | None

_WRITTEN, _FAILED, _AWAIT_REQUEST = -1, -2, -3


class ModelSource(Source):
    """Read the values of a model block by block, like those of a checkpoint. One variable is gathered at a time.

    With several processes, the first one broadcasts the index of each variable that it reads, and all gather it.

    Args:
        model: The model.
        verb: Name of the calling function, for messages.

    Attributes:
        adapter: Adapter of the model.
        is_first_process: Whether this process reads. The others call `gather_until_released`.
    """

    def __init__(self, model: object, verb: str):
        self.adapter = require_capability(get_model_adapter(model), CheckpointAdapter, verb)
        self._verb = verb
        self._engine = get_engine(self.adapter.engine_name)
        self._arrays: dict[str, Any] = {}
        self._last: tuple[str, NumpyArray] | None = None
        self._gather: Callable[[NumpyArray], NumpyArray] | None = None
        self.is_first_process = True
        super().__init__(type(model).__name__, {})
        for stored in self.adapter.list_stored_variables(model, None):
            variable = stored.variable
            layout = self._engine.get_layout(stored.array)
            if layout is not None:
                mesh = self._engine.bind_mesh(layout.mesh)
                if len(mesh.local_device_ids) < mesh.size and self._gather is None:
                    self._gather = functools.partial(self._engine.gather_from_processes, mesh=mesh)
                    self.is_first_process = 0 in mesh.local_device_ids
            self._arrays[variable.path] = stored.array
            self.variables[variable.path] = SavedVariable(
                variable.path, variable.shape, variable.dtype, variable.kind, variable.aliases
            )
        self._numbers = {path: number for number, path in enumerate(self._arrays)}

    def enable_reads_in_all_processes(self) -> None:
        """Let all processes read, not only the first. All must read the same variables in the same order."""
        self._gather = None

    def release_other_processes(self, *, is_complete: bool) -> None:
        """End `gather_until_released` in the other processes. There it raises unless `is_complete`."""
        self._broadcast_request(_WRITTEN if is_complete else _FAILED)

    def gather_until_released(self) -> None:
        """Gather each variable that process 0 reads, until process 0 calls `release_other_processes`."""
        arrays = [*self._arrays.values()]
        while (number := self._broadcast_request(_AWAIT_REQUEST)) >= 0:
            self._engine.to_numpy(arrays[number])
        if number == _FAILED:
            raise CheckpointError(
                f"{self._verb}: the first process could not read or write all values",
                why="the first process raised an error, which states the cause",
                fix="correct the error of the first process",
            )

    def _read_block(self, variable: SavedVariable, index: Index) -> NumpyArray:
        path = variable.path
        if self._last is None or self._last[0] != path:
            self._last = None
            self._broadcast_request(self._numbers[path])
            self._last = path, self._engine.to_numpy(self._arrays[path])
        return self._last[1][index]

    def _broadcast_request(self, number: int) -> int:
        """Return process 0's `number` in all processes: the index of a variable to gather, or a code for the end."""
        return number if self._gather is None else int(self._gather(np.array(number)).max())


def read_model_name_table(names: Names, model: object, adapter: CheckpointAdapter) -> NameTable | None:
    """Read the name table for a model, or return None if its variables keep their paths.

    Args:
        names: A table (see `load`), `"checkpoint"`, or `None`.
        model: The model.
        adapter: Adapter of the model.

    Raises:
        CheckpointError: `names` is `"checkpoint"`, and the model's library has no checkpoint format.
        RuleError: The table cannot be read.
    """
    if names == "checkpoint":
        return make_name_table_of_model(
            f"the checkpoint of {type(model).__name__}", adapter.list_checkpoint_names(model)
        )
    return None if names is None else read_name_table(names)


def rename_source_and_list_weights(
    source: Source, table: NameTable | None
) -> tuple[Source, list[SavedVariable]]:
    """Return a pair: the renamed source, and the list of its variables that are weights or moving statistics."""
    if table is not None:
        source = make_renamed_source(source, table)
    return source, [v for v in source.variables.values() if v.kind in (Kind.WEIGHT, Kind.STATE)]
