"""Export the weights of a model or a checkpoint as files that Hugging Face libraries read: `export`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, cast

from layoutmap.checkpoint.export import MAX_FILE_BYTES, export_source
from layoutmap.checkpoint.foreign import open_checkpoint_source
from layoutmap.checkpoint.source import Source
from layoutmap.saving.model_source import ModelSource, read_model_name_table


def export(
    model: object,
    directory: str | os.PathLike[str],
    *,
    step: int | None = None,
    format: str = "safetensors",
    names: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    max_shard_bytes: int = MAX_FILE_BYTES,
    progress: Callable[[str], object] | None = None,
) -> str:
    """Write the weights of a model as safetensors, optionally under the names of Hugging Face libraries.

    If several processes share the model, all of them call it, and the first one writes. It writes weights and moving
    statistics bit for bit, and no optimizer state. When this returns, the folder is on the disk. An error or a crash
    leaves no part of it.

    Args:
        model: A model, of which one weight at a time is gathered. Or the directory of a checkpoint, which is read in
            blocks, without a model and without a framework.
        directory: Folder to create, or an empty one. To use the weights elsewhere, add `config.json` and the
            tokenizer's files.
        step: Step of a checkpoint; `None`: the last one.
        format: Format of the files, a key of `layoutmap.checkpoint.foreign.WRITERS`.
        names: Names of the variables in the files: a table of the library, such as `"llama"`, a YAML file, or a mapping
            from paths to names; see `load`. `"checkpoint"`: the names in the files of `save_pretrained` of transformers
            or peft, with separate experts and unfused weights. `None`: the paths.
        max_shard_bytes: Largest size of a file in bytes. A larger tensor has a file of its own. One file is
            `model.safetensors`. Several are `model-00001-of-00002.safetensors` and so on, with
            `model.safetensors.index.json`.
        progress: Called with the name of each tensor after it is written.

    Returns:
        The folder.

    Raises:
        CheckpointError: The folder exists and is not empty, something cannot be read or written, or the table has no
            line for a variable. With several processes, all of them raise it.
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
        source: Source = open_checkpoint_source(os.fspath(cast("str | os.PathLike[str]", model)), step)
        return export_source(source, directory, format=format, **options)
    values = ModelSource(model, "export")
    if not values.is_first_process:
        values.gather_until_released()
        return os.path.abspath(os.path.expanduser(os.fspath(directory)))
    is_complete = False
    try:
        options["names"] = read_model_name_table(names, model, values.adapter)
        folder = export_source(values, directory, format=format, **options)
        is_complete = True
        return folder
    finally:
        values.release_other_processes(is_complete=is_complete)
