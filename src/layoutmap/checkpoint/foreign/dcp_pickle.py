"""The pickles of `torch.distributed.checkpoint`, read without torch and without running anything.

A list below has the classes that DCP writes, and each of them is an inert record here. A pickle that names anything
else is refused.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from layoutmap.core.errors import CheckpointError, brief

_STORAGES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
}
_DTYPES = {
    *_STORAGES.values(),
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
    "uint16",
    "uint32",
    "uint64",
}
_RECORDS = {
    ("torch.distributed.checkpoint.metadata", name)
    for name in (
        "Metadata",
        "TensorStorageMetadata",
        "TensorProperties",
        "ChunkStorageMetadata",
        "BytesStorageMetadata",
        "MetadataIndex",
        "StorageMeta",
    )
} | {("torch.distributed.checkpoint.filesystem", "_StorageInfo")}
_IGNORED = {
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"),
    ("pathlib", "WindowsPath"),
    ("pathlib._local", "PosixPath"),
    ("pathlib._local", "WindowsPath"),
    ("torch.distributed.checkpoint._extension", "ZStandard"),
}


class _Record:
    """The attributes of an object of DCP, and nothing that it does."""

    def __setstate__(self, state: Any) -> None:
        if type(self).__name__ == "TensorProperties" and isinstance(state, tuple):
            state = {"dtype": cast("tuple[Any, ...]", state)[0]}
        self.__dict__.update(state)

    def __hash__(self) -> int:
        return id(self)


@dataclass(frozen=True, slots=True)
class Dtype:
    """An element type of torch; `""`: bytes."""

    name: str


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of a pickle: its storage, and which elements of it are its own."""

    storage: tuple[Any, ...]
    start: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class _Unpickler(pickle.Unpickler):
    """Makes inert records of the classes that DCP writes, and refuses all else."""

    def __init__(self, where: str, data: bytes):
        super().__init__(io.BytesIO(data))
        self._where = where

    def find_class(self, module: str, name: str, /) -> Any:
        if (module, name) in _RECORDS:
            return type(name, (_Record,), {})
        if (module, name) in _IGNORED:
            return _nothing
        known: dict[tuple[str, str], Any] = {
            ("torch", "Size"): _size,
            ("torch._utils", "_rebuild_tensor_v2"): _tensor,
            ("torch._utils", "_rebuild_tensor_v3"): _tensor,  # of element types that have no class of storage
            ("torch._utils", "_rebuild_parameter"): _first,
            ("collections", "OrderedDict"): OrderedDict,
            ("builtins", "set"): set,
        }
        if (module, name) in known:
            return known[module, name]
        if module == "torch" and name in _DTYPES:
            return Dtype(name)
        if module in ("torch", "torch.storage") and (name in _STORAGES or name == "UntypedStorage"):
            return Dtype(_STORAGES.get(name, ""))
        raise wrong(
            self._where,
            f"its pickle names {module}.{name}",
            "a pickle can run what it names; a checkpoint is data, never code, and this is none of what DCP writes",
            fix="load it where you trust it, and save it as safetensors",
        )

    def persistent_load(self, pid: Any, /) -> Any:
        kind, storage, key, *_ = pid
        if kind != "storage" or not isinstance(storage, Dtype) or not isinstance(key, str):
            raise wrong(self._where, "its pickle has no plain storage", f"it has {brief(pid)}")
        return kind, storage.name or None, key


def _nothing(*_: Any) -> None:
    return None


def _size(values: Sequence[Any] = ()) -> tuple[Any, ...]:
    return tuple(values)


def _first(value: Any, *_: Any) -> Any:
    return value


def _tensor(storage: Any, start: Any, shape: Any, strides: Any, *_: Any) -> Tensor:
    return Tensor(tuple(storage), as_sizes((start,))[0], as_sizes(shape), as_sizes(strides))


def unpickled(where: str, data: bytes) -> Any:
    """The content of a pickle, in inert records; `where` is its file, for messages."""
    try:
        return _Unpickler(where, data).load()
    except CheckpointError:
        raise
    except Exception as error:  # what a pickle that is no pickle raises is not said anywhere
        raise wrong(where, "its pickle cannot be read", f"{type(error).__name__}: {error}") from error


def as_sizes(values: Sequence[Any]) -> tuple[int, ...]:
    """Whole numbers from 0 on; raises a `ValueError` for others."""
    found = tuple(values)
    if not all(type(n) is int and n >= 0 for n in found):
        raise ValueError(f"{brief(found)} are no sizes")
    return found


def wrong(
    where: str, what: str, why: str, *, fix: str = "restore it from a copy, or save it again with torch"
) -> CheckpointError:
    """The error of a directory of DCP."""
    return CheckpointError(f"{where}: {what}", why=why, fix=fix)
