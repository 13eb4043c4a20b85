"""Load values from numpy and files shard by shard, so that a device receives only its shards.

Keras would first create the whole value on one device, in each of its ways to assign values: `set_weights`,
`load_weights`, `load_model`, and callbacks that restore weights. It also loads a file layer by layer, so that a failed
load of another model's file would leave a mixture of both.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import keras
import ml_dtypes
import numpy as np

from layoutmap.adapters.keras.files import FileArray, FileStore
from layoutmap.adapters.keras.private import H5IOStore, in_stateless_scope
from layoutmap.adapters.keras.protocol import KerasSession, get_backend, get_keras_backend_name
from layoutmap.core.errors import LayoutError
from layoutmap.core.variables import Assignment
from layoutmap.engines import get_engine

_FILES = (".weights.h5", ".weights.json", ".keras")


def is_host_array(value: object) -> bool:
    """Return whether an array is in numpy or in a file, and not on a device."""
    if isinstance(value, (np.ndarray, FileArray)):
        return True
    if isinstance(value, (np.generic, keras.Variable, keras.KerasTensor)) or keras.ops.is_tensor(value):
        return False
    like_an_array = all(hasattr(value, name) for name in ("shape", "dtype", "__getitem__"))
    # Tensors of frameworks look like host arrays, so exclude them by their method `__dlpack__`.
    return like_an_array and not hasattr(value, "__dlpack__")


def shard_host_array(assignment: Assignment, value: Any) -> object:
    """Return a host array as a sharded engine array. Each distinct shard is read once."""
    engine = get_engine(get_backend(get_keras_backend_name()).engine_name)
    name = assignment.variable.dtype
    dtype = engine.canonicalize_values(np.empty(0, getattr(ml_dtypes, name, name))).dtype
    held = replace(assignment, variable=replace(assignment.variable, dtype=dtype.name))
    return engine.create_from_shards(held, lambda index: np.asarray(value[index]).astype(dtype, copy=False))


def install_host_value_sharding(variable: object, assignment: Assignment) -> None:
    """Make a variable take host arrays shard by shard when they are assigned, even after the scope."""
    # Keras has no hook for converting values, so set the method on the instance. A copy of the variable gets its own.
    variable.__dict__["_convert_to_tensor"] = functools.partial(_convert_assigned_value, variable, assignment)


def _convert_assigned_value(
    variable: Any, assignment: Assignment, value: object, dtype: object = None
) -> object:
    """Return an assigned value in the form that a variable stores. Host arrays are read shard by shard."""
    original = type(variable)._convert_to_tensor
    if isinstance(value, get_backend(get_keras_backend_name()).stored_types):
        return value
    if not is_host_array(value):
        return original(variable, value, dtype=dtype)
    check_value_shape(variable, assignment.variable.path, value)
    backend = get_backend(get_keras_backend_name())
    if in_stateless_scope() or backend.is_tracing():
        return original(variable, np.asarray(value), dtype=dtype)
    with backend.suspend_tracing():
        return shard_host_array(assignment, value)


def check_value_shape(variable: keras.Variable, path: str, value: Any) -> None:
    """Raise if a value on the host does not have the shape of a variable."""
    if tuple(variable.shape) != tuple(value.shape):
        raise LayoutError(
            f"{path}: the value has a different shape than the variable",
            facts={
                "variable": tuple(variable.shape),
                "value": tuple(value.shape),
                "from": getattr(value, "where", ""),
            },
            why="a variable keeps its shape",
            fix=f"assign a value of shape {tuple(variable.shape)}",
        )


def make_load_own_variables_wrapper(loaded_object: Any, session: KerasSession) -> Callable[..., object]:
    """Return a wrapper of `load_own_variables` that reads from a file only the shards of this process's devices."""
    original = loaded_object.load_own_variables

    @functools.wraps(original)
    def load_own_variables(store: object) -> None:
        if not isinstance(store, H5IOStore):
            return original(store)
        session.assign_layouts_before_loading()
        files = FileStore(store)
        try:
            mismatches = session.thread_state.shape_mismatches
            if mismatches is None:
                return original(files)
            if _can_dry_run(original):
                variables = (
                    loaded_object.variables
                    if isinstance(loaded_object, keras.Optimizer)
                    else [*loaded_object._trainable_variables, *loaded_object._non_trainable_variables]
                )
                with _record_mismatches_instead_of_assigning(list(variables), session, mismatches):
                    return original(files)
        finally:
            files.close()

    return load_own_variables


def make_load_weights_wrapper(
    model: Any, get_sessions: Callable[[], Iterable[KerasSession | None]]
) -> Callable[..., object]:
    """Return a wrapper of `load_weights` that checks all shapes before any variable changes."""
    original = model.load_weights

    @functools.wraps(original)
    def load_weights(filepath: object, skip_mismatch: bool = False, **kwargs: object) -> object:
        name = str(filepath)
        if name.endswith(_FILES) and "://" not in name and not skip_mismatch:
            mismatches: dict[str, str] = {}
            checking = {session for session in get_sessions() if session is not None}
            for session in checking:
                session.thread_state.shape_mismatches = mismatches
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # the load that follows repeats these warnings
                    original(filepath, **kwargs)
            finally:
                for session in checking:
                    session.thread_state.shape_mismatches = None
            _raise_for_shape_mismatches(name, mismatches)
        return original(filepath, skip_mismatch=skip_mismatch, **kwargs)

    return load_weights


def _raise_for_shape_mismatches(file_name: str, mismatches: dict[str, str]) -> None:
    """Raise if `mismatches` lists variables that have different shapes in a file and in the model."""
    if mismatches:
        shown = dict(list(mismatches.items())[:20])
        more = len(mismatches) - len(shown)
        raise LayoutError(
            f"{file_name}: {len(mismatches)} variables of the model have a different shape in the file",
            facts=shown | ({"and": f"{more} more"} if more else {}),
            why="the file was saved from a different model; nothing was loaded",
            fix="build the saved model, or pass skip_mismatch=True to keep the present values of these "
            "variables",
        )


def _can_dry_run(method: object) -> bool:
    """Return whether a loading method only assigns values, so that a dry run of it has no side effects."""
    module = method.__module__
    own = module.startswith(("keras.src.layers.", "keras.src.optimizers."))
    return own and ".preprocessing." not in module


@contextmanager
def _record_mismatches_instead_of_assigning(
    variables: Sequence[object], session: KerasSession, mismatches_by_path: dict[str, str]
) -> Iterator[None]:
    """Make `assign` only record shapes that differ from those of the variables, until the block ends."""

    def record_shape_mismatch(variable: Any, value: Any) -> object:
        wanted, there = tuple(variable.shape), tuple(value.shape)
        if wanted != there:
            mismatches_by_path[session.find_variable_path(variable)] = f"{wanted}, in the file {there}"
        return value

    for variable in variables:
        variable.__dict__["assign"] = functools.partial(record_shape_mismatch, variable)
    try:
        yield
    finally:
        for variable in variables:
            variable.__dict__.pop("assign", None)
