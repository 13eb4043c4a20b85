"""Several processes write one step: all of it is there, or none, and each of them ends."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from checkpoint.saves import is_good, names_in, save, values_of, writers

from layoutmap.checkpoint import step_writer
from layoutmap.checkpoint.step_writer import StepWriter
from layoutmap.checkpoint.storage import LocalStorage
from layoutmap.core.errors import CheckpointError

PROCESSES = ("core",)
pytestmark = pytest.mark.usefixtures("num_files")


def run_all(working: list[StepWriter]) -> list[str]:
    """What each of the processes says that it fails with, each on a thread; empty if it does not fail."""
    said = [""] * len(working)

    def work(number: int) -> None:
        try:
            with working[number]:
                working[number].write_step()
        except Exception as error:
            said[number] = str(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(working))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return said


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_one_that_fails_fails_all(tmp_path: Path, failing: int) -> None:
    """If a process fails, all fail at once and say which one and why; nothing is left, and the last step is good."""
    save(tmp_path, 3, values_of(0))

    def fail(number: int, path: str) -> None:
        if (number, path) == (failing, "d2.kernel"):
            raise CheckpointError("the disk is full", why="it is small", fix="buy another one")

    said = run_all(writers(tmp_path, 4, values_of(1), 3, before=fail))

    texts = [text.splitlines()[0] for text in said]
    where = f"{tmp_path}/step-4: process {failing} could not write its part"
    assert ["the disk is full" if n == failing else where for n in range(3)] == texts
    assert all("buy another one" in text for text in said)
    assert ["step-3"] == names_in(tmp_path)
    assert is_good(tmp_path, 3, values_of(0))


@pytest.mark.parametrize("dead", [0, 1])
def test_one_that_is_dead_is_not_waited_for(tmp_path: Path, dead: int) -> None:
    """If a process does nothing more, the others fail after a while and say so."""
    save(tmp_path, 3, values_of(0))
    working = writers(tmp_path, 4, values_of(1), 3, patience_seconds=0.2)
    said = run_all([each for number, each in enumerate(working) if number != dead])

    first = said[0].splitlines()
    assert f"{tmp_path}/step-4: other processes do not respond" == first[0]
    assert f"  processes  {dead}" == first[1]
    assert all(text for text in said)
    assert [3] == LocalStorage(tmp_path).list_steps()
    assert is_good(tmp_path, 3, values_of(0))


def test_copies_stay_as_they_were_and_use_memory_again(tmp_path: Path) -> None:
    """What was copied is written as it was then; the next is in that memory; what is read-only is not copied."""
    values, memory = values_of(0), step_writer.CopyBuffers()
    values["d2.kernel"].flags.writeable = False
    places: list[set[int]] = []
    for step in (1, 2):
        (writer,) = writers(tmp_path, step, values)
        with writer:
            writer.copy_values(memory)
            values["d1.kernel"] += 1
            writer.write_step()
        places.append({array.ctypes.data for array in memory.values()})

    assert {"d1.kernel"} == {path for path, _ in memory}
    assert places[0] == places[1]
    assert is_good(tmp_path, 1, values_of(0))
    assert is_good(
        tmp_path, 2, {"d1.kernel": values_of(0)["d1.kernel"] + 1, "d2.kernel": values["d2.kernel"]}
    )
