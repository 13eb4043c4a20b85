"""Read directories of `torch.distributed.checkpoint` (DCP) without torch.

The metadata of the directory and of each tensor are pickles, which `dcp_pickle` reads without running code. The values
are bytes in files, of which only those of a requested block are read.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from layoutmap.checkpoint.dtypes import get_numpy_dtype
from layoutmap.checkpoint.foreign.archives import FileWindow, find_files_in_archive
from layoutmap.checkpoint.foreign.dcp_pickle import (
    PickledDtype,
    PickledTensor,
    make_torch_file_error,
    unpickle_without_code,
    validate_sizes,
)
from layoutmap.checkpoint.foreign.ranges import ByteRangeFile
from layoutmap.checkpoint.source import SavedVariable, Source
from layoutmap.core.blocks import (
    Index,
    NumpyArray,
    compute_block_shape,
    find_coverage_fault,
    format_index,
    intersect_blocks,
    make_relative_index,
    stack_starts_and_stops,
)
from layoutmap.core.errors import join_names, shorten_repr

METADATA = ".metadata"
_FIX = "restore it from a copy, or save it again with torch"
# Limit for the pickle in front of a tensor's values. The pickle of a dense torch.Tensor has about 200 bytes.
_MAX_PICKLE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class _DcpChunk:
    index: Index
    file: str
    start: int
    num_bytes: int


class DistributedCheckpointSource(Source):
    """Read the tensors of a directory of `torch.distributed.checkpoint` (DCP).

    Paths are the keys of the saved state dict, joined by dots as in DCP. Values other than tensors are pickles, which
    are skipped.

    Args:
        path: The directory.

    Attributes:
        where: The directory.
        variables: The tensors by path.

    Raises:
        CheckpointError: The directory cannot be read, or its metadata names a class that is not DCP's.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self._folder = Path(path)
        self._files: dict[str, ByteRangeFile] = {}
        self._heads: dict[tuple[str, int], tuple[PickledTensor, str, int]] = {}
        file = ByteRangeFile(self._folder / METADATA)
        found = unpickle_without_code(file.path, file.read_whole())
        try:
            variables, self._chunks = _parse_metadata(file.path, found)
        except (AttributeError, TypeError, ValueError) as error:
            raise make_torch_file_error(
                file.path, "its metadata does not describe a checkpoint", str(error)
            ) from error
        super().__init__(os.fspath(path), variables)

    @property
    def bytes_read(self) -> int:
        """Bytes of values and pickles that have been read so far."""
        return sum(file.bytes_read for file in self._files.values())

    def _read_block(self, variable: SavedVariable, index: Index) -> NumpyArray:
        path = variable.path
        dtype = get_numpy_dtype(variable.dtype, path)
        result = np.empty(compute_block_shape(index), dtype)
        for chunk, shared_block in self._find_overlapping_chunks(path, index):
            part = self._read_chunk_block(path, chunk, dtype, make_relative_index(shared_block, chunk.index))
            result[(*make_relative_index(shared_block, index), ...)] = part
        return result

    def _verify_block(self, variable: SavedVariable, index: Index) -> None:
        # DCP has no checksums, so only read the header of each chunk, which raises if a file is missing or too short.
        for chunk, _ in self._find_overlapping_chunks(variable.path, index):
            self._read_chunk_header(variable.path, chunk)

    def _find_overlapping_chunks(self, path: str, index: Index) -> list[tuple[_DcpChunk, Index]]:
        """Return the chunks that overlap a block of a tensor, each with the index of the overlap in the tensor.

        Raises:
            CheckpointError: An element of the block is in no chunk or in several chunks.
        """
        shared = ((chunk, intersect_blocks(chunk.index, index)) for chunk in self._chunks[path])
        found = [(chunk, shared_block) for chunk, shared_block in shared if shared_block is not None]
        if (
            fault := find_coverage_fault(
                *stack_starts_and_stops([shared_block for _, shared_block in found], len(index)), index
            )
        ) is not None:
            what = f"{fault[1] or 'no'} chunks in the metadata contain {format_index(fault[0])}"
            raise make_torch_file_error(self.where, f"{path}: values are missing or stored twice", what)
        return found

    def _read_chunk_block(
        self, path: str, chunk: _DcpChunk, dtype: np.dtype[Any], index: Index
    ) -> NumpyArray:
        tensor, _, start = self._read_chunk_header(path, chunk)
        return read_tensor_block(self._files[chunk.file], start, tensor, dtype, index)

    def _read_chunk_header(self, path: str, chunk: _DcpChunk) -> tuple[PickledTensor, str, int]:
        """Return a chunk's unpickled tensor, the dtype of its storage, and the offset of its values in the file."""
        key = chunk.file, chunk.start
        if key in self._heads:
            return self._heads[key]
        file = self._files.get(chunk.file) or ByteRangeFile(self._folder / chunk.file)
        self._files[chunk.file] = file
        window = FileWindow(file, chunk.start, chunk.num_bytes)
        # DCP never compresses the entries of this archive, so refuse compressed ones, which could expand to any size.
        stored = find_files_in_archive(window, file.path, _FIX)
        files = {name.partition("/")[2]: each for name, each in stored.items()}
        head, order = files.get("data.pkl"), files.get("byteorder")
        if head is None or head.num_bytes > _MAX_PICKLE_BYTES:
            raise make_torch_file_error(
                file.path,
                f"{path}: its pickle is missing or too large",
                "the pickle of a tensor has about 200 bytes",
            )
        tensor = unpickle_without_code(file.path, head.read(head.num_bytes) or b"")
        if not isinstance(tensor, PickledTensor):
            raise make_torch_file_error(
                file.path,
                f"{path}: it is not a dense torch.Tensor",
                f"its pickle contains {shorten_repr(tensor)}",
                fix="save a dense torch.Tensor in its place",
            )
        if order is not None and order.read(9) != b"little":
            raise make_torch_file_error(
                file.path,
                f"{path}: its values are not little-endian",
                "they were saved on a big-endian machine",
                fix="save the checkpoint again with torch on a little-endian machine",
            )
        data = files.get(f"data/{tensor.storage[2]}")
        if data is None:
            raise make_torch_file_error(
                file.path, f"{path}: its values are missing", f"the archive has {join_names([*files])}"
            )
        _check_chunk_fits_metadata(file.path, path, tensor, chunk, data, self.variables[path])
        self._heads[key] = tensor, tensor.storage[1], data.start
        return self._heads[key]

    def __repr__(self) -> str:
        return f"<DistributedCheckpointSource {self.where}: {len(self.variables)} tensors, no checksums>"


def read_tensor_block(
    file: ByteRangeFile, start: int, tensor: PickledTensor, dtype: np.dtype[Any], index: Index
) -> NumpyArray:
    """Return the values of a block of a dense tensor. The tensor's storage begins at offset `start` of the file."""
    # A transposed tensor is stored with its axes in a different order, so read them in that order, then transpose.
    order = sorted(range(len(tensor.shape)), key=lambda axis: (-tensor.strides[axis], axis))
    shape = [tensor.shape[axis] for axis in order]
    found = file.read_block(
        start + tensor.start * dtype.itemsize, dtype, shape, tuple(index[axis] for axis in order)
    )
    return found.transpose([order.index(axis) for axis in range(len(order))])


def has_contiguous_values(tensor: PickledTensor) -> bool:
    """Return whether a tensor's values are contiguous in its storage, in any order of its axes."""
    expected, found = 1, True
    for axis in sorted(range(len(tensor.shape)), key=lambda axis: (tensor.strides[axis], -axis)):
        found &= tensor.shape[axis] == 1 or tensor.strides[axis] == expected
        expected *= tensor.shape[axis]
    return found or not expected


def _check_chunk_fits_metadata(
    where: str, path: str, tensor: PickledTensor, chunk: _DcpChunk, data: FileWindow, variable: SavedVariable
) -> None:
    """Raise unless a chunk's pickle agrees with the metadata, and the file has all bytes of the chunk."""
    itemsize = get_numpy_dtype(variable.dtype, path).itemsize
    last = tensor.start + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.strides, strict=True))
    if not has_contiguous_values(tensor):
        raise make_torch_file_error(
            where,
            f"{path}: its values are not contiguous",
            f"its strides are {tensor.strides}",
            fix="save tensor.detach().contiguous() instead of the tensor",
        )
    why = ""
    if tensor.shape != compute_block_shape(chunk.index):
        why = f"it has the shape {tensor.shape}, and in the metadata {compute_block_shape(chunk.index)}"
    elif tensor.storage[1] not in (variable.dtype, None):
        why = f"its elements are {tensor.storage[1]}, and in the metadata {variable.dtype}"
    elif math.prod(tensor.shape) and (last + 1) * itemsize > data.num_bytes:
        why = f"it needs {(last + 1) * itemsize} bytes, and has {data.num_bytes}"
    if why:
        raise make_torch_file_error(where, f"{path}: a chunk contradicts the metadata", why)


def _parse_metadata(where: str, metadata: Any) -> tuple[dict[str, SavedVariable], dict[str, list[_DcpChunk]]]:
    """Return two dicts from unpickled metadata: from path to tensor, and from path to the tensor's chunks."""
    variables: dict[str, SavedVariable] = {}
    chunks: dict[str, list[_DcpChunk]] = {}
    for path, entry in metadata.state_dict_metadata.items():
        if hasattr(entry, "size"):
            dtype = entry.properties.dtype
            if not isinstance(dtype, PickledDtype):
                raise make_torch_file_error(
                    where, f"{path}: its dtype cannot be read", f"it is {shorten_repr(dtype)}"
                )
            variables[str(path)] = SavedVariable(str(path), validate_sizes(entry.size), dtype.name)
            chunks[str(path)] = []
    sizes_by_chunk = {
        (path, validate_sizes(chunk.offsets)): validate_sizes(chunk.sizes)
        for path, entry in metadata.state_dict_metadata.items()
        if path in variables
        for chunk in entry.chunks
    }
    for index, info in metadata.storage_data.items():
        if index.fqn not in variables:
            continue
        offsets = validate_sizes(index.offset if index.offset is not None else ())
        if getattr(info, "transform_descriptors", None):
            raise make_torch_file_error(
                where,
                f"{index.fqn}: its values are compressed",
                "DCP was configured to transform its output",
                fix="save it again without writer extensions such as ZStandard",
            )
        if os.path.basename(info.relative_path) != info.relative_path:
            raise make_torch_file_error(
                where,
                f"{index.fqn}: its file {info.relative_path!r} is not directly in the folder",
                "DCP writes all files of a checkpoint into one folder",
            )
        sizes = sizes_by_chunk[index.fqn, offsets]
        chunk_block = tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))
        start, length = validate_sizes((info.offset, info.length))
        chunks[index.fqn].append(_DcpChunk(chunk_block, info.relative_path, start, length))
    return variables, chunks
