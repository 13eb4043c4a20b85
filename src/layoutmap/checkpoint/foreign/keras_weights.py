"""Read weight files of Keras 3: `*.weights.h5`, also in `*.keras`, and `*.weights.json` with its shards.

Paths of variables are their places in the file, as in `layers.dense.vars.0`, because it lacks their names. Variables
below `optimizer` are slots. HDF5 has no bfloat16, so Keras marks such values. Links to other files are refused.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np

from layoutmap.checkpoint.dtypes import get_numpy_dtype
from layoutmap.checkpoint.foreign.archives import FileWindow, find_files_in_archive
from layoutmap.checkpoint.foreign.ranges import ByteRangeFile
from layoutmap.checkpoint.source import SavedVariable, Source, import_format_package
from layoutmap.core.blocks import Index, NumpyArray
from layoutmap.core.errors import CheckpointError
from layoutmap.core.variables import Kind

_WEIGHTS = "model.weights.h5"
_MAX_DEPTH = 64


class KerasWeightsSource(Source):
    """Read the weights of a Keras weight file.

    Args:
        path: A file `*.weights.h5`, a file `*.keras` that contains one, or the index `*.weights.json` of several.

    Attributes:
        where: The file.
        variables: The variables by path.

    Raises:
        CheckpointError: The file cannot be read or has links, or the package h5py is missing.
    """

    def __init__(self, path: str | os.PathLike[str]):
        super().__init__(os.fspath(path), {})
        self._datasets: dict[str, Any] = {}
        h5py = import_format_package("weight files of Keras", "h5py", "they are files of HDF5")
        for file in _list_weight_files(Path(path)):
            try:
                window = ByteRangeFile(file)
                root = h5py.File(_find_weights_in_archive(window) if file.suffix == ".keras" else file, "r")
                for name, dataset in _iterate_hdf5_datasets(h5py, str(file), root, "", set()):
                    self._add_dataset(str(file), name, dataset, window.num_bytes)
            except (OSError, KeyError, RuntimeError) as error:
                raise _make_keras_error(str(file), "the file cannot be read", str(error)) from error

    def _read_block(self, variable: SavedVariable, index: Index) -> NumpyArray:
        path = variable.path
        try:
            found = np.asarray(self._datasets[path][index])
        except (OSError, RuntimeError) as error:
            raise _make_keras_error(self.where, f"{path}: its values cannot be read", str(error)) from error
        # The view below would read big-endian bytes as little-endian, so convert the byte order first.
        return found.astype(found.dtype.newbyteorder("="), copy=False).view(
            get_numpy_dtype(variable.dtype, path)
        )

    def _add_dataset(self, file: str, name: str, dataset: Any, file_bytes: int) -> None:
        path = name.strip("/").replace("/", ".")
        if path in self.variables:
            raise _make_keras_error(
                file, f"{path}: it appears twice", "another file of the same weights contains it, too"
            )
        if dataset.external is not None or dataset.is_virtual:
            raise _make_keras_error(
                file,
                f"{path}: its values are in another file",
                "Keras stores all values in the weight file itself",
            )
        if dataset.id.get_storage_size() < dataset.nbytes or dataset.nbytes > file_bytes:
            raise _make_keras_error(
                file, f"{path}: its values are missing or compressed", "Keras writes values uncompressed"
            )
        marked = dataset.attrs.get("dtype")
        if marked != "bfloat16" and dataset.dtype.kind not in "biufc":
            return  # skip text, such as the vocabulary of a StringLookup layer
        dtype = "bfloat16" if marked == "bfloat16" else dataset.dtype.name
        kind = Kind.SLOT if path.startswith("optimizer.") else Kind.WEIGHT
        self.variables[path] = SavedVariable(path, tuple(map(int, dataset.shape)), dtype, kind)
        self._datasets[path] = dataset

    def __repr__(self) -> str:
        return f"<KerasWeightsSource {self.where}: {len(self.variables)} variables, no checksums>"


def _iterate_hdf5_datasets(
    h5py: Any, file: str, group: Any, prefix: str, seen_addresses: set[Any]
) -> Iterator[tuple[str, Any]]:
    """Yield the path and dataset of each dataset below a group. Raise for links and for two paths of an object."""
    for name in group:
        path = f"{prefix}/{name}"
        if not isinstance(group.get(name, getlink=True), h5py.HardLink):
            raise _make_keras_error(file, f"{path}: it is a link", "Keras writes no links")
        found = group[name]
        address = h5py.h5o.get_info(found.id).addr
        # Two hard links to each of 40 nested groups would give 2^40 paths, so each object is read once.
        if address in seen_addresses or path.count("/") > _MAX_DEPTH:
            raise _make_keras_error(
                file, f"{path[:200]}: it has two paths or too many levels", "Keras writes no such objects"
            )
        seen_addresses.add(address)
        if isinstance(found, h5py.Group):
            yield from _iterate_hdf5_datasets(h5py, file, found, path, seen_addresses)
        else:
            yield path, found


def _find_weights_in_archive(file: ByteRangeFile) -> FileWindow:
    """Return the weight file inside a `.keras` archive."""
    path = file.path
    files = find_files_in_archive(FileWindow(file, 0, file.num_bytes), path, "save it again with model.save")
    if _WEIGHTS not in files:
        raise _make_keras_error(
            path, "it has no weights", f"Keras stores the weights of a model in {_WEIGHTS}"
        )
    return files[_WEIGHTS]


def _list_weight_files(path: Path) -> list[Path]:
    if path.suffix != ".json":
        return [path]
    try:
        files_by_tensor = cast(
            "dict[str, Any]", json.loads(ByteRangeFile(path).read_whole())["weight_map"]
        ).values()
        names = [name for files in files_by_tensor for name in ([files] if isinstance(files, str) else files)]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _make_keras_error(
            str(path), "the index cannot be read", f"{type(error).__name__}: {error}"
        ) from error
    files = [path.parent / name for name in dict.fromkeys(names)]
    for file in files:
        if file.parent != path.parent or not file.is_file():
            raise _make_keras_error(
                str(file), "the file is missing", f"{path} lists it, but the file is not in the same folder"
            )
    return files


def _make_keras_error(where: str, what: str, why: str) -> CheckpointError:
    return CheckpointError(
        f"{where}: {what}", why=why, fix="restore it from a copy, or save it again with model.save_weights"
    )
