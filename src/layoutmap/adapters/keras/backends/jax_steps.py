"""Run training, test, and predict steps on the mesh, with the state that Keras takes out of a model.

Keras donates the values of all variables to each step, so between two steps no variable has a value. An error in the
step, its data, or a callback, or an interrupt, would leave a model without weights.

Private names of Keras, tested on Keras 3.15:

    keras.Model                                     _get_jax_state, _purge_model_variables, _make_function,
                                                    _jax_state, _jax_state_synced
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import jax
import keras
import numpy as np
from jax.experimental.sparse import JAXSparse

from layoutmap.adapters.fingerprints import hash_lowered_step
from layoutmap.adapters.keras.backends.jax_processes import RowDivider, wrap_to_report_failure
from layoutmap.adapters.keras.protocol import KerasSession, WrappedMethods
from layoutmap.adapters.keras.training import compare_batch_between_processes, make_step_factory_wrappers
from layoutmap.core.layout import Layout
from layoutmap.engines.agreement import CallComparisonSchedule, check_same_program
from layoutmap.engines.jax.ambient import suspend_ambient_mesh
from layoutmap.engines.jax.padded import (
    PaddedArray,
    compute_padded_shape,
    pad_array,
    unpad_array,
    unwrap_padded_array,
    wrap_padded_array,
)
from layoutmap.engines.jax.trees import move_to_memory
from layoutmap.engines.patches import set_attribute_temporarily

PRIVATE_NAMES = ((keras.Model, ("_get_jax_state", "_purge_model_variables", "_make_function")),)
State = Sequence[Sequence[Any]]
Method = Callable[..., Any]
_STEPS = ("train", "test", "predict")
_ENTRIES = ("fit", "evaluate", "predict", *(f"{step}_on_batch" for step in _STEPS))


# A keras `Distribution` is global and refuses uneven batches, so wrap methods instead (decisions/0007).
def make_training_method_wrappers(model: keras.Model, session: KerasSession) -> WrappedMethods:
    """Return wrappers of a model's methods, by name. They place batches, keep layouts, and undo failed steps."""
    last_values = _LastVariableValues(model)
    wrappers: dict[str, Method] = {
        name: _wrap_to_restore_values_after_failure(getattr(model, name), last_values) for name in _ENTRIES
    }
    if session.context.spans_processes:
        wrappers |= {
            name: wrap_to_report_failure(wrappers[name], session, name)
            for name in ("fit", "evaluate", "predict")
        }
    wrappers |= {
        f"{name}_step": _wrap_step_to_keep_layouts(model, getattr(model, f"{name}_step"), session)
        for name in _STEPS
    }

    schedule = CallComparisonSchedule()

    def make_step(step_name: str, make_keras_step: Callable[[], Method]) -> Method:
        # `compile` may change the loss, but jax.jit caches traces by function, so make a new function.
        kept = getattr(model, f"{step_name}_step")
        renewed = functools.wraps(kept)(lambda *arguments: kept(*arguments))
        with set_attribute_temporarily(model, f"{step_name}_step", renewed):
            return _make_batch_placing_step(make_keras_step(), session, step_name, schedule)

    wrappers = make_step_factory_wrappers(model, session, schedule, make_step, wrappers)
    wrappers["_get_jax_state"] = last_values.wrap_get_jax_state(model._get_jax_state)
    wrappers["jax_state_sync"] = last_values.wrap_jax_state_sync(model.jax_state_sync)
    wrappers["_make_function"] = last_values.wrap_keras_make_function(model._make_function, session)
    return wrappers


@functools.partial(jax.tree_util.register_dataclass, data_fields=["array"], meta_fields=["rows"])
@dataclass(frozen=True)
class _RowPaddedArray:
    """Hold an array of a batch that is padded with rows of zeros, so that all devices get equally many rows."""

    array: jax.Array
    rows: int


def place_on_mesh(batch: object, session: KerasSession, *, pad_rows: bool = False) -> Any:
    """Return a batch on the mesh. Arrays are sharded along the first axis, or replicated if that is uneven.

    With `pad_rows`, numpy arrays with uneven rows become `_RowPaddedArray`, from which a step takes the arrays'
    own rows (decisions/0295). All arrays are placed at once. A sparse array is replicated, because it is one list of
    elements of all rows.
    """
    policy, engine = session.policy, session.engine
    arrays: list[Any] = []
    padded: list[int | None] = []
    shardings: list[jax.sharding.Sharding] = []
    for leaf in keras.tree.flatten(batch):
        if not hasattr(leaf, "shape"):
            continue
        padded.append(None)
        if isinstance(leaf, JAXSparse):
            shardings.append(engine.make_native_layout(policy.make_replicated_layout(0), 0))
        else:
            layout = policy.derive_batch_layout(leaf.shape)
            if not isinstance(leaf, jax.Array):
                # JAX on CPUs shares memory with numpy arrays, which users may change, so copy.
                leaf = engine.canonicalize_values(np.array(leaf))
                if pad_rows and (shape := _pad_batch_shape(leaf.shape, session)) != leaf.shape:
                    padded[-1] = len(leaf)
                    leaf = np.concatenate([leaf, np.zeros((shape[0] - len(leaf), *shape[1:]), leaf.dtype)])
                    layout = policy.derive_batch_layout(shape)
            # Reading a sharded array may need collectives, which must not overlap on CPUs, so finish them here.
            elif len(leaf.sharding.device_set) > 1:
                leaf = engine.relayout(leaf, layout)
            shardings.append(engine.make_native_layout(layout, layout.rank))
        arrays.append(leaf)
    # With several processes, jax.jit refuses numpy arrays with shardings, so use device_put.
    if jax.process_count() > 1 or not all(isinstance(array, np.ndarray) for array in arrays):
        placed = iter(jax.device_put(arrays, shardings))
    else:
        with suspend_ambient_mesh():
            placed = iter(_compile_placement_function(tuple(shardings))(*arrays))
    placed = (x if rows is None else _RowPaddedArray(x, rows) for x, rows in zip(placed, padded, strict=True))
    return keras.tree.map_structure(
        lambda leaf: next(placed) if hasattr(leaf, "shape") else leaf, batch, none_is_leaf=True
    )


def _pad_batch_shape(shape: tuple[int, ...], session: KerasSession) -> tuple[int, ...]:
    """Return a shape with rows padded to even shards, or unchanged on explicit mesh axes, where JAX cannot unpad."""
    policy = session.policy
    if policy.batch_dim is None or not shape or policy.mesh.explicit_dims:
        return shape
    return Layout.batch_sharded(policy.mesh, policy.batch_dim, len(shape)).pad_shape(shape)


@functools.lru_cache(maxsize=64)
def _compile_placement_function(
    shardings: tuple[jax.sharding.Sharding, ...],
) -> Callable[..., tuple[jax.Array, ...]]:
    """Return a compiled function that moves numpy arrays to `shardings`, in half the time of `jax.device_put`."""
    return jax.jit(lambda *arrays: arrays, in_shardings=shardings, out_shardings=shardings)


# -- the state of a model


# Keras removes the values of variables during a step, so keep them in case the step fails (decisions/0007).
class _LastVariableValues:
    """Keep the last values of a model's variables, which Keras removes during a step."""

    def __init__(self, model: keras.Model) -> None:
        self._model = model
        self._values: State = ()
        self.depth = 0  # nesting depth: `fit` calls evaluate, and callbacks may predict

    def wrap_get_jax_state(self, original: Method) -> Method:
        """Wrap `_get_jax_state` to record the values of the model's variables before Keras removes them."""

        @functools.wraps(original)
        def get_state(purge_model_variables: bool = False, **groups: bool) -> State:
            _copy_shared_buffers(
                variable for group in _list_variable_groups(self._model, 4) for variable in group
            )
            with _return_stored_arrays_temporarily():
                state = tuple(list(map(unwrap_padded_array, group)) for group in original(**groups))
            self._record_values(state)
            if purge_model_variables:
                self._model._purge_model_variables(**groups)
            return state

        return get_state

    def wrap_keras_make_function(self, original: Method, session: KerasSession) -> Method:
        """Wrap `_make_function` of Keras so that each step records the new values of variables that it returns."""

        @functools.wraps(original)
        def make_recording_function(step: Method, *args: object, **kwargs: object) -> object:
            if session.context.spans_processes and hasattr(step, "lower"):
                step = _wrap_to_compare_programs(step, session)

            def run_and_record_values(state: State, data: object) -> object:
                result, new = step(state, data)
                self._record_values(new)
                return result, new

            return original(run_and_record_values, *args, **kwargs)

        return make_recording_function

    def wrap_jax_state_sync(self, original: Method) -> Method:
        """Wrap `jax_state_sync` to turn padded arrays that a step returns into the `PaddedArray`s of variables."""

        @functools.wraps(original)
        def sync_state() -> None:
            model = self._model
            if getattr(model, "_jax_state", None) and not model._jax_state_synced:
                owners = _list_variable_groups_by_name(model)
                model._jax_state = {
                    name: values
                    and [wrap_padded_array(x, v.shape) for x, v in zip(values, owners[name], strict=True)]
                    for name, values in model._jax_state.items()
                }
            original()

        return sync_state

    def _record_values(self, state: State) -> None:
        """Record the values of a state if `fit` or a similar method is running."""
        if self.depth:
            self._values = state

    def restore_lost_values(self, error: BaseException) -> None:
        """Give variables that lost their value the last recorded one. Add a note to `error` if that is lost, too."""
        lost = False
        for values, variables in zip(
            self._values, _list_variable_groups(self._model, len(self._values)), strict=False
        ):
            for value, variable in zip(values, variables, strict=False):
                if variable._value is None or variable._value.is_deleted():
                    variable._value = wrap_padded_array(value, variable.shape)
                lost |= _has_lost_values(variable._value)
        self._model._jax_state, self._model._jax_state_synced = None, True
        if lost:
            error.add_note(
                f"{self._model.name}: the step had begun and taken the memory of the weights, so their values are "
                "lost: load them again, or build the model again"
            )

    def release_values(self) -> None:
        """Release the recorded values."""
        self._values = ()


def _has_lost_values(array: jax.Array) -> bool:
    """Return whether an array was deleted, or its computation failed."""
    try:
        return array.is_deleted() or jax.block_until_ready(array) is None
    except jax.errors.JaxRuntimeError:  # waiting raises if the computation of the value failed
        return True


def _list_variable_groups_by_name(model: keras.Model) -> dict[str, list[keras.Variable]]:
    """Return a dict from the name of a list in a model's JAX state to the variables that have their values in it."""
    names = ("trainable_variables", "non_trainable_variables", "optimizer_variables", "metrics_variables")
    return dict(zip(names, _list_variable_groups(model, 4), strict=True))


def _list_variable_groups(model: keras.Model, num_groups: int) -> list[list[keras.Variable]]:
    """Return lists of a model's variables, one for each list of values in a Keras state with `num_groups` lists."""
    groups = [model.trainable_variables, model.non_trainable_variables]
    if num_groups > 3:
        groups.append(getattr(getattr(model, "optimizer", None), "variables", []))
    return groups if num_groups == 2 else [*groups, model.metrics_variables]


def _copy_shared_buffers(variables: Iterable[keras.Variable]) -> None:
    """Copy buffers that two variables share, because a step can donate a buffer only once."""
    held: set[int] = set()
    for variable in variables:
        if id(variable._value) in held:
            variable._value = variable._value.copy()
        held.add(id(variable._value))


def read_training_state(model: keras.Model) -> tuple[list[jax.Array], ...]:
    """Return the arrays of a model's variables, in the lists that the model's training step takes."""
    return tuple(
        [unwrap_padded_array(read_stored_array(variable)) for variable in group]
        for group in _list_variable_groups(model, 4)
    )


_returns_stored_arrays: ContextVar[bool] = ContextVar("_returns_stored_arrays", default=False)


@contextmanager
def _return_stored_arrays_temporarily() -> Generator[None]:
    """Make variables return their stored arrays, also padded ones, until the block ends."""
    token = _returns_stored_arrays.set(True)
    try:
        yield
    finally:
        _returns_stored_arrays.reset(token)


def read_stored_array(variable: keras.Variable) -> Any:
    """Return the array that a variable stores, which may be a `PaddedArray`."""
    with _return_stored_arrays_temporarily():
        return variable.value


def read_unpadded_value(variable: keras.Variable, value: Any) -> Any:
    """Return `value` unpadded, in device memory, and autocast. While stored arrays are read, only autocast it."""
    if isinstance(value, PaddedArray):
        if _returns_stored_arrays.get():
            return value
        value = value.__jax_array__()
    if isinstance(value, jax.Array) and not _returns_stored_arrays.get():
        value = move_to_memory(value, "device")
    return type(variable)._maybe_autocast(variable, value)


def _wrap_to_restore_values_after_failure(method: Method, last_values: _LastVariableValues) -> Method:
    """Wrap `fit` or a similar method to leave the mesh of `jax.set_mesh`, and to restore values after a failure."""

    @functools.wraps(method)
    def call_and_restore_after_failure(*args: object, **kwargs: object) -> object:
        last_values.depth += 1
        try:
            with suspend_ambient_mesh():
                return method(*args, **kwargs)
        except BaseException as error:
            last_values.restore_lost_values(error)
            raise
        finally:
            last_values.depth -= 1
            if not last_values.depth:
                last_values.release_values()

    return call_and_restore_after_failure


# -- steps


def _make_batch_placing_step(
    step: Method, session: KerasSession, step_name: str, schedule: CallComparisonSchedule
) -> Method:
    """Return a step that first places the batches that it gets on the mesh."""
    if session.context.spans_processes:
        return _make_multiprocess_step(step, RowDivider(session, step_name, schedule), step_name, session)
    pad_on_mesh = functools.partial(place_on_mesh, pad_rows=True)
    place = _copy_or_place_batch if session.policy.mesh.size == 1 else pad_on_mesh
    return lambda state, data: step(state, (place(batch, session) for batch in data))


def _copy_or_place_batch(batch: object, session: KerasSession) -> Any:
    """Copy a batch of numpy arrays, which `jax.jit` then places on one device, or place another batch on the mesh."""
    if type(batch) is tuple and all(leaf is None or type(leaf) is np.ndarray for leaf in batch):
        return tuple(None if leaf is None else leaf.copy() for leaf in batch)
    return place_on_mesh(batch, session)


def _wrap_to_compare_programs(step: Any, session: KerasSession) -> Method:
    """Wrap a compiled step to compare its lowered program between processes for each new batch signature."""
    known: set[object] = set()

    def run_after_comparing_programs(state: State, data: object) -> object:
        signature = tuple((np.shape(each), jax.numpy.result_type(each)) for each in jax.tree.leaves(data))
        if signature not in known:
            lowered = hash_lowered_step(step.__name__, step.lower(state, data))
            check_same_program(f"the {step.__name__}", [lowered], session.context.gather_from_processes)
            known.add(signature)
        return step(state, data)

    return run_after_comparing_programs


def _make_multiprocess_step(
    step: Method, row_divider: RowDivider, step_name: str, session: KerasSession
) -> Method:
    """Return a step for several processes, in which each passes its own rows, and gets the predictions of these."""

    def run_on_own_rows(state: State, data: Iterator[object]) -> object:
        row_divider.num_placed_rows.clear()
        whole = session.thread_state.has_whole_batch
        batches = _place_whole_batches(data, session) if whole else row_divider.assemble_batches(data)
        outputs, new = step(state, batches)
        if (
            row_divider.is_on_cpus
        ):  # on CPUs, this step and the next comparison of batches could deadlock, so wait
            jax.block_until_ready((outputs, new))
        return (row_divider.extract_own_rows(outputs), new) if step_name == "predict" else (outputs, new)

    return run_on_own_rows


def _place_whole_batches(batches: Iterable[object], session: KerasSession) -> Iterator[object]:
    """Yield batches on the mesh that each process passes as a whole. With `check_batches`, first compare them."""
    for batch in batches:
        compare_batch_between_processes(batch, session)
        yield place_on_mesh(batch, session)


def _wrap_step_to_keep_layouts(model: keras.Model, original: Method, session: KerasSession) -> Method:
    """Wrap a model's step to return the new values of variables in the layouts of the variables."""

    @functools.wraps(original)
    def run_step_in_layouts(state: State, data: object) -> object:
        groups = _list_variable_groups(model, len(state))
        batch = jax.tree.map(_remove_padding_rows, data, is_leaf=_is_row_padded_array)
        result, new = original(tuple(map(_unpad_values, state, groups)), batch)
        # A compiled step can return only even shards, so relay out the result if padded rows were removed.
        has_padded_rows = any(map(_is_row_padded_array, jax.tree.leaves(data, is_leaf=_is_row_padded_array)))
        # A process can read only arrays on its own devices, so place rows and scalars of the result there.
        if session.context.spans_processes or has_padded_rows:
            by_rows = original.__name__ == "predict_step"
            result = keras.tree.map_structure(
                lambda array: _constrain_to_readable_layout(array, session, by_rows), result
            )
        if original.__name__ == "predict_step":
            return result, _constrain_values(new, model.non_trainable_variables)
        return result, tuple(map(_constrain_values, new, _list_variable_groups(model, len(new))))

    return run_step_in_layouts


def _is_row_padded_array(leaf: object) -> bool:
    return isinstance(leaf, _RowPaddedArray)


def _remove_padding_rows(leaf: Any) -> Any:
    """Return a leaf of a batch without the rows that pad it."""
    return leaf.array[: leaf.rows] if isinstance(leaf, _RowPaddedArray) else leaf


def _constrain_to_readable_layout(array: object, session: KerasSession, by_rows: bool) -> object:
    """Return a step's result in a layout that each process can read: sharded by rows, or replicated."""
    if not isinstance(array, jax.Array):
        return array  # a custom step may return numbers, which have no layout
    layout = (
        session.policy.derive_batch_layout(array.shape)
        if by_rows
        else session.policy.make_replicated_layout(array.ndim)
    )
    return jax.lax.with_sharding_constraint(array, session.engine.make_native_layout(layout, layout.rank))


def _unpad_values(values: Sequence[jax.Array], variables: Sequence[keras.Variable]) -> list[jax.Array]:
    """Return the unpadded values of variables in device memory."""
    pairs = zip(values, variables, strict=True)
    return [unpad_array(move_to_memory(value, "device"), variable.shape) for value, variable in pairs]


def _constrain_values(values: Sequence[jax.Array], variables: Sequence[keras.Variable]) -> list[jax.Array]:
    return list(map(constrain_to_layout, values, variables))


def constrain_to_layout(array: Any, variable: keras.Variable) -> jax.Array:
    """Return an array of a step in a variable's layout, padded if needed. Without a layout, return it unchanged."""
    layout = variable._layout
    if not isinstance(layout, jax.sharding.NamedSharding):
        return array
    array = pad_array(array, compute_padded_shape(array.shape, layout))
    array = jax.lax.with_sharding_constraint(array, jax.sharding.NamedSharding(layout.mesh, layout.spec))
    return move_to_memory(array, layout.memory_kind)
