"""Files of safetensors that others wrote: each block in the bytes it needs, and what contradicts itself is refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from layoutmap.checkpoint.foreign import open_checkpoint_source
from layoutmap.checkpoint.foreign.safetensors import SafetensorsSource
from layoutmap.core.errors import CheckpointError

DTYPES = ("float32", "bfloat16", "float8_e4m3fn", "int8", "bool", "uint16", "int64", "float64")


def raw(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    """A file whose header is any text."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


def entry(begin: int, end: int, shape: tuple[Any, ...] = (2,), dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


def sharded(folder: Path, files: Mapping[str, Mapping[str, np.ndarray]], index: Any = None) -> Path:
    """A folder as Hugging Face's libraries write it."""
    folder.mkdir()
    for name, tensors in files.items():
        save_file(dict(tensors), folder / name, metadata={"format": "pt"})
    weight_map = {tensor: name for name, tensors in files.items() for tensor in tensors}
    text = json.dumps({"metadata": {}, "weight_map": weight_map if index is None else index})
    (folder / "model.safetensors.index.json").write_text(text)
    return folder


@given(data=st.data(), dtype=st.sampled_from(DTYPES))
def test_any_block_has_the_bits_that_were_written(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, dtype: str
) -> None:
    """Of any tensor that the library safetensors wrote, any block is read with its bits."""
    import ml_dtypes

    shape = tuple(data.draw(st.lists(st.sampled_from((0, 1, 3, 8)), max_size=3)))
    values = np.random.default_rng(0).integers(-3, 4, shape)
    array = np.asarray(values).astype(getattr(ml_dtypes, dtype, dtype))
    file = tmp_path_factory.mktemp("one") / "x.safetensors"
    save_file({"before": np.ones(3, "int8"), "x": array}, file)
    ends = [sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in shape]
    index = tuple(slice(start, stop) for start, stop in ends)

    found = open_checkpoint_source(file).read("x", index)

    assert (array.dtype, array[index].shape, array[index].tobytes()) == (
        found.dtype,
        found.shape,
        found.tobytes(),
    )


@pytest.mark.parametrize("index", [np.s_[3:5, :], np.s_[:, 512:1024], np.s_[7:8, 256:512]])
def test_only_the_bytes_of_a_block_are_read(tmp_path: Path, index: tuple[slice, ...]) -> None:
    """A block of rows or of columns costs its own bytes, and no more."""
    array = np.arange(16 * 1024, dtype="float32").reshape(16, 1024)
    save_file({"x": array}, tmp_path / "x.safetensors")
    source = SafetensorsSource(tmp_path)
    before = source.bytes_read

    found = source.read("x", index)

    assert (array[index].tolist(), array[index].nbytes) == (found.tolist(), source.bytes_read - before)


def test_narrow_columns_are_read_in_slabs(tmp_path: Path) -> None:
    """Runs of a few bytes are read with what is between them, in pieces of bounded size, and have their bits."""
    array = np.arange(3 * 5000 * 100, dtype="float32").reshape(3, 5000, 100)
    save_file({"x": array}, tmp_path / "x.safetensors")
    source = SafetensorsSource(tmp_path)

    found = source.read("x", np.s_[1:3, 10:4990, 7:9])

    assert array[1:3, 10:4990, 7:9].tobytes() == found.tobytes()
    assert source.bytes_read < array.nbytes


def test_a_folder_of_several_files_is_one_source(tmp_path: Path) -> None:
    """The tensors of all files of an index are there, whether the folder is named, the index, or one has no index."""
    one, two = {"a": np.ones((2, 2), "float32")}, {"b": np.zeros(3, "int8")}
    folder = sharded(tmp_path / "m", {"m-1.safetensors": one, "m-2.safetensors": two})
    named = [open_checkpoint_source(folder), open_checkpoint_source(folder / "model.safetensors.index.json")]
    (folder / "model.safetensors.index.json").unlink()
    named.append(open_checkpoint_source(folder))

    assert [{"a": (2, 2), "b": (3,)}] * 3 == [
        {n: v.shape for n, v in each.variables.items()} for each in named
    ]
    assert f"<SafetensorsSource {folder}: 2 tensors in 2 files, no checksums>" == repr(named[0])


TWO = {"a": entry(0, 8), "b": entry(8, 16)}
LIES: dict[str, tuple[Callable[[Path], object], str]] = {
    "empty": (lambda p: p.write_bytes(b""), "not a safetensors file, or it is truncated"),
    "huge header": (lambda p: raw(p, TWO, bytes(16), 1 << 62), "the header has 4611686018427387904 bytes"),
    "no JSON": (lambda p: raw(p, b"{]"), "its header is not JSON"),
    "deep JSON": (lambda p: raw(p, b"[" * 100_000), "its header is not JSON"),
    "a list": (lambda p: raw(p, []), "its header is not a JSON object"),
    "truncated": (lambda p: raw(p, TWO, bytes(15)), "the file is truncated"),
    "too long": (lambda p: raw(p, TWO, bytes(17)), "the file has more bytes than its header lists"),
    "outside": (lambda p: raw(p, {"a": entry(8, 16)}, bytes(16)), "'a' leaves a gap"),
    "overlap": (lambda p: raw(p, {"a": entry(0, 8), "b": entry(4, 12)}, bytes(12)), "'b' overlaps 'a'"),
    "gap": (lambda p: raw(p, {"a": entry(0, 8), "b": entry(12, 20)}, bytes(20)), "leaves a gap after 'a'"),
    "shape": (lambda p: raw(p, {"a": entry(0, 8, (3,))}, bytes(8)), "its byte count contradicts its shape"),
    "huge shape": (
        lambda p: raw(p, {"a": entry(0, 8, (1 << 62, 1 << 62))}, bytes(8)),
        "contradicts its shape",
    ),
    "negative": (lambda p: raw(p, {"a": entry(0, 8, (-2,))}, bytes(8)), "its entry is invalid"),
    "bool": (lambda p: raw(p, {"a": entry(0, 8, (True, 2))}, bytes(8)), "its entry is invalid"),
    "no entry": (lambda p: raw(p, {"a": None}), "its entry is invalid"),
    "dtype": (lambda p: raw(p, {"a": entry(0, 8, dtype="F6_E2M3")}, bytes(8)), "unknown dtype 'F6_E2M3'"),
    "twice": (lambda p: raw(p, b'{"a": 1, "a": 2}'), "its header has 'a' twice"),
}


@pytest.mark.parametrize("case", LIES)
def test_a_header_that_lies_is_refused(tmp_path: Path, case: str) -> None:
    """A file that is truncated, or whose header contradicts it or itself, is refused by name before a value is read."""
    make, what = LIES[case]
    make(tmp_path / "x.safetensors")

    with pytest.raises(CheckpointError) as raised:
        open_checkpoint_source(tmp_path / "x.safetensors")

    assert [True] * 4 == [
        text in str(raised.value) for text in (what, str(tmp_path / "x.safetensors"), "\n  why ", "\n  fix ")
    ]


INDEXES: dict[str, tuple[Any, str]] = {
    "missing file": (
        {"a": "m-1.safetensors", "b": "m-3.safetensors"},
        "m-3.safetensors: the file is missing",
    ),
    "missing tensor": ({"a": "m-1.safetensors", "c": "m-2.safetensors"}, "c: the index names a tensor"),
    "other file": ({"a": "m-2.safetensors", "b": "m-2.safetensors"}, "a: the index names a tensor"),
    "outside": ({"a": "../m-1.safetensors"}, "the index names the file"),
    "no map": ([], "the index has no weight_map"),
}


@pytest.mark.parametrize("case", INDEXES)
def test_an_index_that_does_not_fit_its_files_is_refused(tmp_path: Path, case: str) -> None:
    """An index that names a file or a tensor that is not there, or a file elsewhere, is refused by name."""
    index, what = INDEXES[case]
    one, two = {"a": np.ones(2, "float32")}, {"b": np.ones(2, "float32")}
    folder = sharded(tmp_path / "m", {"m-1.safetensors": one, "m-2.safetensors": two}, index)

    with pytest.raises(CheckpointError) as raised:
        open_checkpoint_source(folder)

    assert what in str(raised.value)


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    """Which of two tensors of one name is meant cannot be known."""
    for name in ("m-1.safetensors", "m-2.safetensors"):
        save_file({"a": np.ones(2, "float32")}, tmp_path / name)

    with pytest.raises(CheckpointError, match="'a' appears twice"):
        open_checkpoint_source(tmp_path)


def test_a_file_that_is_truncated_later_is_refused(tmp_path: Path) -> None:
    """A file that loses bytes after it was opened is refused when it is checked, and when it is read."""
    file = tmp_path / "x.safetensors"
    save_file({"x": np.ones(8, "float32")}, file)
    source = open_checkpoint_source(file)
    file.write_bytes(file.read_bytes()[:-4])

    with pytest.raises(CheckpointError, match="the size of the file has changed"):
        source.verify_block("x")
    with pytest.raises(CheckpointError, match="the file is truncated"):
        source.read("x")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "x.ckpt"])
def test_a_pickle_is_refused(tmp_path: Path, name: str) -> None:
    """A pickle is not opened, named or in a folder, and the fix is to convert it."""
    (tmp_path / name).write_bytes(b"cos\nsystem\n(S'exit 1'\ntR.")

    for path in (tmp_path / name, tmp_path):
        with pytest.raises(CheckpointError, match=r"(?s)pickles are refused.*never code.*checkpoint convert"):
            open_checkpoint_source(path)


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    """A file of another kind is refused with what is read, an empty folder as one without steps."""
    (tmp_path / "notes.txt").write_text("none")

    with pytest.raises(CheckpointError, match="the format of this checkpoint is not supported"):
        open_checkpoint_source(tmp_path / "notes.txt")
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        open_checkpoint_source(tmp_path)
    save_file({"x": np.ones(8, "float32")}, tmp_path / "x.safetensors")
    with pytest.raises(CheckpointError, match="leave step out"):
        open_checkpoint_source(tmp_path, step=3)
