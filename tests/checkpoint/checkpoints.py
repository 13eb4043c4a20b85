"""Checkpoints of arrays for tests, written as a program would write them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from layoutmap.checkpoint.manifest import NAME, Manifest, manifest_to_bytes
from layoutmap.checkpoint.reader import StepSource
from layoutmap.checkpoint.source import SavedVariable
from layoutmap.checkpoint.storage import LocalStorage, make_random_token
from layoutmap.checkpoint.writer import WriteTask, write_process_part
from layoutmap.core.layout import Layout
from layoutmap.core.mesh import Mesh
from layoutmap.core.variables import Kind


def saved(
    directory: str,
    values: Mapping[str, np.ndarray],
    layouts: Mapping[str, Layout],
    step: int = 0,
    *,
    kinds: Mapping[str, Kind] | None = None,
    aliases: Mapping[str, Sequence[str]] | None = None,
    metadata: Any = None,
) -> StepSource:
    """Save arrays as one process would, in these layouts, and open what was saved."""
    storage, token = LocalStorage(directory), make_random_token()
    variables = [
        SavedVariable(
            path,
            array.shape,
            array.dtype.name,
            (kinds or {}).get(path, Kind.WEIGHT),
            tuple((aliases or {}).get(path, ())),
            tuple(None if s == "unsharded" else s for s in layouts[path].sharding_specs),
        )
        for path, array in values.items()
    ]
    todo: list[WriteTask] = []
    for each in variables:
        layout = layouts[each.path]
        indices = {str(i): i for i in (layout.shard_slices(each.shape, d) for d in range(layout.mesh.size))}
        shards = [(index, values[each.path][index]) for index in reversed(indices.values())]
        todo.append(WriteTask(each, list(indices.values()), lambda shards=shards: iter(shards)))
    folder = storage.create_step_folder(step, token)
    part = write_process_part(storage, folder, 0, todo, sum(array.nbytes for array in values.values()))
    meshes = [layout.mesh for layout in layouts.values()]
    facts = {
        "id": token,
        "writer": "tests",
        "mesh": dict(zip(meshes[0].dim_names, meshes[0].shape, strict=True)),
    }
    manifest = Manifest(step, facts, metadata, {}, part.files, variables, part.chunks)
    with storage.create_file(folder, NAME) as sink:
        sink.write(manifest_to_bytes(manifest))
    storage.commit_step(step, token)
    return StepSource(storage, step)


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
