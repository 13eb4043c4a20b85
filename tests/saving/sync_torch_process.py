"""One of several processes of torch that sync models; run by test_sync_torch.py."""

import json
import os
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

import layoutmap as lm
from layoutmap.core.mesh import Mesh
from layoutmap.engines import get_engine
from layoutmap.engines.torch import moving
from layoutmap.testing.models.choices import Choices
from layoutmap.testing.models.maps import draw_sharding_specs

DTYPES = (torch.float32, torch.bfloat16)


def draw_module(choices, shapes, mesh, dtypes, seed):
    """Draw a module of DTensors in drawn layouts."""
    module, generator = torch.nn.Module(), torch.Generator().manual_seed(seed)
    for number, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True)):
        values = torch.randn(shape, generator=generator).to(dtype)
        layout = lm.Layout(draw_sharding_specs(choices, mesh, shape, "error"), mesh)
        tensor = get_engine("torch").relayout(values, layout)
        if number % 3:
            module.register_parameter(f"w{number}", torch.nn.Parameter(tensor))
        else:
            module.register_buffer(f"w{number}", tensor)
    return module


def draw_pair(seed, size):
    """Draw two modules on two meshes, of which one may have half of the ranks."""
    choices = Choices.from_seed(seed)
    texts = ["x=2,y=2", "x=4", "x=1,y=4"] if size == 4 else ["x=2", "x=1,y=2", "y=2"]
    meshes = [Mesh(None, choices.pick(*texts)) for _ in range(2)]
    if choices.draw_true_once_in(3):
        half = size // 2
        meshes[1] = Mesh([f"CPU:{n}" for n in range(half, size)], {"z": half})
        if choices.draw_true_once_in(2):
            meshes[0] = Mesh([f"CPU:{n}" for n in range(half)], {"z": half})
    shapes = [tuple(choices.pick(8, 16) for _ in range(choices.pick(2, 1, 3, 0))) for _ in range(5)]
    return [
        draw_module(choices, shapes, mesh, [choices.pick(*DTYPES) for _ in shapes], seed + end)
        for end, mesh in enumerate(meshes)
    ]


def list_values(module):
    """Return all values of a module, gathered."""
    engine = get_engine("torch")
    layouts = {name: engine.get_layout(each) for name, each in module.state_dict().items()}
    size = dist.get_world_size()
    replicated = {
        name: engine.relayout(each, lm.Layout.replicated(Mesh(None, {"all": size}), layouts[name].rank))
        for name, each in module.state_dict().items()
    }
    return {name: engine.to_numpy(each) for name, each in replicated.items()}


def sync_pair(seed, size, sent):
    """Sync a drawn pair, and return its differences."""
    trainer, sampler = draw_pair(seed, size)
    before = {name: id(each) for name, each in sampler.named_parameters()}
    sync = lm.plan_sync(trainer, sampler)
    sent.clear()
    synced = sync(verify=True)
    expected, actual = list_values(trainer), list_values(synced)
    wrong = [
        name
        for name, each in expected.items()
        if not np.array_equal(each.astype(actual[name].dtype), actual[name])
    ]
    wrong += ["objects"] * (before != {name: id(each) for name, each in synced.named_parameters()})
    return {"wrong": wrong, "planned": sync.plan.num_bytes, "sent": sum(sent)}


def main():
    number, folder, port, size = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    seeds = range(int(sys.argv[5]), int(sys.argv[6]))
    torch.set_num_threads(1)
    os.environ |= {
        "RANK": str(number),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    lm.create_mesh({"all": size}, engine="torch")
    sent, real = [], dist.all_to_all_single

    def count_bytes(output, given, taken, splits, **options):
        sent.append(given.nbytes)
        return real(output, given, taken, splits, **options)

    moving.dist.all_to_all_single = count_bytes
    pairs = [sync_pair(seed, size, sent) for seed in seeds]
    told = {"pairs": pairs, "one fails": fail_in_one(number, size)}
    (folder / f"{number}.json").write_text(json.dumps(told))
    dist.barrier()
    dist.destroy_process_group()


def fail_in_one(number, size):
    """Return the error of a sync that fails in one process, and whether the sampler is as it was."""
    trainer, sampler = draw_pair(0, size)
    sync = lm.plan_sync(trainer, sampler)
    before = list_values(sampler)
    real = moving._assemble_tensor

    def fail(*args):
        if number == 1:
            raise RuntimeError("no memory")
        return real(*args)

    moving._assemble_tensor = fail
    try:
        sync()
        error = ""
    except (RuntimeError, lm.CheckpointError) as raised:
        error = str(raised).splitlines()[0]
    finally:
        moving._assemble_tensor = real
    is_same = all(np.array_equal(each, before[name]) for name, each in list_values(sampler).items())
    return [error, is_same, sync.version]


if __name__ == "__main__":
    main()
