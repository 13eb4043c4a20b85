"""What is written in chunks is read back in any other blocks, bit for bit."""

from __future__ import annotations

import concurrent.futures.thread
import tempfile
from pathlib import Path

import pytest
from checkpoints import all_layouts, random_values, saved
from hypothesis import given
from hypothesis import strategies as st

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
