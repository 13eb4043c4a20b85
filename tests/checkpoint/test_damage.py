"""What can be wrong with a checkpoint or its directory is said: what, where, why and the fix; no good step is lost."""

from __future__ import annotations

import contextlib
import itertools
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Generator
from pathlib import Path

import numpy as np
import pytest
from checkpoint.checkpoints import random_values, saved
from checkpoint.forged import Place, manifest_in, put, write_manifest
from checkpoint.saves import is_good, names_in, save, values_of, writers

from layoutmap.checkpoint.manifest import NAME, compute_xxh3
from layoutmap.checkpoint.reader import StepSource
from layoutmap.checkpoint.storage import LocalStorage
from layoutmap.core import folders
from layoutmap.core.errors import CheckpointError
from layoutmap.core.layout import Layout
from layoutmap.core.mesh import Mesh

PROCESSES = ("core",)

OLD, NEW = values_of(0), values_of(1)
DATA = "data-00000.safetensors"
NOBODY = 65534


def message(action: Callable[[], object]) -> list[str]:
    """The lines of what an action is refused with; it says why, and how to fix it."""
    with pytest.raises(CheckpointError) as error:
        action()
    lines = str(error.value).splitlines()
    assert {"why", "fix"} <= {line.split()[0] for line in lines[1:]}
    return lines


def read_all(directory: Path, step: int = 1) -> None:
    """Read a step as `load` does."""
    found = StepSource(LocalStorage(directory), step)
    found.check_file_sizes()
    for path in found.variables:
        found.read(path)


@contextlib.contextmanager
def file_sizes_up_to(num_bytes: int) -> Generator[None]:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@contextlib.contextmanager
def as_a_plain_user() -> Generator[None]:
    """Without the rights of root, which may write everywhere."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(user)


# -- saving


@pytest.mark.parametrize("num_bytes", [0, 100, 4000])
def test_one_of_several_files_that_cannot_be_written_leaves_the_last_step(
    tmp_path: Path, num_bytes: int, num_files: int
) -> None:
    """So it is where several files are written at the same time."""
    save(tmp_path, 1, OLD)
    with file_sizes_up_to(num_bytes):
        lines = message(lambda: save(tmp_path, 2, NEW))

    assert ".safetensors: the file cannot be written" in lines[0]
    assert ["step-1"] == names_in(tmp_path)
    assert is_good(tmp_path, 1, OLD)


@pytest.mark.parametrize("num_bytes", [0, 100, 8192, 16_000])
def test_a_file_that_cannot_be_written_leaves_the_last_step(tmp_path: Path, num_bytes: int) -> None:
    """If the system refuses to write on, after any number of bytes, the save fails and leaves nothing behind."""
    save(tmp_path, 1, OLD)
    with file_sizes_up_to(num_bytes):
        lines = message(lambda: save(tmp_path, 2, NEW))

    assert lines[0].endswith(f"{DATA}: the file cannot be written")
    assert "  why   the system says: File too large" in lines
    assert ["step-1"] == names_in(tmp_path)
    assert is_good(tmp_path, 1, OLD)


def test_a_manifest_that_cannot_be_written_leaves_the_last_step(tmp_path: Path) -> None:
    """So it is if there is room for the values and not for the manifest."""
    many = {f"layers.{n}.kernel": np.zeros((2, 2), np.float32) for n in range(30)}
    save(tmp_path, 1, OLD)
    (writer,) = writers(tmp_path, 2, many)
    save(tmp_path / "other", 2, many)
    sizes = [(tmp_path / "other" / "step-2" / name).stat().st_size for name in (DATA, NAME)]
    with file_sizes_up_to(sizes[0]), writer:
        lines = message(writer.write_step)

    assert sizes[0] < sizes[1]
    assert lines[0].endswith(f"{NAME}: the file cannot be written")
    shutil.rmtree(tmp_path / "other")
    del writer
    assert is_good(tmp_path, 1, OLD)


def test_a_save_without_room_is_refused_before_it_begins(tmp_path: Path) -> None:
    """What the file system has no room for is not begun; the message says how much is needed and how much there is."""
    save(tmp_path, 1, OLD)
    huge = {"w": np.broadcast_to(np.float32(0), (1 << 50,))}
    lines = message(lambda: save(tmp_path, 2, huge))

    assert f"{tmp_path}: there is not enough space for step 2" == lines[0]
    assert f"  needed  {1 << 52:,} bytes" == lines[1]
    assert "  free    " == lines[2][:10]
    assert ["step-1"] == names_in(tmp_path)


def test_a_directory_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    """A directory without the right to write is named, and its steps stay."""
    save(tmp_path, 1, OLD)
    for path in (tmp_path, *tmp_path.parents[:-2]):
        path.chmod(0o755)
    tmp_path.chmod(0o555)
    with as_a_plain_user():
        lines = message(lambda: save(tmp_path, 2, NEW))
        assert is_good(tmp_path, 1, OLD)
    tmp_path.chmod(0o755)

    assert [
        f"{tmp_path}: checkpoints cannot be written there",
        "  why   the system says: Permission denied",
        "  fix   give this user access to the path, or name another directory",
    ] == lines
    assert ["step-1"] == names_in(tmp_path)


def test_a_directory_that_is_something_else_is_refused(tmp_path: Path) -> None:
    """A file, a pipe and a link to nothing are refused when saving and loading, and are left as they are."""
    (tmp_path / "file").write_text("mine")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "nowhere").symlink_to(tmp_path / "gone" / "x")
    fix = "  fix   name another directory; "
    for name in ("file", "pipe", "nowhere"):
        lines = message(lambda name=name: save(tmp_path / name, 1, OLD))
        assert (f"{tmp_path / name}: checkpoints cannot be written there", fix) == (
            lines[0],
            lines[-1][: len(fix)],
        )
        assert tmp_path.name in message(lambda name=name: read_all(tmp_path / name))[0]
    assert ["file", "nowhere", "pipe"] == names_in(tmp_path)
    assert "mine" == (tmp_path / "file").read_text()


def test_a_link_to_a_directory_is_that_directory(tmp_path: Path) -> None:
    """Saved through a link, a step is in the directory; so it is read, and deleted."""
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "there")
    save(tmp_path / "link", 1, OLD)
    save(tmp_path / "link", 2, NEW)
    LocalStorage(tmp_path / "link").delete_step(2)

    assert is_good(tmp_path / "there", 1, OLD)
    assert ["step-1"] == names_in(tmp_path / "there")


def test_a_system_without_posix_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On Windows nothing is written or read, and the message says where it is."""
    save(tmp_path, 1, OLD)
    monkeypatch.setattr(folders, "fcntl", None)
    refused = [
        message(lambda: save(tmp_path, 2, NEW))[0],
        message(lambda: StepSource(LocalStorage(tmp_path)))[0],
    ]

    assert [f"{tmp_path}: checkpoints cannot be written or read on this system"] * 2 == refused
    assert ["step-1"] == names_in(tmp_path)


def test_without_the_locks_of_posix_the_library_is_imported() -> None:
    """Python on Windows has no fcntl; models are planned there, and steps of object stores are read."""
    program = "import sys; sys.modules['fcntl'] = None; import layoutmap; print(layoutmap.load.__name__)"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)

    assert ("load\n", "") == (ended.stdout, ended.stderr)


def test_what_has_the_name_of_a_step_is_not_written_over(tmp_path: Path) -> None:
    """A file, a link or a folder of that name stays as it is, and the save is refused."""
    (tmp_path / "step-1").write_text("mine")
    (tmp_path / "step-2").symlink_to("nowhere")
    (tmp_path / "step-3").mkdir()
    for step in (1, 2, 3):
        assert (
            f"{tmp_path}: step {step} exists already"
            == message(lambda step=step: save(tmp_path, step, OLD))[0]
        )
    assert "mine" == (tmp_path / "step-1").read_text()
    assert ["step-1", "step-2", "step-3"] == names_in(tmp_path)


def test_only_names_of_steps_are_steps(tmp_path: Path) -> None:
    """Copies and notes beside the steps, with names like theirs, are no steps."""
    save(tmp_path, 0, OLD)
    save(tmp_path, 10**18 - 1, OLD)
    for name in (
        "step-007",
        "step-x",
        "step-1.bak",
        "step-\u0663",
        "step-" + "9" * 200,
        "step--1",
        "step-",
        "Step-4",
    ):
        (tmp_path / name).mkdir()

    assert [0, 10**18 - 1] == LocalStorage(tmp_path).list_steps()


# -- reading


def test_a_missing_manifest_is_said(tmp_path: Path) -> None:
    """A step without its manifest is refused; another step is read as before."""
    save(tmp_path, 1, OLD)
    save(tmp_path, 2, NEW)
    (tmp_path / "step-1" / NAME).unlink()

    assert f"{tmp_path}/step-1: the manifest is missing" == message(lambda: read_all(tmp_path))[0]
    assert is_good(tmp_path, 2, NEW)


@pytest.mark.parametrize("instead", ["nothing", "folder", "pipe"])
def test_a_missing_data_file_is_said(tmp_path: Path, instead: str) -> None:
    """A data file that is not there, or is not a file, is refused by name, and nothing waits for a pipe."""
    save(tmp_path, 1, OLD)
    file = tmp_path / "step-1" / DATA
    file.unlink()
    if instead == "folder":
        file.mkdir()
    if instead == "pipe":
        os.mkfifo(file)

    assert f"{tmp_path}/step-1/{DATA}: the file is missing" == message(lambda: read_all(tmp_path))[0]
    assert 1 <= len(list(StepSource(LocalStorage(tmp_path), 1).iterate_damage()))


@pytest.mark.parametrize("name", [NAME, DATA])
def test_a_truncated_file_is_said(tmp_path: Path, name: str) -> None:
    """A file of any other length than was written, shorter or longer, is refused by name."""
    save(tmp_path, 1, {"w": np.arange(6, dtype=np.float32)})
    file = tmp_path / "step-1" / name
    data = file.read_bytes()
    for length in range(len(data) + 2):
        if length != len(data):
            file.write_bytes((data + b"\0")[:length])
            assert f"{file}: " == message(lambda: read_all(tmp_path))[0][: len(f"{file}: ")]
    file.write_bytes(data)
    read_all(tmp_path)


def test_a_flipped_bit_in_the_manifest_is_found(tmp_path: Path) -> None:
    """Whichever byte of the manifest has a flipped bit, the step is refused, and the message names the file."""
    save(tmp_path, 1, {"w": np.arange(6, dtype=np.float32)})
    file = tmp_path / "step-1" / NAME
    data = bytearray(file.read_bytes())
    for place in range(len(data)):
        data[place] ^= 1 << place % 8
        file.write_bytes(data)
        assert (
            f"{file}: the manifest was damaged or changed"
            == message(lambda: StepSource(LocalStorage(tmp_path)))[0]
        )
        data[place] ^= 1 << place % 8
    file.write_bytes(data)
    read_all(tmp_path)


def test_a_flipped_bit_in_a_data_file_is_found(tmp_path: Path) -> None:
    """Whichever byte of a data file has a flipped bit, it is found and its file named; no wrong value is read."""
    values = {"w": np.arange(6, dtype=np.float32), "b": np.arange(3, dtype=np.int8)}
    save(tmp_path, 1, values)
    file = tmp_path / "step-1" / DATA
    header = StepSource(LocalStorage(tmp_path)).manifest.files[0].header_bytes
    data = bytearray(file.read_bytes())
    found = 0
    for place in range(len(data)):
        data[place] ^= 1 << place % 8
        file.write_bytes(data)
        step = StepSource(LocalStorage(tmp_path))
        (problem,) = step.iterate_damage()
        assert str(file) in str(problem)
        if place < header:
            assert all(np.array_equal(step.read(path), array) for path, array in values.items())
        else:
            path = "w" if place < header + values["w"].nbytes else "b"
            assert f"{path}: its values differ from the saved ones" == message(lambda: read_all(tmp_path))[0]
            found += 1
        data[place] ^= 1 << place % 8
    assert sum(array.nbytes for array in values.values()) == found


def test_a_deleted_step_is_gone_at_once(tmp_path: Path) -> None:
    """What is deleted is not a step any more, though its files may still be there; to delete it again is no error."""
    save(tmp_path, 1, OLD)
    save(tmp_path, 2, NEW)
    for _ in range(2):
        LocalStorage(tmp_path).delete_step(1)

    assert ["step-2"] == names_in(tmp_path)
    assert is_good(tmp_path, 2, NEW)


def forge(step: Path, place: Place, value: object) -> None:
    """Change a value in the manifest of a step, and its checksum."""
    found = manifest_in(step)
    put(found, place, value)
    write_manifest(step, found)


def test_a_newer_version_is_refused(tmp_path: Path) -> None:
    """A manifest of a version that is not known is refused, with the fix."""
    save(tmp_path, 1, OLD)
    forge(tmp_path / "step-1", ("version",), 99)
    lines = message(lambda: StepSource(LocalStorage(tmp_path)))

    assert f"{tmp_path}/step-1/{NAME}: the format of the manifest is unknown" == lines[0]
    assert "  fix      upgrade: pip install -U layoutmap" == lines[-1]


ROWS = Layout(["x", None], Mesh(None, "x=4"))
ROW_CHUNKS = [[[2 * i, 2 * i + 2], [0, 4]] for i in range(4)]


@pytest.mark.parametrize(
    ("places", "found"),
    [
        ([0, 1, 1, 3], "2 chunks contain [2:4, 0:4]"),
        ([0, 1, 2], "no chunks contain [6:8, 0:4]"),
        ([0, 1, 2, 3, 3], "2 chunks contain [6:8, 0:4]"),
        ([], "no chunks contain [0:8, 0:4]"),
    ],
)
def test_chunks_that_do_not_cover_their_variable_are_refused(
    tmp_path: Path, places: list[int], found: str
) -> None:
    """Two chunks at one place and a hole, with right checksums, are found before a byte is read, and are named."""
    saved(str(tmp_path), {"w": random_values((8, 4), "float32")}, {"w": ROWS}, 1)
    step = tmp_path / "step-1"
    chunks = manifest_in(step)["variables"][0]["chunks"]
    assert ROW_CHUNKS == [chunk[2] for chunk in chunks]
    forged = [
        [file, start, ROW_CHUNKS[place], checksum]
        for place, (file, start, _, checksum) in zip(places, itertools.cycle(chunks), strict=False)
    ]
    forge(step, ("variables", 0, "chunks"), forged)
    lines = message(lambda: StepSource(LocalStorage(tmp_path)))

    assert f"ValueError('w: {found}')" == lines[1].rpartition("is invalid: ")[2]


def test_bytes_that_two_chunks_have_are_read_as_each_says(tmp_path: Path) -> None:
    """A chunk that is kept for the next block is not taken for another one of the same bytes."""
    value = random_values((8, 4), "float32")
    saved(str(tmp_path), {"w": value}, {"w": ROWS}, 1)
    folder = tmp_path / "step-1"
    first = manifest_in(folder)["variables"][0]["chunks"][0][:2]
    same = value[:2].tobytes()
    forge(folder, ("variables", 0, "shape"), [4, 4])
    forge(
        folder,
        ("variables", 0, "chunks"),
        [
            [*first, [[0, 2], [0, 4]], compute_xxh3(same)],
            [*first, [[2, 4], [0, 2]], compute_xxh3(same[:16])],
            [*first, [[2, 4], [2, 4]], compute_xxh3(same[:16])],
        ],
    )
    step = StepSource(LocalStorage(tmp_path))
    parts = [step.read("w", (slice(i, i + 1), slice(0, 4))) for i in range(4)]
    left = value[0].reshape(2, 2)

    assert (
        np.concatenate(parts).tobytes()
        == np.concatenate([value[:2], np.concatenate([left, left], 1)]).tobytes()
    )
