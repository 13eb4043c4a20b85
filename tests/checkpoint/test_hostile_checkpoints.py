"""Damaged and hostile files of each format are refused by name within seconds and bounded memory; good ones load."""

from __future__ import annotations

import functools
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import h5py
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from checkpoint.saves import save as save_own
from safetensors.numpy import save_file

from layoutmap.checkpoint.foreign import open_checkpoint_source
from layoutmap.cli.main import main
from layoutmap.core.errors import CheckpointError

VALUES = {"w": np.arange(64, dtype="f4").reshape(8, 8), "z": np.zeros((4, 4), "f4")}
MOST_MEMORY = 4 << 30  # of address space; the interpreter with numpy, h5py and tensorstore maps 2 GiB


def save_orbax(path: Path, **how: bool) -> Path:
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**how)) as checkpointer:
        checkpointer.save(path, {name: jnp.asarray(value) for name, value in VALUES.items()})
    return path


def save_keras(path: Path) -> Path:
    with h5py.File(path, "w") as file:
        for name, value in VALUES.items():
            file[f"layers/{name}/vars/0"] = value
    return path


def save_archive(path: Path) -> Path:
    save_keras(path.with_suffix(".h5"))
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(path.with_suffix(".h5"), "model.weights.h5")
    path.with_suffix(".h5").unlink()
    return path


def save_keras_shards(path: Path) -> Path:
    """Weights of Keras in several files, as `max_shard_size` has them, and the index that names them."""
    path.parent.mkdir(exist_ok=True)
    names = {}
    for number, (name, value) in enumerate(VALUES.items()):
        file = path.with_name(f"m_{number:05}.weights.h5")
        with h5py.File(file, "w") as made:
            made[f"layers/{name}/vars/0"] = value
        names[f"/layers/{name}/vars"] = [file.name]
    path.write_text(json.dumps({"metadata": {"total_size": 320}, "weight_map": names}))
    return path


def save_index(path: Path) -> Path:
    path.mkdir()
    save_file({"w": VALUES["w"]}, path / "m-1.safetensors")
    save_file({"z": VALUES["z"]}, path / "m-2.safetensors")
    index = '{"weight_map": {"w": "m-1.safetensors", "z": "m-2.safetensors"}}'
    (path / "model.safetensors.index.json").write_text(index)
    return path


def save_step(path: Path) -> Path:
    save_own(path, 1, VALUES)
    return path


def save_safetensors(path: Path) -> Path:
    save_file(VALUES, path)
    return path


@functools.cache
def save_with_torch() -> tempfile.TemporaryDirectory[str]:
    """Written in another process, since torch and JAX do not share a test process."""
    folder = tempfile.TemporaryDirectory()
    program = "import torch, warnings; warnings.simplefilter('ignore'); "
    program += "import torch.distributed.checkpoint as dcp; "
    program += "v = {'w': torch.arange(64.).reshape(8, 8), 'z': torch.zeros(4, 4)}; "
    program += "torch.save(v, 'm.pt'); dcp.save(v, checkpoint_id='m', no_dist=True)"
    command = [sys.executable, "-c", program]
    subprocess.run(command, check=True, capture_output=True, close_fds=False, cwd=folder.name)
    return folder


def save_torch(path: Path) -> Path:
    made = Path(save_with_torch().name) / f"m{path.suffix}"
    (shutil.copytree if made.is_dir() else shutil.copy)(made, path)
    return path


FORMATS: dict[str, tuple[str, Callable[[Path], Path]]] = {
    "safetensors": ("m.safetensors", save_safetensors),
    "index": ("m", save_index),
    "hdf5": ("m.weights.h5", save_keras),
    "keras": ("m.keras", save_archive),
    "keras shards": ("m/m.weights.json", save_keras_shards),
    "zarr": ("m", lambda path: save_orbax(path, use_ocdbt=False)),
    "zarr3": ("m", lambda path: save_orbax(path, use_ocdbt=False, use_zarr3=True)),
    "ocdbt": ("m", lambda path: save_orbax(path, use_ocdbt=True)),
    "own": ("m", save_step),
    "torch": ("m.pt", save_torch),
    "dcp": ("m", save_torch),
}
# Files without values that no reader opens; and without an index, the files of a folder are read as one.
UNREAD = (
    "commit_success.txt",
    "deleted m/model.safetensors.index.json",
    "_sharding",
    "array_metadatas",
    "_CHECKPOINT_METADATA",
    "ocdbt.process_",
)

READ_ALL = """
import contextlib, io, resource, sys
from layoutmap.checkpoint.foreign import open_checkpoint_source
from layoutmap.checkpoint.foreign.torch_file import TorchFileSource
from layoutmap.cli.main import main
from layoutmap.core.errors import CheckpointError
resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[1]),) * 2)
for line in sys.stdin:
    path = line.rstrip()
    command = ["convert", path, path + ".new"] if path.endswith(".pt") else ["verify", path]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as told:
        main(["checkpoint", *command])
    if "bug in layoutmap" in told.getvalue():
        print(f"escaped {told.getvalue()[-300:]!r}", flush=True)
        continue
    try:
        source = TorchFileSource(path) if path.endswith(".pt") else open_checkpoint_source(path)
        values = {name: source.read(name) for name in source.variables}
        if hasattr(source, "check_file_sizes"):
            source.check_file_sizes()
        print("read", *sorted(f"{v.shape}{float(v.sum())}" for v in values.values()), flush=True)
    except CheckpointError as error:
        parts = str(error)
        print("refused" if "  why " in parts and "  fix " in parts else f"no reason: {parts!r}", flush=True)
    except BaseException as error:
        print(f"escaped {error!r:.300}", flush=True)
"""


def outcomes(paths: list[Path]) -> list[str]:
    """What reading each path comes to, in a process of bounded memory and time."""
    ended = subprocess.run(
        [sys.executable, "-c", READ_ALL, str(MOST_MEMORY)],
        input="\n".join(map(str, paths)),
        capture_output=True,
        text=True,
        check=False,
        close_fds=False,  # so that it is spawned, not forked: JAX has threads
        timeout=240,
    )
    lines = ended.stdout.splitlines()
    assert len(lines) == len(paths), (ended.returncode, ended.stderr[-2000:])
    return lines


def damage(file: Path, kind: str) -> None:
    data = file.read_bytes()
    file.unlink()
    if kind == "empty":
        file.write_bytes(b"")
    elif kind == "truncated":
        file.write_bytes(data[: len(data) // 2])
    elif kind == "directory":
        file.mkdir()
    elif kind == "pipe":
        os.mkfifo(file)
    elif kind == "dangling":
        file.symlink_to("nowhere")
    elif kind == "sparse":
        with file.open("wb") as made:
            made.truncate(1 << 40)
    elif kind == "inflated":
        file.write_bytes(data)
        os.truncate(file, 1 << 40)
    elif kind == "nested":
        file.write_bytes(b"[" * 200_000)


KINDS = ("deleted", "empty", "truncated", "directory", "pipe", "dangling", "sparse", "inflated", "nested")


@pytest.fixture(scope="module")
def read(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    """What reading each damaged checkpoint of each format comes to; one process reads all of them."""
    paths: dict[tuple[str, str], Path] = {}
    for name, (file_name, make) in FORMATS.items():
        folder = tmp_path_factory.mktemp("damaged")
        good = folder / "good"
        good.mkdir()
        paths[name, "good"] = make(good / file_name)
        files = sorted(each.relative_to(good) for each in good.rglob("*") if each.is_file())
        for number, file in enumerate(files):
            for kind in KINDS:
                copy = folder / f"{number}-{kind}"
                shutil.copytree(good, copy)
                damage(copy / file, kind)
                paths[name, f"{kind} {file}"] = copy / file_name
    found = dict(zip(paths, outcomes([*paths.values()]), strict=True))
    return {name: {what: text for (n, what), text in found.items() if n == name} for name in FORMATS}


@pytest.mark.every_case
@pytest.mark.parametrize("name", FORMATS)
def test_each_damaged_file_is_refused(read: dict[str, dict[str, str]], name: str) -> None:
    """Deleted, empty, truncated, sparse, inflated, nested, or no file: each is refused, or not needed for values."""
    results = dict(read[name])
    expected = results.pop("good")

    assert expected.startswith("read")
    loose = {what for what, found in results.items() if found != "refused"}
    assert {w for w in loose if results[w] != expected} == set()
    assert {w for w in loose if not any(part in w for part in UNREAD)} == set()


@pytest.mark.parametrize("seed", [59])
@pytest.mark.parametrize("name", FORMATS)
def test_changed_bytes_raise_nothing_else(tmp_path: Path, name: str, seed: int) -> None:
    """Whatever drawn bytes of a checkpoint change, it is read, or refused with why and fix."""
    file_name, make = FORMATS[name]
    rng = random.Random(seed)
    (tmp_path / "good").mkdir()
    make(tmp_path / "good" / file_name)
    files = sorted(each for each in (tmp_path / "good").rglob("*") if each.is_file())
    paths: list[Path] = []
    for number in range(40):
        copy = tmp_path / str(number)
        shutil.copytree(tmp_path / "good", copy)
        file = copy / rng.choice(files).relative_to(tmp_path / "good")
        data = bytearray(file.read_bytes())
        for _ in range(rng.choice((1, 1, 4, 30)) if data else 0):
            data[rng.randrange(len(data))] = rng.randrange(256)
        file.write_bytes(data)
        paths.append(copy / file_name)

    assert [] == [each for each in outcomes(paths) if each.split()[0] not in ("read", "refused")]


@pytest.mark.parametrize("name", ["zarr", "zarr3"])
def test_a_missing_chunk_is_no_zero(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """An array whose chunk file is gone is refused and named by verify; one of zeros is read."""
    path = FORMATS[name][1](tmp_path / "m")
    assert 0.0 == open_checkpoint_source(path).read("z").sum()
    chunk = path / "w" / ("0.0" if name == "zarr" else "c/0/0")
    chunk.unlink()
    with pytest.raises(CheckpointError, match="w: its values cannot be read"):
        open_checkpoint_source(path).read("w")

    assert 1 == main(["checkpoint", "verify", str(path)])
    assert "w: its values cannot be read" in capsys.readouterr().out


@pytest.mark.parametrize("order", ["<", ">"])
def test_hdf5_of_either_byte_order_has_its_values(tmp_path: Path, order: str) -> None:
    """Big-endian values are read as the numbers that they are."""
    with h5py.File(tmp_path / "m.weights.h5", "w") as file:
        file["vars/0"] = np.arange(5, dtype=f"{order}f4")
    found = open_checkpoint_source(tmp_path / "m.weights.h5")

    assert ("float32", [0, 1, 2, 3, 4]) == (found["vars.0"].dtype, found.read("vars.0").tolist())


def linked(path: Path) -> None:
    """Each of 40 groups has two hard links to the next."""
    with h5py.File(path, "w") as file:
        group = file
        for _ in range(40):
            below = group.create_group("a")
            group["b"] = below
            group = below
        group["x"] = 1.0


def torch_pickle(path: Path, content: bytes) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/data.pkl", content)


def safetensors_header(path: Path, header: object) -> None:
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(4))


def zip_bomb(path: Path) -> None:
    """Weights of Keras that inflate from 0.25 MB to 256 MiB of zeros; Keras stores them as they are."""
    with (
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive,
        archive.open("model.weights.h5", "w") as f,
    ):
        for _ in range(16):
            f.write(bytes(1 << 24))


def large_zarr(path: Path) -> None:
    save_orbax(path, use_ocdbt=False)
    file = path / "w" / ".zarray"
    file.write_text(file.read_text().replace('"shape":[8,8]', '"shape":[1099511627776,1099511627776]'))
    assert "1099511627776" in file.read_text()


def absolute(path: Path) -> None:
    save_orbax(path, use_ocdbt=False)
    file = path / "_METADATA"
    file.write_text(file.read_text().replace('"key": "w"', '"key": "/etc"'))


HOSTILE: dict[str, tuple[str, Callable[[Path], object]]] = {
    "hard links": ("a.weights.h5", linked),
    "tuple of tuples as a key": (
        "a.pt",
        lambda p: torch_pickle(p, b"\x80\x02}K\x01\x85" + b"2\x86" * 140 + b"K\x01s."),
    ),
    "deep tuple as a key": (
        "b.pt",
        lambda p: torch_pickle(p, b"\x80\x02}K\x01" + b"\x85" * 200_000 + b"K\x01s."),
    ),
    "state of a function": (
        "c.pt",
        lambda p: torch_pickle(p, b"\x80\x02ctorch\nSize\nq\x00(h\x00)}}tb0h\x00)R."),
    ),
    "long names": (
        "d.pt",
        lambda p: torch_pickle(
            p, b"\x80\x02X" + (30 << 20).to_bytes(4, "little") + b"a" * (30 << 20) + b"q\x000}h\x00}h\x00Nss."
        ),
    ),
    "absolute key": ("m", absolute),
    "5,000 axes": (
        "e.safetensors",
        lambda p: safetensors_header(p, {"w": {"dtype": "F32", "shape": [1] * 5000, "data_offsets": [0, 4]}}),
    ),
    "a shape of 2^80 elements": (
        "f.safetensors",
        lambda p: safetensors_header(
            p, {"w": {"dtype": "F32", "shape": [1 << 40] * 2, "data_offsets": [0, 4]}}
        ),
    ),
    "a name of 5,000 characters": (
        "g.safetensors",
        lambda p: safetensors_header(p, {"w" * 5000: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}),
    ),
    "a zip that inflates": ("h.keras", zip_bomb),
    "an array larger than its files": ("m", large_zarr),
}


def test_hostile_files_are_refused(tmp_path: Path) -> None:
    """A few bytes that would crash the process, fill its memory or lead out of the folder are refused."""
    paths = {name: tmp_path / str(n) / file for n, (name, (file, _)) in enumerate(HOSTILE.items())}
    for name, path in paths.items():
        path.parent.mkdir()
        HOSTILE[name][1](path)
    results = dict(zip(paths, outcomes([*paths.values()]), strict=True))

    assert dict.fromkeys(HOSTILE, "refused") == results
    for command in ("describe", "verify"):
        assert [] == [n for n, path in paths.items() if main(["checkpoint", command, str(path)]) == 0]
