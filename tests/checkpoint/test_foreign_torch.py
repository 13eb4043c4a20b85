"""A file of torch.save is converted without torch; what would run code, or make much of few bytes, is refused."""

from __future__ import annotations

import contextlib
import os
import pickle
import random
import subprocess
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import layoutmap as lm
from layoutmap.checkpoint.foreign.torch_file import TorchFileSource
from layoutmap.cli.main import main
from layoutmap.core.errors import CheckpointError
from layoutmap.engines.torch.element_types import to_numpy

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool]
DTYPES += [torch.int16, torch.complex64, torch.float8_e4m3fn, torch.uint16, torch.uint32]


def drawn(seed: int) -> dict[str, Any]:
    """What programs put into such files: tensors of any type in mappings and lists, with numbers and texts."""
    rng = random.Random(seed)

    def tensor() -> torch.Tensor:
        shape = [rng.randrange(5) for _ in range(rng.randrange(4))]
        made = torch.randint(0, 2, shape).to(rng.choice(DTYPES))
        return rng.choice(
            (made, torch.nn.Parameter(made, requires_grad=False), made.t() if made.ndim == 2 else made)
        )

    kinds: list[Callable[[], Any]] = [tensor, tensor, lambda: rng.random(), lambda: "text", lambda: None]
    return {
        "tied": (tied := tensor()),
        "also": tied,
        "model": OrderedDict((f"block.{n}.w", rng.choice(kinds)()) for n in range(8)),
        "optimizer": {
            "state": {n: {"m": tensor()} for n in range(2)},
            "groups": [{"lr": 0.1, "p": [tensor(), 5]}],
        },
    }


def tensors(found: Any, path: str = "") -> dict[str, torch.Tensor]:
    """The tensors in mappings and lists, by path."""
    if isinstance(found, torch.Tensor):
        return {path[1:]: found}
    parts = found.items() if isinstance(found, dict) else enumerate(found) if isinstance(found, list) else ()
    return {k: v for name, value in parts for k, v in tensors(value, f"{path}.{name}").items()}


@pytest.mark.every_case
@pytest.mark.parametrize("seed", range(10))
def test_what_torch_saved_has_the_bits_that_torch_loads(tmp_path: Path, seed: int) -> None:
    """Each tensor is there under its keys, once under all of them, with the bits of torch.load(weights_only=True)."""
    file = tmp_path / "a.pt"
    torch.save(drawn(seed), file)
    expected = tensors(torch.load(file, weights_only=True))
    source = TorchFileSource(file)
    paths = {name: path for path, each in source.variables.items() for name in (path, *each.aliases)}

    assert {*expected} == {*paths}
    for name, tensor in expected.items():
        assert to_numpy(tensor).tobytes() == np.ascontiguousarray(source.read(paths[name])).tobytes()
        assert tuple(tensor.shape) == source.variables[paths[name]].shape


def test_a_part_of_a_file_is_converted_and_loaded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command writes a step with checksums, which a model loads as it loads others."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6))
    torch.save({"model": model.state_dict(), "epoch": 3}, tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match="layoutmap checkpoint convert"):
        lm.load(model, tmp_path / "a.pt")
    arguments = ["checkpoint", "convert", str(tmp_path / "a.pt"), str(tmp_path / "new"), "--part", "model"]
    assert 0 == main(arguments)
    assert f"<Checkpoint {tmp_path}/new/step-0: 7 variables, 224 B>\n" == capsys.readouterr().out
    other = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6))
    lm.load(other, tmp_path / "new")

    assert () == lm.describe(tmp_path / "new").verify()
    assert all(map(torch.equal, model.state_dict().values(), other.state_dict().values()))


class Running:
    """Runs something when a pickle with it is read."""

    def __init__(self, function: Any, *arguments: Any):
        self.found = function, arguments

    def __reduce__(self) -> Any:
        return self.found


def archive(file: Path, content: bytes, *, compression: int = zipfile.ZIP_STORED, **data: bytes) -> Path:
    """An archive like those of torch, with this pickle."""
    with zipfile.ZipFile(file, "w", compression) as made:
        made.writestr("a/data.pkl", content)
        for name, values in data.items():
            made.writestr(f"a/data/{name[1:]}", values)
    return file


def storage(numel: int = 4) -> str:
    """The opcodes of a storage of numbers: protocol 0, which a person can write."""
    return f"(S'storage'\nctorch\nFloatStorage\nS'0'\nS'cpu'\nI{numel}\ntQ"


def tensor_of(shape: str, strides: str, start: int = 0) -> bytes:
    """The pickle of a mapping with one tensor."""
    head = f"(dS'w'\nctorch._utils\n_rebuild_tensor_v2\n({storage()}I{start}\n({shape}t({strides}tI00\nNtRs."
    return head.encode()


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(lambda mark: pickle.dumps({"w": Running(os.system, f"touch {mark}")}), id="os.system"),
        pytest.param(lambda mark: pickle.dumps({"w": Running(eval, f"open({str(mark)!r}, 'w')")}), id="eval"),
        pytest.param(lambda mark: pickle.dumps({"w": Running(open, str(mark), "w")}), id="open"),
        pytest.param(lambda mark: b"cbuiltins\ngetattr\n(cos\npath\nS'x'\ntR.", id="getattr"),
        pytest.param(lambda mark: f"(S'touch {mark}'\niposix\nsystem\n.".encode(), id="inst"),
        pytest.param(lambda mark: b"ctorch.serialization\nload\n(S'x'\ntR.", id="torch"),
        pytest.param(lambda mark: b"cbuiltins\nbytearray\n(L9999999999999L\ntR.", id="bytearray"),
        pytest.param(lambda mark: b"ccollections\nOrderedDict\n((lp0\ntR.", id="arguments"),
        pytest.param(lambda mark: b"\x80\x02B\xff\xff\xff\x7fabc", id="announced"),
        pytest.param(lambda mark: b"\x80\x02]r\xff\xff\xff\x3f.", id="a list for a billion objects"),
        pytest.param(lambda mark: b"", id="nothing"),
        pytest.param(lambda mark: b"(l.", id="no tensors"),
        pytest.param(lambda mark: b"(dI1\n" + b"(l" * 1000 + b"a" * 999 + b"s.", id="deep"),
        pytest.param(
            lambda mark: (
                b"(lp0\n" + b"".join(b"0(lp%d\ng%d\nag%d\na" % (n, n - 1, n - 1) for n in range(1, 60)) + b"."
            ),
            id="laughs",
        ),
    ],
)
def test_a_pickle_runs_nothing(tmp_path: Path, content: Callable[[Path], bytes]) -> None:
    """Whatever a pickle names or announces, it is refused with a reason and a fix, and nothing has been run."""
    mark = tmp_path / "mark"
    file = archive(tmp_path / "a.pt", content(mark))
    with pytest.raises(CheckpointError) as error:
        TorchFileSource(file)

    assert error.value.why
    assert error.value.fix
    assert not mark.exists()


@pytest.mark.every_case
@pytest.mark.parametrize(
    "name", ["a.pt", "a.bin", "a.pkl", "a.ckpt", "archive.pt", "dcp/.metadata", "run/step-1/manifest.json"]
)
def test_no_entrance_runs_a_pickle(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Given a file that runs something when it is unpickled, functions and commands refuse it, and run nothing."""
    mark, file = tmp_path / "mark", tmp_path / name
    file.parent.mkdir(parents=True, exist_ok=True)
    content = pickle.dumps({"w": torch.ones(2), "x": Running(os.system, f"touch {mark}")})
    if name == "archive.pt":
        archive(file, content)
    else:
        file.write_bytes(content)
    given = str(tmp_path / name.split("/")[0])
    model = torch.nn.Linear(2, 2)
    before = model.weight.tolist()
    refused = 0
    for act in (
        lambda: lm.load(model, given),
        lambda: lm.load(model, given, missing="keep"),
        lambda: lm.describe(given),
        lambda: lm.export(given, tmp_path / "out"),
        lambda: lm.CheckpointManager(given).load(model),
    ):
        with pytest.raises(CheckpointError):
            act()
        refused += 1
    for command in (
        ["describe", given],
        ["verify", given],
        ["export", given, f"{tmp_path}/x"],
        ["convert", given, str(tmp_path / "new")],
    ):
        refused += main(["checkpoint", *command]) != 0
        assert "Traceback" not in capsys.readouterr().err

    assert 9 == refused
    assert before == model.weight.tolist()
    assert not mark.exists()


def test_a_pickle_does_not_change_what_reads_it(tmp_path: Path) -> None:
    """Attributes that a pickle sets on what stands for torch's functions are gone with it."""
    change = b"ctorch\nSize\n(N(dS'__defaults__'\n(I7\ntstb0"
    file = archive(tmp_path / "a.pt", change + tensor_of("I2\nI2\n", "I2\nI1\n"), x0=bytes(16))
    for _ in range(2):
        with contextlib.suppress(CheckpointError):
            TorchFileSource(file)
    torch.save({"w": torch.ones(2, 2)}, tmp_path / "b.pt")
    assert (2, 2) == TorchFileSource(tmp_path / "b.pt").variables["w"].shape


@pytest.mark.parametrize(
    ("content", "more"),
    [
        (tensor_of("I2\nI2\n", "I2\nI1\n"), {"x0": bytes(15)}),  # less than it says
        (tensor_of("I2\nI2\n", "I2\nI1\n", start=1), {"x0": bytes(16)}),
        (tensor_of("I2\nI2\n", "I2\nI1\n"), {}),  # no such storage
        (tensor_of("L1000000000000L\nI2\n", "I0\nI1\n"), {"x0": bytes(16)}),  # one row, again and again
        (tensor_of("L9999999999999999999999L\n", "I1\n"), {"x0": bytes(16)}),
        (tensor_of("I-2\nI2\n", "I2\nI1\n"), {"x0": bytes(16)}),
        (tensor_of("I2\n" * 65, "I1\n" * 65), {"x0": bytes(16)}),
        (tensor_of("I2\nI2\n", "I2\nI1\n"), {"x0": bytes(16), "compression": zipfile.ZIP_DEFLATED}),
        (tensor_of("I2\nI2\n", "I2\nI1\n"), {"x0": bytes(1 << 20), "compression": zipfile.ZIP_BZIP2}),
    ],
)
def test_few_bytes_do_not_become_many(tmp_path: Path, content: bytes, more: dict[str, Any]) -> None:
    """Archives that are compressed, and tensors that have more values than the file, are refused."""
    assert (2, 2) == TorchFileSource(
        archive(tmp_path / "good.pt", tensor_of("I2\nI2\n", "I2\nI1\n"), x0=bytes(16))
    )["w"].shape
    with pytest.raises(CheckpointError) as error:
        TorchFileSource(archive(tmp_path / "a.pt", content, **more))

    assert error.value.why
    assert error.value.fix


def test_views_of_one_memory_do_not_fill_a_disk(tmp_path: Path) -> None:
    """A thousand tensors that are views of one storage, each elsewhere in it, are refused; equal ones are one."""
    memory = torch.zeros(2000)
    torch.save([memory[n : n + 1000] for n in range(1000)], tmp_path / "a.pt")
    torch.save([memory] * 1000, tmp_path / "b.pt")
    with pytest.raises(CheckpointError, match="its tensors have 4000000 bytes"):
        TorchFileSource(tmp_path / "a.pt")

    assert ["0"] == [*TorchFileSource(tmp_path / "b.pt").variables]


def test_files_of_one_archive_share_no_bytes(tmp_path: Path) -> None:
    """An archive whose list has one file many times, at one place, is refused: so 42 KB have become petabytes."""
    file = archive(tmp_path / "a.pt", tensor_of("I2\nI2\n", "I2\nI1\n"), x0=bytes(16), x1=bytes(16))
    data = bytearray(file.read_bytes())
    entries = [n for n in range(len(data)) if data[n : n + 4] == b"PK\1\2"]
    data[entries[2] + 42 : entries[2] + 46] = data[entries[1] + 42 : entries[1] + 46]
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match="the archive cannot be read"):
        TorchFileSource(file)


@pytest.mark.every_case
@pytest.mark.parametrize("seed", range(3))
def test_a_damaged_file_is_refused_or_read(tmp_path: Path, seed: int) -> None:
    """Flipped bits and lost ends raise nothing but errors with a reason, or leave tensors that can be read."""
    file, rng = tmp_path / "a.pt", random.Random(seed)
    torch.save(drawn(seed), file)
    data = file.read_bytes()
    outcomes = set[str]()
    for _ in range(100):
        damaged = bytearray(data)
        if rng.random() < 0.2:
            del damaged[rng.randrange(len(data)) :]
        for _ in range(rng.choice((1, 1, 5))):
            if damaged:
                damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
        file.write_bytes(damaged)
        try:
            source = TorchFileSource(file)
            for path in source.variables:
                source.read(path)
            outcomes.add("read")
        except CheckpointError:
            outcomes.add("refused")
    assert {"read", "refused"} == outcomes


def test_no_torch_is_loaded(tmp_path: Path) -> None:
    """A file is read where torch is not installed."""
    torch.save({"w": torch.ones(2, 2)}, tmp_path / "a.pt")
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "from layoutmap.checkpoint.foreign.torch_file import TorchFileSource\n"
        f"print(TorchFileSource({str(tmp_path / 'a.pt')!r}).read('w').sum())"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)

    assert ("4.0\n", "") == (ended.stdout, ended.stderr)


def test_a_file_before_archives_is_refused(tmp_path: Path) -> None:
    """What torch wrote before 1.6, or what is none of its files, is refused with the fix."""
    torch.save({"w": torch.ones(2)}, tmp_path / "a.pt", _use_new_zipfile_serialization=False)
    (tmp_path / "b.pt").write_bytes(b"no archive")
    (tmp_path / "c.pt").write_bytes(b"")
    for name in ("a.pt", "b.pt", "c.pt"):
        with pytest.raises(CheckpointError, match=r"(?s)the archive cannot be read.*since torch 1\.6"):
            TorchFileSource(tmp_path / name)
