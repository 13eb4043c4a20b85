"""Save and restore the state of data iterators, schedules, and similar objects of any library."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Mapping
from typing import Any, cast

from layoutmap.core.arguments import describe_type
from layoutmap.core.errors import CheckpointError


def read_data_state(data: object) -> Any:
    """Return the state of a data iterator or schedule. For a mapping, return a dict from each name to the state."""
    if isinstance(data, Mapping):
        return {name: read_data_state(each) for name, each in cast("Mapping[Any, Any]", data).items()}
    for name in ("state_dict", "get_state"):
        if callable(method := getattr(data, name, None)):
            return method()
    raise CheckpointError(
        f"data= {describe_type(data)} has no state to save",
        why="it has neither state_dict() nor get_state(), one of which save calls",
        fix="pass an object with one of these methods, or a mapping of several, or store your own state as metadata",
    )


def make_state_restore_function(data: object) -> Callable[[], object]:
    """Return a function that restores the present state of `data`. Without a state, the function does nothing."""
    if isinstance(data, Mapping):
        values = cast("Mapping[Any, Any]", data).values()
        restore_functions = list(map(make_state_restore_function, values))
        return lambda: [restore() for restore in restore_functions]
    try:
        state = copy.deepcopy(read_data_state(data))
    except Exception:  # state_dict of user code may raise anything; without a state there is nothing to undo
        return lambda: None

    def restore_copied_state() -> None:
        with contextlib.suppress(Exception):  # an error here must not replace the original one
            find_state_restore_method(data)(state)

    return restore_copied_state


def restore_data_state(data: object, state: Any) -> None:
    """Restore the state of `data` from a result of `read_data_state`."""
    if isinstance(data, Mapping):
        for name, each in cast("Mapping[Any, Any]", data).items():
            restore_data_state(each, state[name])
    else:
        find_state_restore_method(data)(state)


def find_state_restore_method(data: object) -> Any:
    """Return an object's `load_state_dict` or `set_state`. Raise a `CheckpointError` if it has neither."""
    for name in ("load_state_dict", "set_state"):
        if callable(method := getattr(data, name, None)):
            return method
    raise CheckpointError(
        f"data= {describe_type(data)} cannot restore a state",
        why="it has neither load_state_dict() nor set_state(), one of which load calls",
        fix="pass the same type of object that was saved",
    )
