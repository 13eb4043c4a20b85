"""States beside the variables that each process has for itself: of data iterators, schedules and random generators."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

from layoutmap.adapters import Keeping
from layoutmap.adapters.data_states import find_state_setter, make_undo, restore_state
from layoutmap.core.errors import CheckpointError, join_names
from layoutmap.scope.process_group import Group


def check_data(data: object, states: Sequence[Any], number: int, count: int, name: str = "data") -> Any:
    """Return the state that this process gives back to `data`.

    Raises:
        CheckpointError: There is none, or there is another number of processes and each had a state of its own.
    """
    if not states:
        raise CheckpointError(
            f"{name}: the checkpoint has no state of it",
            why="it was saved without data=",
            fix="leave data out, and start the data where you want to",
        )
    if isinstance(data, Mapping):
        several = cast("Mapping[str, Any]", data)
        saved = [list(cast("dict[str, Any]", each)) if isinstance(each, dict) else [] for each in states]
        if other := [names for names in saved if set(names) != set(several)]:
            raise CheckpointError(
                f"{name}: the names differ from those that were saved",
                facts={"names": join_names(list(several)), "saved": join_names(other[0])},
                why="each of several gets its own state",
                fix="pass the same names as to save",
            )
        return {
            key: check_data(each, [state[key] for state in states], number, count, f"{name}[{key!r}]")
            for key, each in several.items()
        }
    find_state_setter(data)
    found = own_of(states, number, count)
    if found is None:
        raise CheckpointError(
            f"{name}: each of the processes that saved it had its own state, and their number is now different",
            facts={"saved": f"{len(states)} processes", "loading": f"{count} processes"},
            why="where each process would continue does not follow from the saved states",
            fix=f"start {len(states)} processes; or leave data out, and start the data anew",
        )
    return found[0]


def own_of(states: Sequence[Any], number: int, count: int) -> tuple[Any] | None:
    """The state of this process: its own if as many saved, else that which all had; `None`: there is none."""
    if len(states) == count:
        return (states[number],)
    return (states[0],) if all(_same(states[0], state) for state in states[1:]) else None


def random_states_of(states: Sequence[Mapping[str, Any]], number: int, count: int) -> dict[str, Any]:
    """The random states, by generator, that this process goes on with.

    Where each process had another and there is now another number of them, none: the generator is left as it is. That
    is so for any that the program has not seeded, so it is worth no warning.
    """
    found: dict[str, Any] = {}
    for name in states[0] if states else ():
        own = own_of([state.get(name) for state in states], number, count)
        if own is not None:
            found[name] = own[0]
    return found


@contextmanager
def taken_up(
    adapter: Keeping,
    processes: Group,
    where: str,
    model: object,
    random: Mapping[str, Any],
    data: object,
    state: object,
) -> Generator[None]:
    """While open, `data` has the state that was saved; where something raises inside, it gets its own back.

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

    def take_up() -> None:
        before = {"random": adapter.settings(model)["random"]}
        try:
            with _naming(where, "the random states"):
                adapter.restore_settings(model, None, {"random": random})
        finally:
            adapter.restore_settings(model, None, before)
        if data is not None:
            with _naming(where, "data"):
                restore_state(data, state)

    try:
        processes.agreed(take_up)
        yield
    except BaseException:
        undo()
        raise


@contextmanager
def _naming(where: str, what: str) -> Generator[None]:
    """Turn any error of an object that is given its saved state into a `CheckpointError` that names the object."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"{where}: {what} cannot take up what was saved",
            facts={"it says": f"{type(error).__name__}: {error}"},
            why="its state is that of another kind of object, or of another release; nothing has been loaded",
            fix="pass the object that was saved, or leave data out"
            if what == "data"
            else "load it where it was saved; or export the weights, and load those",
        ) from error


def _same(one: object, other: object) -> bool:
    """Whether two states are equal, with the arrays in them."""
    from layoutmap.checkpoint.states import encode

    return encode(one, "") == encode(other, "")
