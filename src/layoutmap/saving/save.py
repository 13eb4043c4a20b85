"""`save`: a model, its optimizer and what else a run needs, as one step of a checkpoint."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, TypeVar

from layoutmap.adapters import Keeping, adapter_of_model, capable
from layoutmap.adapters.data_states import state_of
from layoutmap.adapters.protocol import Stored
from layoutmap.checkpoint.lineage import History, SavedStep, facts_of, following
from layoutmap.checkpoint.manifest import Manifest
from layoutmap.checkpoint.remote import storage_of
from layoutmap.checkpoint.source import SavedVariable
from layoutmap.checkpoint.states import encode
from layoutmap.checkpoint.step_writer import StepWriter, begin_step
from layoutmap.checkpoint.storage import MOST_STEP, new_token
from layoutmap.checkpoint.writer import ToWrite
from layoutmap.core.arguments import as_int
from layoutmap.core.blocks import Index, full_index, held_shards
from layoutmap.core.errors import CheckpointError
from layoutmap.core.layout import UNSHARDED, Layout
from layoutmap.core.mesh import Mesh
from layoutmap.core.variables import Assignment, VariableSpec
from layoutmap.engines import Engine, get_engine
from layoutmap.engines.agreement import check_values
from layoutmap.plan.json import fingerprint
from layoutmap.plan.table import PlanTable
from layoutmap.scope.group import Group
from layoutmap.scope.processes import check_saves
from layoutmap.scope.progress import Progress

T = TypeVar("T")


def save(
    model: object,
    directory: str | os.PathLike[str],
    *,
    step: int = 0,
    optimizer: object = None,
    data: object = None,
    metadata: object = None,
    progress: bool | None = None,
) -> str:
    """Save a model as one step of a checkpoint, each shard from where it is.

    The step exists when this returns, and is durable: all of it, or, whatever happens on the way, none of it. With
    several processes all must call this; each writes the shards that it holds, and no shard is written twice.

    Args:
        model: The model, of any library, in layouts or plain.
        directory: Where checkpoints of this model are kept: a folder, or a URL that fsspec knows, as in
            `"s3://bucket/run"`. The step is its folder `step-<number>`.
        step: The number of the step, 0 or more. A step that exists is not written over.
        optimizer: The model's optimizer, where the model does not have it: of torch, a state of optax, an
            `nnx.Optimizer`. That of a compiled Keras model is saved with it.
        data: What else goes on where it is: an iterator over the data, a schedule of learning rates, anything with
            `state_dict()` or `get_state()`; or a mapping of several, as in `{"loader": loader, "schedule": schedule}`.
            With several processes each saves its own.
        metadata: What else to keep: numbers, texts, lists and mappings of them.
        progress: Whether to show on stderr how far it is; `None`: if it takes long, on a terminal.

    Returns:
        The folder of the step.

    Raises:
        CheckpointError: The step exists already, something cannot be saved, or it cannot be written.

    Example:
        >>> import keras, layoutmap as lm, tempfile
        >>> layout_map = lm.LayoutMap(lm.create_mesh("model=4"), {r".*\\.kernel": (None, "model")})
        >>> model = layout_map.build(lambda: keras.Sequential([keras.Input((8,)), keras.layers.Dense(16, name="d1")]))
        >>> directory = tempfile.mkdtemp()
        >>> folder = lm.save(model, directory, step=100, metadata={"loss": 0.25})
        >>> lm.describe(directory)["d1.kernel"].shape
        (8, 16)
    """
    writer, variables = begin_save(model, directory, step, optimizer, data, metadata)
    with writer, Progress(variables, enabled=progress, verb="saved") as shown:
        writer.write(shown)
    return writer.where


def begin_save(
    model: object,
    directory: str | os.PathLike[str],
    step: int,
    optimizer: object = None,
    data: object = None,
    metadata: object = None,
    *,
    metrics: Mapping[str, float] | None = None,
    after: Callable[[], object] = lambda: None,
    make_way: Callable[[str], SavedStep] | None = None,
    patience_seconds: float | None = None,
) -> tuple[StepWriter, dict[str, VariableSpec]]:
    """Agree with the other processes on a step, and make the folder in which it is written.

    All that processes must do together is done when this returns; `StepWriter.write` may run on a thread.

    Args:
        model: See `save`.
        directory: See `save`.
        step: See `save`.
        optimizer: See `save`.
        data: See `save`.
        metadata: See `save`.
        metrics: Numbers by which steps are compared; those of the first process are kept.
        after: What must have ended; if it raises in one process, all raise.
        make_way: What the first process does then, before the step is begun; if it raises, all raise. It is given the
            id of the save, and returns which step this one comes from; `None`: the one that was saved last.
        patience_seconds: See `StepWriter`.

    Returns:
        What writes the step, and the variables that this process writes.

    Raises:
        CheckpointError: The step exists already, something cannot be saved, there is not enough space, or the processes
            differ; in all of them.
    """
    adapter = capable(adapter_of_model(model), Keeping, "save")
    engine = get_engine(adapter.engine_name)
    kept = list(adapter.stored(model, optimizer))
    layouts = {each.variable.path: engine.layout_of(each.array) for each in kept}
    mesh = _one_mesh(engine, layouts)
    group = Group(engine, mesh)
    storage = storage_of(directory)
    variables = [_saved(each.variable, layouts[each.variable.path]) for each in kept]
    total_bytes = sum(each.variable.global_bytes for each in kept)

    def prepare() -> tuple[Manifest, dict[str, Any]]:
        after()
        facts: dict[str, Any] = {
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "writer": f"layoutmap {sys.modules['layoutmap'].__version__}",  # it imports this file
            "library": adapter.name,
            "engine": engine.name,
            "mesh": None if mesh is None else dict(zip(mesh.dim_names, mesh.shape, strict=True)),
            "plan": None if mesh is None else fingerprint(_table(kept, layouts, mesh)),
        }
        if metrics is not None:
            facts["metrics"] = encode(metrics, "metrics")
        settings = dict(adapter.settings(model, optimizer))
        own = {"random": encode(settings.pop("random"), "random")}
        own |= {} if data is None else {"data": encode(state_of(data), "data")}
        states = {"settings": encode({"library": adapter.name} | settings, "settings")}
        number = check_step(step)
        return Manifest(number, facts, encode(metadata, "metadata"), states, (), variables, {}), own

    manifest, own_states = group.agreed(prepare, "save")
    if group.several:
        saved = {"directory": storage.where, "step": str(manifest.step)}
        saved["metadata"] = json.dumps(manifest.metadata)
        saved |= {each.path: f"{each.shape} {each.dtype} {each.layout}" for each in variables}
        check_saves(saved.items(), group.gather)
        plain = [each for each in kept if layouts[each.variable.path] is None]
        check_values(((each.variable.path, _checksum(engine, each.array)) for each in plain), group.gather)
    own_token = new_token()

    def begin() -> list[str]:
        saved = (make_way or after_the_last)(own_token)
        folder = begin_step(storage, manifest.step, own_token, total_bytes)
        return [own_token, folder, json.dumps(facts_of(saved))]

    def after_the_last(token: str) -> SavedStep:
        history = History(storage)
        last = history.last()
        position = last if last is not None and last.step < manifest.step else None
        return following(manifest.step, token, position, history.steps().values())

    try:
        token, folder, lineage = group.first(begin)
        todo = _shares(group, engine, kept, layouts, variables)
        manifest = replace(manifest, facts={"id": token, **json.loads(lineage), **manifest.facts})
        writer = StepWriter(
            storage,
            folder,
            manifest,
            todo,
            total_bytes=total_bytes,
            number=group.number,
            count=group.count,
            states=own_states,
            patience_seconds=patience_seconds,
        )
        written = {each.variable.path for each in todo}
        return writer, {v.path: v for each in kept if (v := each.variable).path in written}
    except BaseException:
        storage.abandon(manifest.step, own_token)
        raise


def _shares(
    group: Group,
    engine: Engine,
    kept: Sequence[Stored],
    layouts: Mapping[str, Layout | None],
    variables: Sequence[SavedVariable],
) -> list[ToWrite]:
    """The shards that this process writes: of each that several hold, one writes it, who has the least to write."""
    loads = [0] * group.count
    todo: list[ToWrite] = []
    for each, variable in zip(kept, variables, strict=True):
        own: list[Index] = []
        for holders, index, size in _shards(group, each.variable, layouts[variable.path]):
            writer = min(holders, key=loads.__getitem__)
            loads[writer] += size
            if writer == group.number:
                own.append(index)
        if own:
            todo.append(ToWrite(variable, own, _shards_of(engine, each.array)))
    return todo


def _shards(
    group: Group, variable: VariableSpec, layout: Layout | None
) -> Iterator[tuple[list[int], Index, int]]:
    """Each different shard of a variable: the processes that hold it, its index, and its size."""
    if layout is None:
        yield [0], full_index(variable.shape), variable.global_bytes
        return
    process_of = {device: process for process, devices in enumerate(group.devices) for device in devices}
    found = held_shards(layout, variable.shape, process_of)
    size = variable.global_bytes // max(1, len(found))
    for index, devices in found.values():
        yield list(dict.fromkeys(process_of[each] for each in devices)), index, size


def group_of(model: object) -> Group:
    """The processes that a model is on."""
    adapter = capable(adapter_of_model(model), Keeping, "save")
    engine = get_engine(adapter.engine_name)
    layouts = {each.variable.path: engine.layout_of(each.array) for each in adapter.stored(model)}
    return Group(engine, _one_mesh(engine, layouts))


def _saved(variable: VariableSpec, layout: Layout | None) -> SavedVariable:
    specs = None if layout is None else tuple(None if s == UNSHARDED else s for s in layout.sharding_specs)
    return SavedVariable(
        variable.path, variable.shape, variable.dtype, variable.kind, variable.aliases, specs
    )


def _shards_of(engine: Engine, array: object) -> Any:
    return lambda: iter(engine.to_shards(array, copy=False))


def _table(kept: Sequence[Stored], layouts: Mapping[str, Layout | None], mesh: Mesh) -> PlanTable:
    found = [(each.variable, layouts[each.variable.path]) for each in kept]
    return PlanTable(mesh, tuple(Assignment(v, layout) for v, layout in found if layout is not None))


def _one_mesh(engine: Engine, layouts: Mapping[str, Layout | None]) -> Mesh | None:
    meshes = {layout.mesh: path for path, layout in layouts.items() if layout is not None}
    # A slot that torch makes knows the devices of its mesh, and not whether a program has named them.
    bound = {engine.bind(mesh): (mesh, path) for mesh, path in meshes.items()} if len(meshes) > 1 else {}
    if len(bound) > 1:
        (one, path), (other, other_path) = list(bound.values())[:2]
        raise CheckpointError(
            f"{path} and {other_path} are on different meshes",
            facts={path: str(one), other_path: str(other)},
            why="the processes of one mesh save together",
            fix="lay all out on one mesh, or save them as two models",
        )
    mesh = next(iter(meshes), None)
    if mesh is not None and not engine.bind(mesh).local_device_ids:
        raise CheckpointError(
            f"{meshes[mesh]}: this process has no device of its mesh",
            facts={"mesh": str(mesh)},
            why="the processes that have devices of a mesh save what is on it, and they alone",
            fix="call it only in these processes",
        )
    return mesh


def check_step(step: object) -> int:
    """The number of a step.

    Raises:
        CheckpointError: It is none.
    """
    number = as_int(step)
    if number is None or not 0 <= number <= MOST_STEP:
        raise CheckpointError(
            f"step={step!r}: this is not a step",
            why="a step is a whole number, 0 or more, of at most 18 digits",
            fix="pass the number of the training step, as in step=1000",
        )
    return number


def _checksum(engine: Engine, array: object) -> int:
    from layoutmap.core.checksums import checksum

    return checksum(engine.to_numpy(array))
