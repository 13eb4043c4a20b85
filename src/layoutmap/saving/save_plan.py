"""Plan a save: all processes agree on the step, its manifest, and the process that writes each shard.

plan_save --agree--> SavePlan --begin_step--> StepWriter --write_step--> the step
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from layoutmap.adapters import CheckpointAdapter, get_model_adapter, require_capability
from layoutmap.adapters.data_states import read_data_state
from layoutmap.adapters.protocol import StoredVariable
from layoutmap.checkpoint.lineage import (
    StepHistory,
    StepLineage,
    convert_lineage_to_manifest_entries,
    make_step_lineage,
)
from layoutmap.checkpoint.manifest import Manifest
from layoutmap.checkpoint.remote import open_storage
from layoutmap.checkpoint.source import SavedVariable
from layoutmap.checkpoint.states import encode_state
from layoutmap.checkpoint.step_writer import StepWriter, check_space_and_create_step_folder
from layoutmap.checkpoint.storage import MAX_STEP, Storage, make_random_token
from layoutmap.checkpoint.writer import WriteTask
from layoutmap.core.arguments import as_int
from layoutmap.core.blocks import Index, group_devices_by_shard, make_full_index
from layoutmap.core.errors import CheckpointError
from layoutmap.core.layout import UNSHARDED, Layout
from layoutmap.core.mesh import Mesh
from layoutmap.core.variables import Assignment, VariableSpec
from layoutmap.engines import Engine, get_engine
from layoutmap.engines.agreement import check_same_values
from layoutmap.plan.json import compute_fingerprint
from layoutmap.plan.table import PlanTable
from layoutmap.scope.process_group import MeshProcesses, check_same_save_arguments


@dataclass(frozen=True)
class SavePlan:
    """Plan one step of a checkpoint that several processes write together.

    Args:
        storage: The directory of the checkpoint.
        group: The processes that write.
        manifest: The manifest without its id, files, and chunks; equal in all processes.
        shards: The shards that this process writes.
        own_states: Encoded states of this process: its random generators and data iterator.
        total_bytes: Size of all variables, of all processes.
    """

    storage: Storage
    group: MeshProcesses
    manifest: Manifest
    shards: Sequence[WriteTask]
    own_states: Mapping[str, Any]
    total_bytes: int

    @property
    def variables(self) -> dict[str, VariableSpec]:
        """The variables that this process writes, by path."""
        saved = [each.variable for each in self.shards]
        return {v.path: VariableSpec(v.path, v.shape, v.dtype, v.kind) for v in saved}

    def begin_step(
        self,
        choose_lineage: Callable[[str], StepLineage] | None = None,
        *,
        patience_seconds: float | None = None,
    ) -> StepWriter:
        """Create the folder of the step, and return the writer of this process's part. All processes must call this.

        After this returns, no process needs a collective for the save, so `StepWriter.write_step` may run on a thread.

        Args:
            choose_lineage: Called in the first process with the id of the save, to get the lineage of the new step.
                `None`: the new step continues the step that was saved last.
            patience_seconds: See `StepWriter`.

        Raises:
            CheckpointError: The step exists already, or there is not enough space. All processes raise it.
        """
        own_token, step = make_random_token(), self.manifest.step

        def make_folder() -> list[str]:
            lineage = choose_lineage(own_token) if choose_lineage else self._make_next_lineage(own_token)
            folder = check_space_and_create_step_folder(self.storage, step, own_token, self.total_bytes)
            return [own_token, folder, json.dumps(convert_lineage_to_manifest_entries(lineage))]

        try:
            token, folder, lineage = self.group.run_in_first_process(make_folder)
            facts = {"id": token, **json.loads(lineage), **self.manifest.facts}
            return StepWriter(
                self.storage,
                folder,
                replace(self.manifest, facts=facts),
                self.shards,
                total_bytes=self.total_bytes,
                process_index=self.group.process_index,
                num_processes=self.group.num_processes,
                states=self.own_states,
                patience_seconds=patience_seconds,
            )
        except BaseException:
            self.storage.discard_step(step, own_token)
            raise

    def _make_next_lineage(self, token: str) -> StepLineage:
        """Return the lineage of a new step that continues the step that was saved last."""
        history, step = StepHistory(self.storage), self.manifest.step
        last = history.find_last_saved_step()
        position = last if last is not None and last.step < step else None
        return make_step_lineage(step, token, position, history.read_lineages().values())


def plan_save(
    model: object,
    directory: str | os.PathLike[str],
    step: int,
    *,
    optimizer: object = None,
    data: object = None,
    metadata: object = None,
    metrics: Mapping[str, float] | None = None,
) -> SavePlan:
    """Plan a step of a checkpoint with all processes of the model, without writing anything.

    Args:
        model: See `save`.
        directory: See `save`.
        step: The number of the step.
        optimizer: See `save`.
        data: See `save`.
        metadata: See `save`.
        metrics: Numbers by which steps are compared. Those of the first process are saved.

    Raises:
        CheckpointError: Something cannot be saved, or the processes differ. All processes raise it.
    """
    adapter = require_capability(get_model_adapter(model), CheckpointAdapter, "save")
    engine = get_engine(adapter.engine_name)
    stored = list(adapter.list_stored_variables(model, optimizer))
    layouts = {each.variable.path: engine.get_layout(each.array) for each in stored}
    mesh = _find_common_mesh(engine, layouts)
    group = MeshProcesses(engine, mesh)
    storage = open_storage(directory)
    variables = [_make_saved_variable(each.variable, layouts[each.variable.path]) for each in stored]

    def make_manifest() -> tuple[Manifest, dict[str, Any]]:
        facts: dict[str, Any] = {
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            # Read the version from `sys.modules`, because importing the package here would be a circular import.
            "writer": f"layoutmap {sys.modules['layoutmap'].__version__}",
            "library": adapter.name,
            "engine": engine.name,
            "mesh": None if mesh is None else dict(zip(mesh.dim_names, mesh.shape, strict=True)),
            "plan": None if mesh is None else compute_fingerprint(_make_plan_table(stored, layouts, mesh)),
        }
        if metrics is not None:
            facts["metrics"] = encode_state(metrics, "metrics")
        settings = dict(adapter.read_state_outside_variables(model, optimizer))
        own = {"random": encode_state(settings.pop("random"), "random")}
        own |= {} if data is None else {"data": encode_state(read_data_state(data), "data")}
        states = {"settings": encode_state({"library": adapter.name} | settings, "settings")}
        number = validate_step_number(step)
        return Manifest(number, facts, encode_state(metadata, "metadata"), states, (), variables, {}), own

    manifest, own_states = group.run_in_all_processes(make_manifest, "save")
    if group.has_other_processes:
        saved = {"directory": storage.where, "step": str(manifest.step)}
        saved["metadata"] = json.dumps(manifest.metadata)
        saved |= {each.path: f"{each.shape} {each.dtype} {each.layout}" for each in variables}
        check_same_save_arguments(saved.items(), group.gather_from_processes)
        unsharded = [each for each in stored if layouts[each.variable.path] is None]
        sums = ((each.variable.path, _compute_checksum(engine, each.array)) for each in unsharded)
        check_same_values(sums, group.gather_from_processes)
    shards = _choose_shards_to_write(group, engine, stored, layouts, variables)
    total_bytes = sum(each.variable.global_bytes for each in stored)
    return SavePlan(storage, group, manifest, shards, own_states, total_bytes)


def _choose_shards_to_write(
    group: MeshProcesses,
    engine: Engine,
    stored: Sequence[StoredVariable],
    layouts: Mapping[str, Layout | None],
    variables: Sequence[SavedVariable],
) -> list[WriteTask]:
    """Return the shards that this process writes.

    Of the processes that store a shard, the one with the fewest bytes so far writes it.
    """
    loads = [0] * group.num_processes
    todo: list[WriteTask] = []
    for each, variable in zip(stored, variables, strict=True):
        own: list[Index] = []
        for holders, index, size in _iterate_distinct_shards(group, each.variable, layouts[variable.path]):
            writer = min(holders, key=loads.__getitem__)
            loads[writer] += size
            if writer == group.process_index:
                own.append(index)
        if own:
            todo.append(WriteTask(variable, own, _make_read_shard_function(engine, each.array)))
    return todo


def _iterate_distinct_shards(
    group: MeshProcesses, variable: VariableSpec, layout: Layout | None
) -> Iterator[tuple[list[int], Index, int]]:
    """Yield for each distinct shard of a variable: the processes that store it, its index, and its bytes."""
    if layout is None:
        yield [0], make_full_index(variable.shape), variable.global_bytes
        return
    processes = enumerate(group.devices_by_process)
    process_of = {device: process for process, devices in processes for device in devices}
    found = group_devices_by_shard(layout, variable.shape, process_of)
    size = variable.global_bytes // max(1, len(found))
    for index, devices in found.values():
        yield list(dict.fromkeys(process_of[each] for each in devices)), index, size


def find_model_processes(model: object) -> MeshProcesses:
    """Return the group of processes that store a model."""
    adapter = require_capability(get_model_adapter(model), CheckpointAdapter, "save")
    engine = get_engine(adapter.engine_name)
    layouts = {
        each.variable.path: engine.get_layout(each.array) for each in adapter.list_stored_variables(model)
    }
    return MeshProcesses(engine, _find_common_mesh(engine, layouts))


def _make_saved_variable(variable: VariableSpec, layout: Layout | None) -> SavedVariable:
    specs = None if layout is None else tuple(None if s == UNSHARDED else s for s in layout.sharding_specs)
    return SavedVariable(
        variable.path, variable.shape, variable.dtype, variable.kind, variable.aliases, specs
    )


def _make_read_shard_function(engine: Engine, array: object) -> Any:
    return lambda: iter(engine.iterate_shards(array, copy=False))


def _make_plan_table(
    stored: Sequence[StoredVariable], layouts: Mapping[str, Layout | None], mesh: Mesh
) -> PlanTable:
    found = [(each.variable, layouts[each.variable.path]) for each in stored]
    return PlanTable(mesh, tuple(Assignment(v, layout) for v, layout in found if layout is not None))


def _find_common_mesh(engine: Engine, layouts: Mapping[str, Layout | None]) -> Mesh | None:
    """Return the mesh of all layouts, or None if nothing is sharded. Raise if there are several meshes."""
    meshes = {layout.mesh: path for path, layout in layouts.items() if layout is not None}
    # The layouts of torch slots come from a DeviceMesh, not from the `Mesh` of the weights, so compare native meshes.
    bound = {engine.bind_mesh(mesh): (mesh, path) for mesh, path in meshes.items()} if len(meshes) > 1 else {}
    if len(bound) > 1:
        (one, path), (other, other_path) = list(bound.values())[:2]
        raise CheckpointError(
            f"{path} and {other_path} are on different meshes",
            facts={path: str(one), other_path: str(other)},
            why="the processes of one mesh save together",
            fix="move all variables to one mesh, or save the variables of each mesh as a model of their own",
        )
    mesh = next(iter(meshes), None)
    if mesh is not None and not engine.bind_mesh(mesh).local_device_ids:
        raise CheckpointError(
            f"{meshes[mesh]}: this process has no device of the variable's mesh",
            facts={"mesh": str(mesh)},
            why="only processes with devices of the mesh save the model",
            fix="call save only in processes with devices of this mesh",
        )
    return mesh


def validate_step_number(step: object) -> int:
    """Return a step number as an int, or raise if it is not an integer in the allowed range."""
    number = as_int(step)
    if number is None or not 0 <= number <= MAX_STEP:
        raise CheckpointError(
            f"step={step!r} is not a step number",
            why="a step is an integer of 0 or more with at most 18 digits",
            fix="pass the number of the training step, as in step=1000",
        )
    return number


def _compute_checksum(engine: Engine, array: object) -> int:
    from layoutmap.core.checksums import compute_checksum

    return compute_checksum(engine.to_numpy(array))
