"""Run `fit`, `evaluate`, and `predict` on a sharded model.

Keras's own loops and callbacks stay. This module has the parts that are equal on every backend: before a step,
variables without a layout, such as metrics, are placed on the mesh, and so is each batch. The modules in `backends`
wrap the steps of a backend.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from types import MappingProxyType
from typing import Any

import keras

from layoutmap.adapters.keras.fingerprints import describe_step_program
from layoutmap.adapters.keras.private import is_default
from layoutmap.adapters.keras.protocol import KerasSession, read_global_value
from layoutmap.core.arguments import describe_type
from layoutmap.core.errors import LayoutMapError, ScopeError, shorten_repr
from layoutmap.engines.agreement import CallComparisonSchedule, check_same_batch, check_same_program
from layoutmap.engines.patches import set_attribute_temporarily, wrap_method_in_context


def create_missing_variables(model: Any, inputs: object) -> None:
    """Create a model's weights by a call with symbolic inputs, and its optimizer's slots, without computing.

    Without inputs, the model is not called, and may stay without weights.
    """
    if inputs is not None:
        _call_with_symbolic_inputs(
            model, keras.tree.map_structure(functools.partial(_make_symbolic_input, inputs), inputs)
        )
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and not optimizer.built and _has_all_weights(model):
        optimizer.build(model.trainable_variables)


def list_layers_to_build(layers: Iterable[Any]) -> list[Any]:
    """Return the layers that have no weights yet, because they create them in their first call.

    A layer that has some weights, and that the call of a layer around it did not reach, is complete.
    """
    layers = list(layers)
    return [layer for layer, is_reached in _iterate_unbuilt_layers(layers) if is_reached or not layer.weights]


def _has_all_weights(model: keras.Model) -> bool:
    """Return whether a model has all weights that it trains. It trains none of layers that no call reaches."""
    layers = list(model._flatten_layers())
    return model.built and not any(is_reached for _, is_reached in _iterate_unbuilt_layers(layers))


def _iterate_unbuilt_layers(layers: Sequence[Any]) -> Iterator[tuple[Any, bool]]:
    """Yield each layer that is not built, and whether its first call can still come in that of a layer around it."""
    unbuilt = [each for each in layers if not getattr(each, "built", True) and not is_default(each.build)]
    around = [each for each in layers if isinstance(each, keras.layers.Layer) and each.built and each._called]
    unused = {
        id(inner)
        for layer in around * bool(unbuilt)
        for inner in layer._flatten_layers(include_self=False)
        if not inner._called
    }
    yield from ((layer, id(layer) not in unused) for layer in unbuilt)


def _call_with_symbolic_inputs(model: keras.Model, symbolic_inputs: object) -> None:
    """Call a model with symbolic inputs, so that it creates its weights. Raise a `ScopeError` if the call fails."""
    try:
        model(symbolic_inputs)
    except LayoutMapError:
        raise
    except Exception as error:
        given = ", ".join(f"{s.dtype}{list(s.shape)}" for s in keras.tree.flatten(symbolic_inputs))
        said = (
            line for line in str(error).splitlines() if line.strip() and not line.startswith("Exception enc")
        )
        raise ScopeError(
            f"{model.name}: the model cannot be called with inputs of these shapes",
            facts={"inputs": given, type(error).__name__: next(said, "")},
            why="to create its weights, the model is called with symbolic inputs, which have shapes but no values",
            fix="pass inputs= with the shapes, types, and nesting of the model's inputs",
        ) from error


def _make_symbolic_input(inputs: Any, input_leaf: Any) -> object:
    """Return a symbolic tensor with the shape and dtype of one input."""
    if not hasattr(input_leaf, "shape") or not hasattr(input_leaf, "dtype"):
        sizes = isinstance(inputs, tuple | list) and all(n is None or isinstance(n, int) for n in inputs)
        shape = tuple(inputs) if sizes else (8, 16)
        raise ScopeError(
            f"inputs={shorten_repr(inputs)}: {shorten_repr(input_leaf)} is not an array",
            why=f"it is {describe_type(input_leaf)}, without a shape or without an element type",
            fix="pass an example batch, or its shape and type: "
            f'inputs=keras.Input(batch_shape={shape}, dtype="float32")',
        )
    return keras.KerasTensor(input_leaf.shape, str(input_leaf.dtype))


def register_training_variables(model: keras.Model, session: KerasSession) -> None:
    """Add all variables that a step uses to the scope's registry, and each slot with its weight."""
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None:
        session.registry.add_optimizer(optimizer)
    slots = list(optimizer.variables) if optimizer is not None else []
    weights = list(model.trainable_variables)
    for slot, parent in zip(slots, find_slot_weights(slots, weights), strict=True):
        if parent is not None and not session.registry.has_variable(slot):
            session.registry.set_slot_weight(slot, parent)
    for variable in (*model.variables, *slots, *model.metrics_variables):
        session.registry.add_variable(variable)


def create_training_variables(model: keras.Model, session: KerasSession | None, batch: object) -> None:
    """Create the weights, slots, metrics, and loss trackers that a traced training step would create.

    A session gives them their layouts. A model that is not compiled gets no new variables.
    """
    if model.compiled:
        with nullcontext() if session is None else session.defer_variables():
            model._symbolic_build(data_batch=batch)
    if session is not None:
        materialize_training_variables(model, session)


def materialize_training_variables(model: keras.Model, session: KerasSession) -> None:
    """Give every variable that a step uses its layout and its value."""
    register_training_variables(model, session)
    session.raise_if_plan_only(model.name)
    session.materialize_variables()


def make_step_factory_wrappers(
    model: keras.Model,
    session: KerasSession,
    schedule: CallComparisonSchedule,
    make_step: Callable[[str, Callable[[], Any]], Any],
    wrappers: Mapping[str, Callable[..., object]] = MappingProxyType({}),
) -> dict[str, Callable[..., object]]:
    """Return `wrappers`, and wrappers of `make_train_function` and the like, which make a model's steps.

    `make_step` takes `"train"`, `"test"`, or `"predict"`, and a function that returns Keras's own step, and returns
    the step to run. With several processes, the wrappers also tell the schedule which step begins an epoch.
    """

    def wrap_make_step_function(step_name: str) -> Callable[..., object]:
        original, attribute = getattr(model, f"make_{step_name}_function"), f"{step_name}_function"

        @functools.wraps(original)
        def make_function(force: bool = False) -> object:
            def make_keras_step() -> object:
                original(force=force)
                return getattr(model, attribute)

            materialize_training_variables(model, session)
            if step_name == "train":
                session.context.warn_of_idle_dims("fit")
            if getattr(model, attribute) is None or force:
                if session.context.spans_processes:
                    check_same_program(
                        f"the {step_name} step",
                        describe_step_program(model, step_name),
                        session.context.gather_from_processes,
                    )
                setattr(model, attribute, make_step(step_name, make_keras_step))
            return getattr(model, attribute)

        return make_function

    makes = {f"make_{name}_function": wrap_make_step_function(name) for name in ("train", "test", "predict")}
    epochs = _wrap_to_track_epochs(model, schedule, wrappers) if session.context.spans_processes else {}
    return {**wrappers, **makes, **epochs}


def wrap_fit_with_checks(fit: Callable[..., object], session: KerasSession) -> Callable[..., object]:
    """Wrap `fit` to refuse unsupported callbacks, and to warn at the end if no batch could be sharded."""

    @functools.wraps(fit)
    def check_and_fit(*args: object, **kwargs: object) -> object:
        _check_tensorboard_callbacks(kwargs.get("callbacks"), session)
        batches = session.policy.batches
        batches.clear()
        result = fit(*args, **kwargs)
        if session.policy.batch_dim is not None and batches and True not in batches:
            session.policy.warn_of_uneven_batch("fit", "keras")
        return result

    return check_and_fit


def _check_tensorboard_callbacks(callbacks: object, session: KerasSession) -> None:
    """Raise for TensorBoard options that would fail at the end of the first epoch."""
    for callback in getattr(callbacks, "callbacks", None) or keras.tree.flatten(callbacks):
        if isinstance(callback, keras.callbacks.TensorBoard) and callback.histogram_freq:
            for option in filter(
                lambda name: getattr(callback, name), session.backend.unsupported_board_options
            ):
                raise ScopeError(
                    f"fit: TensorBoard with {option} cannot show sharded weights on "
                    f"{session.backend.engine_name}",
                    why="TensorBoard computes with the weights by operations for a single device",
                    fix=f"leave {option} out, and log variable.numpy() in your own callback",
                )


def _wrap_to_track_epochs(
    model: keras.Model, schedule: CallComparisonSchedule, other_wrappers: Mapping[str, Callable[..., object]]
) -> dict[str, Callable[..., object]]:
    """Return wrappers of a model's methods, by name. They tell `schedule` which step is the first of an epoch."""
    reset = model.reset_metrics

    @functools.wraps(reset)
    def reset_and_begin_epoch() -> None:
        # `train_on_batch` also resets metrics, in each call, so only a reset in `fit` or `evaluate` begins an epoch.
        schedule.begins_epoch = schedule.is_in_epochs
        reset()

    in_epochs = functools.partial(set_attribute_temporarily, schedule, "is_in_epochs", True)
    loops = {name: other_wrappers.get(name) or getattr(model, name) for name in ("fit", "evaluate")}
    loops = {name: wrap_method_in_context(original, in_epochs) for name, original in loops.items()}
    return {"reset_metrics": reset_and_begin_epoch, **loops}


def build_model_for_batch(model: keras.Model, session: KerasSession, batch: object) -> bool:
    """Build a model that was not called yet for inputs of a batch's shapes. Return whether that was needed."""
    if all(layer.built for layer in model._flatten_layers()):
        return False
    x, _, _ = keras.utils.unpack_x_y_sample_weight(batch)
    with session.defer_variables():
        model(
            keras.tree.map_structure(
                lambda each: keras.KerasTensor(each.shape, keras.backend.standardize_dtype(each.dtype)), x
            )
        )
    return True


def has_shape(value: object) -> bool:
    """Return whether a value in a batch has a shape, as arrays have."""
    return value is not None and hasattr(value, "shape")


def place_batch(batch: object, session: KerasSession, can_place: Callable[[object], bool] = has_shape) -> Any:
    """Shard the arrays that `can_place` accepts along the first axis, or replicate them if that is uneven."""

    def place_array(array: Any) -> object:
        if not can_place(array):
            return array
        return session.engine.relayout(array, session.policy.derive_batch_layout(tuple(array.shape)))

    return keras.tree.map_structure(place_array, batch, none_is_leaf=True)


def compare_batch_between_processes(
    batch: object, session: KerasSession, schedule: CallComparisonSchedule | None = None
) -> bool:
    """Raise if the processes pass different batches. Return whether batches were compared in this call.

    Without a schedule, every call is compared.
    """
    if not (session.context.spans_processes and session.context.options.check_batches):
        return False
    if schedule is not None and not schedule.count_call_and_check_due():
        return False
    leaves = [leaf for leaf in keras.tree.flatten(batch) if hasattr(leaf, "shape")]
    call = None if schedule is None else schedule.calls
    check_same_batch(
        list(map(keras.ops.convert_to_numpy, leaves)), session.context.gather_from_processes, call
    )
    return True


def compute_loss(model: keras.Model, batch: Any) -> Any:
    """Compute the training loss of a batch with the model's `compute_loss`."""
    x, y, sample_weight = batch
    y_pred = model(x, training=True) if model._call_has_training_arg else model(x)
    return model._compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=True)


@contextmanager
def preserve_model_state(model: keras.Model) -> Generator[None]:
    """Restore statistics, seeds, and metrics of a model when the block ends without an error."""
    before = [(v, read_global_value(v)) for v in (*model.non_trainable_variables, *model.metrics_variables)]
    yield
    for variable, value in before:
        variable.assign(value)


def has_custom_train_step(model: keras.Model) -> bool:
    """Return whether a model's class overrides `train_step`, so that only the model knows its loss."""
    return type(model).train_step is not keras.Model.train_step


def run_custom_train_step_without_updates(model: keras.Model, batch: object) -> tuple[Any, list[Any]]:
    """Run a model's own `train_step`, but update no weight. Return its logs, and the gradients for its optimizers."""
    with record_gradients_instead_of_applying(model) as found:
        logs = model.train_step(batch)
    return logs, [found.get(id(variable)) for variable in model.trainable_variables]


@contextmanager
def record_gradients_instead_of_applying(model: keras.Model) -> Generator[dict[int, object]]:
    """Make a model's optimizers only record gradients until the block ends. Yield them in a dict from variable ids."""
    found: dict[int, object] = {}
    held = [model.optimizer, *vars(model).values()]
    optimizers = {id(each): each for each in held if isinstance(each, keras.optimizers.Optimizer)}.values()

    def make_recording_apply(optimizer: keras.Optimizer) -> Callable[..., None]:
        def record_instead_of_applying(
            grads: Any, trainable_variables: Iterable[keras.Variable] | None = None
        ) -> None:
            weights = optimizer._trainable_variables if trainable_variables is None else trainable_variables
            found.update((id(w), g) for w, g in zip(weights, grads, strict=True) if g is not None)

        return record_instead_of_applying

    before = [(each, each.__dict__.get("apply")) for each in optimizers]
    try:
        for each, _ in before:
            each.__dict__["apply"] = make_recording_apply(each)
        yield found
    finally:
        for each, apply in before:
            del each.__dict__["apply"]
            if apply is not None:
                each.__dict__["apply"] = apply


def find_slot_weights(slots: Iterable[keras.Variable], weights: Iterable[keras.Variable]) -> list[Any]:
    """Return the weight of each slot, found by name and shape, or None for a slot without a matching weight.

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
        prefixes = [slot.name[:i] for i, letter in enumerate(slot.name) if letter == "_"]
        matches = ([w for w in named.get(each, ()) if tuple(w.shape) == shape] for each in reversed(prefixes))
        fitting = next(filter(None, matches), [])
        number = seen.get((slot.name, shape), 0)
        seen[slot.name, shape] = number + 1
        parents.append(fitting[min(number, len(fitting) - 1)] if fitting else None)
    return parents
