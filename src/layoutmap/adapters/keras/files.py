"""Values in Keras's weight files, read from the disk only where they are wanted.

A store of Keras's returns global arrays: of a sharded weight, each would be in the host's memory at once. This one
hands out arrays that are still in the file, and of which a block can be read. Whatever else is done with one reads it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np

from layoutmap.adapters.keras.private import dataset_of


class FileArray(np.lib.mixins.NDArrayOperatorsMixin):
    """An array in a file, while the file is open; in memory from then on, if somebody keeps it."""

    def __init__(self, dataset: Any, dtype: np.dtype[Any]):
        self._source = dataset
        self.shape: tuple[int, ...] = tuple(dataset.shape)
        self.dtype = dtype
        self.where = (
            f"{dataset.file.filename}:{dataset.name}" if isinstance(dataset.file.filename, str) else ""
        )

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)

    def __getitem__(self, index: Any) -> Any:
        return np.asarray(self._source[index]).view(self.dtype)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        self.keep()
        return self._source if dtype is None else self._source.astype(dtype)

    def __array_ufunc__(self, ufunc: object, method: str, *inputs: object, **kwargs: object) -> object:
        return getattr(ufunc, method)(*map(_in_memory, inputs), **kwargs)

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
        if name.startswith("_"):  # nor is it an array of this or that framework
            raise AttributeError(name)
        return getattr(np.asarray(self), name)

    def keep(self) -> None:
        """Read all of it, once."""
        if not isinstance(self._source, np.ndarray):
            self._source = self[()]


class FileStore:
    """A store of Keras's that hands out arrays which are still in the file."""

    def __init__(self, store: object):
        self._store = store
        self._given: list[weakref.ref[FileArray]] = []
        self._opened: dict[str, Any] = {}

    def __getitem__(self, key: str) -> object:
        dataset = dataset_of(self._store, key, self._opened)
        dtype = None if dataset is None else _dtype_of(dataset)
        if dtype is None:
            return self._plain[key]
        array = FileArray(dataset, dtype)
        self._given.append(weakref.ref(array))
        return array

    def __contains__(self, key: str) -> bool:
        return key in self._plain

    def __len__(self) -> int:
        return len(self._plain)

    def keys(self) -> Any:
        """The names of the arrays."""
        return self._plain.keys()

    @property
    def _plain(self) -> Any:
        """The store, which may now close one file to open another."""
        self.keep()
        return self._store

    def keep(self) -> None:
        """Read what somebody still holds, before the file is closed."""
        for given in self._given:
            array = given()
            if array is not None:
                array.keep()
        self._given.clear()

    def close(self) -> None:
        """Read what somebody still holds, and close what was opened here."""
        self.keep()
        while self._opened:
            self._opened.popitem()[1].close()


def _dtype_of(dataset: Any) -> np.dtype[Any] | None:
    """The type of a dataset's elements; `None` if they are no numbers."""
    if dataset.attrs.get("dtype") == "bfloat16":  # as Keras marks them
        return np.dtype(ml_dtypes.bfloat16)
    return dataset.dtype if dataset.dtype.kind in "biufc" else None


def _in_memory(value: object) -> object:
    return np.asarray(value) if isinstance(value, FileArray) else value
