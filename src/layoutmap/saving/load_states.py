"""Restore the state of each process: data iterators, schedules, and random generators."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

from layoutmap.adapters import Keeping
from layoutmap.adapters.data_states import find_state_setter, make_undo, restore_state
from layoutmap.core.errors import CheckpointError, join_names
from layoutmap.scope.process_group import Group


def check_data(data: object, states: Sequence[Any], number: int, count: int, name: str = "data") -> Any:
    """Return the saved state to restore in `data` in this process.

    Raises:
        CheckpointError: There is none, or there is another number of processes and each had a state of its own.
    """
    if not states:
        raise CheckpointError(
            f"{name}: the checkpoint has no data state",
            why="it was saved without data=",
            fix="leave data out, and position the iterator yourself",
        )
    if isinstance(data, Mapping):
        several = cast("Mapping[str, Any]", data)
        saved = [list(cast("dict[str, Any]", each)) if isinstance(each, dict) else [] for each in states]
        if other := [names for names in saved if set(names) != set(several)]:
            raise CheckpointError(
                f"{name}: the names differ from those that were saved",
                facts={"names": join_names(list(several)), "saved": join_names(other[0])},
                why="each iterator gets the state of its name",
                fix="pass the same names as to save",
            )
        return {
            key: check_data(each, [state[key] for state in states], number, count, f"{name}[{key!r}]")
            for key, each in several.items()
        }
    find_state_setter(data)
    found = choose_state(states, number, count)
    if found is None:
        raise CheckpointError(
            f"{name}: each process saved its own state, and the number of processes has changed",
            facts={"saved": f"{len(states)} processes", "loading": f"{count} processes"},
            why="the saved states do not determine where other processes continue",
            fix=f"start {len(states)} processes, or leave data out and restart the data",
        )
    return found[0]


def choose_state(states: Sequence[Any], number: int, count: int) -> tuple[Any] | None:
    """Return this process's state in a tuple: its own if the process counts match, else the shared one, or `None`."""
    if len(states) == count:
        return (states[number],)
    return (states[0],) if all(_is_same(states[0], state) for state in states[1:]) else None


def choose_random_states(states: Sequence[Mapping[str, Any]], number: int, count: int) -> dict[str, Any]:
    """Return the saved states of this process's random generators.

    Where each process had another and there is now another number of them, none: the generator is left as it is. That
    is so for any that the program has not seeded, so it is worth no warning.
    """
    found: dict[str, Any] = {}
    for name in states[0] if states else ():
        own = choose_state([state.get(name) for state in states], number, count)
        if own is not None:
            found[name] = own[0]
    return found


@contextmanager
def restore_data(
    adapter: Keeping,
    processes: Group,
    where: str,
    model: object,
    random: Mapping[str, Any],
    data: object,
    state: object,
) -> Generator[None]:
    """Restore the state of `data`, and undo that if the block raises.

    Args:
        adapter: Knows the model.
        processes: Those that load; what raises in one of them raises in all.
        where: What is loaded, for messages.
        model: The model.
        random: Random states, which are to be set in the end: whether they can be is tried.
        data: See `load`; `None`: there is none.
        state: The state that was saved.

    Raises:
        CheckpointError: A random state, or `data`, does not take up what was saved.
    """
    undo = make_undo(data)

    def restore_all() -> None:
        before = {"random": adapter.settings(model)["random"]}
        try:
            with _translate_errors(where, "the random states"):
                adapter.restore_settings(model, None, {"random": random})
        finally:
            adapter.restore_settings(model, None, before)
        if data is not None:
            with _translate_errors(where, "data"):
                restore_state(data, state)

    try:
        processes.agreed(restore_all)
        yield
    except BaseException:
        undo()
        raise


@contextmanager
def _translate_errors(where: str, what: str) -> Generator[None]:
    """Convert any error of an object that restores its state to a `CheckpointError` that names the object."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"{where}: {what} cannot restore the saved state",
            facts={"it says": f"{type(error).__name__}: {error}"},
            why="the state is from another type of object or another release; nothing was loaded",
            fix="pass the same type of object that was saved, or leave data out"
            if what == "data"
            else "load it with the library that saved it, or export the weights and load those",
        ) from error


def _is_same(one: object, other: object) -> bool:
    """Return whether two nested states are equal, including their arrays."""
    from layoutmap.checkpoint.states import encode_state

    return encode_state(one, "") == encode_state(other, "")
