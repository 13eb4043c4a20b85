"""Write weights as safetensors files and an index, as Hugging Face libraries do."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from layoutmap.checkpoint.dtypes import SAFETENSORS, get_numpy_dtype
from layoutmap.checkpoint.source import SavedVariable, Source
from layoutmap.checkpoint.storage import FileMaker
from layoutmap.checkpoint.writer import encode_safetensors_header
from layoutmap.core.blocks import Index, make_full_index
from layoutmap.core.errors import CheckpointError

_BLOCK_BYTES = 1 << 26
"""The maximum number of bytes in memory at once, unless a single row is larger."""


def write_variables(
    storage: FileMaker,
    folder: str,
    source: Source,
    variables: Sequence[SavedVariable],
    max_shard_bytes: int,
    progress: Callable[[str], object],
) -> None:
    """Write variables into a folder, as every writer in `layoutmap.checkpoint.foreign.WRITERS` does.

    One file is `model.safetensors`. Several are `model-00001-of-00002.safetensors` and so on, with an index.

    Args:
        storage: The storage of the folder.
        folder: The folder, which is empty.
        source: The source of the values.
        variables: The variables to write.
        max_shard_bytes: The maximum size of a file in bytes. A file with one larger tensor may exceed it.
        progress: Called with the path of each variable that is written.

    Raises:
        CheckpointError: safetensors lacks the element type of a variable, or a file cannot be written.
    """
    files = list(_group_variables_by_file(variables, max_shard_bytes))
    weight_map: dict[str, str] = {}
    for number, content in enumerate(files, 1):
        name = "model.safetensors"
        if len(files) > 1:
            name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        with storage.create_file(folder, name) as sink:
            rows = [(v.path, SAFETENSORS[v.dtype], v.shape, v.global_bytes) for v in content]
            # write "pt" for all models, because transformers reads only files with this format entry
            sink.write(encode_safetensors_header("pt", rows))
            for variable in content:
                for index in _iterate_row_blocks(variable):
                    values = np.ascontiguousarray(source.read(variable.path, index))
                    sink.write(values.reshape(-1).view(np.uint8).data)
                    del values  # free the block before the next variable is read
                weight_map[variable.path] = name
                progress(variable.path)
    if len(files) > 1:
        total = sum(each.global_bytes for each in variables)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        with storage.create_file(folder, "model.safetensors.index.json") as sink:
            sink.write(json.dumps(index, indent=2).encode())


def _group_variables_by_file(
    variables: Sequence[SavedVariable], max_bytes: int
) -> Iterator[list[SavedVariable]]:
    """Yield the variables of each file, those with larger elements first, so that all values are aligned."""
    found: list[SavedVariable] = []
    size = 0
    for variable in variables:
        if variable.dtype not in SAFETENSORS:
            raise CheckpointError(
                f"{variable.path}: dtype {variable.dtype} cannot be written",
                why=f"safetensors supports {', '.join(SAFETENSORS)}",
                fix="cast the variable to one of these dtypes, or store it with layoutmap.save",
            )
        if found and size + variable.global_bytes > max_bytes:
            yield _sort_by_alignment(found)
            found, size = [], 0
        found.append(variable)
        size += variable.global_bytes
    yield _sort_by_alignment(found)


def _sort_by_alignment(variables: list[SavedVariable]) -> list[SavedVariable]:
    return sorted(variables, key=lambda each: -get_numpy_dtype(each.dtype).itemsize)


def _iterate_row_blocks(variable: SavedVariable) -> Iterator[Index]:
    """Yield the index of each block to write. A block is a range of the first axis, so it is contiguous."""
    everything = make_full_index(variable.shape)
    if not variable.shape:
        yield everything
        return
    row = variable.global_bytes // max(1, variable.shape[0])
    step = max(1, _BLOCK_BYTES // max(1, row))
    for start in range(0, variable.shape[0], step):
        yield (slice(start, min(start + step, variable.shape[0])), *everything[1:])
