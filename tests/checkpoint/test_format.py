"""What is written in chunks is read back in any other blocks, bit for bit."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from layoutmap.checkpoint.manifest import NAME, Manifest, manifest_to_bytes
from layoutmap.checkpoint.reader import Step
from layoutmap.checkpoint.source import SavedVariable
from layoutmap.checkpoint.storage import LocalStorage, new_token
from layoutmap.checkpoint.writer import ToWrite, write_part
from layoutmap.core.layout import Layout
from layoutmap.core.mesh import Mesh

DTYPES = ("float32", "bfloat16", "float8_e4m3fn", "int8", "int4", "bool", "complex128", "uint16", "int64")


def saved(directory: str, values: dict[str, np.ndarray], layouts: dict[str, Layout], step: int = 0) -> Step:
    """Save arrays as one process would, in these layouts, and open what was saved."""
    storage, token = LocalStorage(directory), new_token()
    variables = [SavedVariable(path, array.shape, array.dtype.name) for path, array in values.items()]
    todo: list[ToWrite] = []
    for each in variables:
        layout = layouts[each.path]
        indices = {str(i): i for i in (layout.shard_slices(each.shape, d) for d in range(layout.mesh.size))}
        shards = [(index, values[each.path][index]) for index in reversed(indices.values())]
        todo.append(ToWrite(each, list(indices.values()), lambda shards=shards: iter(shards)))
    folder = storage.begin(step, token)
    part = write_part(storage, folder, 0, todo, sum(array.nbytes for array in values.values()))
    manifest = Manifest(step, {"id": token}, None, {}, part.files, variables, part.chunks)
    with storage.create(folder, NAME) as sink:
        sink.write(manifest_to_bytes(manifest))
    storage.commit(step, token)
    return Step(storage, step)


def random_values(shape: tuple[int, ...], dtype: str, seed: int = 0) -> np.ndarray:
    import ml_dtypes

    raw = np.random.default_rng(seed).integers(-7, 8, shape)
    return np.asarray(raw).astype(getattr(ml_dtypes, dtype, dtype))


def all_layouts(mesh: Mesh, rank: int) -> Iterator[Layout]:
    """The layouts in which each axis is sharded over at most one dim."""
    for specs in itertools.product((None, *mesh.dim_names), repeat=rank):
        used = [dim for dim in specs if dim is not None]
        if len(used) == len({*used}):
            yield Layout(specs, mesh)


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
