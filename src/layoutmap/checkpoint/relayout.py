"""Rewrite a step for different layouts, with chunks that align with the shards of a different mesh.

Values are read and written in blocks of bounded size, so memory for a few blocks is enough for shards of any size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from layoutmap.checkpoint.chunks import choose_chunk_shape, split_shard_into_chunks
from layoutmap.checkpoint.dtypes import get_numpy_dtype
from layoutmap.checkpoint.manifest import Manifest
from layoutmap.checkpoint.source import SavedVariable, Source
from layoutmap.checkpoint.step_writer import StepWriter, check_space_and_create_step_folder
from layoutmap.checkpoint.storage import Storage, make_random_token
from layoutmap.checkpoint.writer import ShardIterator, WriteTask, count_task_bytes
from layoutmap.core.blocks import Index, compute_block_shape, group_devices_by_shard
from layoutmap.core.layout import UNSHARDED, Layout
from layoutmap.core.mesh import Mesh

MAX_BLOCK_BYTES = 1 << 26
"""The maximum size of a block that is read and written at once."""


def write_step_with_layouts(
    source: Source,
    storage: Storage,
    layouts: Mapping[str, Layout],
    mesh: Mesh,
    plan: str,
    progress: Callable[[str], object] | None = None,
) -> str:
    """Write the content of a source as a new step with the given layouts, and return the step's folder.

    Args:
        source: A step of a checkpoint, whose number, metadata, and states are kept. Or files of another library, which
            become step 0.
        storage: The storage for the new step, which exists when this returns, and not before.
        layouts: The layout of each variable, by path.
        mesh: The mesh of the layouts.
        plan: The fingerprint of the plan with these layouts.
        progress: Called with the path of each variable when it is written.

    Raises:
        CheckpointError: Saved values are damaged, the new step exists already, or it cannot be written.
    """
    manifest: Manifest | None = getattr(source, "manifest", None)
    if manifest is None:
        manifest = Manifest(0, {}, None, {}, (), (), {})
    token = make_random_token()
    facts: dict[str, Any] = {
        **manifest.facts,
        "id": token,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "mesh": dict(zip(mesh.dim_names, mesh.shape, strict=True)),
        "plan": plan,
    }
    variables = [replace(v, layout=_get_json_specs(layouts[v.path])) for v in source.variables.values()]
    tasks = [_make_write_task(source, each, layouts[each.path]) for each in variables]
    total_bytes = count_task_bytes(tasks)
    folder = check_space_and_create_step_folder(storage, manifest.step, token, total_bytes)
    head = replace(manifest, facts=facts, variables=variables)
    with StepWriter(storage, folder, head, tasks, total_bytes=total_bytes) as writer:
        writer.write_step(progress)
    return writer.where


def _make_write_task(source: Source, variable: SavedVariable, layout: Layout) -> WriteTask:
    itemsize = get_numpy_dtype(variable.dtype, variable.path).itemsize
    blocks: list[Index] = []
    for index, _ in group_devices_by_shard(layout, variable.shape, range(layout.mesh.size)).values():
        blocks += split_shard_into_chunks(
            index, choose_chunk_shape(compute_block_shape(index), itemsize, MAX_BLOCK_BYTES, variable.shape)
        )

    def read_shards() -> ShardIterator:
        return ((index, source.read(variable.path, index)) for index in blocks)

    return WriteTask(variable, blocks, read_shards)


def _get_json_specs(layout: Layout) -> tuple[str | tuple[str, ...] | None, ...]:
    return tuple(None if spec == UNSHARDED else spec for spec in layout.sharding_specs)
