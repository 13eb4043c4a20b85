"""States of what goes on with a run: iterators over data, schedules and the like, of any library."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Mapping
from typing import Any, cast

from layoutmap.core.arguments import describe_type
from layoutmap.core.errors import CheckpointError


def state_of(data: object) -> Any:
    """The state of an iterator over data, of a schedule or the like; of a mapping of them, the states by name."""
    if isinstance(data, Mapping):
        return {name: state_of(each) for name, each in cast("Mapping[Any, Any]", data).items()}
    for name in ("state_dict", "get_state"):
        if callable(method := getattr(data, name, None)):
            return method()
    raise CheckpointError(
        f"data: {describe_type(data)}, it has no state that can be saved",
        why="what goes on where it was is asked for its state by state_dict() or get_state()",
        fix="pass one that has them, or a mapping of several, or leave data out and save what you need as metadata",
    )


def undo_of(data: object) -> Callable[[], object]:
    """Return what gives `data` the state back that it has now, of each part of it that says what its state is."""
    if isinstance(data, Mapping):
        undos = [undo_of(each) for each in cast("Mapping[Any, Any]", data).values()]
        return lambda: [undo() for undo in undos]
    try:
        state = copy.deepcopy(state_of(data))
    except (
        Exception
    ):  # a user's object raises what it likes; without a state of its own there is nothing to undo
        return lambda: None

    def undo() -> None:
        with contextlib.suppress(Exception):  # the error that made this necessary is the one to raise
            taker(data)(state)

    return undo


def restore_state(data: object, state: Any) -> None:
    """Give a state back to what `state_of` was given."""
    if isinstance(data, Mapping):
        for name, each in cast("Mapping[Any, Any]", data).items():
            restore_state(each, state[name])
    else:
        taker(data)(state)


def taker(data: object) -> Any:
    """Return the method by which something takes up a state."""
    for name in ("load_state_dict", "set_state"):
        if callable(method := getattr(data, name, None)):
            return method
    raise CheckpointError(
        f"data: {describe_type(data)}, it cannot take up a state",
        why="what goes on where it was is given its state by load_state_dict() or set_state()",
        fix="pass the one whose state was saved",
    )
