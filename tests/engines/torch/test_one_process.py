"""Devices are simulated in a program of one process: what it does with plain tensors is not split among them."""

import json

import pytest
import torch
import torch.distributed as dist
from engines.fresh_process import run
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DistributedSampler

import layoutmap as lm
from layoutmap.engines.torch import simulation

PROGRAM = """
import json, sys, tempfile
import torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import async_save, load, save  # before anything is simulated
from torch.distributed.checkpoint.utils import _DistWrapper
from torch.utils.data import DistributedSampler
import layoutmap as lm

def net():
    return torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(8)])

def restored(write):
    kept, other, folder = net().state_dict(), net().state_dict(), tempfile.mkdtemp()
    write({"model": kept}, folder)
    load({"model": other}, checkpoint_id=folder)
    return sum(map(torch.equal, kept.values(), other.values()))

def found():
    return {
        "save": restored(lambda values, folder: save(values, checkpoint_id=folder)),
        "dcp.save": restored(lambda values, folder: dcp.save(values, checkpoint_id=folder)),
        "async_save": restored(lambda values, folder: async_save(values, checkpoint_id=folder).result()),
    }

before = [vars(owner)["__init__"] for owner in (_DistWrapper, DistributedSampler)]
lm.LayoutMap("batch=2,model=2", {".*weight": ("model", None)}).build(net, library="torch")
told = {"beside a model in layouts": found()}
dist.destroy_process_group()
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
told["in a group of its own"] = found() | {"samples": len(list(DistributedSampler(range(80))))}
after = [vars(owner)["__init__"] for owner in (_DistWrapper, DistributedSampler)]
print(json.dumps(told | {"as it was": before == after}))
"""


def test_distributed_checkpoint_writes_every_tensor():
    """A plain model's checkpoint of torch is complete beside a model in layouts, and in a later group of its own."""
    ended = run(PROGRAM, {"WORLD_SIZE": None, "RANK": None})

    all_tensors = {"save": 16, "dcp.save": 16, "async_save": 16}
    assert 0 == ended.returncode, ended.stderr[-4000:]
    assert {
        "beside a model in layouts": all_tensors,
        "in a group of its own": {**all_tensors, "samples": 80},
        "as it was": True,
    } == json.loads(ended.stdout)


@pytest.fixture(autouse=True)
def simulated():
    simulation.start()


def gathered(x):
    dist.all_gather([torch.empty_like(x) for _ in range(dist.get_world_size())], x)


def trained(x):
    module = torch.nn.Linear(4, 8)
    fully_shard(module)
    module(x)


COLLECTIVES = {
    "all_reduce": dist.all_reduce,
    "all_gather": gathered,
    "all_gather_object": lambda x: dist.all_gather_object([None] * dist.get_world_size(), "text"),
    "broadcast of another's": lambda x: dist.broadcast(x, 1),
    "fully_shard": trained,
}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_collectives_of_plain_tensors_are_refused(name):
    """Nobody would answer: what a device lacks would be left as it is, and a sum be that of one."""
    with pytest.raises(lm.EngineError) as found:
        COLLECTIVES[name](torch.ones(2, 4))

    assert "a collective of plain tensors, among devices that are simulated" in found.value.what
    assert "WORLD_SIZE" in found.value.fix


def test_what_one_process_knows_is_allowed():
    """All wait for each other, and what the first process says is what this one has."""
    x = torch.arange(4.0)
    dist.barrier()
    dist.broadcast(x, 0)

    assert [0, 1, 2, 3] == x.tolist()


@pytest.mark.parametrize("own", [False, True])
def test_a_sampler_that_would_leave_out_data_is_refused(own):
    """Seven eighths of the data would be that of devices which are simulated here."""
    numbers = {"num_replicas": dist.get_world_size(), "rank": dist.get_rank()} if own else {}
    with pytest.raises(lm.EngineError, match="would skip the data of 7 of 8 simulated devices"):
        DistributedSampler(range(80), **numbers)

    assert 40 == len(DistributedSampler(range(80), num_replicas=2, rank=1))
