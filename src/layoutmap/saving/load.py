"""Load a model from a checkpoint onto any mesh. Each process reads the bytes of its own shards: `load`."""

from __future__ import annotations

import os
import warnings
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal, cast, get_args

from layoutmap.adapters import (
    CheckpointAdapter,
    find_model_adapter,
    get_adapter,
    get_adapter_of_imported_library,
    get_model_adapter,
    require_capability,
)
from layoutmap.adapters.protocol import SavedOptimizer, StoredVariable
from layoutmap.checkpoint.foreign import open_checkpoint_source
from layoutmap.checkpoint.foreign.keras_weights import KerasWeightsSource
from layoutmap.checkpoint.model_values import Extra, Missing, SavedModelValues, is_integer_state
from layoutmap.checkpoint.name_tables import read_name_table
from layoutmap.checkpoint.reader import StepSource
from layoutmap.checkpoint.renamed_source import RenamedSource
from layoutmap.checkpoint.source import SavedVariable, Source
from layoutmap.core.blocks import Index, NumpyArray, group_devices_by_shard, make_full_index
from layoutmap.core.errors import CheckpointError, LayoutMapWarning, format_count, join_names
from layoutmap.core.layout import Layout
from layoutmap.core.mesh import Mesh
from layoutmap.core.users_line import find_user_stacklevel
from layoutmap.core.variables import Assignment, Kind, VariableSpec
from layoutmap.engines import get_engine
from layoutmap.engines.agreement import map_process_names_to_texts
from layoutmap.rules.rule_set import RuleSet
from layoutmap.saving.load_states import choose_data_state, choose_random_states, restore_data_with_rollback
from layoutmap.saving.model_source import read_model_name_table
from layoutmap.scope.optimizers import shard_unsharded_optimizer
from layoutmap.scope.owner import retry_with_model_library
from layoutmap.scope.process_group import MeshProcesses
from layoutmap.scope.progress import Progress
from layoutmap.scope.scope import build

Verify = Literal["first", "while", "no"]


@retry_with_model_library
def load(
    model: Any,
    directory: str | os.PathLike[str],
    *,
    layout_map: RuleSet | None = None,
    step: int | None = None,
    names: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    optimizer: Any = None,
    data: Any = None,
    missing: Missing = "error",
    extra: Extra = "error",
    cast: bool = False,
    override: Mapping[str, object] | None = None,
    verify: Verify = "first",
    room_bytes: int | None = None,
    progress: bool | None = None,
    inputs: Any = None,
    **options: Any,
) -> Any:
    """Load a model from a step of a checkpoint, saved on any mesh and with any engine.

    Args:
        model: An existing model, sharded or not. Or a function that makes the model: with `layout_map`, it is built in
            a scope, its weights are read directly into their shards, and no initializer runs.
        directory: Checkpoint of this library. Or files of others: `*.safetensors` or a folder of them, as from Hugging
            Face; a directory of orbax or `torch.distributed.checkpoint`; or `*.weights.h5` of a Keras model. These have
            no checksums, so a changed value in them is not noticed.
        layout_map: Rules for a function. They may differ from those of the saved model.
        step: Number of the step; `None`: the last one.
        names: Names of the model's variables in the checkpoint, if their names or axes differ: a table of the library,
            such as `"llama"` for a folder from Hugging Face, a YAML file, or a mapping from paths to names. For an
            existing model of transformers or peft, `"checkpoint"` stands for the names in its own files.
        optimizer: See `save`. It may be new, without slots. Slots of optax on no mesh are sharded like the weights. Or
            a function that makes it from the model: `lambda model: torch.optim.AdamW(model.parameters())`. With an
            optimizer, `load` returns a pair.
        data: Objects to restore, with `load_state_dict()` or `set_state()`, in the form that was saved. Each process
            gets the state that it saved. If the number of processes differs, all get the state if it was equal in all
            processes, and otherwise an error is raised. The random states of Python, numpy, and torch are restored
            likewise, but stay unchanged where an error would be raised.
        missing: What to do with weights of the model that are not in the checkpoint: `"error"`, or `"keep"` to keep
            their values or initialize them, with a warning that names them.
        extra: What to do with variables in the checkpoint that the model does not have: `"error"` or `"ignore"`.
            Without an optimizer, slots are left out, and a warning names them unless this is `"ignore"`. `compile` of
            a Keras model restores them.
        cast: Whether to convert values to the dtypes of the model.
        override: Settings of a torch optimizer that replace the saved ones in all of its groups, as in `{"lr": 1e-4}`.
            Other settings are restored, with a warning if the optimizer was made with another value. Keras optimizers
            keep their learning rate in a variable: assign it after the load.
        verify: When to compare checksums. `"first"`: before an existing model changes, so that a damaged file changes
            nothing. `"while"`: while values are put into the model, without extra memory and without a second read; if
            one is damaged, the error says that the model is loaded in part and must not be used. `"no"`: never.
        room_bytes: Bytes of compared values that a process keeps until it uses them; it reads the rest again. `None`:
            1 GiB, or on torch 0 of a local checkpoint, whose second read comes from the page cache.
        progress: See `save`.
        inputs: Example input, or its shape and dtype, for a model that creates its weights in its first call: see
            `build`.
        **options: With `layout_map`, other arguments of `build`, as in `batch_dim="batch"`.

    Returns:
        The model, or with `optimizer` the model and the optimizer. Both are the objects that were passed, unless they
        cannot be changed, as pytrees.

    Raises:
        CheckpointError: The step does not exist, is damaged, or belongs to another model: paths, shapes, or dtypes
            differ. Or a random state or `data` cannot be restored. The model, the optimizer, and `data` are unchanged.
        PlanError: The layout map does not fit the model.

    Example:
        >>> import keras, layoutmap as lm, tempfile
        >>> def make_model():
        ...     return keras.Sequential([keras.Input((8,)), keras.layers.Dense(16, name="d1")])
        >>> directory = tempfile.mkdtemp()
        >>> folder = lm.save(make_model(), directory)
        >>> layout_map = lm.LayoutMap(lm.create_mesh("model=4"), {r".*\\.kernel": (None, "model")})
        >>> lm.load(make_model, directory, layout_map=layout_map).layers[0].kernel.layout.sharding_specs
        ('unsharded', 'model')
    """
    _check_arguments(model, layout_map, options, missing, extra, verify)
    if layout_map is not None:
        library = options.get("library")
        adapter = require_capability(
            get_adapter(library) if library else get_adapter_of_imported_library(), CheckpointAdapter, "load"
        )
        options["library"] = adapter.name
        found, mesh = None, layout_map.mesh
    else:
        found = _make_model_if_function(model)
        adapter = require_capability(get_model_adapter(found), CheckpointAdapter, "load")
        if inputs is not None:
            adapter.create_lazy_variables(found, (inputs,))
        mesh = find_model_mesh(adapter, found)
    processes = MeshProcesses(get_engine(adapter.engine_name), mesh)
    source = _open_source_of_same_step(directory, step, processes)
    if isinstance(source, StepSource):
        source.verifies = verify != "no"
        # Torch copies values into the model's memory. Other engines use the memory into which they were read.
        source.allow_cache(room_bytes, is_copied=adapter.engine_name == "torch")
    table = None
    if names is not None:
        table = read_name_table(names) if found is None else read_model_name_table(names, found, adapter)
    values = SavedModelValues(source, names=table, missing=missing, extra=extra, cast=cast)
    if isinstance(source, KerasWeightsSource) and table is None:
        passed = {"optimizer": optimizer is not None, "data": data is not None, "cast": cast}
        passed |= {"missing": missing != "error", "extra": extra != "error"}
        _check_arguments_for_keras_file(source, [name for name, is_passed in passed.items() if is_passed])
        if layout_map is not None:
            found = build(model, layout_map, progress=progress, inputs=inputs, **options)
        return _load_keras_weights(found, source)
    loading = ModelLoader(adapter, values, processes, progress, override)
    saved = loading.states.get("processes", [])
    position = processes.process_index, processes.num_processes
    states = [each["data"] for each in saved if "data" in each]
    state = processes.run_in_all_processes(
        lambda: None if data is None else choose_data_state(data, states, *position)
    )
    is_new = layout_map is not None  # a new model needs no protection from a damaged checkpoint
    if layout_map is not None:
        found = build(model, layout_map, values=values, progress=progress, inputs=inputs, **options)
        found, _ = loading.load_values(found, None, verify_first=False)
    made = optimizer(found) if callable(optimizer) else optimizer
    if layout_map is not None and made is optimizer is not None and adapter.name == "jax":
        made = shard_unsharded_optimizer(layout_map, optimizer, found)
    random = choose_random_states([each.get("random", {}) for each in saved], *position)
    within = restore_data_with_rollback(adapter, processes, source.where, found, random, data, state)
    is_new = is_new and (made is None or callable(optimizer))
    with nullcontext() if is_new or verify == "first" else mention_partial_load_in_errors():
        loaded = loading.load_values(
            found,
            made,
            verify_first=not is_new and verify == "first",
            after_checks=within,
            random_states=random,
        )
    values.stop_providing_values()
    if values.kept_paths:
        warning = LayoutMapWarning(
            f"{source.where}: {format_count(len(values.kept_paths), 'weight')} of the model not restored",
            facts={"not in the checkpoint": join_names(list(values.kept_paths))},
            why='with missing="keep", such weights keep their values, and new ones are initialized',
            fix="if they were renamed, pass a name table: names={path of the model: name in the checkpoint}",
        )
        warnings.warn(warning, stacklevel=find_user_stacklevel())
    if loading.unread and extra == "error":
        again = SavedModelValues(source, names=table, missing=missing, cast=cast)
        _warn_of_unread_slots(loading, again, loaded[0])
    return loaded if optimizer is not None else loaded[0]


def _check_arguments(
    model: object,
    layout_map: RuleSet | None,
    options: Mapping[str, Any],
    missing: object,
    extra: object,
    verify: object,
) -> None:
    """Raise for arguments that have unknown values, no effect, or contradict each other."""
    choices = ("missing", missing, Missing), ("extra", extra, Extra), ("verify", verify, Verify)
    for name, value, known in ((name, value, get_args(kind)) for name, value, kind in choices):
        if value not in known:
            raise CheckpointError(
                f"{name}={value!r}: this value is not allowed",
                why=f"{name} must be one of {', '.join(map(repr, known))}",
                fix=f"leave {name} out, or pass {name}={known[1]!r}",
            )
    if layout_map is None and options:
        names = ", ".join(f"{name}=" for name in options)
        raise CheckpointError(
            f"load: {names} has no effect without layout_map=",
            why="these are options of build, which load calls only with layout_map=",
            fix="pass a function that makes the model, and layout_map=",
        )
    if layout_map is not None and find_model_adapter(model) is not None:
        raise CheckpointError(
            f"load: {type(model).__name__} is a model, and layout_map= needs a function that makes a model",
            why="an existing model keeps its layouts",
            fix="leave layout_map out, or pass the function; layout_map.apply(model) shards an existing model",
        )


def _check_arguments_for_keras_file(source: KerasWeightsSource, passed_names: Sequence[str]) -> None:

    if passed_names:
        raise CheckpointError(
            f"{source.where}: {', '.join(f'{name}=' for name in passed_names)} has no effect on a weight file of Keras",
            why="Keras's load_weights reads the file, by the order of the layers",
            fix="leave the argument out, or skip weights of different shapes: load_weights(path, skip_mismatch=True)",
        )


def _load_keras_weights(model: object, source: KerasWeightsSource) -> Any:
    """Load a weight file of Keras by `load_weights`, because the file names weights by layer instead of by path."""
    load_weights = getattr(model, "load_weights", None)
    if load_weights is None:
        raise CheckpointError(
            f"{source.where}: this is a Keras weight file, but the model is a {type(model).__name__}",
            why="the file names weights by Keras layers, as in layers.dense.vars.0, and not by path",
            fix="pass a Keras model, or a table names= from the model's paths to names of this form",
        )
    load_weights(source.where)
    return model


def _open_source_of_same_step(
    directory: str | os.PathLike[str], step: int | None, processes: MeshProcesses
) -> Source:
    """Open the same step in all processes. Without `step`, it is the last step that process 0 finds."""

    def open_checked_source(step: int | None) -> Source:
        found = open_checkpoint_source(directory, step)
        if isinstance(found, StepSource):
            found.check_file_sizes()
        return found

    source = processes.run_in_all_processes(lambda: open_checked_source(step))
    if not isinstance(source, StepSource):
        return source
    if differ := processes.gather_texts_if_different(_format_step_identity(source)):
        step = int(differ[0].split()[0])
        source = processes.run_in_all_processes(lambda: open_checked_source(step))
        differ = processes.gather_texts_if_different(_format_step_identity(source))
    if differ:
        raise CheckpointError(
            f"{source.where}: the processes load different checkpoints",
            facts=map_process_names_to_texts(differ),
            why="the ids of the checkpoints differ, so these are from different saves",
            fix="pass a directory that all processes share, or identical copies",
        )
    return source


def _format_step_identity(source: Any) -> str:
    return f"{source.step} {source.manifest.facts.get('id')}"


@contextmanager
def mention_partial_load_in_errors() -> Generator[None]:
    """Add to each `CheckpointError` in the block that the model may be loaded in part and must not be used."""
    try:
        yield
    except CheckpointError as error:
        why = f"{error.why}; the model may have been loaded in part, and must not be used"
        raise CheckpointError(error.what, facts=error.facts, why=why, fix=error.fix) from error


# Allocating and copying take long, so values are read into the memory of existing arrays (decisions/0127).
class ModelLoader:
    """Load the values of a checkpoint into an existing model and its optimizer."""

    def __init__(
        self,
        adapter: CheckpointAdapter,
        values: SavedModelValues,
        processes: MeshProcesses,
        progress: bool | None,
        override: Mapping[str, object] | None,
    ):
        self.adapter = adapter
        self._engine = get_engine(adapter.engine_name)
        self.values = values
        self.unread: Sequence[str] = ()
        self._processes = processes
        self._progress = progress
        self.states = values.source.states
        settings: Mapping[str, Any] = self.states.get("settings", {})
        self._settings = settings if settings.get("library") == adapter.name else dict[str, Any]()
        if override:
            _check_override_settings(override, self._settings)
        if self._settings:
            self._settings = {**self._settings, "override": dict(override or {})}

    def load_values(
        self,
        model: object,
        optimizer: object,
        *,
        verify_first: bool,
        after_checks: AbstractContextManager[object] | None = None,
        random_states: Mapping[str, Any] | None = None,
        only_paths: Collection[str] | None = None,
    ) -> tuple[Any, Any]:
        """Read all values that were not read yet into a model and its optimizer, and return both as a pair.

        Args:
            model: The model.
            optimizer: The optimizer, if the model does not contain it.
            verify_first: Whether to verify all values before the model changes. A new model does not need this.
            after_checks: Context that is entered after all checks, and in which the model changes.
            random_states: Random states to restore at the end, with the settings of the optimizer; `None`: neither.
            only_paths: Paths in the checkpoint of the variables to read; `None`: all.
        """
        stored = self._processes.run_in_all_processes(lambda: self._list_checked_variables(model, optimizer))
        # Initializers may have advanced a generator after its state was read, so read the states of generators again.
        taken = self.values.read_paths - {e.variable.path for e in stored if e.variable.kind is Kind.RNG}
        rest = [
            e
            for e in stored
            if e.variable.path not in taken
            and (saved := self.values.find_saved_variable(e.variable))
            and (only_paths is None or saved.path in only_paths)
        ]
        self.unread = self._find_unread_slots(stored)
        layouts = {each.variable.path: self._engine.get_layout(each.array) for each in rest}
        variables = {each.variable.path: each.variable for each in rest}
        # A slot that does not exist yet is listed with its weight's array, so do not read the slot into that array.
        weights = {id(each.array) for each in stored if not _is_slot(each)}
        own = {
            each.variable.path: (each.array, memory)
            for each in rest
            if not (_is_slot(each) and id(each.array) in weights)
            and (memory := self._get_writable_memory(each.array))
        }
        if verify_first:
            with Progress(variables, enabled=self._progress, verb="checked") as progress:
                self._processes.run_in_all_processes(
                    lambda: self._verify_values(variables.values(), layouts, progress)
                )
        del stored, rest  # so that the old arrays are freed one by one while new ones are read
        with Progress(variables, enabled=self._progress, verb="loaded") as progress:

            def read_arrays() -> Iterator[tuple[str, Any]]:
                for path, variable in variables.items():
                    read, layout = self.values.make_block_reader(variable), layouts[path]
                    assert read is not None
                    array, memory = own.pop(path, (None, ()))
                    if self.values.read_into_shards(variable, memory):
                        yield path, array
                    elif layout is None:
                        yield path, read(make_full_index(variable.shape))
                    else:
                        yield (
                            path,
                            self._engine.create_from_shards(
                                Assignment(variable, layout, is_padded=True), read, copy=False
                            ),
                        )
                    progress(path)

            with after_checks or nullcontext():
                loaded = self._processes.run_in_all_processes(
                    lambda: self.adapter.restore_variables(model, optimizer, read_arrays())
                )
                if random_states is not None:
                    self.adapter.restore_state_outside_variables(
                        *loaded, {**self._settings, "random": random_states}
                    )
            return loaded

    def _get_writable_memory(self, array: object) -> Sequence[tuple[Index, NumpyArray]]:
        return self._engine.get_writable_memory(array) if isinstance(array, self._engine.array_types) else ()

    def _list_checked_variables(self, model: object, optimizer: object) -> Sequence[StoredVariable]:
        """Return the variables of the model and its optimizer, after checking that the checkpoint fits them."""
        source = self.values.source
        if isinstance(source, RenamedSource):
            # A name table renames slots with their weights, so find the weights before listing the optimizer's slots.
            for each in self.adapter.list_stored_variables(model):
                self.values.find_saved_variable(each.variable)
            if self._settings:
                self._settings = {**self._settings, "renamed": source.list_paths_by_tensor_name()}
        slots = [_make_variable_spec(v) for v in source.variables.values() if v.kind is Kind.SLOT]
        if optimizer is not None:
            self._check_optimizer_state(bool(slots))
        saved = SavedOptimizer(slots if self._settings else (), self._settings)
        stored = self.adapter.list_stored_variables(model, optimizer, saved)
        if not self._settings:  # another library saved the optimizer, so its slots cannot be restored
            stored = [each for each in stored if not _is_slot(each)]
        kinds = {Kind.WEIGHT, Kind.STATE}
        if self._settings and (optimizer is not None or (slots and any(map(_is_slot, stored)))):
            kinds.add(Kind.SLOT)
        self.values.check_variables_match([each.variable for each in stored], kinds)
        return stored

    def _find_unread_slots(self, stored: Sequence[StoredVariable]) -> Sequence[str]:
        """Return the paths of saved slots that are not read because the model has no optimizer."""
        if not self._settings:  # another library saved the optimizer, so its slots cannot be read
            return ()
        known = {saved.path for each in stored if (saved := self.values.find_saved_variable(each.variable))}
        slots = [v.path for v in self.values.source.variables.values() if v.kind is Kind.SLOT]
        return [path for path in slots if path not in known]

    def _check_optimizer_state(self, has_slots: bool) -> None:
        """Raise if the checkpoint has no state for the optimizer that was passed, unless `missing` is "keep"."""
        if self.values.missing == "keep" or self._settings.get("optimizer") or (has_slots and self._settings):
            return
        library = self.states.get("settings", {}).get("library")
        raise CheckpointError(
            f"{self.values.source.where}: no optimizer state for {self.adapter.name} was saved",
            facts={"saved by": library, "loading": self.adapter.name},
            why="it was saved without optimizer="
            if library == self.adapter.name
            else "each library stores optimizer state in its own format",
            fix='leave optimizer out, or pass missing="keep" to start with a new state',
        )

    def _verify_values(
        self, variables: Iterable[VariableSpec], layouts: Mapping[str, Layout | None], progress: Progress
    ) -> None:
        """Raise if a value that this process needs is damaged."""
        for variable in variables:
            saved = self.values.find_saved_variable(variable)
            assert saved is not None
            layout = layouts[variable.path]
            read = self.values.make_block_reader(variable)
            if is_integer_state(variable, saved) and read is not None:
                read(make_full_index(saved.shape))  # raises if the value exceeds the range of the dtype
            elif layout is None:
                self.values.source.verify_block(saved.path)
            else:
                ids = self._engine.bind_mesh(layout.mesh).local_device_ids
                for index, _ in group_devices_by_shard(layout, saved.shape, ids).values():
                    self.values.source.verify_block(saved.path, index)
            progress(variable.path)


# A Keras model may be compiled after the load, so `compile` restores its optimizer's slots (decisions/0081).
def _warn_of_unread_slots(loading: ModelLoader, values: SavedModelValues, model: object) -> None:
    """Warn that saved optimizer slots were not read, and restore them once the model has an optimizer."""
    unread, where = tuple(loading.unread), values.source.where

    def restore_slots() -> None:
        try:
            loading.values = values
            loading.load_values(model, None, verify_first=True, only_paths=unread)
        except CheckpointError as error:
            warning = LayoutMapWarning(
                f"{where}: the optimizer state was not restored",
                facts={"not read": join_names(unread)},
                why=f"the optimizer differs from the one that was saved: {error.what}",
                fix="compile the model with the same optimizer as when it was saved",
            )
            warnings.warn(warning, stacklevel=find_user_stacklevel({loading.adapter.name}))

    is_restored = loading.adapter.restore_when_optimizer_is_set(model, restore_slots)
    warning = LayoutMapWarning(
        f"{where}: {len(unread)} optimizer variables were not read",
        facts={"not read": join_names(unread)},
        why="the model has no optimizer",
        fix="call model.compile(...), which restores them" * is_restored
        + "pass optimizer=, or a function of the model that makes it" * (not is_restored)
        + ', or pass extra="ignore" to leave them out',
    )
    warnings.warn(warning, stacklevel=find_user_stacklevel())


def _check_override_settings(override: Mapping[str, Any], settings: Mapping[str, Any]) -> None:

    found = settings.get("optimizer")
    groups: Sequence[Mapping[str, Any]] = (
        cast("Mapping[str, Any]", found).get("groups", ()) if isinstance(found, Mapping) else ()
    )
    known = {name for group in groups for name in group} - {"params"}
    if unknown := [name for name in override if name not in known]:
        raise CheckpointError(
            f"override={dict(override)!r}: the saved optimizer has no setting {unknown[0]!r}",
            facts={"settings": join_names(sorted(known)) or "none: no torch optimizer was saved"},
            why="only torch optimizers save settings; other libraries keep them in code or in variables",
            fix="use one of these settings, or change the optimizer after the load",
        )


def _make_variable_spec(saved: SavedVariable) -> VariableSpec:
    return VariableSpec(saved.path, saved.shape, saved.dtype, saved.kind, saved.aliases)


def _is_slot(stored: StoredVariable) -> bool:
    return stored.variable.kind is Kind.SLOT


def find_model_mesh(adapter: CheckpointAdapter, model: object) -> Mesh | None:
    """Return the mesh of an existing model, or `None` if it is on no mesh."""
    engine = get_engine(adapter.engine_name)
    layouts = (engine.get_layout(each.array) for each in adapter.list_stored_variables(model))
    return next((layout.mesh for layout in layouts if layout is not None), None)


def _make_model_if_function(model: object) -> Any:
    """Return the result of a function that makes a model. Return anything else unchanged."""
    if find_model_adapter(model) is None and callable(model):
        return model()
    return model
