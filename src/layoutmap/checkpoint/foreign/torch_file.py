"""Read files of `torch.save` without torch and without running code, for `layoutmap checkpoint convert`.

Such a file is an archive with a pickle, which `TensorUnpickler` converts to inert records, and with the bytes of each
storage. The tensors may not have more bytes than the file, so that a small file cannot become a large checkpoint.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from typing import Any, cast

from layoutmap.checkpoint.dtypes import get_numpy_dtype
from layoutmap.checkpoint.foreign.archives import FileWindow, find_files_in_archive
from layoutmap.checkpoint.foreign.dcp import has_contiguous_values, read_tensor_block
from layoutmap.checkpoint.foreign.dcp_pickle import (
    PickledTensor,
    TensorUnpickler,
    make_torch_file_error,
    unpickle_without_code,
)
from layoutmap.checkpoint.foreign.ranges import ByteRangeFile
from layoutmap.checkpoint.source import SavedVariable, Source
from layoutmap.core.blocks import Index, NumpyArray
from layoutmap.core.errors import CheckpointError, join_names

_MAX_PICKLE_BYTES = 1 << 24
_MAX_DEPTH = 32
_MAX_NAME_LENGTH = 4096
_FIX = "save the state dict again with torch.save, which has made such archives since torch 1.6"


# A pickle can run code, so it may create only inert records of known names (decisions/0085).
class TorchFileSource(Source):
    """Read the tensors of a file of `torch.save`.

    Paths are the keys of its mappings and lists, joined by dots. Values other than tensors are skipped.

    Args:
        path: The file.
        part: The entry to read, such as `"model"` or `"model.encoder"`; `None`: all entries.

    Attributes:
        where: The file.
        variables: The tensors by path. Further paths of one tensor are its aliases.

    Raises:
        CheckpointError: The file cannot be read, has other classes than tensors, or has fewer bytes than its tensors.
    """

    def __init__(self, path: str | os.PathLike[str], part: str | None = None):
        super().__init__(os.fspath(path), {})
        self._file = ByteRangeFile(path)
        self._tensors: dict[str, tuple[PickledTensor, FileWindow]] = {}
        whole = FileWindow(self._file, 0, self._file.num_bytes)
        files = {
            name.partition("/")[2]: file
            for name, file in find_files_in_archive(whole, self.where, _FIX).items()
        }
        head = files.get("data.pkl")
        if head is None or head.num_bytes > _MAX_PICKLE_BYTES:
            raise self._make_torch_file_error(
                "its pickle is missing or too large", f"data.pkl is expected among {join_names([*files])}"
            )
        order = files.get("byteorder")
        if order is not None and order.read(9) != b"little":
            raise make_torch_file_error(
                self.where,
                "its values are not little-endian",
                "they were saved on a big-endian machine",
                fix="save the file again with torch on a little-endian machine",
            )
        found = unpickle_without_code(self.where, head.read(head.num_bytes) or b"", TensorUnpickler)
        known: dict[PickledTensor, str] = {}
        aliases: dict[str, list[str]] = {}
        for name, tensor in _iterate_tensors(self.where, found, head.num_bytes):
            if part is not None and name != part and not name.startswith(f"{part}."):
                continue
            name = name.removeprefix(f"{part}.")
            if name in self._tensors or name in aliases:
                raise make_torch_file_error(
                    self.where,
                    f"{name}: two tensors have this path",
                    "a key with dots equals the joined keys of nested mappings",
                    fix="rename one of the keys, and save the file again",
                )
            first = known.setdefault(tensor, name)
            aliases.setdefault(first, []).append(name)
            if first == name:
                self._tensors[name] = tensor, self._find_storage(name, tensor, files)
        self.variables = {
            name: SavedVariable(name, each.shape, each.dtype or "", aliases=tuple(aliases[name][1:]))
            for name, (each, _) in self._tensors.items()
        }
        if not self.variables:
            raise make_torch_file_error(
                self.where,
                f"it has no tensors{' in ' * bool(part)}{part or ''}",
                "only tensors can be read",
                fix="name an entry that has tensors" if part else "save tensors, such as model.state_dict()",
            )
        if (total := sum(map(_count_tensor_bytes, self._tensors.values()))) > self._file.num_bytes:
            raise make_torch_file_error(
                self.where,
                f"its tensors have {total} bytes, more than the file",
                f"the file has {self._file.num_bytes}, so several tensors are views of the same bytes",
                fix="save tensor.clone() in place of each tensor",
            )

    def _read_block(self, variable: SavedVariable, index: Index) -> NumpyArray:
        tensor, data = self._tensors[variable.path]
        return read_tensor_block(
            self._file, data.start, tensor, get_numpy_dtype(variable.dtype, variable.path), index
        )

    def _find_storage(self, name: str, tensor: PickledTensor, files: Mapping[str, FileWindow]) -> FileWindow:
        """Return the bytes of a tensor's storage. Raise if values are missing or not contiguous."""
        data = files.get(f"data/{tensor.storage[2]}")
        if data is None or not tensor.dtype or not has_contiguous_values(tensor):
            raise make_torch_file_error(
                self.where,
                f"{name}: its values are missing or not contiguous",
                f"its storage is {tensor.storage[2]}, and its strides are {tensor.strides}",
                fix="save tensor.detach().contiguous() instead of the tensor",
            )
        end = (tensor.start + math.prod(tensor.shape)) * get_numpy_dtype(tensor.dtype, name).itemsize
        if end > data.num_bytes:
            raise self._make_torch_file_error(
                f"{name}: its values are missing",
                f"it needs {end} bytes, but its storage has {data.num_bytes}",
            )
        return data

    def _make_torch_file_error(self, what: str, why: str) -> CheckpointError:
        return make_torch_file_error(self.where, what, why)

    def __repr__(self) -> str:
        return f"<TorchFileSource {self.where}: {len(self.variables)} tensors, no checksums>"


def _count_tensor_bytes(stored: tuple[PickledTensor, FileWindow]) -> int:
    tensor, _ = stored
    return math.prod(tensor.shape) * get_numpy_dtype(tensor.dtype or "").itemsize


def _iterate_tensors(where: str, root: object, max_entries: int) -> Iterator[tuple[str, PickledTensor]]:
    """Yield the path and record of each tensor in nested mappings and lists of at most `max_entries` entries."""
    pending: list[tuple[tuple[str, ...], object]] = [((), root)]
    count = 0
    while pending:
        path, value = pending.pop()
        count += 1
        if count > max_entries or len(path) > _MAX_DEPTH or sum(map(len, path)) > _MAX_NAME_LENGTH:
            raise make_torch_file_error(
                where,
                "its nested mappings and lists have too many entries, too many levels, or too long keys",
                f"at most {max_entries} entries, {_MAX_DEPTH} levels, and {_MAX_NAME_LENGTH} characters of joined keys "
                "are allowed, and mappings that contain each other have no end",
                fix="save only the tensors, as in torch.save(model.state_dict(), file)",
            )
        if isinstance(value, PickledTensor):
            yield ".".join(path) or "tensor", value
        elif isinstance(value, Mapping):
            parts = cast("Mapping[Any, Any]", value).items()
            pending += [((*path, str(key)), each) for key, each in parts if isinstance(key, (str, int))][::-1]
        elif isinstance(value, (list, tuple)):
            parts = enumerate(cast("list[Any]", value))
            pending += [((*path, str(number)), each) for number, each in parts][::-1]
