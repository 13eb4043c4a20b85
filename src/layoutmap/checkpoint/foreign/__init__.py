"""Open files of other libraries as sources, which read only the bytes that a requested block needs.

None of these formats has checksums that cover its values: a file that is too short or contradicts itself is refused,
and a changed value cannot be seen. Nothing of a file is ever run.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from layoutmap.checkpoint.foreign.dcp import METADATA, DistributedCheckpoint
from layoutmap.checkpoint.foreign.keras_weights import KerasWeights
from layoutmap.checkpoint.foreign.orbax import Orbax, is_orbax
from layoutmap.checkpoint.foreign.safetensors import INDEX, Safetensors
from layoutmap.checkpoint.gate import check_regular, translate_parser_errors
from layoutmap.checkpoint.manifest import NAME
from layoutmap.checkpoint.reader import StepSource
from layoutmap.checkpoint.remote import open_storage
from layoutmap.checkpoint.source import Source, check_variables
from layoutmap.checkpoint.storage import LocalStorage
from layoutmap.core.errors import CheckpointError, join_names

_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".joblib")
_KNOWN = (
    "a directory that layoutmap.save wrote to, *.safetensors (a file, several, or with an index), *.weights.h5, "
    "*.keras, a directory of orbax or of torch.distributed.checkpoint"
)


WRITERS = {"safetensors": "layoutmap.checkpoint.foreign.safetensors_export"}
"""The formats of `export` by name, each with the module whose `write_variables` writes it."""


def load_writer(name: str) -> Callable[..., None]:
    """Return the function that writes variables in a format. See `safetensors_export.write_variables`.

    Raises:
        CheckpointError: There is no such format.
    """
    if name not in WRITERS:
        raise CheckpointError(
            f"format={name!r}: this is no format of export",
            why=f"the formats are {', '.join(WRITERS)}",
            fix="use one of them",
        )
    return import_module(WRITERS[name]).write_variables


# Files may be malicious, so formats are read without their frameworks and pickles are refused (decisions/0085).
def open_source(path: str | os.PathLike[str], step: int | None = None) -> Source:
    """Open a checkpoint of this library or of another one.

    Args:
        path: A directory that was saved to, which may be the URL of an object store; the folder of one of its steps, a
            file `*.safetensors` or its index, a folder with such files, a file `*.weights.h5` or `*.keras`, or a
            directory of orbax or of `torch.distributed.checkpoint`.
        step: The step, where there are several; `None`: the last one.

    Returns:
        The source. Of a checkpoint of this library it is the `StepSource`.

    Raises:
        CheckpointError: There is no checkpoint, it is damaged, or it is of a kind that is not read, such as a pickle.
    """
    with translate_parser_errors(os.fspath(path)):
        found = _find_source(path, step)
        check_variables(found.where, found.variables.values())
    return found


def _find_source(path: str | os.PathLike[str], step: int | None) -> Source:
    storage = open_storage(path)
    if not isinstance(storage, LocalStorage):
        return StepSource(storage, step)
    where = Path(path)
    name = where.name
    if where.exists() and not where.is_dir():
        check_regular(os.fspath(path), where.stat())
    if where.is_dir():
        if (where / NAME).is_file() and name.startswith("step-") and name[5:].isdigit():
            return StepSource(LocalStorage(where.parent), _check_only_step(step, int(name[5:]), path))
        if LocalStorage(where).steps():
            return StepSource(LocalStorage(where), step)
        found = _open_folder(where, step)
        if found is not None:
            return found
        pickles = [each.name for each in sorted(where.iterdir()) if each.name.endswith(_PICKLES)]
        if pickles:
            raise _make_pickle_error(os.fspath(path), f"it has {join_names(pickles)}, and no other weights")
    elif name.endswith((".safetensors", INDEX)):
        _refuse_step(step, path)
        return Safetensors(where)
    elif name.endswith((".weights.h5", ".weights.json", ".keras")):
        _refuse_step(step, path)
        return KerasWeights(where)
    elif name.endswith(_PICKLES):
        raise _make_pickle_error(
            os.fspath(path), "a file of that name is a pickle, which can run any code when it is read"
        )
    elif where.is_file():
        raise CheckpointError(
            f"{path}: not a known kind of checkpoint",
            why=f"what is read is {_KNOWN}",
            fix="convert it to safetensors with the library that wrote it",
        )
    return StepSource(storage, step)


def _open_folder(folder: Path, step: int | None) -> Source | None:
    if any(folder.glob("*.safetensors")) or any(folder.glob("*" + INDEX)):
        _refuse_step(step, folder)
        return Safetensors(folder)
    if is_orbax(folder):
        return Orbax(folder, step)
    if (folder / METADATA).is_file():
        _refuse_step(step, folder)
        return DistributedCheckpoint(folder)
    return None


def _refuse_step(step: int | None, path: str | os.PathLike[str]) -> None:
    if step is not None:
        raise CheckpointError(
            f"{path}: there is no step {step}",
            why="checkpoints of this kind have no steps",
            fix="leave step out",
        )


def _check_only_step(step: int | None, there: int, path: str | os.PathLike[str]) -> int:
    if step not in (None, there):
        raise CheckpointError(
            f"{path}: this is step {there}, not {step}",
            why="it is the folder of one step",
            fix="leave step out, or name the directory above it",
        )
    return there


def _make_pickle_error(where: str, why: str) -> CheckpointError:
    return CheckpointError(
        f"{where}: pickles are not read",
        why=f"{why}; a checkpoint is data, never code",
        fix=f"convert it, which runs nothing: layoutmap checkpoint convert {where} NEW, for each such file",
    )
