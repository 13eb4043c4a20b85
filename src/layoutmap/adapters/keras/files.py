"""Read arrays in Keras's weight files from disk only when needed.

A store of Keras returns whole arrays, which would fill host memory. The store of this module returns arrays that are
still in the file, and of which single blocks can be read. Any other use reads the array.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np

from layoutmap.adapters.keras.private import find_h5_dataset


class FileArray(np.lib.mixins.NDArrayOperatorsMixin):
    """An array in an open file. It is read before the file closes if it is still referenced."""

    def __init__(self, dataset: Any, dtype: np.dtype[Any]):
        self._source = dataset
        self.shape: tuple[int, ...] = tuple(dataset.shape)
        self.dtype = dtype
        self.where = (
            f"{dataset.file.filename}:{dataset.name}" if isinstance(dataset.file.filename, str) else ""
        )

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    def __getitem__(self, index: Any) -> Any:
        return np.asarray(self._source[index]).view(self.dtype)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        self.load_values()
        return self._source if dtype is None else self._source.astype(dtype)

    def __array_ufunc__(self, ufunc: object, method: str, *inputs: object, **kwargs: object) -> object:
        return getattr(ufunc, method)(*map(_convert_file_array, inputs), **kwargs)

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Iterator[object]:
        return iter(np.asarray(self))

    def __int__(self) -> int:
        return int(np.asarray(self))

    def __float__(self) -> float:
        return float(np.asarray(self))

    def __bool__(self) -> bool:
        return bool(np.asarray(self))

    def __getattr__(self, name: str) -> object:
        if name.startswith("_"):  # numpy and copy probe private names, which must not read the file
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(np.asarray(self), name)

    def load_values(self) -> None:
        """Read the whole array into memory once."""
        if not isinstance(self._source, np.ndarray):
            self._source = self[()]


class FileStore:
    """A Keras store that reads arrays from the file on demand."""

    def __init__(self, store: object):
        self._store = store
        self._given: list[weakref.ref[FileArray]] = []
        self._opened: dict[str, Any] = {}

    def __getitem__(self, key: str) -> object:
        dataset = find_h5_dataset(self._store, key, self._opened)
        dtype = None if dataset is None else _read_dataset_dtype(dataset)
        if dtype is None:
            return self._store_after_loading_arrays[key]
        array = FileArray(dataset, dtype)
        self._given.append(weakref.ref(array))
        return array

    def __contains__(self, key: str) -> bool:
        return key in self._store_after_loading_arrays

    def __len__(self) -> int:
        return len(self._store_after_loading_arrays)

    def keys(self) -> Any:
        """Return the names of the arrays."""
        return self._store_after_loading_arrays.keys()

    @property
    def _store_after_loading_arrays(self) -> Any:
        """Keras's own store. It may close its file, so arrays that are still referenced are read first."""
        self.load_referenced_arrays()
        return self._store

    def load_referenced_arrays(self) -> None:
        """Read the arrays that are still referenced, before the file is closed."""
        for given in self._given:
            array = given()
            if array is not None:
                array.load_values()
        self._given.clear()

    def close(self) -> None:
        """Read the arrays that are still referenced, and close the files opened here."""
        self.load_referenced_arrays()
        while self._opened:
            self._opened.popitem()[1].close()


def _read_dataset_dtype(dataset: Any) -> np.dtype[Any] | None:
    """Return the dtype of a dataset's elements, or None if they are not numbers."""
    if dataset.attrs.get("dtype") == "bfloat16":  # HDF5 has no bfloat16, so Keras stores its name
        return np.dtype(ml_dtypes.bfloat16)
    return dataset.dtype if dataset.dtype.kind in "biufc" else None


def _convert_file_array(value: object) -> object:
    """Return a `FileArray` as a numpy array, and any other value unchanged."""
    return np.asarray(value) if isinstance(value, FileArray) else value
