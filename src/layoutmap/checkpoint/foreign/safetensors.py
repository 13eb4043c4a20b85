"""Read safetensors files as Hugging Face libraries write them: one file, or several with an index.

A file begins with the length of its header in 8 bytes, then has the header, which is JSON, then the values:

    {"d1.weight": {"dtype": "BF16", "shape": [4, 8], "data_offsets": [0, 64]}, "__metadata__": {"format": "pt"}}

The format has no checksums. So only the header is checked against the file, and a changed value is not detected.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from layoutmap.checkpoint.dtypes import SAFETENSORS, get_numpy_dtype
from layoutmap.checkpoint.foreign.ranges import ByteRangeFile
from layoutmap.checkpoint.source import SavedVariable, Source
from layoutmap.core.blocks import Index, NumpyArray
from layoutmap.core.errors import CheckpointError, join_names, shorten_repr

INDEX = ".safetensors.index.json"
_MAX_HEADER_BYTES = 100_000_000  # limit of the safetensors library
_DTYPE_NAMES = {there: name for name, there in SAFETENSORS.items()}
_FIX = "download or copy the file again, or write it again with the library safetensors"


@dataclass(frozen=True, slots=True)
class _StoredTensor:
    file: ByteRangeFile
    start: int
    variable: SavedVariable


class SafetensorsSource(Source):
    """Read the tensors of one or several safetensors files.

    Args:
        path: A file `*.safetensors`, an index `*.safetensors.index.json`, or a folder with an index or with files.
            All files of a folder are read as one checkpoint.

    Attributes:
        where: The path.
        variables: The tensors by name.
        metadata: The `__metadata__` of the files.

    Raises:
        CheckpointError: A file is missing, a header does not fit its file, or an index does not fit its files.
    """

    def __init__(self, path: str | os.PathLike[str]):
        super().__init__(os.fspath(path), {})
        self.metadata: dict[str, str] = {}
        self._files: list[ByteRangeFile] = []
        self._tensors: dict[str, _StoredTensor] = {}
        names, index = _find_files_and_read_index(Path(self.where))
        for name in names:
            self._add_file(ByteRangeFile(name))
        self.variables = {name: tensor.variable for name, tensor in self._tensors.items()}
        for tensor, file in (index or {}).items():
            found = self._tensors.get(tensor)
            if found is None or os.path.basename(found.file.path) != file:
                raise CheckpointError(
                    f"{tensor}: the index names a tensor that is not in its file",
                    facts={
                        "index": self.where,
                        "file": file,
                        "found in": "no file" if found is None else found.file.path,
                    },
                    why="the index and the files belong to different checkpoints",
                    fix="download or copy all files of the folder again",
                )

    @property
    def bytes_read(self) -> int:
        """Bytes that have been read so far, headers included."""
        return sum(file.bytes_read for file in self._files)

    def _read_block(self, variable: SavedVariable, index: Index) -> NumpyArray:
        tensor, dtype = self._tensors[variable.path], get_numpy_dtype(variable.dtype, variable.path)
        return tensor.file.read_block(tensor.start, dtype, variable.shape, index)

    def _verify_block(self, variable: SavedVariable, index: Index) -> None:
        tensor = self._tensors[variable.path]
        size = os.stat(tensor.file.path).st_size
        if size != tensor.file.num_bytes:
            raise _make_file_error(
                tensor.file,
                "the size of the file has changed",
                f"it had {tensor.file.num_bytes} bytes, now {size}",
            )

    def _add_file(self, file: ByteRangeFile) -> None:
        self._files.append(file)
        start, header = _read_header(file)
        metadata = header.pop("__metadata__", None)
        self.metadata |= metadata if isinstance(metadata, dict) else {}
        last, last_name = 0, ""
        entries = [(*_parse_tensor_entry(file, name, entry), name) for name, entry in header.items()]
        for begin, end, variable, name in sorted(entries, key=lambda each: each[:2]):
            if begin != last:
                after = f" after {last_name!r}" if last_name else ""
                what = f"overlaps {last_name!r}" if begin < last else f"leaves a gap{after}"
                why = f"its values begin at byte {begin}, and the previous values end at byte {last}"
                raise _make_file_error(file, f"tensor {name!r} {what}", why)
            if name in self._tensors:
                other = self._tensors[name].file.path
                raise _make_file_error(
                    file, f"tensor {name!r} appears twice", f"{other} has a tensor of that name, too"
                )
            last, last_name = end, name
            self._tensors[name] = _StoredTensor(file, start + begin, variable)
        if start + last != file.num_bytes:
            raise _make_file_error(
                file,
                "the file is truncated"
                if start + last > file.num_bytes
                else "the file has more bytes than its header lists",
                f"its header lists {start + last} bytes, and the file has {file.num_bytes}",
            )

    def __repr__(self) -> str:
        content = f"{len(self._tensors)} tensors in {len(self._files)} files"
        return f"<SafetensorsSource {self.where}: {content}, no checksums>"


def _find_files_and_read_index(path: Path) -> tuple[list[Path], dict[str, str] | None]:
    """Return a pair: the files to read, and the index's mapping of tensors to files, or `None` if there is no index."""
    if path.is_dir():
        indexes = sorted(path.glob("*" + INDEX))
        one = path / "model.safetensors"
        if len(indexes) > 1 and (path / ("model" + INDEX)) in indexes:
            indexes = [path / ("model" + INDEX)]
        if len(indexes) > 1:
            raise CheckpointError(
                f"{path}: the folder has several indexes",
                facts={"indexes": join_names([each.name for each in indexes])},
                why="each index belongs to a different checkpoint",
                fix="name one of these indexes, as in .../" + indexes[0].name,
            )
        if not indexes:
            return [one] if one.is_file() else sorted(path.glob("*.safetensors")), None
        path = indexes[0]
    if not path.name.endswith(INDEX):
        return [path], None
    file = ByteRangeFile(path)
    found = _parse_json_object(file, file.read_whole(), "the index")
    names = found.get("weight_map")
    if not isinstance(names, dict) or not all(
        isinstance(name, str) for name in cast("dict[str, Any]", names).values()
    ):
        raise _make_file_error(
            file, "the index has no weight_map", "weight_map maps each tensor's name to its file's name"
        )
    index = cast("dict[str, str]", names)
    files = [path.parent / name for name in dict.fromkeys(index.values())]
    for each in files:
        if each.name not in index.values() or each.parent != path.parent:
            raise _make_file_error(
                file,
                f"the index names the file {str(each)!r} outside its folder",
                "an index is beside its files",
            )
        if not each.is_file():
            count = sum(name == each.name for name in index.values())
            raise CheckpointError(
                f"{each}: the file is missing",
                facts={"index": str(path), "tensors": count},
                why="the index says that the file has tensors",
                fix="download or copy the file again",
            )
    return files, index


def _read_header(file: ByteRangeFile) -> tuple[int, dict[str, object]]:
    """Return a pair: the offset of the values in a file, and a dict from name to entry of the file's header."""
    length = int.from_bytes(file.read(0, 8), "little") if file.num_bytes >= 8 else -1
    if not 2 <= length <= min(_MAX_HEADER_BYTES, file.num_bytes - 8):
        raise _make_file_error(
            file,
            "this is not a safetensors file, or it is truncated",
            f"by its first 8 bytes the header has {length} bytes, but the file has {file.num_bytes}"
            if length >= 0
            else f"it has {file.num_bytes} bytes, and its first 8 must give the size of the header",
        )
    return 8 + length, _parse_json_object(file, file.read(8, length), "its header")


def _parse_json_object(file: ByteRangeFile, data: bytes, subject: str) -> dict[str, object]:
    """Return the JSON object in bytes of a file. Raise for other data, and for names that appear twice."""

    def make_dict_without_duplicates(pairs: Sequence[tuple[str, object]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, value in pairs:
            if name in found:
                raise _make_file_error(file, f"{subject} has {name!r} twice", "a duplicate name is ambiguous")
            found[name] = value
        return found

    try:
        found = json.loads(data.decode(), object_pairs_hook=make_dict_without_duplicates)
    except CheckpointError:
        raise
    except (ValueError, RecursionError) as error:
        raise _make_file_error(file, f"{subject} is not JSON", str(error)) from error
    if not isinstance(found, dict):
        raise _make_file_error(file, f"{subject} is not a JSON object", f"it is {shorten_repr(found)}")
    return cast("dict[str, Any]", found)


def _parse_tensor_entry(file: ByteRangeFile, name: str, entry: Any) -> tuple[int, int, SavedVariable]:
    """Return three values for a tensor: the begin and the end of its bytes in the file's data, and its variable."""
    try:
        shape: tuple[int, ...] = tuple(entry["shape"])
        (begin, end), code = entry["data_offsets"], entry["dtype"]
        sound = all(type(n) is int and n >= 0 for n in (*shape, begin, end)) and isinstance(code, str)
    except (TypeError, KeyError, ValueError):
        shape, begin, end, code, sound = tuple[int, ...](), 0, 0, "", False
    if not sound:
        why = "it needs a dtype, and a shape and two data_offsets of integers of 0 or more"
        raise _make_file_error(file, f"tensor {name!r}: its entry is invalid", why, entry=shorten_repr(entry))
    if code not in _DTYPE_NAMES:
        known = f"the known types are {', '.join(_DTYPE_NAMES)}"
        raise _make_file_error(
            file, f"tensor {name!r} has the unknown dtype {code!r}", known, fix="convert it to a known type"
        )
    dtype = _DTYPE_NAMES[code]
    needed = math.prod(shape) * get_numpy_dtype(dtype, name).itemsize
    if end - begin != needed:
        why = f"{code} of shape {shape} needs {needed} bytes, and its data_offsets have {end - begin}"
        raise _make_file_error(file, f"tensor {name!r}: its byte count contradicts its shape", why)
    return begin, end, SavedVariable(name, shape, dtype)


def _make_file_error(
    file: ByteRangeFile, what: str, why: str, *, fix: str = _FIX, **facts: object
) -> CheckpointError:
    return CheckpointError(f"{file.path}: {what}", facts=facts, why=why, fix=fix)
