"""Counts steps of modules without devices, then takes them on simulated ones; run by `test_torch_cost.py`."""

from __future__ import annotations

import json
import sys
from collections import Counter

import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import CommDebugMode

import layoutmap as lm

MESH = "data=2,model=4"


class Block(torch.nn.Module):
    def __init__(self, width=64, inner=256):
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.up = torch.nn.Linear(width, inner, bias=False)
        self.down = torch.nn.Linear(inner, width, bias=False)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Stack(torch.nn.Module):
    def __init__(self, blocks=2):
        super().__init__()
        self.blocks = torch.nn.ModuleList([Block() for _ in range(blocks)])
        self.head = torch.nn.Linear(64, 32)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


RULES = {
    "data": {},
    "model": {r".*up\.weight": ("model", None), r".*down\.weight": (None, "model")},
    "fsdp": {r".*(up|down|head)\.weight": ("data", None)},
    "both": {r".*up\.weight": ("model", "data"), r".*down\.weight": ("data", "model")},
}
KINDS = {"all_gather": "all_gather", "allgather": "all_gather", "reduce_scatter": "reduce_scatter"}
KINDS |= {"all_reduce": "all_reduce", "allreduce": "all_reduce", "all_to_all": "all_to_all"}


class Shape:
    shape, dtype = (16, 8, 64), "float32"


def layout_map(name):
    made = lm.LayoutMap(MESH, RULES[name])
    made.rest = "replicated"
    return made


def loss_of(output):
    return output.square().mean()


def counted(name):
    """What the plan says of a step: calls by kind, and bytes."""
    plan = lm.plan(
        Stack, layout_map(name), inputs=Shape(), on="h100", optimizer="adamw", loss=loss_of, library="torch"
    )
    step = plan.cost.step
    calls = Counter()
    for each in step.collectives:
        calls[each.kind] += each.calls
    causes = sorted({each.cause for each in step.collectives if each.kind == "reduce_scatter"})
    return calls, {
        "arguments": step.argument_bytes,
        "peak": step.peak_bytes,
        "flops": dict(step.flops),
        "causes": causes,
        "notes": step.notes,
    }


def taken(name):
    """The same step on simulated devices, as torch's own debug mode counts it."""
    model = lm.build(Stack, layout_map(name), batch_dim="data", gather="own")
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.ones(Shape.shape)

    def once():
        optimizer.zero_grad()
        loss_of(model(batch)).backward()
        optimizer.step()

    once()
    with CommDebugMode() as mode:
        once()
    calls = Counter()
    for op, number in mode.get_comm_counts().items():
        kind = next(
            kind for part, kind in KINDS.items() if part in str(op).replace("_allgather_base", "allgather")
        )
        calls[kind] += number
    return calls


def main(names):
    counts = {name: counted(name) for name in names}
    left = dist.is_initialized()
    print(json.dumps({"counted": counts, "taken": {name: taken(name) for name in names}, "left": left}))


if __name__ == "__main__":
    main(sys.argv[1:])
