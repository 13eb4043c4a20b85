"""A program that computes with DTensors of its own before it imports layoutmap; run by test_slices.py."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor


def change_own():
    """Call what torch's C++ keeps of DTensor's dispatcher from its first call on."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    own = distribute_tensor(torch.ones(4, 2), init_device_mesh("cpu", (1,)), [Shard(0)])
    own[1:].add_(1)
    torch.add(own, own, out=own)
    dist.destroy_process_group()


def change_weight():
    """The first column of a weight of which a slice was changed, piece by piece."""
    import layoutmap as lm

    layout_map = lm.LayoutMap(lm.create_mesh("model=2"), {"weight": ("model", None)})
    layer = layout_map.build(lambda: torch.nn.Linear(2, 4, bias=False), library="torch")
    with torch.no_grad():
        layer.weight.fill_(1)
        layer.weight[:2].zero_()
    return [value for piece in lm.dtensor.unpack(layer.weight) for value in piece[:, 0].tolist()]


if __name__ == "__main__":
    change_own()
    print(change_weight())
