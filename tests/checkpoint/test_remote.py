"""Checkpoints in object stores: what a save leaves there, and what moves between a disk and a store."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from checkpoint.saves import is_good, save, values_of, writers

from layoutmap.checkpoint import remote
from layoutmap.checkpoint.reader import StepSource
from layoutmap.checkpoint.remote import RemoteStorage, open_storage
from layoutmap.checkpoint.storage import LocalStorage
from layoutmap.core.errors import CheckpointError

PROCESSES = ("core",)


def names_in(url: str) -> list[str]:
    """Every file below a URL, with the token of a save as `*`."""
    storage = RemoteStorage(url)
    names = (path.removeprefix(storage._root + "/").split("/") for path in storage._files.find(storage._root))
    return sorted("/".join("*" if len(part) == 16 and "." not in part else part for part in n) for n in names)


def test_urls_are_in_object_stores_and_paths_on_this_machine(tmp_path: Path) -> None:
    """A URL is one of an object store, unless it is of a file."""
    found = [
        type(open_storage(each)) for each in ("memory://x", str(tmp_path), tmp_path, f"file://{tmp_path}")
    ]

    assert [RemoteStorage, LocalStorage, LocalStorage, LocalStorage] == found
    assert str(tmp_path) == open_storage(f"file://{tmp_path}").where


def test_a_store_that_nothing_reaches_is_an_error() -> None:
    """A URL that fsspec does not know is an error that says what to install."""
    with pytest.raises(CheckpointError, match="this store cannot be accessed") as found:
        open_storage("nowhere://x")
    assert "pip install" in str(found.value)


def test_a_step_is_a_manifest_and_the_files_of_one_save(url: str) -> None:
    """What dead saves have left is gone once the step is there; a failed save leaves nothing, if it can."""
    for seed in (1, 2):
        dead = writers(url, 3, values_of(seed))[0]
        dead._storage.create_file(dead._folder, "data-00000.safetensors").__enter__().write(b"x")
        with dead._storage.create_file(dead._folder, "part-00001.json") as sink:
            sink.write(b"{}")
    save(url, 3, values_of(0))
    (failing,) = writers(url, 4, values_of(0), before=lambda *_: 1 / 0)
    with failing._storage.create_file(failing._folder, "part-00001.json") as sink:
        sink.write(b"{}")
    with pytest.raises(ZeroDivisionError), failing:
        failing.write_step()

    assert ["step-3/*/data-00000.safetensors", "step-3/manifest.json"] == names_in(url)
    assert is_good(url, 3, values_of(0))


def test_an_answer_that_was_lost_is_no_failure(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the store has written the manifest and its answer is lost, the step is there, and none of it is deleted."""
    (writer,) = writers(url, 3, values_of(0))
    files = RemoteStorage(url)._files  # fsspec has one for all of a kind
    put = files.pipe_file

    def lose(*args: object, **kwargs: object) -> None:
        put(*args, **kwargs)
        raise TimeoutError

    monkeypatch.setattr(files, "pipe_file", lose)
    with writer:
        writer.write_step()

    assert is_good(url, 3, values_of(0))


def test_a_store_that_fails_says_so(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a store raises is said with the file, and the step is not there."""
    (writer,) = writers(url, 3, values_of(0))

    def fail(*args: object, **kwargs: object) -> None:
        raise PermissionError("not yours")

    monkeypatch.setattr(RemoteStorage(url)._files, "pipe_file", fail)
    with pytest.raises(CheckpointError, match="step 3 cannot be completed") as found, writer:
        writer.write_step()

    assert "not yours" in str(found.value)
    assert [] == names_in(url)


def test_a_large_file_is_sent_in_parts(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of several parts is the same as one of one part; one that is given up is not there."""
    monkeypatch.setattr(remote, "_PART_BYTES", 5 << 20)
    values = {"w": np.arange(3 << 20, dtype=np.float32).reshape(3, -1)}
    place = f"{s3}/{os.urandom(8).hex()}"
    save(place, 0, values)

    def fail(number: int, path: str) -> None:
        if path == "x":
            raise ZeroDivisionError

    (failing,) = writers(place, 1, values | {"x": values["w"]}, before=fail)
    with pytest.raises(ZeroDivisionError), failing:
        failing.write_step()

    assert is_good(place, 0, values)
    assert ["step-0/*/data-00000.safetensors", "step-0/manifest.json"] == names_in(place)


def test_steps_move_between_a_disk_and_a_store(url: str, tmp_path: Path) -> None:
    """A step that is copied from a store to a disk, or the other way, file by file, can be read there."""
    save(tmp_path, 1, values_of(1))
    save(url, 2, values_of(2))
    storage = RemoteStorage(url)
    files, root = storage._files, storage._root
    files.put(f"{tmp_path}/step-1", f"{root}/step-1", recursive=True)
    for path in files.find(f"{root}/step-2"):
        target = tmp_path / path.removeprefix(f"{root}/")
        target.parent.mkdir(parents=True, exist_ok=True)
        files.get_file(path, str(target))

    for place in (url, tmp_path):
        assert [1, 2] == open_storage(place).list_steps()
        assert [True, True] == [is_good(place, seed, values_of(seed)) for seed in (1, 2)]


def test_only_what_is_wanted_is_fetched(url: str) -> None:
    """A quarter of a weight is fetched as the bytes of that quarter."""
    values = {"w": np.random.default_rng(0).random((2048, 1024), np.float32)}
    save(url, 0, values)
    step = StepSource(open_storage(url))
    found = step.read("w", (slice(0, 1024), slice(512, 1024)))

    assert np.array_equal(values["w"][:1024, 512:], found)
    assert values["w"].nbytes // 4 == step.bytes_read


KILLED = """
import os, sys
sys.path.insert(0, "tests")
from checkpoint.saves import save, values_of
from layoutmap.checkpoint.remote import RemoteStorage
if sys.argv[2] == "before":
    RemoteStorage.commit_step = lambda *_: os.kill(os.getpid(), 9)
else:
    RemoteStorage.remove_file = lambda *_: os.kill(os.getpid(), 9)
save(sys.argv[1], 3, values_of(0))
"""


@pytest.mark.parametrize(("moment", "steps"), [("before", [2]), ("after", [2, 3])])
def test_a_killed_save_is_a_step_or_none(s3: str, moment: str, steps: list[int]) -> None:
    """A process that is killed before its manifest is there leaves no step; after it, a good one."""
    place = f"{s3}/{os.urandom(8).hex()}"
    save(place, 2, values_of(2))
    root = Path(__file__).parents[2]
    ended = subprocess.run([sys.executable, "-c", KILLED, place, moment], cwd=root, check=False)

    assert -9 == ended.returncode
    assert steps == open_storage(place).list_steps()
    assert [True] * len(steps) == [is_good(place, n, values_of(2 if n == 2 else 0)) for n in steps]


def test_a_save_into_a_bucket_that_is_not_there_says_so(s3: str) -> None:
    """It is not a file that was lost: the bucket is to be made, or its name to be corrected."""
    with pytest.raises(CheckpointError, match="the file or the bucket does not exist") as error:
        save("s3://other-bucket/run", 1, values_of(0))

    assert "create the bucket, or correct its name in the URL, and save again" == error.value.fix
