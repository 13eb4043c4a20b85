"""Read orbax directories: their metadata, and ranges of their zarr arrays through tensorstore.

The module reads the arrays and numbers that `StandardCheckpointer`, `PyTreeCheckpointer` and `CheckpointManager` write,
either into one database (OCDBT) or into a folder for each array. Other items of a step, such as JSON, are skipped.
Neither orbax nor JAX is needed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from layoutmap.checkpoint.foreign.ranges import ByteRangeFile
from layoutmap.checkpoint.gate import check_name_inside_folder, check_regular_file, check_size_limit
from layoutmap.checkpoint.source import SavedVariable, Source, check_variable_limits, import_format_package
from layoutmap.core.blocks import Index, NumpyArray
from layoutmap.core.errors import CheckpointError, join_names

METADATA = "_METADATA"
_STEP_METADATA = "_CHECKPOINT_METADATA"
_METADATA_FILES = {".zarray", ".zattrs", "zarr.json"}
_MAX_COMPRESSION = 1 << 16  # limit for array bytes per file byte; zstd reaches 1 << 15 for zeros


class OrbaxCheckpointSource(Source):
    """Read the arrays of an orbax directory.

    Paths are the keys of the saved tree, joined by dots, without a last key `value`: `d1.kernel.value` of an
    `nnx.State` has the path `d1.kernel`. If a step has several items, each path begins with the name of its item.

    Args:
        path: The directory of one checkpoint, of one step, or of several steps.
        step: The step; `None`: the last one.

    Attributes:
        where: The directory of the step.
        variables: The arrays by path.

    Raises:
        CheckpointError: There is no such checkpoint, it cannot be read, or the package tensorstore is missing.
    """

    def __init__(self, path: str | os.PathLike[str], step: int | None = None):
        folder = _choose_step_folder(Path(path), step)
        super().__init__(str(folder), {})
        self._stores: dict[str, Any] = {}
        items = [folder] if (folder / METADATA).is_file() else _list_item_folders(folder)
        if not items:
            raise CheckpointError(
                f"{folder}: this orbax checkpoint has no arrays",
                why=f"there is no file {METADATA} in the directory or in a subfolder",
                fix="name the directory of the checkpoint, and check that its save was complete",
            )
        for item in items:
            self._add_arrays_of_item(item, "" if len(items) == 1 else f"{item.name}.")

    def _read_block(self, variable: SavedVariable, index: Index) -> NumpyArray:
        try:
            found: Any = self._stores[variable.path][index].read().result()
        except (ValueError, OSError, RuntimeError) as error:
            raise _make_array_read_error(self.where, variable.path, error) from error
        return np.array(found)

    def _add_arrays_of_item(self, item: Path, prefix: str) -> None:
        file = item / METADATA
        num_bytes = _sum_file_sizes(item)
        try:
            found = json.loads(ByteRangeFile(file).read_whole())
            leaves = [
                (tuple(str(key["key"]) for key in leaf["key_metadata"]), leaf["value_metadata"])
                for leaf in found["tree_metadata"].values()
            ]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(
                f"{file}: the metadata cannot be read",
                why=f"{type(error).__name__}: {error}",
                fix="restore it from a copy, or load another step",
            ) from error
        for keys, value in leaves:
            if value.get("skip_deserialize"):  # skip None and empty dicts, which store no array
                continue
            name = ".".join(keys)
            path = prefix + ".".join(keys[:-1] if keys[-1:] == ("value",) and len(keys) > 1 else keys)
            if path in self.variables:
                raise CheckpointError(
                    f"{path}: two arrays have this path",
                    facts={"file": str(file)},
                    why="keys with dots give two arrays the same path",
                    fix="rename one of the keys, and save again",
                )
            check_name_inside_folder(str(file), name)
            store = self._open_array(item, path, name, found)
            shape = tuple(map(int, store.shape))
            self.variables[path] = SavedVariable(path, shape, store.dtype.numpy_dtype.name)
            self._stores[path] = store
        check_variable_limits(str(item), self.variables.values(), num_bytes * _MAX_COMPRESSION)

    def _open_array(self, item: Path, path: str, name: str, metadata: Mapping[str, Any]) -> Any:
        base: dict[str, Any] = {"driver": "file", "path": f"{item}/"}
        if metadata.get("use_ocdbt"):
            base = {"driver": "ocdbt", "base": base, "path": f"{name}/"}
        else:
            base["path"] = f"{item / name}/"
        spec: dict[str, Any] = {"driver": "zarr3" if metadata.get("use_zarr3") else "zarr", "kvstore": base}
        # orbax writes every chunk, so a missing chunk must raise. By default, tensorstore would read zeros.
        spec["fill_missing_data_reads"] = False
        tensorstore = import_format_package(
            "checkpoints of orbax", "tensorstore", "their arrays are in its formats"
        )
        try:
            return tensorstore.open(spec, open=True, read=True).result()
        except (ValueError, OSError, RuntimeError) as error:
            raise _make_array_read_error(str(item), path, error) from error

    def __repr__(self) -> str:
        return f"<Orbax {self.where}: {len(self.variables)} arrays, no checksums>"


def _sum_file_sizes(item: Path) -> int:
    """Return the total size of a checkpoint's files, and raise if one is not a regular file.

    Raises:
        CheckpointError: A file is not a regular file. tensorstore would wait forever for a pipe.
    """
    total = 0
    for folder, _, names in os.walk(item):
        for path in (os.path.join(folder, name) for name in names):
            try:
                found = os.stat(path)
            except OSError as error:
                raise _make_array_read_error(str(item), path, error) from error
            check_regular_file(path, found)
            if os.path.basename(path) in _METADATA_FILES:
                check_size_limit(path, found.st_size)
            total += found.st_size
    return total


def is_orbax_folder(folder: Path) -> bool:
    """Return whether a folder is an orbax checkpoint, a step of a checkpoint, or a folder of steps."""
    return (
        (folder / METADATA).is_file()
        or (folder / _STEP_METADATA).is_file()
        or bool(_get_step_folders(folder))
    )


def _get_step_folders(folder: Path) -> dict[int, Path]:
    """Return a dict from step number to folder. Before the number, the folder's name may have a prefix and zeros."""
    found = {
        each: each.name.rpartition("_")[2] for each in folder.iterdir() if (each / _STEP_METADATA).is_file()
    }
    return {int(number): each for each, number in found.items() if number.isdecimal()}


def _choose_step_folder(path: Path, step: int | None) -> Path:
    steps = (
        {} if (path / METADATA).is_file() or (path / _STEP_METADATA).is_file() else _get_step_folders(path)
    )
    if not steps and step is None:
        return path
    if step is not None and step not in steps:
        raise CheckpointError(
            f"{path}: there is no step {step}",
            facts={"steps": join_names([str(each) for each in sorted(steps)]) or "none"},
            why="an orbax step is a folder named by its number",
            fix="load one of these steps" if steps else "leave step out",
        )
    return steps[max(steps) if step is None else step]


def _list_item_folders(folder: Path) -> list[Path]:
    return sorted(each.parent for each in folder.glob(f"*/{METADATA}"))


def _make_array_read_error(where: str, path: str, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"{path}: its values cannot be read",
        facts={"checkpoint": where},
        why=f"tensorstore says: {str(error).splitlines()[0][:300]}",
        fix="restore the files from a copy, or load another step",
    )
