"""Directories of torch.distributed.checkpoint: blocks of tensors, read without torch, and no pickle that is run."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import forked
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

import layoutmap as lm
from layoutmap.checkpoint.foreign import open_checkpoint_source
from layoutmap.checkpoint.foreign.dcp import DistributedCheckpointSource
from layoutmap.core.errors import CheckpointError

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch.distributed")
TENSORS = {
    "w": torch.arange(12.0).reshape(3, 4),
    "transposed": torch.arange(24.0).reshape(2, 3, 4).permute(2, 0, 1),
    "scalar": torch.tensor(3.0),
    "empty": torch.zeros(0, 3),
    "nested.bf16": torch.arange(5.0).to(torch.bfloat16),
    "nested.bool": torch.tensor([True, False]),
    "nested.fp8": torch.arange(4.0).to(torch.float8_e4m3fn),
    "nested.uint16": torch.arange(4).to(torch.uint16),
    "nested.part": torch.arange(12)[4:8],
}


def saved(folder: Path, tensors: dict[str, torch.Tensor] = TENSORS) -> DistributedCheckpointSource:
    nested = {name.partition(".")[2]: t for name, t in tensors.items() if "." in name}
    plain: dict[str, Any] = {name: t for name, t in tensors.items() if "." not in name}
    dcp.save(plain | {"nested": nested, "step": 3, "text": "as is"}, checkpoint_id=folder, no_dist=True)
    source = open_checkpoint_source(folder)
    assert isinstance(source, DistributedCheckpointSource)
    return source


def test_what_torch_saved_is_read(tmp_path: Path) -> None:
    """Tensors of any type, order in memory and size are read with their bits; what is not a tensor is left out."""
    source = saved(tmp_path / "c")
    expected = {
        name: (tuple(tensor.shape), tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
        for name, tensor in TENSORS.items()
        if tensor.shape
    }
    found = {n: (v.shape, source.read(n).tobytes()) for n, v in source.variables.items() if v.shape}

    assert (expected, 3.0) == (found, source.read("scalar").item())
    assert f"<DistributedCheckpointSource {tmp_path / 'c'}: 9 tensors, no checksums>" == repr(source)


def test_only_the_bytes_of_a_block_are_read(tmp_path: Path) -> None:
    """After the head of a tensor is known, a block of rows or columns costs its own bytes, in any order in memory."""
    wide = torch.arange(2048.0 * 8).reshape(8, 2048)
    source = saved(tmp_path / "c", {"wide": wide, "long": wide.t()})
    source.verify_block("wide")
    source.verify_block("long")
    before = source.bytes_read
    rows, columns = source.read("wide", np.s_[2:4, 512:1024]), source.read("long", np.s_[512:1024, 2:4])

    assert wide[2:4, 512:1024].tolist() == rows.tolist() == columns.T.tolist()
    assert 2 * rows.nbytes == source.bytes_read - before


SHARDED = """
import os, sys
import torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2] + ".group", rank=rank, world_size=2)
mesh = init_device_mesh("cpu", (2,))
tensors = {str(axis): distribute_tensor(torch.arange(35.0).reshape(5, 7), mesh, [Shard(axis)]) for axis in (0, 1)}
dcp.save(tensors, checkpoint_id=sys.argv[2])
dist.destroy_process_group()
"""


@pytest.mark.long
def test_shards_of_two_processes_are_one_tensor(tmp_path: Path) -> None:
    """What two processes have saved, each its uneven shards, is read in any block."""
    folder = tmp_path / "c"
    ended = forked.wait_for_all([forked.start(SHARDED, [str(rank), str(folder)]) for rank in range(2)])
    assert [0, 0] == [each.returncode for each in ended], ended[0].stderr
    source, values = open_checkpoint_source(folder), np.arange(35, dtype="float32").reshape(5, 7)

    assert {"__0_0.distcp", "__1_0.distcp"} <= {each.name for each in folder.iterdir()}
    for index in (np.s_[0:5, 0:7], np.s_[1:4, 2:6], np.s_[4:5, 6:7]):
        assert [values[index].tolist()] * 2 == [source.read(name, index).tolist() for name in ("0", "1")]


def test_a_module_is_loaded_from_torch_s_checkpoint(tmp_path: Path) -> None:
    """A module in layouts takes its weights from a checkpoint of DCP, with a prefix taken away by a table."""
    model = torch.nn.Linear(8, 16)
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "c", no_dist=True)
    layout_map = lm.LayoutMap(lm.create_mesh("model=4"), {"weight": ("model", None), "bias": ("model",)})

    found = lm.load(
        lambda: torch.nn.Linear(8, 16),
        tmp_path / "c",
        layout_map=layout_map,
        names={"**": "model.**"},
        library="torch",
    )

    assert model.weight.tolist() == found.weight.full_tensor().tolist()


class Evil:
    def __reduce__(self) -> Any:
        return os.system, ("touch evil",)


def test_a_pickle_that_names_anything_else_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Metadata that would run a program when torch reads it runs nothing here, and is refused by what it names."""
    monkeypatch.chdir(tmp_path)
    saved(tmp_path / "c")
    for data in (pickle.dumps(Evil()), b"cbuiltins\neval\n(S'1'\ntR.", b"\x80\x04garbage", b""):
        (tmp_path / "c" / ".metadata").write_bytes(data)
        with pytest.raises(
            CheckpointError,
            match=r"its pickle (refers to the unknown name (posix\.system|builtins\.eval)|cannot be read)",
        ):
            open_checkpoint_source(tmp_path / "c")

    assert ["c"] == [each.name for each in tmp_path.iterdir()]


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    """A file that is missing, truncated, or is not a file of torch's, is refused when the tensor is checked."""
    source = saved(tmp_path / "c", {"w": torch.ones(64)})
    (file,) = (tmp_path / "c").glob("*.distcp")
    data = file.read_bytes()
    for damaged in (data[: len(data) // 2], b"\0" * len(data), None):
        file.unlink()
        if damaged is not None:
            file.write_bytes(damaged)
        with pytest.raises(CheckpointError):
            open_checkpoint_source(tmp_path / "c").verify_block("w")

    assert ["w"] == list(source.variables)


@pytest.mark.parametrize(("second", "found"), [(1, "2 chunks"), (2, None), (3, "no chunks")])
def test_chunks_that_do_not_cover_a_tensor_are_refused(
    tmp_path: Path, second: int, found: str | None
) -> None:
    """Two chunks at one place and a hole add up to the size of a tensor, and are no tensor."""
    parts = {"a": torch.arange(8.0).reshape(2, 4), "b": torch.arange(8.0, 16).reshape(2, 4)}
    saved(tmp_path / "c", parts)
    file = tmp_path / "c" / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    places = {"a": torch.Size((0, 0)), "b": torch.Size((second, 0))}
    whole = metadata.state_dict_metadata["a"]
    whole.size = torch.Size((2 + second if found is None else 4, 4))
    whole.chunks = [ChunkStorageMetadata(place, torch.Size((2, 4))) for place in places.values()]
    metadata.state_dict_metadata = {"w": whole}
    metadata.storage_data = {
        MetadataIndex("w", places[index.fqn]): info
        for index, info in metadata.storage_data.items()
        if index.fqn in places
    }
    file.write_bytes(pickle.dumps(metadata))
    source = open_checkpoint_source(tmp_path / "c")

    if found is None:
        assert list(range(16)) == source.read("w").flatten().tolist()
        return
    for action in (source.read, source.verify_block):
        with pytest.raises(CheckpointError, match=f"w: values are missing or stored twice\n  why   {found} "):
            action("w")
