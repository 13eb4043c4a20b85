"""Run `fit`, `evaluate`, and `predict` on a sharded model.

Keras keeps its own loops and callbacks. What is the same on every backend is here: before a step, variables that nobody
laid out yet (metrics, an optimizer made elsewhere) join the mesh, and each batch is placed on it. How a backend's steps
are wrapped is in `backends`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager, nullcontext
from types import MappingProxyType
from typing import Any

import keras

from layoutmap.adapters.keras.fingerprints import describe_model
from layoutmap.adapters.keras.protocol import KerasSession, read_variable
from layoutmap.core.arguments import describe_type
from layoutmap.core.errors import LayoutMapError, ScopeError, shorten_repr
from layoutmap.engines.agreement import CallSchedule, check_batch, check_program
from layoutmap.engines.patches import set_temporarily, wrap_in_context


def complete(model: Any, inputs: object) -> None:
    """Create, without computing, the variables that a first call and training step would create.

    Without inputs, the model is not called, and may stay without weights.
    """
    if inputs is not None:
        _call_with_symbols(model, keras.tree.map_structure(functools.partial(_make_symbol, inputs), inputs))
    optimizer = getattr(model, "optimizer", None)
    if (
        optimizer is not None
        and not optimizer.built
        and all(layer.built for layer in model._flatten_layers())
    ):
        optimizer.build(model.trainable_variables)


def _call_with_symbols(model: keras.Model, symbols: object) -> None:
    """Call a model with symbols of its inputs."""
    try:
        model(symbols)
    except LayoutMapError:
        raise
    except Exception as error:
        given = ", ".join(f"{s.dtype}{list(s.shape)}" for s in keras.tree.flatten(symbols))
        said = (
            line for line in str(error).splitlines() if line.strip() and not line.startswith("Exception enc")
        )
        raise ScopeError(
            f"{model.name}: it cannot be called with inputs of these shapes",
            facts={"inputs": given, type(error).__name__: next(said, "")},
            why="the model is called with symbols, which have shapes and no values, to create its weights",
            fix="pass inputs= of the shapes, types and nesting with which the model is called",
        ) from error


def _make_symbol(inputs: Any, leaf: Any) -> object:
    """Return a symbolic tensor with the shape and dtype of one input."""
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
        sizes = isinstance(inputs, tuple | list) and all(n is None or isinstance(n, int) for n in inputs)
        shape = tuple(inputs) if sizes else (8, 16)
        raise ScopeError(
            f"inputs={shorten_repr(inputs)}: {shorten_repr(leaf)} is not an array",
            why=f"it is {describe_type(leaf)}, and has neither a shape nor an element type",
            fix="pass an example batch, or its shape and type: "
            f'inputs=keras.Input(batch_shape={shape}, dtype="float32")',
        )
    return keras.KerasTensor(leaf.shape, str(leaf.dtype))


def adopt_for_training(model: keras.Model, session: KerasSession) -> None:
    """Add all variables that a step uses to the scope."""
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None:
        session.registry.add_optimizer(optimizer)
    slots = list(optimizer.variables) if optimizer is not None else []
    weights = list(model.trainable_variables)
    for slot, parent in zip(slots, match_slots(slots, weights), strict=True):
        if parent is not None and not session.registry.has_variable(slot):
            session.registry.set_parent(slot, parent)
    for variable in (*model.variables, *slots, *model.metrics_variables):
        session.registry.add(variable)


def make_for_training(model: keras.Model, session: KerasSession | None, batch: object) -> None:
    """Create the weights, slots, metrics, and loss trackers that a traced training step would create.

    They are placed on the mesh of the session, if there is one. A model that is not compiled only gets weights.
    """
    if model.compiled:
        with nullcontext() if session is None else session.defer():
            model._symbolic_build(data_batch=batch)
    if session is not None:
        materialize_for_training(model, session)


def materialize_for_training(model: keras.Model, session: KerasSession) -> None:
    """Place every variable that a step touches on the mesh."""
    adopt_for_training(model, session)
    session.refuse_in_a_plan(model.name)
    session.materialize()


def make_step_wraps(
    model: keras.Model,
    session: KerasSession,
    schedule: CallSchedule,
    step: Callable[[str, Callable[[], Any]], Any],
    wraps: Mapping[str, Callable[..., object]] = MappingProxyType({}),
) -> dict[str, Callable[..., object]]:
    """Return the methods to wrap on a model: those that make its steps, and the one that begins an epoch.

    `step` returns the step `"train"`, `"test"`, or `"predict"`. Its second argument returns Keras's own step.
    """

    def wrap_make_function(name: str) -> Callable[..., object]:
        plain, attribute = getattr(model, f"make_{name}_function"), f"{name}_function"

        @functools.wraps(plain)
        def make(force: bool = False) -> object:
            def make_own_step() -> object:
                plain(force=force)
                return getattr(model, attribute)

            materialize_for_training(model, session)
            if name == "train":
                session.context.warn_of_idle_dims("fit")
            if getattr(model, attribute) is None or force:
                if session.context.across:
                    check_program(f"the {name} step", describe_model(model, name), session.context.gather)
                setattr(model, attribute, step(name, make_own_step))
            return getattr(model, attribute)

        return make

    makes = {f"make_{name}_function": wrap_make_function(name) for name in ("train", "test", "predict")}
    epochs = _make_epoch_wraps(model, schedule, wraps) if session.context.across else {}
    return {**wraps, **makes, **epochs}


def wrap_fit(fit: Callable[..., object], session: KerasSession) -> Callable[..., object]:
    """Wrap `fit` to refuse unsupported callbacks, and to warn at the end if no batch could be sharded."""

    @functools.wraps(fit)
    def fit_checked(*args: object, **kwargs: object) -> object:
        _check_callbacks(kwargs.get("callbacks"), session)
        batches = session.policy.batches
        batches.clear()
        result = fit(*args, **kwargs)
        if session.policy.batch_dim is not None and batches and True not in batches:
            session.policy.warn_of_uneven_batch("fit", "keras")
        return result

    return fit_checked


def _check_callbacks(callbacks: object, session: KerasSession) -> None:
    """Raise for TensorBoard options that would fail at the end of the first epoch."""
    for callback in getattr(callbacks, "callbacks", None) or keras.tree.flatten(callbacks):
        if isinstance(callback, keras.callbacks.TensorBoard) and callback.histogram_freq:
            for option in filter(
                lambda name: getattr(callback, name), session.backend.unsupported_board_options
            ):
                raise ScopeError(
                    f"fit: TensorBoard with {option} cannot show sharded weights on "
                    f"{session.backend.engine_name}",
                    why="it computes with the weights, using operations for a single device",
                    fix=f"leave {option} out, and log variable.numpy() in your own callback",
                )


def _make_epoch_wraps(
    model: keras.Model, schedule: CallSchedule, wraps: Mapping[str, Callable[..., object]]
) -> dict[str, Callable[..., object]]:
    """Return the methods to wrap on a model so that its schedule knows the first step of each epoch."""
    reset = model.reset_metrics

    @functools.wraps(reset)
    def begin_epoch() -> None:
        # `fit` and `evaluate` reset metrics in each epoch, but `train_on_batch` in each call.
        schedule.begins_epoch = schedule.is_in_epochs
        reset()

    in_epochs = functools.partial(set_temporarily, schedule, "is_in_epochs", True)
    loops = {name: wraps.get(name) or getattr(model, name) for name in ("fit", "evaluate")}
    loops = {name: wrap_in_context(plain, in_epochs) for name, plain in loops.items()}
    return {"reset_metrics": begin_epoch, **loops}


def build_for_step(model: keras.Model, session: KerasSession, batch: object) -> bool:
    """Build an uncalled model for inputs of a batch's shapes, and return whether that was needed."""
    if all(layer.built for layer in model._flatten_layers()):
        return False
    x, _, _ = keras.utils.unpack_x_y_sample_weight(batch)
    with session.defer():
        model(
            keras.tree.map_structure(
                lambda each: keras.KerasTensor(each.shape, keras.backend.standardize_dtype(each.dtype)), x
            )
        )
    return True


def has_shape(value: object) -> bool:
    """Return whether a part of a batch is an array."""
    return value is not None and hasattr(value, "shape")


def place_batch(batch: object, session: KerasSession, can_place: Callable[[object], bool] = has_shape) -> Any:
    """Place a batch on the mesh: shard each array along its first axis, or replicate it if uneven."""

    def place(array: Any) -> object:
        if not can_place(array):
            return array
        return session.engine.relayout(array, session.policy.derive_batch_layout(tuple(array.shape)))

    return keras.tree.map_structure(place, batch, none_is_leaf=True)


def check_same_batch(batch: object, session: KerasSession, schedule: CallSchedule | None = None) -> bool:
    """Raise if processes that each pass the whole batch pass different ones. Return whether they compared it.

    Without a schedule, every call is compared.
    """
    if not (session.context.across and session.context.options.check_batches):
        return False
    if schedule is not None and not schedule.count_call():
        return False
    leaves = [leaf for leaf in keras.tree.flatten(batch) if hasattr(leaf, "shape")]
    call = None if schedule is None else schedule.calls
    check_batch(list(map(keras.ops.convert_to_numpy, leaves)), session.context.gather, call)
    return True


def compute_loss(model: keras.Model, batch: Any) -> Any:
    """Compute the training loss of a batch with the model's `compute_loss`."""
    x, y, sample_weight = batch
    y_pred = model(x, training=True) if model._call_has_training_arg else model(x)
    return model._compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=True)


@contextmanager
def restored_state(model: keras.Model) -> Generator[None]:
    """Restore the statistics, seeds, and metrics that a model's call changes in the block."""
    before = [(v, read_variable(v)) for v in (*model.non_trainable_variables, *model.metrics_variables)]
    yield
    for variable, value in before:
        variable.assign(value)


def has_own_step(model: keras.Model) -> bool:
    """Return whether a model's class overrides `train_step`, so that only the model knows its loss."""
    return type(model).train_step is not keras.Model.train_step


def call_own_step(model: keras.Model, batch: object) -> tuple[Any, list[Any]]:
    """Return the logs of a model's `train_step`, and the gradient that it passes on for each trainable variable."""
    with record_gradients(model) as found:
        logs = model.train_step(batch)
    return logs, [found.get(id(variable)) for variable in model.trainable_variables]


@contextmanager
def record_gradients(model: keras.Model) -> Generator[dict[int, object]]:
    """Make a model's optimizers record gradients by variable id instead of updating, until the block ends."""
    found: dict[int, object] = {}
    held = [model.optimizer, *vars(model).values()]
    optimizers = {id(each): each for each in held if isinstance(each, keras.optimizers.Optimizer)}.values()

    def wrap_apply(optimizer: keras.Optimizer) -> Callable[..., None]:
        def apply(grads: Any, trainable_variables: Iterable[keras.Variable] | None = None) -> None:
            weights = optimizer._trainable_variables if trainable_variables is None else trainable_variables
            found.update((id(w), g) for w, g in zip(weights, grads, strict=True) if g is not None)

        return apply

    before = [(each, each.__dict__.get("apply")) for each in optimizers]
    try:
        for each, _ in before:
            each.__dict__["apply"] = wrap_apply(each)
        yield found
    finally:
        for each, apply in before:
            del each.__dict__["apply"]
            if apply is not None:
                each.__dict__["apply"] = apply


def match_slots(slots: Iterable[keras.Variable], weights: Iterable[keras.Variable]) -> list[Any]:
    """Return the weight of each slot, or None, by the slot's name, which starts with the weight's.

    Weights may share a name. Optimizers make the slots of one kind in the order of the weights, so the second slot of
    a name is that of the second weight of its name.
    """
    named: dict[str, list[keras.Variable]] = {}
    for weight in weights:
        named.setdefault(weight.path.replace("/", "_"), []).append(weight)
    seen: dict[tuple[str, tuple[int, ...]], int] = {}
    parents: list[keras.Variable | None] = []
    for slot in slots:
        shape = tuple(slot.shape)
        ends = [i for i, letter in enumerate(slot.name) if letter == "_"]
        fitting = next(
            (f for i in reversed(ends) if (f := _filter_by_shape(named.get(slot.name[:i], ()), shape))), []
        )
        number = seen.get((slot.name, shape), 0)
        seen[slot.name, shape] = number + 1
        parents.append(fitting[min(number, len(fitting) - 1)] if fitting else None)
    return parents


def _filter_by_shape(weights: Iterable[keras.Variable], shape: tuple[int, ...]) -> list[keras.Variable]:
    return [weight for weight in weights if tuple(weight.shape) == shape]
