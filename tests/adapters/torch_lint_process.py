"""Lint of models that `parallelize_module` and `fully_shard` have laid out, as rank 0 of eight."""

import json
import random
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

import layoutmap as lm

MESHES = [((2, 4), ("dp", "tp")), ((4, 2), ("rows", "tp")), ((2, 2, 2), ("copies", "shards", "tp"))]
COLUMNS, ROWS = ("q_proj", "k_proj", "v_proj", "up"), ("o_proj", "down")


class Block(nn.Module):
    def __init__(self, size, head_dim):
        super().__init__()
        self.attention, self.mlp, self.norm = nn.Module(), nn.Module(), nn.LayerNorm(size)
        self.attention.head_dim = head_dim
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(self.attention, name, nn.Linear(size, size))
        self.mlp.up, self.mlp.down = nn.Linear(size, 4 * size), nn.Linear(4 * size, size)


def lay_out(seed, knocked_out):
    """Return a drawn model in layouts, and the path of the block that was not parallelized, if one is to be so."""
    drawn = random.Random(seed)
    shape, names = drawn.choice(MESHES)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    # Of four heads fully_shard may split each: it gathers them before they compute.
    head_dim, number = drawn.choice((4, 8)), drawn.randint(4, 7)
    model = nn.Module()
    model.blocks = nn.ModuleList(Block(4 * head_dim, head_dim) for _ in range(number))
    odd = drawn.randrange(number)
    for i, block in enumerate(model.blocks):
        if i != odd or not knocked_out:
            plan = {f"*.{name}": ColwiseParallel() for name in COLUMNS}
            plan |= {f"*.{name}": RowwiseParallel() for name in ROWS}
            parallelize_module(block, mesh["tp"], plan)
        if drawn.random() < 0.8:
            fully_shard(block, mesh=mesh[names[:-1]])
    fully_shard(model, mesh=mesh[names[:-1]])
    return model, f"blocks.{odd}"


if __name__ == "__main__":
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    torch.set_num_threads(1)
    found = []
    for seed in map(int, sys.argv[1:]):
        for knocked_out in (False, True):
            model, odd = lay_out(seed, knocked_out)
            problems = [
                [p.kind, p.subject] for p in lm.inspect(model).lint().problems if p.kind != "unused dim"
            ]
            found.append([problems, [["odd one out", odd]] if knocked_out else []])
    print(json.dumps(found))
