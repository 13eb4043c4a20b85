"""Open checkpoints of other libraries as sources, which read only the bytes of a requested block.

None of these formats has checksums of its values. So a file that is too short or contradicts itself is refused, but a
changed value is not detected. No code in a file is ever run.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from layoutmap.checkpoint.foreign.dcp import METADATA, DistributedCheckpointSource
from layoutmap.checkpoint.foreign.keras_weights import KerasWeightsSource
from layoutmap.checkpoint.foreign.orbax import OrbaxCheckpointSource, is_orbax_folder
from layoutmap.checkpoint.foreign.safetensors import INDEX, SafetensorsSource
from layoutmap.checkpoint.gate import check_regular_file, translate_parser_errors
from layoutmap.checkpoint.manifest import NAME
from layoutmap.checkpoint.reader import StepSource
from layoutmap.checkpoint.remote import open_storage
from layoutmap.checkpoint.source import Source, check_variable_limits
from layoutmap.checkpoint.storage import LocalStorage
from layoutmap.core.errors import CheckpointError, join_names

_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".joblib")
_KNOWN_FORMATS = (
    "a directory that layoutmap.save wrote to, *.safetensors (a file, several, or with an index), *.weights.h5, "
    "*.keras, a directory of orbax or of torch.distributed.checkpoint"
)


WRITERS = {"safetensors": "layoutmap.checkpoint.foreign.safetensors_export"}
"""The module with the function `write_variables` for each format of `export`."""


def load_export_writer(name: str) -> Callable[..., None]:
    """Return the function that writes variables in a format. See `safetensors_export.write_variables`.

    Raises:
        CheckpointError: There is no such format.
    """
    if name not in WRITERS:
        raise CheckpointError(
            f"format={name!r} is not an export format",
            why=f"the export formats are {', '.join(WRITERS)}",
            fix="use one of these formats",
        )
    return import_module(WRITERS[name]).write_variables


# Files may be malicious, so they are read without their frameworks, and pickled models are refused (decisions/0085).
def open_checkpoint_source(path: str | os.PathLike[str], step: int | None = None) -> Source:
    """Open a checkpoint of layoutmap, or files of a different library in one of the supported formats.

    Args:
        path: The directory of a checkpoint, which may be the URL of an object store; the folder of one of its steps; a
            file `*.safetensors` or its index; a folder with such files; a file `*.weights.h5` or `*.keras`; or a
            directory of orbax or of `torch.distributed.checkpoint`.
        step: The step, if the directory has several; `None`: the last one.

    Returns:
        The source. For a checkpoint of this library it is a `StepSource`.

    Raises:
        CheckpointError: There is no checkpoint, it is damaged, or its format is not supported, such as a pickle.
    """
    with translate_parser_errors(os.fspath(path)):
        found = _open_source_by_format(path, step)
        check_variable_limits(found.where, found.variables.values())
    return found


def _open_source_by_format(path: str | os.PathLike[str], step: int | None) -> Source:
    storage = open_storage(path)
    if not isinstance(storage, LocalStorage):
        return StepSource(storage, step)
    where = Path(path)
    name = where.name
    if where.exists() and not where.is_dir():
        check_regular_file(os.fspath(path), where.stat())
    if where.is_dir():
        if (where / NAME).is_file() and name.startswith("step-") and name[5:].isdigit():
            return StepSource(LocalStorage(where.parent), _validate_step_of_folder(step, int(name[5:]), path))
        if LocalStorage(where).list_steps():
            return StepSource(LocalStorage(where), step)
        found = _open_foreign_folder(where, step)
        if found is not None:
            return found
        pickles = [each.name for each in sorted(where.iterdir()) if each.name.endswith(_PICKLES)]
        if pickles:
            raise _make_pickle_error(os.fspath(path), f"it contains only pickles: {join_names(pickles)}")
    elif name.endswith((".safetensors", INDEX)):
        _check_step_is_none(step, path)
        return SafetensorsSource(where)
    elif name.endswith((".weights.h5", ".weights.json", ".keras")):
        _check_step_is_none(step, path)
        return KerasWeightsSource(where)
    elif name.endswith(_PICKLES):
        raise _make_pickle_error(
            os.fspath(path), "by its name, the file is a pickle, which can run code when it is read"
        )
    elif where.is_file():
        raise CheckpointError(
            f"{path}: the format of this checkpoint is not supported",
            why=f"the supported formats are {_KNOWN_FORMATS}",
            fix="convert it to safetensors with the library that wrote it",
        )
    return StepSource(storage, step)


def _open_foreign_folder(folder: Path, step: int | None) -> Source | None:
    if any(folder.glob("*.safetensors")) or any(folder.glob("*" + INDEX)):
        _check_step_is_none(step, folder)
        return SafetensorsSource(folder)
    if is_orbax_folder(folder):
        return OrbaxCheckpointSource(folder, step)
    if (folder / METADATA).is_file():
        _check_step_is_none(step, folder)
        return DistributedCheckpointSource(folder)
    return None


def _check_step_is_none(step: int | None, path: str | os.PathLike[str]) -> None:
    if step is not None:
        raise CheckpointError(
            f"{path}: there is no step {step}",
            why="checkpoints of this format have no steps",
            fix="leave step out",
        )


def _validate_step_of_folder(step: int | None, folder_step: int, path: str | os.PathLike[str]) -> int:
    if step not in (None, folder_step):
        raise CheckpointError(
            f"{path}: this is step {folder_step}, not {step}",
            why="the path is the folder of a single step",
            fix="leave step out, or name the parent directory of this folder",
        )
    return folder_step


def _make_pickle_error(where: str, why: str) -> CheckpointError:
    return CheckpointError(
        f"{where}: pickles are refused",
        why=f"{why}; a checkpoint is data, never code",
        fix=f"convert each file of torch.save, which runs none of its code: layoutmap checkpoint convert {where} NEW",
    )
