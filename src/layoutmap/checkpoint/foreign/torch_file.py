"""Files of `torch.save`, read without torch and without running anything, for `layoutmap checkpoint convert`.

Such a file is an archive with a pickle, of which `TensorUnpickler` makes inert records, as `torch.load` does with
`weights_only=True`, and with the bytes of each storage. No more is read or written of it than it has bytes.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from typing import Any, cast

from layoutmap.checkpoint.dtypes import numpy_dtype
from layoutmap.checkpoint.foreign.archives import Window, stored_files
from layoutmap.checkpoint.foreign.dcp import is_dense, read_tensor
from layoutmap.checkpoint.foreign.dcp_pickle import Tensor, TensorUnpickler, unpickled, wrong
from layoutmap.checkpoint.foreign.ranges import ByteFile
from layoutmap.checkpoint.source import SavedVariable, Source
from layoutmap.core.blocks import Index, NumpyArray
from layoutmap.core.errors import CheckpointError, join_names

_MOST_PICKLE_BYTES = 1 << 24
_MOST_DEPTH = 32
_MOST_NAME = 4096
_FIX = "save the state dict again with torch.save, which has made such archives since torch 1.6"


class TorchFile(Source):  # why: decisions/0085
    """The tensors of a file of `torch.save`.

    Paths are the keys of its mappings and lists, joined by dots. What is no tensor is left out.

    Args:
        path: The file.
        part: Which of its entries is meant, as in `"model"`, or `"model.encoder"`; `None`: all of it.

    Attributes:
        where: The file.
        variables: The tensors by path; one under several paths is an alias.

    Raises:
        CheckpointError: It cannot be read, names anything but tensors, or would have more bytes than the file.
    """

    def __init__(self, path: str | os.PathLike[str], part: str | None = None):
        super().__init__(os.fspath(path), {})
        self._file = ByteFile(path)
        self._tensors: dict[str, tuple[Tensor, Window]] = {}
        whole = Window(self._file, 0, self._file.num_bytes)
        files = {name.partition("/")[2]: file for name, file in stored_files(whole, self.where, _FIX).items()}
        head = files.get("data.pkl")
        if head is None or head.num_bytes > _MOST_PICKLE_BYTES:
            raise self._wrong(
                "its pickle is missing, or too large", f"it is data.pkl of {join_names([*files])}"
            )
        order = files.get("byteorder")
        if order is not None and order.read(9) != b"little":
            raise self._wrong("its bytes are in the other order", "the machine was another")
        found = unpickled(self.where, head.read(head.num_bytes) or b"", TensorUnpickler)
        known: dict[Tensor, str] = {}
        aliases: dict[str, list[str]] = {}
        for name, tensor in _tensors(self.where, found, head.num_bytes):
            if part is not None and name != part and not name.startswith(f"{part}."):
                continue
            name = name.removeprefix(f"{part}.")
            if name in self._tensors or name in aliases:
                raise self._wrong(
                    f"{name}: it is there twice", "keys that have dots, and keys in mappings, meet"
                )
            first = known.setdefault(tensor, name)
            aliases.setdefault(first, []).append(name)
            if first == name:
                self._tensors[name] = tensor, self._checked(name, tensor, files)
        self.variables = {
            name: SavedVariable(name, each.shape, each.dtype or "", aliases=tuple(aliases[name][1:]))
            for name, (each, _) in self._tensors.items()
        }
        if not self.variables:
            raise self._wrong(f"it has no tensors{' in ' * bool(part)}{part or ''}", "only tensors are read")
        if (total := sum(map(_num_bytes, self._tensors.values()))) > self._file.num_bytes:
            raise wrong(
                self.where,
                f"its tensors have {total} bytes",
                f"the file has {self._file.num_bytes}, of which several tensors are views",
                fix="save tensor.clone() of each",
            )

    def _read(self, variable: SavedVariable, wanted: Index) -> NumpyArray:
        tensor, data = self._tensors[variable.path]
        return read_tensor(self._file, data.start, tensor, numpy_dtype(variable.dtype, variable.path), wanted)

    def _checked(self, name: str, tensor: Tensor, files: Mapping[str, Window]) -> Window:
        """Where the storage of a tensor is."""
        data = files.get(f"data/{tensor.storage[2]}")
        if data is None or not tensor.dtype or not is_dense(tensor):
            raise wrong(
                self.where,
                f"{name}: its values are missing, or not side by side",
                f"its storage is {tensor.storage[2]}, its strides {tensor.strides}",
                fix="save tensor.detach().contiguous() in its place",
            )
        end = (tensor.start + math.prod(tensor.shape)) * numpy_dtype(tensor.dtype, name).itemsize
        if end > data.num_bytes:
            raise self._wrong(f"{name}: its values are missing", f"it needs {end} bytes of {data.num_bytes}")
        return data

    def _wrong(self, what: str, why: str) -> CheckpointError:
        return wrong(self.where, what, why)

    def __repr__(self) -> str:
        return f"<TorchFile {self.where}: {len(self.variables)} tensors, no checksums>"


def _num_bytes(found: tuple[Tensor, Window]) -> int:
    tensor, _ = found
    return math.prod(tensor.shape) * numpy_dtype(tensor.dtype or "").itemsize


def _tensors(where: str, found: object, most: int) -> Iterator[tuple[str, Tensor]]:
    """The tensors in mappings and lists, by path; what is there many times by reference is as many as it says."""
    left: list[tuple[tuple[str, ...], object]] = [((), found)]
    count = 0
    while left:
        path, value = left.pop()
        count += 1
        if count > most or len(path) > _MOST_DEPTH or sum(map(len, path)) > _MOST_NAME:
            raise wrong(
                where,
                "its mappings refer to each other",
                "they have more parts than the pickle has bytes, or names too long",
            )
        if isinstance(value, Tensor):
            yield ".".join(path) or "tensor", value
        elif isinstance(value, Mapping):
            parts = cast("Mapping[Any, Any]", value).items()
            left += [((*path, str(key)), each) for key, each in parts if isinstance(key, (str, int))][::-1]
        elif isinstance(value, (list, tuple)):
            parts = enumerate(cast("list[Any]", value))
            left += [((*path, str(number)), each) for number, each in parts][::-1]
