"""How much is read for a shard, whatever the mesh that its variable was saved on."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from checkpoint.test_format import random_values, saved
from core.test_blocks import cuts, indices
from hypothesis import given
from hypothesis import strategies as st

from layoutmap.checkpoint.chunk_table import Chunk, build_chunk_tables, chunk_to_json
from layoutmap.checkpoint.chunks import choose_chunk_shape, choose_max_chunk_bytes, split_shard_into_chunks
from layoutmap.checkpoint.source import SavedVariable
from layoutmap.core.blocks import (
    Index,
    assemble_blocks,
    compute_block_shape,
    intersect_blocks,
    make_full_index,
)
from layoutmap.core.layout import Layout
from layoutmap.core.mesh import Mesh

PROCESSES = ("core",)
BOTH = ("x", "y")
SPECS = ((None, None), ("x", None), (None, "x"), ("x", "y"), ("y", "x"), (BOTH, None), (None, BOTH))
MIB = 1 << 20


def chunks_saved(shape: tuple[int, ...], itemsize: int, layout: Layout) -> list[Index]:
    """The chunks of a variable that is saved in a layout."""
    num_bytes = math.prod(shape) * itemsize
    most = choose_max_chunk_bytes(num_bytes, num_bytes)
    shards = {str(i): i for i in (layout.shard_slices(shape, d) for d in range(layout.mesh.size))}
    return [
        chunk
        for index in shards.values()
        for chunk in split_shard_into_chunks(
            index, choose_chunk_shape(compute_block_shape(index), itemsize, most, shape)
        )
    ]


def layouts_of(devices: int) -> st.SearchStrategy[Layout]:
    """Layouts of a matrix on meshes of powers of two, of at most so many devices."""
    sizes = [(2**i, 2**j) for i in range(6) for j in range(6) if 2 ** (i + j) <= devices]
    return st.builds(
        lambda size, specs: Layout(specs, Mesh(None, f"x={size[0]},y={size[1]}")),
        st.sampled_from(sizes),
        st.sampled_from(SPECS),
    )


@pytest.mark.parametrize(("least_bytes", "devices"), [(4 * MIB, 8), (16 * MIB, 16)])
@given(data=st.data())
def test_a_shard_on_another_mesh_consists_of_chunks(
    least_bytes: int, devices: int, data: st.DataObject
) -> None:
    """For a shard of a matrix of 4 MiB on 8 devices, or 16 MiB on 16, no byte more is read than it has."""
    shape = data.draw(
        st.sampled_from([(1024, 1024), (4096, 1024), (512, 8192), (4096, 4096), (11008, 4096), (32000, 512)])
    )
    itemsize = data.draw(st.sampled_from((1, 2, 4)))
    while math.prod(shape) * itemsize < least_bytes:
        shape = (2 * shape[0], shape[1])
    first, second = data.draw(layouts_of(devices)), data.draw(layouts_of(devices))
    wanted = second.shard_slices(shape, data.draw(st.integers(0, second.mesh.size - 1)))
    read = [chunk for chunk in chunks_saved(shape, itemsize, first) if intersect_blocks(chunk, wanted)]

    assert math.prod(compute_block_shape(wanted)) == sum(
        math.prod(compute_block_shape(chunk)) for chunk in read
    )


@pytest.mark.parametrize(
    ("shape", "axis"),
    [
        ((50257, 768), 1),
        ((4096, 32, 128), 1),
        ((8, 1024, 3584), 0),
        ((3, 3, 512, 512), 3),
        ((5_000_001,), None),
    ],
)
def test_chunks_of_other_shapes(shape: tuple[int, ...], axis: int | None) -> None:
    """Odd axes, heads, experts and convolutions are divided where 8 devices divide them, in chunks of some size."""
    mesh = Mesh(None, "x=8")
    plain = Layout.replicated(mesh, len(shape))
    chunks = chunks_saved(shape, 4, plain)
    sharded = Layout([("x" if each == axis else None) for each in range(len(shape))], mesh)
    wanted = sharded.shard_slices(shape, 3)
    read = [chunk for chunk in chunks if intersect_blocks(chunk, wanted)]

    assert math.prod(compute_block_shape(wanted)) == sum(
        math.prod(compute_block_shape(chunk)) for chunk in read
    )
    assert len(chunks) <= 1024
    assert (1 << 14) <= min(4 * math.prod(compute_block_shape(chunk)) for chunk in chunks)


def checked(chunks: list[Index], shape: tuple[int, ...]) -> None:
    """Check the chunks of a variable as a manifest does, between two others."""
    found = {"a": [make_full_index(shape)], "w": chunks, "z": [make_full_index(shape)]}
    rows = [[chunk_to_json(Chunk(0, 0, each, "0" * 16)) for each in own] for own in found.values()]
    build_chunk_tables([SavedVariable(path, shape, "uint8") for path in found], rows, [math.prod(shape)])


@given(st.data(), st.lists(st.integers(0, 6), max_size=4).map(tuple))
def test_chunks_that_cover_their_variable_are_accepted(data: st.DataObject, shape: tuple[int, ...]) -> None:
    """Be they a grid or none, and in any order."""
    checked(data.draw(cuts(shape)), shape)


@given(st.data(), st.lists(st.integers(1, 6), max_size=4).map(tuple))
def test_chunks_that_do_not_are_refused(data: st.DataObject, shape: tuple[int, ...]) -> None:
    """A chunk that is lost, there twice, longer, shorter or elsewhere is found, also where all sizes add up."""
    chunks = data.draw(cuts(shape))
    lost = data.draw(st.integers(0, len(chunks) - 1))
    others = chunks[:lost] + chunks[lost + 1 :]
    elsewhere = data.draw(st.lists(indices(shape), max_size=2).filter(lambda new: new != [chunks[lost]]))
    filling = [each for each in elsewhere if all(compute_block_shape(each))]
    if [chunks[lost]] == filling:
        filling *= 2

    with pytest.raises(ValueError, match=r"w: (no|\d+) chunks contain \["):
        checked(others + filling, shape)


def test_bytes_read_are_those_of_the_shards(tmp_path: Path) -> None:
    """What a step says that it has read is what the shards have, saved by rows and read by columns."""
    value = random_values((1024, 1024), "float32")
    rows, columns = (Layout(specs, Mesh(None, "x=8")) for specs in (("x", None), (None, "x")))
    step = saved(str(tmp_path), {"w": value}, {"w": rows})
    indices = [columns.shard_slices(value.shape, device) for device in range(8)]
    blocks = [(index, step.read("w", index)) for index in indices]

    assert value.nbytes == step.bytes_read
    assert np.array_equal(value, assemble_blocks(blocks, value.shape, value.dtype))


def test_a_chunk_of_which_parts_are_wanted_is_read_once(tmp_path: Path) -> None:
    """Shards smaller than a chunk, wanted one after another, are one read."""
    value = random_values((64, 64), "float32")
    step = saved(str(tmp_path), {"w": value}, {"w": Layout.replicated(Mesh(None, "x=8"), 2)})
    blocks = [step.read("w", (slice(8 * i, 8 * i + 8), slice(0, 64))) for i in range(8)]

    assert np.array_equal(value, np.concatenate(blocks))
    assert value.nbytes == step.bytes_read


@pytest.mark.parametrize(("room", "times"), [(0, 2), (64 * 64 * 2, 1.5), (64 * 64 * 4, 1)])
def test_what_was_checked_is_read_once_while_there_is_room(tmp_path: Path, room: int, times: float) -> None:
    """Of shards that are checked and then read, as many are read once as fit into the room."""
    value = random_values((64, 64), "float32")
    layout = Layout(("x", None), Mesh(None, "x=8"))
    step = saved(str(tmp_path), {"w": value}, {"w": layout})
    indices = [layout.shard_slices(value.shape, device) for device in range(8)]
    step.cache_bytes = room
    for index in indices:
        step.verify_block("w", index)
    first, second = ([step.read("w", index) for index in indices] for _ in range(2))

    assert (times + 1) * value.nbytes == step.bytes_read
    assert np.array_equal(value, np.concatenate(first))
    assert np.array_equal(value, np.concatenate(second))


@pytest.mark.parametrize(("is_copied", "times"), [(True, 2), (False, 1)])
def test_a_local_file_is_read_twice_if_its_values_are_copied(
    tmp_path: Path, is_copied: bool, times: int
) -> None:
    """New memory for a copy takes longer than a second read from the page cache."""
    value = random_values((64, 64), "float32")
    step = saved(str(tmp_path), {"w": value}, {"w": Layout.replicated(Mesh(None, "x=2"), 2)})
    step.allow_cache(None, is_copied=is_copied)
    step.verify_block("w")
    step.read("w")
    assert times * value.nbytes == step.bytes_read


def test_memory_that_is_read_into_is_aligned(tmp_path: Path) -> None:
    """Values begin where JAX and TensorFlow can keep them without a copy, and nobody else has their memory."""
    values = {name: random_values((n, 7), "float32", n) for n, name in enumerate("abc", 1)}
    plain = {name: Layout.replicated(Mesh(None, "x=2"), 2) for name in values}
    step = saved(str(tmp_path), values, plain)
    found = [step.read(name) for name in values for _ in range(2)]

    assert [0] * 6 == [each.ctypes.data % 64 for each in found]
    assert not any(np.shares_memory(a, b) for a in found for b in found if a is not b)
    assert all(each.flags.c_contiguous and each.flags.writeable for each in found)
