"""Plan a save: all processes agree on the step, its manifest, and the process that writes each shard.

plan_save --agree--> SavePlan --begin--> StepWriter --write--> the step
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from layoutmap.adapters import Keeping, get_model_adapter, require_capability
from layoutmap.adapters.data_states import read_state
from layoutmap.adapters.protocol import Stored
from layoutmap.checkpoint.lineage import History, SavedStep, extend_lineage, make_lineage_facts
from layoutmap.checkpoint.manifest import Manifest
from layoutmap.checkpoint.remote import open_storage
from layoutmap.checkpoint.source import SavedVariable
from layoutmap.checkpoint.states import encode_state
from layoutmap.checkpoint.step_writer import StepWriter, begin_step
from layoutmap.checkpoint.storage import MOST_STEP, Storage, make_token
from layoutmap.checkpoint.writer import WriteTask
from layoutmap.core.arguments import as_int
from layoutmap.core.blocks import Index, find_distinct_shards, make_full_index
from layoutmap.core.errors import CheckpointError
from layoutmap.core.layout import UNSHARDED, Layout
from layoutmap.core.mesh import Mesh
from layoutmap.core.variables import Assignment, VariableSpec
from layoutmap.engines import Engine, get_engine
from layoutmap.engines.agreement import check_values
from layoutmap.plan.json import compute_fingerprint
from layoutmap.plan.table import PlanTable
from layoutmap.scope.process_group import Group, check_saves


@dataclass(frozen=True)
class SavePlan:
    """Plan for one step of a checkpoint that several processes write together.

    Args:
        storage: The directory of the checkpoint.
        group: The processes that write.
        manifest: The manifest without its id, files and chunks; equal in all processes.
        shards: The shards that this process writes.
        own_states: Encoded states of this process: its random generators and data iterator.
        total_bytes: Size of all variables, of all processes.
    """

    storage: Storage
    group: Group
    manifest: Manifest
    shards: Sequence[WriteTask]
    own_states: Mapping[str, Any]
    total_bytes: int

    @property
    def variables(self) -> dict[str, VariableSpec]:
        """The variables that this process writes, by path."""
        saved = [each.variable for each in self.shards]
        return {v.path: VariableSpec(v.path, v.shape, v.dtype, v.kind) for v in saved}

    def begin(
        self,
        choose_lineage: Callable[[str], SavedStep] | None = None,
        *,
        patience_seconds: float | None = None,
    ) -> StepWriter:
        """Create the folder of the step. All processes must call this.

        No process needs another one after it returns, so `StepWriter.write` may run on a thread.

        Args:
            choose_lineage: Called in the first process with the id of the save, returns the steps that it comes from.
                `None`: it comes from the step that was saved last.
            patience_seconds: See `StepWriter`.

        Raises:
            CheckpointError: The step exists already, or there is not enough space; in all processes.
        """
        own_token, step = make_token(), self.manifest.step

        def make_folder() -> list[str]:
            lineage = choose_lineage(own_token) if choose_lineage else self._follow_last_step(own_token)
            folder = begin_step(self.storage, step, own_token, self.total_bytes)
            return [own_token, folder, json.dumps(make_lineage_facts(lineage))]

        try:
            token, folder, lineage = self.group.first(make_folder)
            facts = {"id": token, **json.loads(lineage), **self.manifest.facts}
            return StepWriter(
                self.storage,
                folder,
                replace(self.manifest, facts=facts),
                self.shards,
                total_bytes=self.total_bytes,
                number=self.group.number,
                count=self.group.count,
                states=self.own_states,
                patience_seconds=patience_seconds,
            )
        except BaseException:
            self.storage.abandon(step, own_token)
            raise

    def _follow_last_step(self, token: str) -> SavedStep:
        """Return the lineage of a new step that continues the last saved one."""
        history, step = History(self.storage), self.manifest.step
        last = history.last()
        position = last if last is not None and last.step < step else None
        return extend_lineage(step, token, position, history.steps().values())


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
        model: See `save`, as for all but `metrics`.
        directory: Where checkpoints of the model are kept.
        step: The number of the step.
        optimizer: The model's optimizer.
        data: What has a position in the data.
        metadata: What else to keep.
        metrics: Numbers by which steps are compared; those of the first process are kept.

    Raises:
        CheckpointError: Something cannot be saved, or the processes differ; in all of them.
    """
    adapter = require_capability(get_model_adapter(model), Keeping, "save")
    engine = get_engine(adapter.engine_name)
    kept = list(adapter.list_stored_variables(model, optimizer))
    layouts = {each.variable.path: engine.get_layout(each.array) for each in kept}
    mesh = _find_mesh(engine, layouts)
    group = Group(engine, mesh)
    storage = open_storage(directory)
    variables = [_make_saved_variable(each.variable, layouts[each.variable.path]) for each in kept]

    def make_manifest() -> tuple[Manifest, dict[str, Any]]:
        facts: dict[str, Any] = {
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            # Read the version from sys.modules, because importing the package here would be a cycle.
            "writer": f"layoutmap {sys.modules['layoutmap'].__version__}",
            "library": adapter.name,
            "engine": engine.name,
            "mesh": None if mesh is None else dict(zip(mesh.dim_names, mesh.shape, strict=True)),
            "plan": None if mesh is None else compute_fingerprint(_make_table(kept, layouts, mesh)),
        }
        if metrics is not None:
            facts["metrics"] = encode_state(metrics, "metrics")
        settings = dict(adapter.settings(model, optimizer))
        own = {"random": encode_state(settings.pop("random"), "random")}
        own |= {} if data is None else {"data": encode_state(read_state(data), "data")}
        states = {"settings": encode_state({"library": adapter.name} | settings, "settings")}
        number = check_step(step)
        return Manifest(number, facts, encode_state(metadata, "metadata"), states, (), variables, {}), own

    manifest, own_states = group.agreed(make_manifest, "save")
    if group.has_others:
        saved = {"directory": storage.where, "step": str(manifest.step)}
        saved["metadata"] = json.dumps(manifest.metadata)
        saved |= {each.path: f"{each.shape} {each.dtype} {each.layout}" for each in variables}
        check_saves(saved.items(), group.gather)
        unsharded = [each for each in kept if layouts[each.variable.path] is None]
        sums = ((each.variable.path, _compute_checksum(engine, each.array)) for each in unsharded)
        check_values(sums, group.gather)
    shards = _assign_shards(group, engine, kept, layouts, variables)
    total_bytes = sum(each.variable.global_bytes for each in kept)
    return SavePlan(storage, group, manifest, shards, own_states, total_bytes)


def _assign_shards(
    group: Group,
    engine: Engine,
    kept: Sequence[Stored],
    layouts: Mapping[str, Layout | None],
    variables: Sequence[SavedVariable],
) -> list[WriteTask]:
    """Select the shards that this process writes.

    Of the processes that hold a shard, the one with the fewest bytes so far writes it.
    """
    loads = [0] * group.count
    todo: list[WriteTask] = []
    for each, variable in zip(kept, variables, strict=True):
        own: list[Index] = []
        for holders, index, size in _find_shards(group, each.variable, layouts[variable.path]):
            writer = min(holders, key=loads.__getitem__)
            loads[writer] += size
            if writer == group.number:
                own.append(index)
        if own:
            todo.append(WriteTask(variable, own, _make_shard_reader(engine, each.array)))
    return todo


def _find_shards(
    group: Group, variable: VariableSpec, layout: Layout | None
) -> Iterator[tuple[list[int], Index, int]]:
    """Yield each distinct shard of a variable: the processes that store it, its index, and its bytes."""
    if layout is None:
        yield [0], make_full_index(variable.shape), variable.global_bytes
        return
    process_of = {device: process for process, devices in enumerate(group.devices) for device in devices}
    found = find_distinct_shards(layout, variable.shape, process_of)
    size = variable.global_bytes // max(1, len(found))
    for index, devices in found.values():
        yield list(dict.fromkeys(process_of[each] for each in devices)), index, size


def make_group(model: object) -> Group:
    """Return the group of processes that store a model."""
    adapter = require_capability(get_model_adapter(model), Keeping, "save")
    engine = get_engine(adapter.engine_name)
    layouts = {
        each.variable.path: engine.get_layout(each.array) for each in adapter.list_stored_variables(model)
    }
    return Group(engine, _find_mesh(engine, layouts))


def _make_saved_variable(variable: VariableSpec, layout: Layout | None) -> SavedVariable:
    specs = None if layout is None else tuple(None if s == UNSHARDED else s for s in layout.sharding_specs)
    return SavedVariable(
        variable.path, variable.shape, variable.dtype, variable.kind, variable.aliases, specs
    )


def _make_shard_reader(engine: Engine, array: object) -> Any:
    return lambda: iter(engine.to_shards(array, copy=False))


def _make_table(kept: Sequence[Stored], layouts: Mapping[str, Layout | None], mesh: Mesh) -> PlanTable:
    found = [(each.variable, layouts[each.variable.path]) for each in kept]
    return PlanTable(mesh, tuple(Assignment(v, layout) for v, layout in found if layout is not None))


def _find_mesh(engine: Engine, layouts: Mapping[str, Layout | None]) -> Mesh | None:
    meshes = {layout.mesh: path for path, layout in layouts.items() if layout is not None}
    # torch slots know their DeviceMesh but not the `Mesh` object, so compare bound meshes.
    bound = {engine.bind(mesh): (mesh, path) for mesh, path in meshes.items()} if len(meshes) > 1 else {}
    if len(bound) > 1:
        (one, path), (other, other_path) = list(bound.values())[:2]
        raise CheckpointError(
            f"{path} and {other_path} are on different meshes",
            facts={path: str(one), other_path: str(other)},
            why="a save is a collective of the processes of one mesh",
            fix="place all variables on one mesh, or save two models",
        )
    mesh = next(iter(meshes), None)
    if mesh is not None and not engine.bind(mesh).local_device_ids:
        raise CheckpointError(
            f"{meshes[mesh]}: this process has no device of its mesh",
            facts={"mesh": str(mesh)},
            why="only processes with devices of the mesh save the model",
            fix="call save only in processes with devices of this mesh",
        )
    return mesh


def check_step(step: object) -> int:
    """Check a step number, and return it as an int."""
    number = as_int(step)
    if number is None or not 0 <= number <= MOST_STEP:
        raise CheckpointError(
            f"step={step!r}: this is not a step number",
            why="a step is a whole number, 0 or more, of at most 18 digits",
            fix="pass the number of the training step, as in step=1000",
        )
    return number


def _compute_checksum(engine: Engine, array: object) -> int:
    from layoutmap.core.checksums import compute_checksum

    return compute_checksum(engine.to_numpy(array))
