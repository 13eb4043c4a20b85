"""What is written in chunks is read back in any other blocks, bit for bit."""

from __future__ import annotations

import concurrent.futures.thread
import tempfile
from pathlib import Path

import numpy as np
import pytest
from checkpoints import all_layouts, random_values, saved
from hypothesis import given
from hypothesis import strategies as st

from layoutmap.checkpoint import chunks
from layoutmap.checkpoint.manifest import compute_xxh3
from layoutmap.checkpoint.storage import LocalStorage
from layoutmap.core.layout import Layout
from layoutmap.core.mesh import Mesh

DTYPES = ("float32", "bfloat16", "float8_e4m3fn", "int8", "int4", "bool", "complex128", "uint16", "int64")


@given(data=st.data(), dtype=st.sampled_from(DTYPES))
def test_any_block_of_any_layout_is_read_back(data: st.DataObject, dtype: str) -> None:
    """Whatever the layout that was saved, each shard of any other layout has the bits of the global value."""
    rank = data.draw(st.integers(0, 3))
    shape = tuple(data.draw(st.sampled_from((0, 12, 24))) for _ in range(rank))
    meshes = Mesh(None, "a=2,b=3"), Mesh(None, "c=4,d=3")
    first, second = (data.draw(st.sampled_from(list(all_layouts(mesh, rank)))) for mesh in meshes)
    value = random_values(shape, dtype)
    with tempfile.TemporaryDirectory() as directory:
        step = saved(directory, {"x": value}, {"x": first})
        for device in range(second.mesh.size):
            index = second.shard_slices(shape, device)
            found = step.read("x", index)
            assert (found.dtype, found.tobytes()) == (value.dtype, value[index].tobytes())


def test_a_save_ends_well_while_the_program_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When Python starts no thread any more, what is left of a save is written all the same."""
    monkeypatch.setattr(concurrent.futures.thread, "_shutdown", True)
    value = random_values((512, 2048), "float32")
    layout = Layout([None, "a"], Mesh(None, "a=2"))
    step = saved(str(tmp_path), {"x": value}, {"x": layout})
    monkeypatch.undo()
    assert value.tobytes() == step.read("x").tobytes()


@pytest.mark.parametrize("first", ["empty", "full"])
def test_a_variable_without_elements_has_a_checksum_of_its_own(
    tmp_path: Path, first: str, num_files: int
) -> None:
    """It begins at the byte at which the next one begins, in one file and in several."""
    values = {"empty": np.empty((0, 8), np.float32), "full": random_values((8, 8), "float32")}
    values = {path: values[path] for path in sorted(values, key=lambda path: path != first)}
    values |= {f"{path} {n}": value for n in range(4) for path, value in values.items()}
    layouts = dict.fromkeys(values, Layout([None, "a"], Mesh(None, "a=4")))
    step = saved(str(tmp_path), values, layouts)

    assert num_files == len(step.manifest.files)
    assert [] == list(step.iterate_damage())
    assert {compute_xxh3(b"")} == {
        chunk.checksum for n in range(4) for chunk in step.manifest.chunks[f"empty {n}"]
    }
    assert all(np.array_equal(value, step.read(path)) for path, value in values.items())


def test_a_process_writes_several_files_of_about_equal_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They differ by a chunk at most, any reader of safetensors reads them, and equal values give equal bytes."""
    from safetensors.numpy import load_file

    monkeypatch.setattr(LocalStorage, "write_files", 3)
    values = {f"w{n}": random_values((256 * n, 4096), "float32", n) for n in range(1, 9)}
    layouts = dict.fromkeys(values, Layout([None, "a"], Mesh(None, "a=4")))
    steps = [saved(str(tmp_path / name), values, layouts) for name in "ab"]
    folders = [tmp_path / name / "step-0" for name in "ab"]
    names = [f"data-00000{k}.safetensors" for k in ("", "-01", "-02")]
    sizes = [(folders[0] / name).stat().st_size for name in names]
    found = {key: value for name in names for key, value in load_file(folders[0] / name).items()}

    assert {*names, "manifest.json"} == {path.name for path in folders[0].iterdir()}
    assert max(sizes) - min(sizes) < chunks.MAX_CHUNK_BYTES
    assert sum(value.nbytes for value in values.values()) == sum(value.nbytes for value in found.values())
    assert all(value.tobytes() == steps[0].read(path).tobytes() for path, value in values.items())
    assert all((folders[0] / name).read_bytes() == (folders[1] / name).read_bytes() for name in names)
    assert [list(step.manifest.chunks["w3"]) for step in steps[:1]] == [list(steps[1].manifest.chunks["w3"])]


def test_a_large_checkpoint_has_chunks_of_a_mebibyte() -> None:
    """From half a gibibyte on, a variable of it is divided into chunks of that size, and not of an eighth of it."""
    assert [1 << 16, 1 << 20, 1 << 20, 1 << 23] == [
        chunks.choose_max_chunk_bytes(variable_bytes, total_bytes)
        for variable_bytes, total_bytes in (
            (1 << 22, 1 << 22),
            (1 << 22, 1 << 29),
            (1 << 27, 1 << 30),
            (1 << 33, 1 << 34),
        )
    ]
