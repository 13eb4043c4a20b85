"""`save`: a model, its optimizer and what else a run needs, as one step of a checkpoint."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from layoutmap.adapters import adapter_of_model
from layoutmap.adapters.protocol import Stored
from layoutmap.checkpoint.manifest import (
    NAME,
    Chunk,
    DataFile,
    Manifest,
    Part,
    manifest_to_bytes,
    part_from_bytes,
    part_to_bytes,
)
from layoutmap.checkpoint.source import SavedVariable
from layoutmap.checkpoint.states import encode
from layoutmap.checkpoint.storage import LocalStorage, Storage, new_token
from layoutmap.checkpoint.writer import ToWrite, bytes_to_write, write_part
from layoutmap.core.arguments import as_int
from layoutmap.core.blocks import Ends, Index, ends_of, full_index
from layoutmap.core.errors import CheckpointError
from layoutmap.core.layout import UNSHARDED, Layout
from layoutmap.core.mesh import Mesh
from layoutmap.core.variables import Assignment, VariableSpec
from layoutmap.engines import Engine, get_engine
from layoutmap.plan.json import fingerprint
from layoutmap.plan.table import PlanTable
from layoutmap.scope.processes import check_values, gather_texts
from layoutmap.scope.progress import Progress
from layoutmap.scope.states import state_of

_PATIENCE_SECONDS = 600.0
_POLL_SECONDS = 0.02


def save(
    model: Any,
    directory: str | os.PathLike[str],
    *,
    step: int = 0,
    optimizer: Any = None,
    data: Any = None,
    metadata: Any = None,
    progress: bool | None = None,
) -> str:
    """Save a model as one step of a checkpoint, each shard from where it is.

    The step is there when this returns, and durable: all of it, or, whatever happens on the way, none of it. With
    several processes all must call this; each writes the shards that it holds, and no shard is written twice.

    Args:
        model: The model, of any library, in layouts or plain.
        directory: Where checkpoints of this model are kept. The step is its folder `step-<number>`.
        step: The number of the step, 0 or more. A step that is there is not written over.
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
        CheckpointError: The step is there already, something cannot be saved, or it cannot be written.

    Example:
        >>> import keras, layoutmap as lm, tempfile
        >>> layout_map = lm.LayoutMap(lm.create_mesh("model=4"), {r".*\\.kernel": (None, "model")})
        >>> model = layout_map.build(lambda: keras.Sequential([keras.Input((8,)), keras.layers.Dense(16, name="d1")]))
        >>> directory = tempfile.mkdtemp()
        >>> folder = lm.save(model, directory, step=100, metadata={"loss": 0.25})
        >>> lm.describe(directory)["d1.kernel"].shape
        (8, 16)
    """
    number = _checked_step(step)
    adapter = adapter_of_model(model)
    engine = get_engine(adapter.engine_name)
    kept = list(adapter.stored(model, optimizer))
    settings = dict(adapter.settings(model, optimizer))
    own_states = {"random": encode(settings.pop("random"), "random")}
    own_states |= {} if data is None else {"data": encode(state_of(data), "data")}
    states = {"settings": encode({"library": adapter.name} | settings, "settings")}
    layouts = {each.variable.path: engine.layout_of(each.array) for each in kept}
    mesh = _one_mesh(layouts)
    group = Group(engine, mesh)
    token = group.first(new_token())
    if group.several:
        plain = [each for each in kept if layouts[each.variable.path] is None]
        check_values(((each.variable.path, _checksum(engine, each.array)) for each in plain), group.gather)
    variables = [_saved(each.variable, layouts[each.variable.path]) for each in kept]
    facts = {
        "id": token,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "writer": _writer(),
        "library": adapter.name,
        "engine": engine.name,
        "mesh": None if mesh is None else dict(zip(mesh.dim_names, mesh.shape, strict=True)),
        "plan": None if mesh is None else fingerprint(_table(kept, layouts, mesh)),
    }
    manifest = Manifest(number, facts, encode(metadata, "metadata"), states, (), variables, {})
    todo = group.shares(kept, layouts, variables)
    total_bytes = sum(each.variable.global_bytes for each in kept)
    specs = {each.variable.path: Assignment(each.variable, _any_layout(each.variable)) for each in kept}
    storage = LocalStorage(directory)
    with Progress(
        {each.variable.path: specs[each.variable.path] for each in todo}, enabled=progress, verb="saved"
    ) as shown:
        _write(storage, manifest, group, todo, own_states, total_bytes, shown)
    return f"{storage.where}/{storage.folder(number)}"


class Group:
    """The processes that save together: those that have devices of the mesh.

    Args:
        engine: What holds the arrays.
        mesh: Their mesh; `None`: this process is alone.

    Attributes:
        number: The number of this process among them.
        count: How many they are.
    """

    def __init__(self, engine: Engine, mesh: Mesh | None):
        self._engine = engine
        self._mesh = mesh
        self.number, self.count = 0, 1
        self._devices: list[tuple[int, ...]] = [tuple(range(mesh.size))] if mesh is not None else [()]
        if mesh is not None:
            bound = engine.bind(mesh)
            if len(bound.local_device_ids) < bound.size:
                own = ",".join(map(str, bound.local_device_ids))
                texts = gather_texts(own, self.gather)
                self._devices = [tuple(map(int, text.split(","))) for text in texts]
                self.number, self.count = texts.index(own), len(texts)

    @property
    def several(self) -> bool:
        """Whether there are other processes."""
        return self.count > 1

    def gather(self, values: Any) -> Any:
        """The numpy values of each process, one row each; they must all ask."""
        assert self._mesh is not None
        return self._engine.all_gather(values, self._mesh)

    def first(self, text: str) -> str:
        """The text of the first process; they must all ask."""
        return gather_texts(text, self.gather)[0] if self.several else text

    def shares(
        self,
        kept: Sequence[Stored],
        layouts: Mapping[str, Layout | None],
        variables: Sequence[SavedVariable],
    ) -> list[ToWrite]:
        """What this process writes: of each shard that several hold, one writes it, who has the least to write."""
        loads = [0] * self.count
        todo: list[ToWrite] = []
        for each, variable in zip(kept, variables, strict=True):
            own: list[Index] = []
            for holders, index, size in self._shards(each.variable, layouts[variable.path]):
                writer = min(holders, key=loads.__getitem__)
                loads[writer] += size
                if writer == self.number:
                    own.append(index)
            if own:
                todo.append(ToWrite(variable, own, _shards_of(self._engine, each.array)))
        return todo

    def _shards(
        self, variable: VariableSpec, layout: Layout | None
    ) -> Iterator[tuple[list[int], Index, int]]:
        """Each different shard of a variable: the processes that hold it, its index, and its size."""
        if layout is None:
            yield [0], full_index(variable.shape), variable.global_bytes
            return
        found: dict[Ends, tuple[list[int], Index]] = {}
        for process, devices in enumerate(self._devices):
            for device in devices:
                index = layout.shard_slices(variable.shape, device)
                holders = found.setdefault(ends_of(index), ([], index))[0]
                if process not in holders:
                    holders.append(process)
        size = variable.global_bytes // max(1, len(found))
        for holders, index in found.values():
            yield holders, index, size


def _write(
    storage: Storage,
    manifest: Manifest,
    group: Group,
    todo: Sequence[ToWrite],
    states: Mapping[str, Any],
    total_bytes: int,
    progress: Any,
) -> None:
    """Write this process's part; the first process then joins all parts, and the others wait for it."""
    step, token = manifest.step, manifest.facts["id"]
    folder = f".step-{step}.{token}"
    if group.number == 0:
        storage.begin(step, token)
    if group.several:
        group.first("")  # the folder is there now
    try:
        _check_space(storage, bytes_to_write(todo))
        part = write_part(storage, folder, group.number, todo, total_bytes, progress)
        part = Part(part.files, part.chunks, states)
        parts = [part]
        if group.several:
            with storage.create(folder, f"part-{group.number:05d}.json") as sink:
                sink.write(part_to_bytes(part))
            group.first("")
            if group.number == 0:
                parts = [_read_part(storage, folder, number) for number in range(group.count)]
        if group.number == 0:
            with storage.create(folder, NAME) as sink:
                sink.write(manifest_to_bytes(_joined(manifest, parts)))
            storage.commit(step, token)
        if group.several:
            group.first("")
    except BaseException:
        if group.number == 0:
            storage.abandon(step, token)
        raise


def _read_part(storage: Storage, folder: str, number: int) -> Part:
    name = f"part-{number:05d}.json"
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while (size := storage.size(folder, name)) is None and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    data = bytearray(size or 0)
    storage.read_into(folder, name, 0, memoryview(data))
    return part_from_bytes(bytes(data))


def _joined(manifest: Manifest, parts: Sequence[Part]) -> Manifest:
    files: list[DataFile] = []
    chunks: dict[str, list[Chunk]] = {each.path: [] for each in manifest.variables}
    for part in parts:
        for path, found in part.chunks.items():
            chunks[path] += (
                Chunk(chunk.file + len(files), chunk.start, chunk.index, chunk.checksum) for chunk in found
            )
        files += part.files
    states = dict(manifest.states)
    own = [part.states for part in parts]
    states["processes"] = own[:1] if all(each == own[0] for each in own) else own
    return Manifest(
        manifest.step, manifest.facts, manifest.metadata, states, files, manifest.variables, chunks
    )


def _check_space(storage: Storage, needed: int) -> None:
    free = storage.free_bytes()
    if free is not None and free < needed:
        raise CheckpointError(
            f"{storage.where}: there is no room for this step",
            facts={"needed": f"{needed:,} bytes", "free": f"{free:,} bytes"},
            why="the file system has less space left than the shards of this process need",
            fix="free some space, or save elsewhere; the steps that are there are as they were",
        )


def _saved(variable: VariableSpec, layout: Layout | None) -> SavedVariable:
    specs = None if layout is None else tuple(None if s == UNSHARDED else s for s in layout.sharding_specs)
    return SavedVariable(
        variable.path, variable.shape, variable.dtype, variable.kind, variable.aliases, specs
    )


def _shards_of(engine: Engine, array: Any) -> Any:
    return lambda: iter(engine.to_shards(array))


def _table(kept: Sequence[Stored], layouts: Mapping[str, Layout | None], mesh: Mesh) -> PlanTable:
    found = [(each.variable, layouts[each.variable.path]) for each in kept]
    return PlanTable(mesh, tuple(Assignment(v, layout) for v, layout in found if layout is not None))


def _any_layout(variable: VariableSpec) -> Layout:
    return Layout.replicated(Mesh(None, "x=1"), len(variable.shape))


def _one_mesh(layouts: Mapping[str, Layout | None]) -> Mesh | None:
    meshes = {layout.mesh: path for path, layout in layouts.items() if layout is not None}
    if len(meshes) > 1:
        (one, path), (other, other_path) = list(meshes.items())[:2]
        raise CheckpointError(
            f"{path} and {other_path} are on two meshes",
            facts={path: str(one), other_path: str(other)},
            why="the processes of one mesh save together",
            fix="lay all out on one mesh, or save them as two models",
        )
    return next(iter(meshes), None)


def _checked_step(step: Any) -> int:
    number = as_int(step)
    if number is None or number < 0:
        raise CheckpointError(
            f"step={step!r}: this is no step",
            why="a step is a whole number, 0 or more",
            fix="pass the number of the training step, as in step=1000",
        )
    return number


def _checksum(engine: Engine, array: Any) -> int:
    from layoutmap.core.checksums import checksum

    return checksum(engine.to_numpy(array))


def _writer() -> str:
    from importlib.metadata import version

    return f"layoutmap {version('layoutmap')}"
