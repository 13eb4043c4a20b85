"""Restore the state of each process: data iterators, schedules, and random generators."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

from layoutmap.adapters import CheckpointAdapter
from layoutmap.adapters.data_states import (
    find_state_restore_method,
    make_state_restore_function,
    restore_data_state,
)
from layoutmap.core.errors import CheckpointError, join_names
from layoutmap.scope.process_group import MeshProcesses


def choose_data_state(
    data: object, states: Sequence[Any], process_index: int, num_processes: int, name: str = "data"
) -> Any:
    """Return the saved state that this process restores in `data`.

    Raises:
        CheckpointError: There is no saved state, its names differ, or the processes saved different states and their
            number has changed.
    """
    if not states:
        raise CheckpointError(
            f"{name}: the checkpoint has no data state",
            why="it was saved without data=",
            fix="leave data out, and move the iterator to its position yourself",
        )
    if isinstance(data, Mapping):
        iterators = cast("Mapping[str, Any]", data)
        saved = [list(cast("dict[str, Any]", each)) if isinstance(each, dict) else [] for each in states]
        if other := [names for names in saved if set(names) != set(iterators)]:
            raise CheckpointError(
                f"{name}: its names differ from the saved names",
                facts={"names": join_names(list(iterators)), "saved": join_names(other[0])},
                why="each object gets the state that was saved under its name",
                fix="pass the same names as to save",
            )
        return {
            key: choose_data_state(
                each, [state[key] for state in states], process_index, num_processes, f"{name}[{key!r}]"
            )
            for key, each in iterators.items()
        }
    find_state_restore_method(data)
    found = choose_process_state(states, process_index, num_processes)
    if found is None:
        raise CheckpointError(
            f"{name}: each process saved its own state, and the number of processes has changed",
            facts={"saved": f"{len(states)} processes", "loading": f"{num_processes} processes"},
            why="it is unknown where a different number of processes continues in the data",
            fix=f"start {len(states)} processes, or leave data out and restart the data",
        )
    return found[0]


def choose_process_state(states: Sequence[Any], process_index: int, num_processes: int) -> tuple[Any] | None:
    """Return a 1-tuple of this process's state, or None if states differ and the process count has changed."""
    if len(states) == num_processes:
        return (states[process_index],)
    return (states[0],) if all(_are_equal_states(states[0], state) for state in states[1:]) else None


def choose_random_states(
    states: Sequence[Mapping[str, Any]], process_index: int, num_processes: int
) -> dict[str, Any]:
    """Return the saved states of this process's random generators.

    If the states of the processes differed and the number of processes has changed, a generator has no saved state and
    stays unchanged. This gives no warning, because the states of all unseeded generators differ.
    """
    found: dict[str, Any] = {}
    for name in states[0] if states else ():
        own = choose_process_state([state.get(name) for state in states], process_index, num_processes)
        if own is not None:
            found[name] = own[0]
    return found


@contextmanager
def restore_data_with_rollback(
    adapter: CheckpointAdapter,
    processes: MeshProcesses,
    where: str,
    model: object,
    random: Mapping[str, Any],
    data: object,
    state: object,
) -> Generator[None]:
    """Return a context manager that restores the state of `data` at its start, and undoes this if the block raises.

    Args:
        adapter: Adapter of the model.
        processes: The processes that load. An error in one of them is raised in all.
        where: The checkpoint, for messages.
        model: The model.
        random: Random states that are restored later. Here they are only tried, so that an error is raised early.
        data: See `load`; `None`: there is no data.
        state: The saved state of `data`.

    Raises:
        CheckpointError: A random generator, or `data`, cannot restore the saved state.
    """
    undo = make_state_restore_function(data)

    def restore_states() -> None:
        before = {"random": adapter.read_state_outside_variables(model)["random"]}
        try:
            with _translate_restore_errors(where, "the random states"):
                adapter.restore_state_outside_variables(model, None, {"random": random})
        finally:
            adapter.restore_state_outside_variables(model, None, before)
        if data is not None:
            with _translate_restore_errors(where, "data"):
                restore_data_state(data, state)

    try:
        processes.run_in_all_processes(restore_states)
        yield
    except BaseException:
        undo()
        raise


@contextmanager
def _translate_restore_errors(where: str, subject: str) -> Generator[None]:
    """Convert any error that an object raises while it restores its state to a `CheckpointError`."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"{where}: {subject} cannot restore the saved state",
            facts={"error": f"{type(error).__name__}: {error}"},
            why="a different type of object or a different release saved the state; nothing was loaded",
            fix="pass the same type of object that was saved, or leave data out"
            if subject == "data"
            else "load it with the library that saved it, or export the weights and load those",
        ) from error


def _are_equal_states(one: object, other: object) -> bool:
    """Return whether two nested states are equal, including their arrays."""
    from layoutmap.checkpoint.states import encode_state

    return encode_state(one, "") == encode_state(other, "")
