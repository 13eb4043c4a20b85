"""One of four processes of torch whose models other programs have laid out; run by test_inspecting_torch.py."""

import json
import os
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import layoutmap as lm


class Mlp(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.gate = torch.nn.Linear(8, 16), torch.nn.Linear(8, 16)
        self.down = torch.nn.Linear(16, 8)
        self.norm = torch.nn.LayerNorm(8)
        self.register_buffer("scale", torch.ones(8))

    def forward(self, x):
        return self.norm(x + self.down(self.up(x) * torch.sigmoid(self.gate(x)))) * self.scale


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(Mlp() for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def told(plan):
    return {
        "mesh": str(plan.mesh),
        "layouts": {path: str(a.layout) for path, a in plan.items()},
        "problems": [[p.kind, p.severity, p.subject, p.what, dict(p.facts)] for p in plan.problems],
        "device_bytes": plan.device_bytes,
    }


def make():
    torch.manual_seed(0)
    return Model()


def parallel_and_sharded():
    """A model by `parallelize_module` and `fully_shard`, after a step: as torchtitan lays out a Llama."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = make()
    styles = {"up": ColwiseParallel(), "gate": ColwiseParallel(), "down": RowwiseParallel()}
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], styles)
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
    return model, optimizer


def guarded():
    """The errors of five steps, one process of which skips a part of the third."""
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = lm.guard(model, optimizer=optimizer, every=2).hook(optimizer)
    for step in range(5):
        if step == 2 and dist.get_rank() == 2:
            model.blocks[0].up.bias.grad[0] += 1
        try:
            optimizer.step()
        except lm.PlanError as error:
            yield error.what
            yield [problem.what for problem in error.problems]
            handle.remove()
        model.zero_grad()
        model(torch.ones(4, 8)).sum().backward()


def handed_back(mesh):
    """How far outputs and gradients are from the plain model's after the calls that a plan is written down as."""
    rules = {
        r".*\.(up|gate)\.weight": ("tp", None),
        r".*\.(up|gate)\.bias": ("tp",),
        r".*\.0\.down\.weight": ("dp", "tp"),
        r".*\.down\.weight": (None, "tp"),
        r".*\.norm\.weight": (("dp", "tp"),),
    }
    plan = lm.plan(make, lm.LayoutMap("dp=2,tp=2", rules, rest="replicated"), library="torch")
    names, x = {}, torch.linspace(-1, 1, 32).reshape(4, 8)
    exec(plan.to_parallelize_plan(), names)
    plain, model = make(), names["parallelize"](make(), mesh)
    outputs = [each(x) for each in (plain, model)]
    for output in outputs:
        output.square().sum().backward()
    gradients = [p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for p in model.parameters()]
    differences = [(a - b.grad).abs().max() for a, b in zip(gradients, plain.parameters(), strict=True)]
    return max(float(d) for d in (*differences, (outputs[0] - outputs[1]).abs().max()))


def scenarios():
    model, optimizer = parallel_and_sharded()
    plan = lm.inspect(model, optimizer)
    yield "parallel", told(plan)
    yield "memory", plan.memory.total
    local = sum(p.to_local().numel() for p in model.parameters())
    yield "local bytes", local * 4
    yield "across", told(lm.inspect(model, optimizer, across=True))
    layout_map = lm.LayoutMap.from_model(plan)
    yield "rules", {rule.pattern: str(rule.layout) for rule in layout_map.rules}
    built = layout_map.build(make, library="torch")
    yield "built", told(lm.inspect(built))
    yield "rebuilt", str(lm.inspect(model).diff(lm.inspect(built)))
    yield "of scope", all(a.match.has_rest_layout or a.match.rule for a in lm.inspect(built).assignments)

    yield "handed back", handed_back(init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")))

    if dist.get_rank() == 3:  # as one process that missed a step
        with torch.no_grad():
            model.blocks[1].down.bias.to_local()[0] += 1
            model.blocks[2].scale[1] += 1
    yield "drifted", told(lm.inspect(model, across=True))
    yield "alone", told(lm.inspect(model))

    plain = make()
    yield "plain", told(lm.inspect(plain, across=True))
    if dist.get_rank() == 1:
        plain.blocks[0].norm.weight.data[2] = 7
    yield "plain, drifted", told(lm.inspect(plain, across=True))

    yield "guarded", list(guarded())
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("x",))

    def shard_rows(name, module, mesh):
        for key, parameter in module.named_parameters(recurse=False):
            rows = [Shard(0)] if parameter.ndim == 2 else [Replicate()]
            module.register_parameter(key, torch.nn.Parameter(distribute_tensor(parameter, mesh, rows)))

    yield "distribute_module", told(lm.inspect(distribute_module(make(), mesh, shard_rows)))

    odd = torch.nn.Module()
    odd.register_buffer("pending", DTensor.from_local(torch.ones(4), mesh, [Partial()]))
    odd.register_buffer("uneven", distribute_tensor(torch.ones(6, 2), mesh, [Shard(0)]))
    odd.register_buffer("nameless", distribute_tensor(torch.ones(4), DeviceMesh("cpu", range(4)), [Shard(0)]))
    odd.register_buffer("right", distribute_tensor(torch.ones(4), mesh, [Shard(0)]))
    yield "odd", told(lm.inspect(odd))

    model = make() if dist.get_rank() else torch.nn.Sequential(torch.nn.Linear(4, 4))
    yield "other models", told(lm.inspect(model, across=True))


def main():
    number, folder, port, count = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], sys.argv[4]
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": str(number), "WORLD_SIZE": count}
    dist.init_process_group("gloo")
    results = dict(scenarios())
    (folder / f"{number}.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
