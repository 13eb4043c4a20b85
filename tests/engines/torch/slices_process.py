"""A program that computes with DTensors of its own before it imports layoutmap; run by test_slices.py."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
own = distribute_tensor(torch.ones(4, 2), init_device_mesh("cpu", (1,)), [Shard(0)])
own[1:].add_(1)
torch.add(own, own, out=own)
dist.destroy_process_group()

import layoutmap as lm  # noqa: E402

mesh = lm.create_mesh("model=2")
layer = lm.LayoutMap(mesh, {"weight": ("model", None)}).build(
    lambda: torch.nn.Linear(2, 4, bias=False), library="torch"
)
with torch.no_grad():
    layer.weight.fill_(1)
    layer.weight[:2].zero_()
print(lm.dtensor.unpack(layer.weight)[0][:, 0].tolist() + lm.dtensor.unpack(layer.weight)[1][:, 0].tolist())
