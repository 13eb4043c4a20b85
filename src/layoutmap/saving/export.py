"""Export the weights of a model or a checkpoint as files that Hugging Face libraries read: `export`."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from typing import Any, cast

import numpy as np

from layoutmap.adapters import Keeping, get_model_adapter, require_capability
from layoutmap.checkpoint.export import MOST_BYTES, export_source
from layoutmap.checkpoint.foreign import open_source
from layoutmap.checkpoint.source import SavedVariable, Source
from layoutmap.core.blocks import Index, NumpyArray
from layoutmap.core.errors import CheckpointError
from layoutmap.engines import get_engine


def export(
    model: object,
    directory: str | os.PathLike[str],
    *,
    step: int | None = None,
    format: str = "safetensors",
    names: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    max_shard_bytes: int = MOST_BYTES,
    progress: Callable[[str], object] | None = None,
) -> str:
    """Write the weights of a model as safetensors, optionally under the names of Hugging Face libraries.

    If several processes share the model, all of them call it, and the first one writes.

    Weights and moving statistics are written, bit for bit; what an optimizer has is not. The folder exists when this
    returns, and durable: all of it, or, whatever happens on the way, none of it.

    Args:
        model: A model, of which one weight at a time is gathered. Or the directory of a checkpoint, which is read in
            blocks, without a model and without a framework.
        directory: The folder to make. If it exists, it is empty. Add `config.json` and the tokenizer's files to it,
            which say how the weights are used.
        step: The step of a checkpoint; `None`: the last one.
        format: The format of the files, a key of `layoutmap.checkpoint.foreign.WRITERS`.
        names: What the variables are called in the files: a table of the library, such as `"llama"`, a YAML file, or a
            mapping from paths to names; see `load`. `None`: their paths.
        max_shard_bytes: The size of a file, in bytes, unless one tensor is larger. One file is `model.safetensors`;
            several are `model-00001-of-00002.safetensors` and so on, with `model.safetensors.index.json`.
        progress: Called with the name of each tensor when it is written.

    Returns:
        The folder.

    Raises:
        CheckpointError: The folder exists and is not empty, something cannot be read or written, or the table has no
            line for a variable. In several processes each of them raises it.
        RuleError: The table of names cannot be read.

    Example:
        >>> import keras, layoutmap as lm, tempfile
        >>> model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16, name="d1")])
        >>> names = {"d1.kernel": {"from": "fc.weight", "axes": "out in -> in out"}, "d1.bias": "fc.bias"}
        >>> folder = lm.export(model, tempfile.mkdtemp(), names=names)
        >>> lm.load(model, folder, names=names) is model
        True
    """
    options: dict[str, Any] = {"names": names, "max_shard_bytes": max_shard_bytes, "progress": progress}
    if isinstance(model, str | os.PathLike):
        source: Source = open_source(os.fspath(cast("str | os.PathLike[str]", model)), step)
        return export_source(source, directory, format=format, **options)
    values = _Values(model)
    if not values.is_first:
        values.follow_first()
        return os.path.abspath(os.path.expanduser(os.fspath(directory)))
    end = _FAILED
    try:
        folder = export_source(values, directory, format=format, **options)
        end = _WRITTEN
        return folder
    finally:
        values.announce(end)


_WRITTEN, _FAILED, _ASKS = -1, -2, -3


class _Values(Source):
    """Source of a model's values. It caches the last variable, since blocks of one are read in a row.

    In several processes the first one announces the number of each variable that it reads, and all gather it.
    """

    def __init__(self, model: object):
        adapter = require_capability(get_model_adapter(model), Keeping, "export")
        self._engine = get_engine(adapter.engine_name)
        self._arrays: dict[str, Any] = {}
        self._last: tuple[str, NumpyArray] | None = None
        self._gather: Callable[[NumpyArray], NumpyArray] | None = None
        self.is_first = True
        super().__init__(type(model).__name__, {})
        for stored in adapter.list_stored_variables(model, None):
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

    def _read(self, variable: SavedVariable, wanted: Index) -> NumpyArray:
        path = variable.path
        if self._last is None or self._last[0] != path:
            self._last = None
            self.announce([*self._arrays].index(path))
            self._last = path, self._engine.to_numpy(self._arrays[path])
        return self._last[1][wanted]

    def announce(self, number: int) -> int:
        """Return the number that the first process announces: of a variable, or how the export has ended."""
        return number if self._gather is None else int(self._gather(np.array(number)).max())

    def follow_first(self) -> None:
        """Gather the variables that the first process reads, until it has ended."""
        arrays = [*self._arrays.values()]
        while (number := self.announce(_ASKS)) >= 0:
            self._engine.to_numpy(arrays[number])
        if number == _FAILED:
            raise CheckpointError(
                "export: the first process could not write the files",
                why="its own error says what it lacks",
                fix="see the error of the first process",
            )
