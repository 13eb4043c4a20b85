"""Rewrite a step for other layouts, with chunks that align with the shards of another mesh.

Values go from file to file in blocks of bounded size, whatever the shards are: never is more than one block held.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from layoutmap.checkpoint.chunks import choose_chunk_shape, split_shard
from layoutmap.checkpoint.dtypes import get_numpy_dtype
from layoutmap.checkpoint.manifest import Manifest
from layoutmap.checkpoint.source import SavedVariable, Source
from layoutmap.checkpoint.step_writer import StepWriter, begin_step
from layoutmap.checkpoint.storage import Storage, make_token
from layoutmap.checkpoint.writer import Shards, WriteTask, count_bytes
from layoutmap.core.blocks import Index, compute_block_shape, find_distinct_shards
from layoutmap.core.layout import UNSHARDED, Layout
from layoutmap.core.mesh import Mesh

MAX_BLOCK_BYTES = 1 << 26
"""The maximum size of a block that is read and written at once."""


def write_relayout(
    source: Source,
    storage: Storage,
    layouts: Mapping[str, Layout],
    mesh: Mesh,
    plan: str,
    progress: Callable[[str], object] | None = None,
) -> str:
    """Write the content of a source as a step in other layouts, and return the step's folder.

    Args:
        source: A step of a checkpoint: its number, metadata and states are kept. Or files that others have written,
            which become step 0.
        storage: Where to; the step exists when this returns, and not before.
        layouts: The layout of each variable, by path.
        mesh: The mesh of the layouts.
        plan: The fingerprint of their plan.
        progress: Called with the path of each variable when it is written.

    Raises:
        CheckpointError: Values are not those that were saved, the step exists already, or it cannot be written.
    """
    manifest: Manifest | None = getattr(source, "manifest", None)
    if manifest is None:
        manifest = Manifest(0, {}, None, {}, (), (), {})
    token = make_token()
    facts: dict[str, Any] = {
        **manifest.facts,
        "id": token,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "mesh": dict(zip(mesh.dim_names, mesh.shape, strict=True)),
        "plan": plan,
    }
    variables = [replace(v, layout=_convert_specs(layouts[v.path])) for v in source.variables.values()]
    todo = [_make_write_task(source, each, layouts[each.path]) for each in variables]
    total_bytes = count_bytes(todo)
    folder = begin_step(storage, manifest.step, token, total_bytes)
    head = replace(manifest, facts=facts, variables=variables)
    with StepWriter(storage, folder, head, todo, total_bytes=total_bytes) as writer:
        writer.write(progress)
    return writer.where


def _make_write_task(source: Source, variable: SavedVariable, layout: Layout) -> WriteTask:
    itemsize = get_numpy_dtype(variable.dtype, variable.path).itemsize
    blocks: list[Index] = []
    for index, _ in find_distinct_shards(layout, variable.shape, range(layout.mesh.size)).values():
        blocks += split_shard(
            index, choose_chunk_shape(compute_block_shape(index), itemsize, MAX_BLOCK_BYTES, variable.shape)
        )

    def read() -> Shards:
        return ((index, source.read(variable.path, index)) for index in blocks)

    return WriteTask(variable, blocks, read)


def _convert_specs(layout: Layout) -> tuple[str | tuple[str, ...] | None, ...]:
    return tuple(None if spec == UNSHARDED else spec for spec in layout.sharding_specs)
