"""Read pickles of torch and `torch.distributed.checkpoint` without torch and without running code.

Lists below have what torch writes of tensors and the classes that DCP writes. Each of them is an inert record here. A
pickle that names anything else is refused.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from layoutmap.core.errors import CheckpointError, shorten_repr

_MOST_AXES = 64
_MAX_TUPLE_ELEMENTS = 10_000  # limit for the elements of a tuple, with those of nested tuples
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
    """Hold the attributes of a pickled DCP object, without its methods."""

    def __setstate__(self, state: Any) -> None:
        if type(self).__name__ == "TensorProperties" and isinstance(state, tuple):
            state = {"dtype": cast("tuple[Any, ...]", state)[0]}
        self.__dict__.update(state)

    def __hash__(self) -> int:
        return id(self)


@dataclass(frozen=True, slots=True)
class DtypeRecord:
    """A torch dtype by name. An empty name stands for untyped bytes."""

    name: str


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """A pickled tensor: its storage, offset, shape, strides, and its dtype if it differs from the storage's."""

    storage: tuple[Any, ...]
    start: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str | None


class _SafeFunction:
    """Wrap a function that a pickle may call but must not modify."""

    __slots__ = ("_make",)

    def __init__(self, make: Callable[..., object]):
        self._make = make

    def __call__(self, *values: object) -> object:
        return self._make(*values)

    def __setstate__(self, state: object) -> None:
        raise ValueError("a pickle changes a function")


# torch's own readers can run code or allocate without limit, so pickles become inert records here (decisions/0182).
class TensorUnpickler(pickle.Unpickler):
    """Unpickle tensors to inert records, and allow only mappings, lists, numbers, and text besides."""

    writer = "torch.save writes of tensors"

    def __init__(self, where: str, data: bytes):
        super().__init__(io.BytesIO(data))
        self._where = where

    def find_class(self, module: str, name: str, /) -> Any:
        """Replace a class or function by an inert record or a safe function, or raise."""
        known: dict[tuple[str, str], Any] = {
            ("torch", "Size"): _make_size,
            ("torch._utils", "_rebuild_tensor_v2"): _make_tensor,
            (
                "torch._utils",
                "_rebuild_tensor_v3",
            ): _make_tensor,  # torch uses this for dtypes without a storage class
            ("torch._utils", "_rebuild_parameter"): _return_first,
            ("collections", "OrderedDict"): _make_ordered_dict,
            ("collections", "Counter"): _return_first,
        }
        if (module, name) in known:
            return _SafeFunction(known[module, name])
        if module == "torch" and name in _DTYPES:
            return DtypeRecord(name)
        if module in ("torch", "torch.storage") and (name in _STORAGES or name == "UntypedStorage"):
            return DtypeRecord(_STORAGES.get(name, ""))
        raise make_dcp_error(
            self._where,
            f"its pickle names {module}.{name}",
            f"unpickling a name can run code, and this is not a name that {self.writer}",
            fix="load it on a machine where you trust it, and save it as safetensors",
        )

    def persistent_load(self, pid: Any, /) -> Any:
        """Return the record of a tensor's storage."""
        kind, storage, key, *_ = pid
        if kind != "storage" or not isinstance(storage, DtypeRecord) or not isinstance(key, str):
            raise make_dcp_error(
                self._where, "its pickle has no torch storage", f"it has {shorten_repr(pid)}"
            )
        return kind, storage.name or None, key


class _Unpickler(TensorUnpickler):
    """Unpickle the classes that DCP writes to inert records, too."""

    writer = "DCP writes"

    def find_class(self, module: str, name: str, /) -> object:
        if (module, name) in _RECORDS:
            return type(name, (_Record,), {})
        if (module, name) in _IGNORED:
            return _SafeFunction(_return_none)
        return set if (module, name) == ("builtins", "set") else super().find_class(module, name)


def _make_ordered_dict() -> OrderedDict[object, object]:
    return OrderedDict()


def _return_none(*_: object) -> None:
    return None


def _make_size(values: Sequence[object] = ()) -> tuple[object, ...]:
    return as_sizes(values)


def _return_first(value: object, *_: object) -> object:
    return value


def _make_tensor(storage: Any, start: Any, shape: Any, strides: Any, *rest: Any) -> TensorRecord:
    if any(isinstance(each, dict) and each != {} for each in rest):
        raise ValueError("a tensor is a conjugate or negated view")
    dtype = next((each.name for each in rest if isinstance(each, DtypeRecord)), storage[1])
    return TensorRecord(tuple(storage), as_sizes((start,))[0], as_sizes(shape), as_sizes(strides), dtype)


def read_pickle(where: str, data: bytes, kind: type[TensorUnpickler] = _Unpickler) -> object:
    """Unpickle data to inert records. Errors name the file `where`."""
    try:
        _check_memo(data)
        _check_tuples(data)
        return kind(where, data).load()
    except CheckpointError:
        raise
    except Exception as error:  # pickle raises undocumented errors for damaged data
        raise make_dcp_error(
            where, "its pickle cannot be read", f"{type(error).__name__}: {error}"
        ) from error


def _check_memo(data: bytes) -> None:
    """Raise a `ValueError` if a pickle makes Python allocate more memo entries than it has bytes."""
    for opcode, number, _ in pickletools.genops(data):
        if opcode.name in ("PUT", "BINPUT", "LONG_BINPUT") and not 0 <= cast("int", number) <= len(data):
            raise ValueError(f"object {number} of {len(data)} bytes")


def _check_tuples(data: bytes) -> None:
    """Raise a `ValueError` if a tuple is so large that Python would hash it for minutes."""
    stack: list[int] = []  # sizes of the values on the unpickler's stack
    marks: list[int] = []
    memo: dict[int, int] = {}
    for opcode, number, _ in pickletools.genops(data):
        name, before = opcode.name, opcode.stack_before
        if name == "MARK":
            marks.append(len(stack))
        elif name in ("PUT", "BINPUT", "LONG_BINPUT"):
            memo[cast("int", number)] = stack[-1]
        elif name == "MEMOIZE":
            memo[len(memo)] = stack[-1]
        elif name in ("GET", "BINGET", "LONG_BINGET"):
            stack.append(memo[cast("int", number)])
        elif name == "DUP":
            stack.append(stack[-1])
        elif name == "POP" and marks and marks[-1] == len(stack):
            marks.pop()
        else:
            if pickletools.markobject in before:
                kept = marks.pop() - before.index(pickletools.markobject)
            else:
                kept = len(stack) - len(before)
            parts = stack[kept:]
            del stack[kept:]
            size = 1 + sum(parts) if name.startswith("TUPLE") or name == "FROZENSET" else 1
            if size > _MAX_TUPLE_ELEMENTS:
                raise ValueError(f"a tuple of {shorten_repr(size)} elements")
            stack += [size] * len(opcode.stack_after)


def as_sizes(values: Sequence[Any]) -> tuple[int, ...]:
    """Convert non-negative whole numbers to a tuple, or raise a `ValueError` for other values."""
    found = tuple(values)
    if len(found) > _MOST_AXES or not all(type(n) is int and n >= 0 for n in found):
        raise ValueError(f"{shorten_repr(found)} are not sizes")
    return found


def make_dcp_error(
    where: str, what: str, why: str, *, fix: str = "restore it from a copy, or save it again with torch"
) -> CheckpointError:
    """Return the error for a damaged DCP directory."""
    return CheckpointError(f"{where}: {what}", why=why, fix=fix)
