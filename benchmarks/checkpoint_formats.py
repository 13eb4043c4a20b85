"""Compare checkpoint formats: flat safetensors files with a manifest, and zarr3 through tensorstore.

    python benchmarks/checkpoint_formats.py                1 GiB, 5 rounds: some minutes

16 random float32 arrays are saved as the 8 shards of a 2x4 mesh, and read as the 8 shards of a 4x2 mesh. Every round
tries each format once, in the same order. A write is timed until all files and folders are on the disk. A read comes
from the page cache, so its time is the library's. "flipped bit" says whether the reader detects one flipped bit in the
middle of the largest file. zarr3 stores each saved shard as one chunk. "zarr3 sharded" stores each shard as one file
with inner chunks of the size that this library uses.
"""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from checkpoint_speed import sync_tree
from measure import make_parser, time_call

NUM_ARRAYS, WIDTH = 16, 4096
CRC = [{"name": "bytes"}, {"name": "crc32c"}]
NO_CRC = [{"name": "bytes"}]
Arrays = dict[str, np.ndarray]


def split_matrix(shape: tuple[int, ...], rows: int, columns: int) -> Iterator[tuple[slice, slice]]:
    """Yield the indices of the shards of a matrix."""
    height, width = shape[0] // rows, shape[1] // columns
    for i in range(rows):
        for j in range(columns):
            yield slice(i * height, (i + 1) * height), slice(j * width, (j + 1) * width)


def write_safetensors(folder: str, arrays: Arrays) -> None:
    """Write arrays in this library's format."""
    from layoutmap.checkpoint.manifest import Manifest
    from layoutmap.checkpoint.source import SavedVariable
    from layoutmap.checkpoint.step_writer import StepWriter, check_space_and_create_step_folder
    from layoutmap.checkpoint.storage import LocalStorage, make_random_token
    from layoutmap.checkpoint.writer import WriteTask

    token, total = make_random_token(), sum(each.nbytes for each in arrays.values())
    storage = LocalStorage(folder)
    variables = [SavedVariable(name, each.shape, each.dtype.name) for name, each in arrays.items()]
    todo: list[WriteTask] = []
    for each in variables:
        parts = [(index, arrays[each.path][index]) for index in split_matrix(each.shape, 2, 4)]
        todo.append(WriteTask(each, [index for index, _ in parts], lambda parts=parts: iter(parts)))
    manifest = Manifest(0, {"id": token}, None, {}, (), variables, {})
    with StepWriter(
        storage,
        check_space_and_create_step_folder(storage, 0, token, total),
        manifest,
        todo,
        total_bytes=total,
    ) as writer:
        writer.write_step()


def read_safetensors(folder: str, shape: tuple[int, int]) -> Arrays:
    """Read the shards of a 4x2 mesh from this library's format."""
    from layoutmap.checkpoint.reader import StepSource
    from layoutmap.checkpoint.storage import LocalStorage

    step = StepSource(LocalStorage(folder))
    return {
        f"{name}{i}": step.read(name, ix)
        for name in step.variables
        for i, ix in enumerate(split_matrix(shape, 4, 2))
    }


def make_zarr_functions(codecs: list[Any], inner: bool) -> tuple[Callable[..., None], Callable[..., Arrays]]:
    """Return functions that write and read with tensorstore."""

    def make_spec(path: str, shape: tuple[int, int] | None) -> dict[str, Any]:
        spec: dict[str, Any] = {"driver": "zarr3", "kvstore": {"driver": "file", "path": path}}
        if shape is not None:
            part = [shape[0] // 2, shape[1] // 4]
            used = codecs
            if inner:
                chunk = [part[0] // 8, part[1] // 8]
                used = [
                    {"name": "sharding_indexed", "configuration": {"chunk_shape": chunk, "codecs": codecs}}
                ]
            spec["metadata"] = {
                "shape": shape,
                "data_type": "float32",
                "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": part}},
                "codecs": used,
            }
        return spec

    def write(folder: str, arrays: Arrays) -> None:
        import tensorstore as ts

        opened = {n: ts.open(make_spec(f"{folder}/{n}", a.shape), create=True) for n, a in arrays.items()}
        waiting = [
            opened[name].result()[index].write(array[index], can_reference_source_data_indefinitely=True)
            for name, array in arrays.items()
            for index in split_matrix(array.shape, 2, 4)
        ]
        for each in waiting:
            each.result()

    def read(folder: str, shape: tuple[int, int]) -> Arrays:
        import tensorstore as ts

        opened = {n: ts.open(make_spec(f"{folder}/{n}", None), open=True) for n in os.listdir(folder)}
        waiting = {
            f"{n}{i}": o.result()[ix].read()
            for n, o in opened.items()
            for i, ix in enumerate(split_matrix(shape, 4, 2))
        }
        return {name: each.result() for name, each in waiting.items()}

    return write, read


FORMATS: dict[str, tuple[Callable[..., None], Callable[..., Arrays]]] = {
    "safetensors, xxh3": (write_safetensors, read_safetensors),
    "zarr3": make_zarr_functions(NO_CRC, False),
    "zarr3, crc32c": make_zarr_functions(CRC, False),
    "zarr3 sharded": make_zarr_functions(NO_CRC, True),
    "zarr3 sharded, crc32c": make_zarr_functions(CRC, True),
}


def flip_bit(name: str, folder: str, shape: tuple[int, int], expected: Arrays) -> str:
    """Flip one bit of a checkpoint, read it, and describe the result."""
    largest = max((p for p in Path(folder).rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    with open(largest, "r+b") as file:
        file.seek(largest.stat().st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
    try:
        arrays = FORMATS[name][1](folder, shape)
    except Exception as error:
        return f"found: {type(error).__name__}"
    same = all(arrays[path].tobytes() == each.tobytes() for path, each in expected.items())
    return "no difference" if same else "SILENT"


def main() -> None:
    """Run the benchmark."""
    parser = make_parser(__doc__)
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory")
    args = parser.parse_args()
    shape = (max(64, (args.mib << 20) // NUM_ARRAYS // 4 // WIDTH // 64 * 64), WIDTH)
    random = np.random.default_rng(0)
    arrays = {f"w{i:02d}": random.random(shape, np.float32) for i in range(NUM_ARRAYS)}
    expected = {f"{n}{i}": a[ix] for n, a in arrays.items() for i, ix in enumerate(split_matrix(shape, 4, 2))}
    writes: dict[str, list[float]] = {name: [] for name in FORMATS}
    reads: dict[str, list[float]] = {name: [] for name in FORMATS}
    bits: dict[str, str] = {}
    root = tempfile.mkdtemp(dir=args.directory)
    try:
        for number in range(args.rounds):
            for name, (write, read) in FORMATS.items():
                print(f"\r\x1b[Kround {number + 1}/{args.rounds} {name}", end="", file=sys.stderr)
                folder = f"{root}/{number} {name}"
                os.makedirs(folder)
                os.sync()
                start = time.perf_counter()
                write(folder, arrays)
                sync_tree(folder)
                writes[name].append(time.perf_counter() - start)
                seconds, shards = time_call(lambda read=read, folder=folder: read(folder, shape))
                reads[name].append(seconds)
                assert all(np.array_equal(shards[path], each) for path, each in expected.items())
                del shards
                if name not in bits:
                    bits[name] = flip_bit(name, folder, shape, expected)
                shutil.rmtree(folder)
    finally:
        shutil.rmtree(root)
    print("\r\x1b[K", end="", file=sys.stderr)
    total = sum(each.nbytes for each in arrays.values())
    print(f"{total >> 20} MiB in {NUM_ARRAYS} arrays, {args.rounds} rounds, medians")
    print(
        f"{'format':<22} {'write s':>8} {'GB/s':>6} {'ratio':>6} {'read s':>8} {'GB/s':>6} {'ratio':>6}  flipped bit"
    )
    first = next(iter(FORMATS))
    for name in FORMATS:
        write, read = statistics.median(writes[name]), statistics.median(reads[name])
        print(
            f"{name:<22} {write:>8.2f} {total / write / 1e9:>6.2f} {statistics.median(writes[first]) / write:>6.2f} "
            f"{read:>8.2f} {total / read / 1e9:>6.2f} {statistics.median(reads[first]) / read:>6.2f}  {bits[name]}"
        )
    show_checksums(next(iter(arrays.values())))


def show_checksums(array: np.ndarray) -> None:
    """Print the best of 5 speeds of checksums on one core, and of numpy's sum of the same bytes."""
    data = array.reshape(-1).view(np.uint8)
    functions: dict[str, Callable[[], object]] = {
        "xxh3": lambda: xxhash.xxh3_64_intdigest(data.data),
        "zlib crc32": lambda: zlib.crc32(data.data),
        "numpy sum": lambda: array.sum(),
    }
    for name, function in functions.items():
        seconds = min(time_call(function)[0] for _ in range(5))
        print(f"{name:<22} {data.size / seconds / 1e9:.1f} GB/s, one core")


if __name__ == "__main__":
    main()
