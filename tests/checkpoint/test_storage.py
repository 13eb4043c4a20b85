"""What holds wherever checkpoints are kept: on a disk, in S3, in another object store."""

from __future__ import annotations

from typing import Any

import pytest
from checkpoint.saves import is_good, save, values_of, writers
from checkpoint.test_step_writer import run_all

from layoutmap.checkpoint.manifest import NAME
from layoutmap.checkpoint.reader import StepSource
from layoutmap.checkpoint.remote import open_storage
from layoutmap.checkpoint.step_writer import StepWriter
from layoutmap.core.errors import CheckpointError

PROCESSES = ("core",)


def data_of(directory: str, step: int = 3) -> tuple[str, str]:
    """The folder and the name of the file of data of a step."""
    storage = open_storage(directory)
    (file,) = StepSource(storage, step).manifest.files
    return storage.get_folder_name(step), file.name


def change(directory: str, folder: str, name: str, edit: Any) -> None:
    """Write a file again as `edit` returns it; `None`: delete it."""
    storage = open_storage(directory)
    data = memoryview(bytearray(storage.get_file_size(folder, name) or 0))
    storage.read_file_into(folder, name, 0, data)
    storage.remove_file(folder, name)
    if (new := edit(bytearray(data))) is not None:
        with storage.create_file(folder, name) as sink:
            sink.write(bytes(new))


def flipped(data: bytearray) -> bytearray:
    data[len(data) * 2 // 3] ^= 1
    return data


def test_steps_are_saved_read_and_deleted(directory: str) -> None:
    """A step is there with its values when it was saved, beside others, and is not once it was deleted."""
    storage = open_storage(directory)
    for step in (3, 20):
        save(directory, step, values_of(step))
    with pytest.raises(CheckpointError, match="step 3 exists already"):
        save(directory, 3, values_of(0))

    assert [3, 20] == storage.list_steps()
    assert is_good(directory, 3, values_of(3))
    assert is_good(directory, 20, values_of(20))
    storage.delete_step(3)
    assert [20] == storage.list_steps()
    save(directory, 3, values_of(1))
    assert is_good(directory, 3, values_of(1))


def test_there_is_no_step_in_a_folder_that_is_not_there(directory: str) -> None:
    """A folder that nobody has written has no steps, and a load from it says so."""
    assert [] == open_storage(f"{directory}/nothing").list_steps()
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        StepSource(open_storage(f"{directory}/nothing"))


@pytest.mark.parametrize("count", [2, 4])
def test_several_processes_write_one_step(directory: str, count: int) -> None:
    """What several processes write is one step, with all their values."""
    said = run_all(writers(directory, 3, values_of(0), count))

    assert [""] * count == said
    assert is_good(directory, 3, values_of(0))


def test_a_process_that_fails_fails_all(directory: str) -> None:
    """If a process fails, all fail and say why; there is no step, and it can be saved again."""

    def fail(number: int, path: str) -> None:
        if (number, path) == (1, "d2.kernel"):
            raise CheckpointError("the disk is full", why="it is small", fix="buy another one")

    said = run_all(writers(directory, 3, values_of(1), 3, before=fail))

    assert [True] * 3 == ["buy another one" in text for text in said]
    assert [] == open_storage(directory).list_steps()
    save(directory, 3, values_of(0))
    assert is_good(directory, 3, values_of(0))


def test_a_save_that_dies_before_its_manifest_leaves_no_step(
    directory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save whose process is gone before it has committed leaves the steps as they were, and can be done again."""
    save(directory, 2, values_of(2))
    (writer,) = writers(directory, 3, values_of(0))
    monkeypatch.setattr(StepWriter, "__exit__", lambda *_: None)  # a dead process tidies nothing up
    monkeypatch.setattr(type(writer._storage), "commit_step", lambda *_: None)
    with writer:
        writer.write_step()
    monkeypatch.undo()

    assert [2] == open_storage(directory).list_steps()
    del writer  # its lock goes with its process
    save(directory, 3, values_of(1))
    assert is_good(directory, 3, values_of(1))
    assert is_good(directory, 2, values_of(2))


DAMAGE = {
    "missing": (lambda _: None, "the file is missing"),
    "truncated": (lambda data: data[:-1], "the size of the file has changed"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_file_that_is_missing_or_truncated_is_named(directory: str, kind: str) -> None:
    """A file of data that is missing or too short is found before anything is read, by its name."""
    save(directory, 3, values_of(0))
    folder, name = data_of(directory)
    edit, text = DAMAGE[kind]
    change(directory, folder, name, edit)

    with pytest.raises(CheckpointError, match=text) as found:
        StepSource(open_storage(directory)).check_file_sizes()
    assert str(found.value).startswith(f"{open_storage(directory).where}/{folder}/{name}: ")


def test_a_truncated_file_is_found_while_it_is_read(directory: str) -> None:
    """Values beyond the end of a file are an error that says how many bytes are missing."""
    save(directory, 3, values_of(0))
    change(directory, *data_of(directory), lambda data: data[:400])

    with pytest.raises(CheckpointError, match="its values differ from the saved ones") as found:
        StepSource(open_storage(directory)).read("d2.kernel")
    assert "missing bytes  8192" in str(found.value)


def test_a_flipped_bit_is_found(directory: str) -> None:
    """One flipped bit in a file of data is found, and the variable named."""
    save(directory, 3, values_of(0))
    change(directory, *data_of(directory), flipped)
    step = StepSource(open_storage(directory))

    assert ["d2.kernel: its values differ from the saved ones"] == [
        str(problem).splitlines()[0] for problem in step.iterate_damage()
    ]


def test_a_flipped_bit_in_the_manifest_is_found(directory: str) -> None:
    """One flipped bit in the manifest is found when the step is opened."""
    save(directory, 3, values_of(0))
    change(directory, open_storage(directory).get_folder_name(3), NAME, flipped)

    with pytest.raises(CheckpointError, match="the manifest was damaged or changed"):
        StepSource(open_storage(directory))


def test_of_two_saves_of_a_step_one_is_kept(directory: str) -> None:
    """Of two saves of one step the first to end is kept, the other says so, and nothing of it is left."""
    (first,), (second,) = (writers(directory, 3, values_of(seed)) for seed in (0, 1))
    with first:
        first.write_step()
    with pytest.raises(CheckpointError, match="step 3 exists already"), second:
        second.write_step()

    assert is_good(directory, 3, values_of(0))
