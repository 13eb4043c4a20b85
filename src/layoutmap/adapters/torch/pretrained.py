"""Write the files of `save_pretrained` for a sharded model in parallel: each process writes its own shards.

A file of safetensors is a header and the bytes of its tensors, one after the other. Size and place of each are known
before, so each process writes the bytes of its shards where they belong, and none ever holds more than those. Which
files there are, and what else is in the folder, transformers says: it saves tensors without values.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from layoutmap.core.blocks import Index, NumpyArray, get_starts_and_stops
from layoutmap.core.errors import CheckpointError
from layoutmap.core.folders import make_hidden_path, open_hidden_folder
from layoutmap.core.layout import Layout
from layoutmap.engines import get_engine
from layoutmap.engines.agreement import call_and_share_errors, gather_texts
from layoutmap.engines.torch.operators import Function
from layoutmap.engines.torch.specs import get_local
from layoutmap.engines.torch.storages import get_storage_key

_INDEX = ".safetensors.index.json"
_files: ContextVar[list[tuple[str, dict[str, DTensor]]] | None] = ContextVar("files", default=None)


def wrap_save_file(original: Function) -> Function:
    """Wrap safetensors' `save_file`. In `_capture_saved_files`, it records its arguments and writes no file."""

    def save_file(tensors: dict[str, DTensor], filename: str, *args: object, **options: object) -> object:
        files = _files.get()
        if files is None:
            return original(tensors, filename, *args, **options)
        files.append((os.path.basename(filename), dict(tensors)))
        return None

    return save_file


@contextmanager
def _capture_saved_files() -> Generator[list[tuple[str, dict[str, DTensor]]]]:
    """Record the file names and tensors of `save_file` calls until the block ends. The calls write no file."""
    files: list[tuple[str, dict[str, DTensor]]] = []
    token = _files.set(files)
    try:
        yield files
    finally:
        _files.reset(token)


class _TensorFilePosition(NamedTuple):
    """The name of a sharded tensor in the state dict, the file for its values, and the byte where they start."""

    name: str
    file: str
    start: int


# A gather would send all bytes over the network, so each process writes its own shards (decisions/0096).
def save_model_in_parallel(
    save: Function, directory: str | os.PathLike[str], tensors: Mapping[str, torch.Tensor]
) -> bool:
    """Save a model in parallel: each process writes its own shards. All processes of the mesh must call it.

    The files are made in a hidden folder beside the directory, which becomes the directory. Into one that exists they
    are moved, its old index being removed before and the new one put there last.

    Args:
        save: Saves the model as transformers does: takes the folder and `state_dict=`.
        directory: The folder.
        tensors: The state of the model.

    Returns:
        Whether the model is saved. It is not, and nothing is written, if transformers stores other tensors than the
        model has, for example because it splits merged experts.

    Raises:
        CheckpointError: This process or another one cannot write the files.
    """
    engine = get_engine("torch")
    layouts = {
        name: layout
        for name, tensor in tensors.items()
        if isinstance(tensor, DTensor) and (layout := engine.get_layout(tensor)) is not None
    }
    if not layouts:  # no layout describes the tensors, so their shards cannot be assigned to processes
        return False
    # Gather over the largest mesh, because it contains all processes.
    mesh = max((layout.mesh for layout in layouts.values()), key=lambda each: each.size)

    def gather(values: NumpyArray) -> NumpyArray:
        return engine.gather_from_processes(values, mesh)

    # Two programs may save to the same folder at the same time, so the temporary folder has a random name.
    own_token = os.urandom(8).hex()
    tokens = gather_texts(own_token, gather)
    is_first_process = own_token == tokens[0]
    target = Path(os.path.abspath(os.path.expanduser(os.fspath(directory))))
    hidden = make_hidden_path(target, tokens[0])
    with ExitStack() as end:

        def write_folder() -> list[_TensorFilePosition] | None:
            return _write_files_without_sharded_values(
                save, end.enter_context(open_hidden_folder(target, own_token)), target, tensors, layouts
            )

        plan = call_and_share_errors(lambda: write_folder() if is_first_process else None, gather, "save")
        received_plan = json.loads(gather_texts(json.dumps(plan), gather)[0])
        if received_plan is None:
            return False
        offsets = [_TensorFilePosition(*each) for each in received_plan]
        call_and_share_errors(lambda: _write_shards(hidden, offsets, tensors, layouts), gather, "save")

        def publish_files() -> None:
            _move_files(hidden, target)
            end.close()  # close, and so delete the temporary folder, before any process returns

        call_and_share_errors(lambda: publish_files() if is_first_process else None, gather, "save")
        return True


def _write_files_without_sharded_values(
    save: Function, folder: Path, target: Path, tensors: Mapping[str, Any], layouts: Mapping[str, Layout]
) -> list[_TensorFilePosition] | None:
    """Write files without sharded values, and return where these belong, or None if `save` changes tensors."""
    if target.exists() and not target.is_dir():
        raise CheckpointError(
            f"{target} is a file",
            why="save_pretrained writes a folder",
            fix="pass a folder, or a path that does not exist yet",
        )
    names_by_placeholder_id: dict[int, str] = {}
    placeholders: dict[int, torch.Tensor] = {}  # one for each shared tensor, so that it is saved once
    state: dict[str, object] = dict(tensors)
    for name in layouts:
        tensor = tensors[name]
        key = get_storage_key(get_local(tensor))
        if key not in placeholders:
            placeholders[key] = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            names_by_placeholder_id[id(placeholders[key])] = name
        state[name] = placeholders[key]
    with _capture_saved_files() as files:
        save(folder, state_dict=state)
    if any(
        each.is_meta and id(each) not in names_by_placeholder_id
        for _, content in files
        for each in content.values()
    ):
        return None
    return [
        place
        for file, content in files
        for place in _write_file_without_sharded_values(folder, file, content, names_by_placeholder_id)
    ]


def _write_file_without_sharded_values(
    folder: Path, file: str, tensors: Mapping[str, torch.Tensor], names_by_placeholder_id: Mapping[int, str]
) -> list[_TensorFilePosition]:
    """Write a file of the final size with its header and unsharded values. Return where its sharded values belong."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    # safetensors sorts by element size, so that each tensor is aligned. Use the same order.
    ordered = sorted(tensors.items(), key=lambda each: (-each[1].dtype.itemsize, each[0]))
    for name, tensor in ordered:
        end = offset + tensor.numel() * tensor.dtype.itemsize
        entries[name] = {
            "dtype": _find_safetensors_dtype_name(tensor.dtype),
            "shape": [*tensor.shape],
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # align the values, as the format requires
    offsets: list[_TensorFilePosition] = []
    with open(folder / file, "xb") as sink:
        sink.write(len(text).to_bytes(8, "little") + text)
        data_start = sink.tell()
        for name, tensor in ordered:
            start = data_start + entries[name]["data_offsets"][0]
            if tensor.is_meta:
                offsets.append(_TensorFilePosition(names_by_placeholder_id[id(tensor)], file, start))
            else:
                sink.seek(start)
                sink.write(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        sink.truncate(data_start + offset)  # so that other processes can write at any offset
    return offsets


def _find_safetensors_dtype_name(dtype: torch.dtype) -> str:
    """Return the safetensors name of an element type."""
    from safetensors.torch import save

    text = save({"": torch.empty(0, dtype=dtype)})
    return json.loads(text[8 : 8 + int.from_bytes(text[:8], "little")])[""]["dtype"]


def _write_shards(
    folder: Path,
    offsets: Sequence[_TensorFilePosition],
    tensors: Mapping[str, torch.Tensor],
    layouts: Mapping[str, Layout],
) -> None:
    """Write this process's shards, and flush them to disk."""
    files: dict[str, int] = {}
    try:
        for position, (name, file, start) in enumerate(offsets):
            if file not in files:
                files[file] = os.open(folder / file, os.O_RDWR)
            for index, values in _iterate_shards_to_write(tensors[name], layouts[name], position):
                _write_block(files[file], start, tensors[name].shape, index, values)
        for each in files.values():
            os.fsync(each)  # flush before the index lists the file
    except OSError as error:
        raise CheckpointError(
            f"{folder} cannot be written",
            why=f"the system says: {error.strerror or error}",
            fix="pass a folder that all processes can write to; the unfinished files were removed",
        ) from error
    finally:
        for each in files.values():
            os.close(each)


def _iterate_shards_to_write(
    tensor: torch.Tensor, layout: Layout, turn: int
) -> Iterator[tuple[Index, NumpyArray]]:
    """Yield the shards that this process writes. Of the processes with equal shards, `turn` selects one."""
    engine = get_engine("torch")
    holders: dict[object, list[int]] = {}
    for device in range(layout.mesh.size):
        holders.setdefault(get_starts_and_stops(layout.shard_slices(tensor.shape, device)), []).append(device)
    local_devices = set(engine.bind_mesh(layout.mesh).local_device_ids)
    # If several devices hold the same shard, the next one writes it each time, so that all share the writes.
    writers = {ends: devices[turn % len(devices)] for ends, devices in holders.items()}
    if local_devices.intersection(writers.values()):
        for index, values in engine.iterate_shards(tensor, copy=False):
            if writers[get_starts_and_stops(index)] in local_devices:
                yield index, values


def _write_block(file: int, start: int, shape: Sequence[int], index: Index, values: NumpyArray) -> None:
    """Write a block of a tensor into its file, with one write for each run of consecutive bytes."""
    block = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    sizes = [each.stop - each.start for each in index]
    num_outer_axes = max((axis for axis, size in enumerate(sizes) if size < shape[axis]), default=0)
    strides = [math.prod(shape[axis + 1 :]) * values.dtype.itemsize for axis in range(len(shape))]
    first_byte = start + sum(each.start * stride for each, stride in zip(index, strides, strict=True))
    run_bytes = math.prod(sizes[num_outer_axes:]) * values.dtype.itemsize
    for run_index, outer in enumerate(np.ndindex(*sizes[:num_outer_axes])):
        offset = first_byte + sum(each * stride for each, stride in zip(outer, strides, strict=False))
        data = block[run_index * run_bytes : (run_index + 1) * run_bytes].data
        while data:  # a system call may write only a part of the data
            written = os.pwrite(file, data, offset)
            data, offset = data[written:], offset + written


def _move_files(folder: Path, target: Path) -> None:
    """Move the written files to the target folder and delete the old weights there. The index file is moved last."""
    if not target.exists():
        os.rename(folder, target)
        return
    new_names = sorted(path.name for path in folder.iterdir())
    weights = [name for name in new_names if name.endswith(".safetensors")]
    stem = re.escape(re.sub(r"(-\d{5}-of-\d{5})?\.safetensors$", "", weights[0]))
    old_weights = re.compile(rf"{stem}(-\d{{5}}-of-\d{{5}})?\.safetensors")
    (target / (re.sub(r"(-\d{5}-of-\d{5})?\.safetensors$", "", weights[0]) + _INDEX)).unlink(missing_ok=True)
    for name in new_names:
        if not name.endswith(_INDEX):
            os.replace(folder / name, target / name)
    for path in list(target.iterdir()):
        if old_weights.fullmatch(path.name) and path.name not in weights:
            path.unlink()
    for name in new_names:
        if name.endswith(_INDEX):
            os.replace(folder / name, target / name)
