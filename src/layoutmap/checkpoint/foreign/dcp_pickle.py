"""Read pickles of torch and `torch.distributed.checkpoint` (DCP) without torch and without running code.

The constants of this module list the names that torch writes for tensors and the classes that DCP writes. Unpickling
makes an inert record of each. A pickle with any other name is refused.
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

_MAX_AXES = 64
_MAX_TUPLE_ELEMENTS = 10_000  # limit for the elements of a tuple, including those of nested tuples
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


class _PickledDcpObject:
    """A pickled object of DCP, unpickled to its attributes without its methods."""

    def __setstate__(self, state: Any) -> None:
        if type(self).__name__ == "TensorProperties" and isinstance(state, tuple):
            state = {"dtype": cast("tuple[Any, ...]", state)[0]}
        self.__dict__.update(state)

    def __hash__(self) -> int:
        return id(self)


@dataclass(frozen=True, slots=True)
class PickledDtype:
    """A torch dtype or storage class in a pickle. `name` is the dtype's name, or empty for untyped bytes."""

    name: str


@dataclass(frozen=True, slots=True)
class PickledTensor:
    """A pickled tensor without its values, which begin `start` elements after the beginning of `storage`."""

    storage: tuple[Any, ...]
    start: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str | None


class _AllowedFunction:
    """Wrap a function that a pickle may call, so that the pickle cannot set attributes of the function."""

    __slots__ = ("_function",)

    def __init__(self, function: Callable[..., object]):
        self._function = function

    def __call__(self, *values: object) -> object:
        return self._function(*values)

    def __setstate__(self, state: object) -> None:
        raise ValueError("a pickle must not set attributes of a function")


# torch's own readers can run code or allocate without limit, so read pickles into inert records here (decisions/0182).
class TensorUnpickler(pickle.Unpickler):
    """Unpickle tensors without running code. Other values may only be mappings, lists, numbers, and text."""

    writer = "torch.save"

    def __init__(self, where: str, data: bytes):
        super().__init__(io.BytesIO(data))
        self._where = where

    def find_class(self, module: str, name: str, /) -> Any:
        """Return a harmless replacement for a class or function in the pickle. Raise if its name is unknown."""
        known: dict[tuple[str, str], Any] = {
            ("torch", "Size"): _rebuild_torch_size,
            ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor,
            ("torch._utils", "_rebuild_tensor_v3"): _rebuild_tensor,  # for dtypes without a storage class
            ("torch._utils", "_rebuild_parameter"): _return_first_argument,
            ("collections", "OrderedDict"): _make_ordered_dict,
            ("collections", "Counter"): _return_first_argument,
        }
        if (module, name) in known:
            return _AllowedFunction(known[module, name])
        if module == "torch" and name in _DTYPES:
            return PickledDtype(name)
        if module in ("torch", "torch.storage") and (name in _STORAGES or name == "UntypedStorage"):
            return PickledDtype(_STORAGES.get(name, ""))
        raise make_torch_file_error(
            self._where,
            f"its pickle refers to the unknown name {module}.{name}",
            f"{self.writer} does not write this name for tensors, and unpickling an unknown name can run code",
            fix="if you trust the file, load it with torch, and save its tensors as safetensors",
        )

    def persistent_load(self, pid: Any, /) -> Any:
        """Return three values of a tensor's storage: its kind, its dtype or `None`, and its key in the archive."""
        kind, storage, key, *_ = pid
        if kind != "storage" or not isinstance(storage, PickledDtype) or not isinstance(key, str):
            raise make_torch_file_error(
                self._where, "its pickle has an invalid torch storage", f"the storage is {shorten_repr(pid)}"
            )
        return kind, storage.name or None, key


class _DcpUnpickler(TensorUnpickler):
    """Unpickle tensors, and the objects of DCP's metadata, without running their code."""

    writer = "DCP"

    def find_class(self, module: str, name: str, /) -> object:
        if (module, name) in _RECORDS:
            return type(name, (_PickledDcpObject,), {})
        if (module, name) in _IGNORED:
            return _AllowedFunction(_return_none)
        return set if (module, name) == ("builtins", "set") else super().find_class(module, name)


def _make_ordered_dict() -> OrderedDict[object, object]:
    return OrderedDict()


def _return_none(*_: object) -> None:
    return None


def _rebuild_torch_size(values: Sequence[object] = ()) -> tuple[object, ...]:
    return validate_sizes(values)


def _return_first_argument(value: object, *_: object) -> object:
    return value


def _rebuild_tensor(storage: Any, start: Any, shape: Any, strides: Any, *options: Any) -> PickledTensor:
    if any(isinstance(each, dict) and each != {} for each in options):
        raise ValueError("a tensor is a conjugate or negated view, which cannot be read")
    dtype = next((each.name for each in options if isinstance(each, PickledDtype)), storage[1])
    return PickledTensor(
        tuple(storage), validate_sizes((start,))[0], validate_sizes(shape), validate_sizes(strides), dtype
    )


def unpickle_without_code(
    where: str, data: bytes, unpickler_class: type[TensorUnpickler] = _DcpUnpickler
) -> object:
    """Return the content of a pickle, without running code. Raise a `CheckpointError` if that is impossible."""
    try:
        _check_memo_size(data)
        _check_tuple_sizes(data)
        return unpickler_class(where, data).load()
    except CheckpointError:
        raise
    except Exception as error:  # pickle raises undocumented errors for damaged data, so catch all
        raise make_torch_file_error(
            where, "its pickle cannot be read", f"{type(error).__name__}: {error}"
        ) from error


def _check_memo_size(data: bytes) -> None:
    """Raise a `ValueError` if a pickle's memo would have more entries than the pickle has bytes."""
    for opcode, number, _ in pickletools.genops(data):
        if opcode.name in ("PUT", "BINPUT", "LONG_BINPUT") and not 0 <= cast("int", number) <= len(data):
            raise ValueError(f"a pickle of only {len(data)} bytes uses memo entry {number}")


def _check_tuple_sizes(data: bytes) -> None:
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
                raise ValueError(
                    f"a tuple has {shorten_repr(size)} elements, more than {_MAX_TUPLE_ELEMENTS}"
                )
            stack += [size] * len(opcode.stack_after)


def validate_sizes(values: Sequence[Any]) -> tuple[int, ...]:
    """Return non-negative integers as a tuple, or raise a `ValueError` for other values or too many of them."""
    found = tuple(values)
    if len(found) > _MAX_AXES or not all(type(n) is int and n >= 0 for n in found):
        raise ValueError(f"{shorten_repr(found)} are not the sizes of an array")
    return found


def make_torch_file_error(
    where: str, what: str, why: str, *, fix: str = "restore it from a copy, or save it again with torch"
) -> CheckpointError:
    """Return the error for a DCP directory or a file of `torch.save` that cannot be read."""
    return CheckpointError(f"{where}: {what}", why=why, fix=fix)
