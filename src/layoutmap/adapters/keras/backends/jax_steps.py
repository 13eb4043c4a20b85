"""Run training, test, and predict steps on the mesh, with the state that Keras takes out of a model.

Keras passes the values of all variables to each step and gives their memory away; between two steps no variable has
one. What fails there, be it the step, its data, a callback or an interrupt, would leave a model without weights.

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

from layoutmap.adapters.fingerprints import hash_lowered
from layoutmap.adapters.keras.backends.jax_processes import Rows, wrap_failure_report
from layoutmap.adapters.keras.protocol import KerasSession, WrappedMethods
from layoutmap.adapters.keras.training import check_same_batch, make_step_wraps
from layoutmap.core.layout import Layout
from layoutmap.engines.agreement import CallSchedule, check_program
from layoutmap.engines.jax.ambient import leave_ambient_mesh
from layoutmap.engines.jax.padded import PaddedArray, find_padded_shape, pad, unpad, unwrap, wrap
from layoutmap.engines.jax.trees import set_memory
from layoutmap.engines.patches import set_temporarily

PRIVATE = ((keras.Model, ("_get_jax_state", "_purge_model_variables", "_make_function")),)
State = Sequence[Sequence[Any]]
Method = Callable[..., Any]
_STEPS = ("train", "test", "predict")
_ENTRIES = ("fit", "evaluate", "predict", *(f"{step}_on_batch" for step in _STEPS))


# A keras `Distribution` is global and refuses uneven batches, so wrap methods instead (decisions/0007).
def make_training_wraps(model: keras.Model, session: KerasSession) -> WrappedMethods:
    """Wrap methods of a model to place batches, keep layouts, and restore values after a failed step."""
    last_values = _LastValues(model)
    wraps: dict[str, Method] = {name: _wrap_entry(getattr(model, name), last_values) for name in _ENTRIES}
    if session.context.across:
        wraps |= {
            name: wrap_failure_report(wraps[name], session, name) for name in ("fit", "evaluate", "predict")
        }
    wraps |= {f"{name}_step": _wrap_step(model, getattr(model, f"{name}_step"), session) for name in _STEPS}

    schedule = CallSchedule()

    def step(name: str, own: Callable[[], Method]) -> Method:
        # `compile` may change the loss, but jax.jit caches traces by function, so make a new function.
        kept = getattr(model, f"{name}_step")
        with set_temporarily(model, f"{name}_step", functools.wraps(kept)(lambda *given: kept(*given))):
            return _make_step(own(), session, name, schedule)

    wraps = make_step_wraps(model, session, schedule, step, wraps)
    wraps["_get_jax_state"] = last_values.wrap_get_state(model._get_jax_state)
    wraps["jax_state_sync"] = last_values.wrap_sync(model.jax_state_sync)
    wraps["_make_function"] = last_values.wrap_make_function(model._make_function, session)
    return wraps


@functools.partial(jax.tree_util.register_dataclass, data_fields=["array"], meta_fields=["rows"])
@dataclass(frozen=True)
class _PaddedRows:
    """Array of a batch with rows of zeros after its own, so that they divide."""

    array: jax.Array
    rows: int


def place_on_mesh(batch: object, session: KerasSession, *, pad_rows: bool = False) -> Any:
    """Return a batch on the mesh: arrays are sharded along the first axis, or replicated if it does not divide.

    With `pad_rows`, arrays of numpy whose rows do not divide are padded, and a step takes their own rows
    (decisions/0295). All arrays are placed at once. Sparse arrays are replicated: theirs is one list of elements for
    all rows.
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
            shardings.append(engine.native(policy.replicated(0), 0))
        else:
            layout = policy.derive_batch_layout(leaf.shape)
            if not isinstance(leaf, jax.Array):
                # JAX on CPUs shares memory with numpy arrays, which the program may change, so copy.
                leaf = engine.canonicalize(np.array(leaf))
                if pad_rows and (shape := _pad_shape(leaf.shape, session)) != leaf.shape:
                    padded[-1] = len(leaf)
                    leaf = np.concatenate([leaf, np.zeros((shape[0] - len(leaf), *shape[1:]), leaf.dtype)])
                    layout = policy.derive_batch_layout(shape)
            # Reading may need collectives, which must not overlap on CPUs.
            elif len(leaf.sharding.device_set) > 1:
                leaf = engine.relayout(leaf, layout)
            shardings.append(engine.native(layout, layout.rank))
        arrays.append(leaf)
    # With several processes, jax.jit refuses numpy arrays with shardings, even on a mesh of one of them.
    if jax.process_count() > 1 or not all(isinstance(array, np.ndarray) for array in arrays):
        placed = iter(jax.device_put(arrays, shardings))
    else:
        with leave_ambient_mesh():
            placed = iter(_compile_placement(tuple(shardings))(*arrays))
    placed = (x if rows is None else _PaddedRows(x, rows) for x, rows in zip(placed, padded, strict=True))
    return keras.tree.map_structure(
        lambda leaf: next(placed) if hasattr(leaf, "shape") else leaf, batch, none_is_leaf=True
    )


def _pad_shape(shape: tuple[int, ...], session: KerasSession) -> tuple[int, ...]:
    """Return the shape of a batch with rows that divide. JAX slices no rows along explicit axes."""
    policy = session.policy
    if policy.batch_dim is None or not shape or policy.mesh.explicit_dims:
        return shape
    return Layout.batch_sharded(policy.mesh, policy.batch_dim, len(shape)).pad_shape(shape)


@functools.lru_cache(maxsize=64)
def _compile_placement(shardings: tuple[jax.sharding.Sharding, ...]) -> Callable[..., tuple[jax.Array, ...]]:
    """Compile a function that places numpy arrays, because `jax.jit` takes half the time of `jax.device_put`."""
    return jax.jit(lambda *arrays: arrays, in_shardings=shardings, out_shardings=shardings)


# -- the state of a model


# Keras removes values from variables during a step, so keep the last ones for failures (decisions/0007).
class _LastValues:
    """Keep the last values of a model's variables, which Keras removes during a step."""

    def __init__(self, model: keras.Model) -> None:
        self._model = model
        self._values: State = ()
        self.depth = 0  # nesting depth: `fit` calls evaluate, and callbacks may predict

    def wrap_get_state(self, plain: Method) -> Method:
        """Return a `_get_jax_state` that records the values before it removes them from the variables."""

        @functools.wraps(plain)
        def get(purge_model_variables: bool = False, **groups: bool) -> State:
            _give_own_memory(
                variable for group in _list_variable_groups(self._model, 4) for variable in group
            )
            with _use_stored_values():
                state = tuple(list(map(unwrap, group)) for group in plain(**groups))
            self._record_values(state)
            if purge_model_variables:
                self._model._purge_model_variables(**groups)
            return state

        return get

    def wrap_make_function(self, plain: Method, session: KerasSession) -> Method:
        """Return a `_make_function` that makes steps record the values that they return."""

        @functools.wraps(plain)
        def make(step: Method, *args: object, **kwargs: object) -> object:
            if session.context.across and hasattr(step, "lower"):
                step = _compare_lowered(step, session)

            def run_and_note(state: State, data: object) -> object:
                result, new = step(state, data)
                self._record_values(new)
                return result, new

            return plain(run_and_note, *args, **kwargs)

        return make

    def wrap_sync(self, plain: Method) -> Method:
        """Return a `jax_state_sync` that gives variables the padded arrays that steps return."""

        @functools.wraps(plain)
        def sync() -> None:
            model = self._model
            if getattr(model, "_jax_state", None) and not model._jax_state_synced:
                owners = _name_variable_groups(model)
                model._jax_state = {
                    name: values and [wrap(x, v.shape) for x, v in zip(values, owners[name], strict=True)]
                    for name, values in model._jax_state.items()
                }
            plain()

        return sync

    def _record_values(self, state: State) -> None:
        if self.depth:
            self._values = state

    def restore_values(self, error: BaseException) -> None:
        """Restore the last known value of each variable without a value."""
        lost = False
        for values, variables in zip(
            self._values, _list_variable_groups(self._model, len(self._values)), strict=False
        ):
            for value, variable in zip(values, variables, strict=False):
                if variable._value is None or variable._value.is_deleted():
                    variable._value = wrap(value, variable.shape)
                lost |= _is_lost(variable._value)
        self._model._jax_state, self._model._jax_state_synced = None, True
        if lost:
            error.add_note(
                f"{self._model.name}: the step had begun and taken the memory of the weights, so their values are "
                "lost: load them again, or build the model again"
            )

    def forget(self) -> None:
        """Release the recorded values."""
        self._values = ()


def _is_lost(array: jax.Array) -> bool:
    try:
        return array.is_deleted() or jax.block_until_ready(array) is None
    except jax.errors.JaxRuntimeError:  # reading fails if the computation of the value failed
        return True


def _name_variable_groups(model: keras.Model) -> dict[str, list[keras.Variable]]:
    names = ("trainable_variables", "non_trainable_variables", "optimizer_variables", "metrics_variables")
    return dict(zip(names, _list_variable_groups(model, 4), strict=True))


def _list_variable_groups(model: keras.Model, number: int) -> list[list[keras.Variable]]:
    """Return the lists of variables in a state with this number of parts, in its order."""
    groups = [model.trainable_variables, model.non_trainable_variables]
    if number > 3:
        groups.append(getattr(getattr(model, "optimizer", None), "variables", []))
    return groups if number == 2 else [*groups, model.metrics_variables]


def _give_own_memory(variables: Iterable[keras.Variable]) -> None:
    """Copy buffers shared by two variables, because a step donates each buffer once."""
    held: set[int] = set()
    for variable in variables:
        if id(variable._value) in held:
            variable._value = variable._value.copy()
        held.add(id(variable._value))


def read_state(model: keras.Model) -> tuple[list[jax.Array], ...]:
    """Return the values that a model's training step takes."""
    return tuple(
        [unwrap(read_stored(variable)) for variable in group] for group in _list_variable_groups(model, 4)
    )


_has_stored_values: ContextVar[bool] = ContextVar("_has_stored_values", default=False)


@contextmanager
def _use_stored_values() -> Generator[None]:
    """Make variables return their stored arrays, also padded ones, until the block ends."""
    token = _has_stored_values.set(True)
    try:
        yield
    finally:
        _has_stored_values.reset(token)


def read_stored(variable: keras.Variable) -> Any:
    """Return the array that a variable stores, which may be a `PaddedArray`."""
    with _use_stored_values():
        return variable.value


def read_logical(variable: keras.Variable, value: Any) -> Any:
    """Return the unpadded value of a variable in device memory. This replaces `_maybe_autocast`."""
    if isinstance(value, PaddedArray):
        if _has_stored_values.get():
            return value
        value = value.__jax_array__()
    if isinstance(value, jax.Array) and not _has_stored_values.get():
        value = set_memory(value, "device")
    return type(variable)._maybe_autocast(variable, value)


def _wrap_entry(plain: Method, last_values: _LastValues) -> Method:
    """Wrap `fit` or a similar method so that it restores the model's weights after a failure."""

    @functools.wraps(plain)
    def call_entry(*args: object, **kwargs: object) -> object:
        last_values.depth += 1
        try:
            with leave_ambient_mesh():
                return plain(*args, **kwargs)
        except BaseException as error:
            last_values.restore_values(error)
            raise
        finally:
            last_values.depth -= 1
            if not last_values.depth:
                last_values.forget()

    return call_entry


# -- steps


def _make_step(step: Method, session: KerasSession, name: str, schedule: CallSchedule) -> Method:
    if session.context.across:
        return _make_multiprocess_step(step, Rows(session, name, schedule), name, session)
    place = _copy_numpy if session.policy.mesh.size == 1 else functools.partial(place_on_mesh, pad_rows=True)
    return lambda state, data: step(state, (place(batch, session) for batch in data))


def _copy_numpy(batch: object, session: KerasSession) -> Any:
    """Copy a batch for a mesh of one device, where `jax.jit` places numpy arrays in a tenth of the time."""
    if type(batch) is tuple and all(leaf is None or type(leaf) is np.ndarray for leaf in batch):
        return tuple(None if leaf is None else leaf.copy() for leaf in batch)
    return place_on_mesh(batch, session)


def _compare_lowered(step: Any, session: KerasSession) -> Method:
    """Wrap a compiled step to compare its lowered program between processes for each new signature."""
    known: set[object] = set()

    def run_compared(state: State, data: object) -> object:
        signature = tuple((np.shape(each), jax.numpy.result_type(each)) for each in jax.tree.leaves(data))
        if signature not in known:
            lowered = hash_lowered(step.__name__, step.lower(state, data))
            check_program(f"the {step.__name__}", [lowered], session.context.gather)
            known.add(signature)
        return step(state, data)

    return run_compared


def _make_multiprocess_step(step: Method, rows: Rows, name: str, session: KerasSession) -> Method:
    """Return a step for several processes, each with its own rows."""

    def run_on_own_rows(state: State, data: Iterator[object]) -> object:
        rows.placed.clear()
        whole = session.on_thread.has_all_rows
        outputs, new = step(state, _place_whole_batches(data, session) if whole else rows.place_batches(data))
        if rows.on_cpus:  # on CPUs, this step and the next comparison of batches could deadlock, so wait
            jax.block_until_ready((outputs, new))
        return (rows.take_own_rows(outputs), new) if name == "predict" else (outputs, new)

    return run_on_own_rows


def _place_whole_batches(data: Iterable[object], session: KerasSession) -> Iterator[object]:
    """Place batches on the mesh when each process has all rows."""
    for batch in data:
        check_same_batch(batch, session)
        yield place_on_mesh(batch, session)


def _wrap_step(model: keras.Model, plain: Method, session: KerasSession) -> Method:
    """Return a step that returns new variable values in the layouts of their variables."""

    @functools.wraps(plain)
    def step(state: State, data: object) -> object:
        groups = _list_variable_groups(model, len(state))
        batch = jax.tree.map(_take_rows, data, is_leaf=_has_padded_rows)
        result, new = plain(tuple(map(_take_logical, state, groups)), batch)
        # Programs return only even shards.
        has_padded_rows = any(map(_has_padded_rows, jax.tree.leaves(data, is_leaf=_has_padded_rows)))
        if session.context.across or has_padded_rows:  # place rows and scalars on the process's own devices
            by_rows = plain.__name__ == "predict_step"
            result = keras.tree.map_structure(
                lambda array: _make_addressable(array, session, by_rows), result
            )
        if plain.__name__ == "predict_step":
            return result, _pin_values(new, model.non_trainable_variables)
        return result, tuple(map(_pin_values, new, _list_variable_groups(model, len(new))))

    return step


def _has_padded_rows(leaf: object) -> bool:
    return isinstance(leaf, _PaddedRows)


def _take_rows(leaf: Any) -> Any:
    return leaf.array[: leaf.rows] if isinstance(leaf, _PaddedRows) else leaf


def _make_addressable(array: object, session: KerasSession, by_rows: bool) -> object:
    if not isinstance(array, jax.Array):
        return array  # a number returned by a custom step
    layout = (
        session.policy.derive_batch_layout(array.shape) if by_rows else session.policy.replicated(array.ndim)
    )
    return jax.lax.with_sharding_constraint(array, session.engine.native(layout, layout.rank))


def _take_logical(values: Sequence[jax.Array], variables: Sequence[keras.Variable]) -> list[jax.Array]:
    """Return the unpadded values of variables in device memory."""
    pairs = zip(values, variables, strict=True)
    return [unpad(set_memory(value, "device"), variable.shape) for value, variable in pairs]


def _pin_values(values: Sequence[jax.Array], variables: Sequence[keras.Variable]) -> list[jax.Array]:
    return list(map(pin_layout, values, variables))


def pin_layout(array: Any, variable: keras.Variable) -> jax.Array:
    """Constrain an array in a step to a variable's layout, and pad it if needed."""
    layout = variable._layout
    if not isinstance(layout, jax.sharding.NamedSharding):
        return array
    array = pad(array, find_padded_shape(array.shape, layout))
    array = jax.lax.with_sharding_constraint(array, jax.sharding.NamedSharding(layout.mesh, layout.spec))
    return set_memory(array, layout.memory_kind)
