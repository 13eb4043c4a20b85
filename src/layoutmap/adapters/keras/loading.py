"""Load values from numpy and files shard by shard, so that a device receives only its shards.

Keras would first make all of a value an array on one device, whoever assigns it: `set_weights`, `load_weights`,
`load_model`, a callback that restores weights. And it loads a file layer by layer, so that a file of another model
leaves a mixture of both.
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
from layoutmap.adapters.keras.protocol import KerasSession, get_backend, get_backend_name
from layoutmap.core.errors import LayoutError
from layoutmap.core.variables import Assignment
from layoutmap.engines import get_engine

_FILES = (".weights.h5", ".weights.json", ".keras")


def is_on_host(value: object) -> bool:
    """Return whether an array is in numpy or in a file, and not on a device."""
    if isinstance(value, (np.ndarray, FileArray)):
        return True
    if isinstance(value, (np.generic, keras.Variable, keras.KerasTensor)) or keras.ops.is_tensor(value):
        return False
    like_an_array = all(hasattr(value, name) for name in ("shape", "dtype", "__getitem__"))
    return like_an_array and not hasattr(value, "__dlpack__")  # tensors of other frameworks have `__dlpack__`


def place_host_array(assignment: Assignment, value: Any) -> object:
    """Make an engine array from a host array, and read each distinct shard once."""
    engine = get_engine(get_backend(get_backend_name()).engine_name)
    name = assignment.variable.dtype
    dtype = engine.canonicalize(np.empty(0, getattr(ml_dtypes, name, name))).dtype
    held = replace(assignment, variable=replace(assignment.variable, dtype=dtype.name))
    return engine.from_shards(held, lambda index: np.asarray(value[index]).astype(dtype, copy=False))


def shard_host_assignments(variable: object, assignment: Assignment) -> None:
    """Make a variable take host arrays shard by shard when they are assigned, even after the scope."""
    # Keras has no hook for this, so set the method on the instance. A copy of the variable gets its own.
    variable.__dict__["_convert_to_tensor"] = functools.partial(_convert_value, variable, assignment)


def _convert_value(variable: Any, assignment: Assignment, value: object, dtype: object = None) -> object:
    plain = type(variable)._convert_to_tensor
    if isinstance(value, get_backend(get_backend_name()).stored_types):
        return value
    if not is_on_host(value):
        return plain(variable, value, dtype=dtype)
    check_shape(variable, assignment.variable.path, value)
    backend = get_backend(get_backend_name())
    if in_stateless_scope() or backend.is_tracing():
        return plain(variable, np.asarray(value), dtype=dtype)
    with backend.leave_tracing():
        return place_host_array(assignment, value)


def check_shape(variable: keras.Variable, path: str, value: Any) -> None:
    """Raise if a value on the host does not have the shape of a variable."""
    if tuple(variable.shape) != tuple(value.shape):
        raise LayoutError(
            f"{path}: the value has another shape",
            facts={
                "variable": tuple(variable.shape),
                "value": tuple(value.shape),
                "from": getattr(value, "where", ""),
            },
            why="a variable keeps its shape",
            fix=f"assign a value of shape {tuple(variable.shape)}",
        )


def wrap_load_own_variables(thing: Any, session: KerasSession) -> Callable[..., object]:
    """Return a `load_own_variables` that reads only the shards of this process's devices from a file."""
    plain = thing.load_own_variables

    @functools.wraps(plain)
    def load_own_variables(store: object) -> None:
        if not isinstance(store, H5IOStore):
            return plain(store)
        session.plan_ahead()
        files = FileStore(store)
        try:
            found = session.on_thread.mismatches
            if found is None:
                return plain(files)
            if _is_assign_only(plain):
                variables = (
                    thing.variables
                    if isinstance(thing, keras.Optimizer)
                    else [*thing._trainable_variables, *thing._non_trainable_variables]
                )
                with _check_assignments(list(variables), session, found):
                    return plain(files)
        finally:
            files.close()

    return load_own_variables


def wrap_load_weights(
    model: Any, sessions: Callable[[], Iterable[KerasSession | None]]
) -> Callable[..., object]:
    """Return a `load_weights` that checks all shapes before it changes anything."""
    plain = model.load_weights

    @functools.wraps(plain)
    def load_weights(filepath: object, skip_mismatch: bool = False, **kwargs: object) -> object:
        name = str(filepath)
        if name.endswith(_FILES) and "://" not in name and not skip_mismatch:
            found: dict[str, str] = {}
            checking = {session for session in sessions() if session is not None}
            for session in checking:
                session.on_thread.mismatches = found
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # the load itself will warn again
                    plain(filepath, **kwargs)
            finally:
                for session in checking:
                    session.on_thread.mismatches = None
            _refuse_other_shapes(name, found)
        return plain(filepath, skip_mismatch=skip_mismatch, **kwargs)

    return load_weights


def _refuse_other_shapes(name: str, found: dict[str, str]) -> None:
    if found:
        shown = dict(list(found.items())[:20])
        more = len(found) - len(shown)
        raise LayoutError(
            f"{name}: {len(found)} variables of the model have another shape in the file",
            facts=shown | ({"and": f"{more} more"} if more else {}),
            why="the file belongs to another model; nothing was loaded",
            fix="build the saved model, or pass skip_mismatch=True to keep the present values of these "
            "variables",
        )


def _is_assign_only(method: object) -> bool:
    """Return whether a loading method only assigns values, so that a dry run has no side effects."""
    module = method.__module__
    own = module.startswith(("keras.src.layers.", "keras.src.optimizers."))
    return own and ".preprocessing." not in module


@contextmanager
def _check_assignments(
    variables: Sequence[object], session: KerasSession, found: dict[str, str]
) -> Iterator[None]:
    """Check the shapes of assigned values instead of storing them until the block ends."""

    def check(variable: Any, value: Any) -> object:
        wanted, there = tuple(variable.shape), tuple(value.shape)
        if wanted != there:
            found[session.find_path(variable)] = f"{wanted}, in the file {there}"
        return value

    for variable in variables:
        variable.__dict__["assign"] = functools.partial(check, variable)
    try:
        yield
    finally:
        for variable in variables:
            variable.__dict__.pop("assign", None)
