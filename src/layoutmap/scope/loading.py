"""`load`: a model from a step of a checkpoint, on any mesh, each process reading what its shards need."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from layoutmap.adapters import Adapter, adapter_of_model, find_adapter
from layoutmap.adapters.protocol import Stored
from layoutmap.checkpoint.dtypes import numpy_dtype
from layoutmap.checkpoint.foreign import open_source
from layoutmap.checkpoint.reader import Step
from layoutmap.checkpoint.renamed import Renamed
from layoutmap.checkpoint.renaming import Names, read_names
from layoutmap.checkpoint.source import SavedVariable, Source
from layoutmap.core.arguments import kind_of
from layoutmap.core.blocks import Index, NumpyArray, ends_of, full_index
from layoutmap.core.errors import CheckpointError
from layoutmap.core.variables import Assignment, Kind, VariableSpec
from layoutmap.engines import Engine, get_engine
from layoutmap.rules.near_misses import Candidates
from layoutmap.rules.rule_set import RuleSet
from layoutmap.scope.scope import build

Missing = Literal["error", "keep"]
Extra = Literal["error", "ignore"]


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
    progress: bool | None = None,
    inputs: Any = None,
    **options: Any,
) -> Any:
    """Load a model from a step of a checkpoint, whatever mesh and engine it was saved on, or from files of others.

    Args:
        model: A function that makes the model: with `layout_map` it is built in a scope, in which its weights are read
            straight into their shards and no initializer runs. Or a model that exists, in layouts or plain: what it
            needs is read and checked once, and then read into it, so that a damaged file changes nothing.
        directory: What it was saved to. Or what others have written: `*.safetensors` or a folder of them, as Hugging
            Face has it, `*.weights.h5`, a directory of orbax or of `torch.distributed.checkpoint`. These have no
            checksums: a changed value in them cannot be seen.
        layout_map: The rules, for a function. They need not be those of the model that was saved.
        step: The step; `None`: the last one.
        names: What the model's variables are called there, where they have other names or axes: a table of the library,
            such as `"llama"` for a folder of Hugging Face's, a YAML file, or a mapping from paths to names.
        optimizer: See `save`. What it returns then is a pair.
        data: An iterator over the data, which goes on where it was: anything with `load_state_dict()` or `set_state()`.
        missing: What happens with weights of the model that are not in the checkpoint: `"error"`, or `"keep"`: they
            keep their values, or are initialized.
        extra: What happens with weights in the checkpoint that the model does not have: `"error"`, or `"ignore"`.
            Slots of an optimizer are never needed.
        cast: Whether values of another element type are converted to that of the model.
        progress: See `save`.
        inputs: An example of what the model is called with, or its shape and type, for a model that makes its weights
            at its first call: see `build`.
        **options: With `layout_map`: what `build` takes beside, as in `batch_dim="batch"`.

    Returns:
        The model; with `optimizer` the model and the optimizer. Both are the objects that were passed, unless these
        cannot be changed, as pytrees.

    Raises:
        CheckpointError: There is no such step, it is damaged, or it is that of another model: paths, shapes or element
            types differ. The model is as it was.
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
    source = open_source(directory, step)
    if isinstance(source, Step):
        source.check_files()
    table = None if names is None else read_names(names)
    values = Values(source, names=table, missing=missing, extra=extra, cast=cast)
    if layout_map is not None:
        found = build(model, layout_map, values=values, progress=progress, inputs=inputs, **options)
        adapter = adapter_of_model(found)
    else:
        found = _existing(model)
        adapter = adapter_of_model(found)
        if inputs is not None or any(v.kind is Kind.SLOT for v in source.variables.values()):
            adapter.complete(found, (inputs,))
    loaded = _put(adapter, found, optimizer, values, progress)
    values.close()
    if settings := source.states.get("settings"):
        adapter.restore_settings(*loaded, settings)
    if data is not None:
        _restore_data(data, source)
    return loaded if optimizer is not None else loaded[0]


class Values:
    """The values of a checkpoint for the variables of one model.

    Args:
        source: What they are read from.
        names: What the variables are called in it; `None`: what they are called in the model.
        missing: See `load`.
        extra: See `load`.
        cast: See `load`.

    Attributes:
        taken: The paths of variables whose values have been read.
    """

    def __init__(
        self,
        source: Source,
        *,
        names: Names | None = None,
        missing: Missing = "error",
        extra: Extra = "error",
        cast: bool = False,
    ):
        self._renamed = None if names is None else Renamed(source, names)
        self.source = source if self._renamed is None else self._renamed
        self._missing = missing
        self._extra = extra
        self._cast = cast
        self.taken: set[str] = set()
        self._closed = False
        self._by_alias = {a: v.path for v in source.variables.values() for a in v.aliases}

    def find(self, variable: VariableSpec) -> SavedVariable | None:
        """Return what the checkpoint has for a variable, under any of its paths; `None`: nothing."""
        if self._renamed is not None and variable.kind in (Kind.WEIGHT, Kind.STATE):
            self._renamed.fit((variable.path, *variable.aliases), variable.shape)
        for path in (variable.path, *variable.aliases):
            if path in self.source.variables:
                return self.source.variables[path]
            if path in self._by_alias:
                return self.source.variables[self._by_alias[path]]
        return None

    def check(self, variables: Sequence[VariableSpec]) -> None:
        """Compare all variables of a model with the checkpoint; raises once, with all differences.

        Raises:
            CheckpointError: They differ.
        """
        found = [(variable, self.find(variable)) for variable in variables]
        if self._renamed is not None:
            self._renamed.check_once(saved.path for _, saved in found if saved)
        wrong = [text for variable, saved in found if saved and (text := self._difference(variable, saved))]
        known = {saved.path for _, saved in found if saved}
        unknown = [v for v, saved in found if saved is None and _needed(v, self.source)]
        rest = [
            path for path, v in self.source.variables.items() if path not in known and v.kind is Kind.WEIGHT
        ]
        missing = unknown if self._missing == "error" else []
        extra = rest if self._extra == "error" else []
        if not (wrong or missing or extra):
            return
        near = Candidates(rest, most=10_000)
        facts: dict[str, object] = {}
        for variable in missing:
            names = near.nearest(variable.path, 1)
            facts[variable.path] = "not in the checkpoint" + (f"; it has {names[0]}" if names else "")
        facts |= dict(wrong)
        facts |= dict.fromkeys(extra, "in the checkpoint, and not in the model")
        shown = dict(list(facts.items())[:20])
        if len(facts) > len(shown):
            shown["and"] = f"{len(facts) - len(shown)} more"
        fixes = ["build the model that was saved"]
        fixes += ['pass missing="keep" to keep what the checkpoint does not have'] * bool(missing)
        fixes += ['pass extra="ignore" to leave out what the model does not have'] * bool(extra)
        fixes += ["pass cast=True to convert element types"] * any("dtype" in text for _, text in wrong)
        raise CheckpointError(
            f"{self.source.where}: this is not the checkpoint of the model",
            facts=shown,
            why=f"{len(facts)} variables differ; nothing has been loaded",
            fix=", or ".join(fixes),
        )

    def reader(self, variable: VariableSpec) -> Callable[[Index], NumpyArray] | None:
        """Return what reads the shards of a variable; `None` if the checkpoint does not have it."""
        saved = None if self._closed else self.find(variable)
        if (
            saved is None or saved.shape != variable.shape
        ):  # of another shape: one that is read before all are known
            return None
        self.taken.add(variable.path)
        dtype = numpy_dtype(variable.dtype, variable.path)

        def read(index: Index) -> NumpyArray:
            found = self.source.read(saved.path, index)
            values = found.astype(dtype, copy=False)
            if variable.kind is Kind.RNG and not np.array_equal(values, found):
                raise CheckpointError(
                    f"{variable.path}: a random state does not fit",
                    facts={"saved": f"{found.tolist()}, {saved.dtype}", "element type here": variable.dtype},
                    why="libraries hold random states as integers of different types, and this one has no such number",
                    fix="load it where it was saved, or seed the generator with a number below 2**31",
                )
            return values

        return read

    def close(self) -> None:
        """Have no more values: what a model makes later begins as it does by itself."""
        self._closed = True

    def _difference(self, variable: VariableSpec, saved: SavedVariable) -> tuple[str, str] | None:
        if saved.shape != variable.shape:
            return variable.path, f"shape {variable.shape}, in the checkpoint {saved.shape}"
        if saved.dtype != variable.dtype and not self._cast and variable.kind is not Kind.RNG:
            return variable.path, f"dtype {variable.dtype}, in the checkpoint {saved.dtype}"
        return None


def _needed(variable: VariableSpec, source: Source) -> bool:
    """Whether a model cannot go on as it was without a variable."""
    if variable.kind is Kind.SLOT:
        return any(v.kind is Kind.SLOT for v in source.variables.values())
    return variable.kind in (Kind.WEIGHT, Kind.STATE)


def _put(
    adapter: Adapter, model: Any, optimizer: Any, values: Values, progress: bool | None
) -> tuple[Any, Any]:
    """Read what has not been read yet into a model that exists."""
    engine = get_engine(adapter.engine_name)
    stored = adapter.stored(model, optimizer)
    values.check([each.variable for each in stored])
    # Initializers, in their turn, may have drawn from a generator whose state had been read.
    done = values.taken - {each.variable.path for each in stored if each.variable.kind is Kind.RNG}
    rest = [each for each in stored if each.variable.path not in done and values.find(each.variable)]
    for each in rest:
        _check_values(engine, each, values)
    layouts = {each.variable.path: engine.layout_of(each.array) for each in rest}

    def arrays() -> Iterator[tuple[str, Any]]:
        for each in rest:
            path, layout = each.variable.path, layouts[each.variable.path]
            read = values.reader(each.variable)
            assert read is not None
            if layout is None:
                yield path, read(full_index(each.variable.shape))
            else:
                yield path, engine.from_shards(Assignment(each.variable, layout), read, copy=False)

    return adapter.restored(model, optimizer, arrays())


def _check_values(engine: Engine, stored: Stored, values: Values) -> None:
    """Raise if what a variable needs in this process is not as it was saved."""
    saved = values.find(stored.variable)
    assert saved is not None
    layout = engine.layout_of(stored.array)
    read = values.reader(stored.variable)
    if stored.variable.kind is Kind.RNG and read is not None:
        read(full_index(saved.shape))
        return
    if layout is None:
        values.source.check(saved.path)
        return
    ids = engine.bind(layout.mesh).local_device_ids
    indices = {ends_of(index): index for index in (layout.shard_slices(saved.shape, i) for i in ids)}
    for index in indices.values():
        values.source.check(saved.path, index)


def _existing(model: Any) -> Any:
    if find_adapter(model) is None and callable(model):
        return model()
    return model


def _restore_data(data: Any, source: Source) -> None:
    states = source.states.get("processes", [])
    state = states[0]["data"] if len(states) == 1 else None
    for name in ("load_state_dict", "set_state"):
        if callable(method := getattr(data, name, None)):
            method(state)
            return
    raise CheckpointError(
        f"data: {kind_of(data)}, it cannot take up a state",
        why="an iterator is given it by load_state_dict() or set_state()",
        fix="pass the one whose state was saved",
    )
