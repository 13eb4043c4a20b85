"""Counts steps of modules without devices, then takes them on simulated ones; run by `test_torch_cost.py`."""

from __future__ import annotations

import json
import re
import sys
import warnings
from collections import Counter

import torch
import torch.distributed as dist
import transformers
from torch.distributed.tensor.debug import CommDebugMode

import layoutmap as lm
from layoutmap.cost import torch_module_step, torch_step

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


class Attending(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.given = torch.nn.Linear(64, 3 * 64)

    def forward(self, x):
        q, k, v = self.given(x).reshape(*x.shape[:2], 3, 4, 16).permute(2, 0, 3, 1, 4)
        return torch.nn.functional.scaled_dot_product_attention(q, k, v)


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
    model = lm.build(Stack, layout_map(name), batch_dim="data", gather="own", library="torch")
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


def assumed_of_attention():
    """What is assumed of attention that is one operation of torch."""
    plan = lm.plan(Attending, layout_map("data"), inputs=Shape(), on="h100", library="torch")
    return [note for note in plan.cost.step.notes if "attention" in note]


def advised():
    """What a step needs with weights sharded over the dim of the batch: as it was advised, and planned so."""
    options = {"inputs": Shape(), "on": "h100", "optimizer": "adamw", "library": "torch"}
    peak = lm.plan(Stack, layout_map("data"), **options).cost.step.peak_bytes
    options["device_memory"] = 4 * peak // 5
    verdict = lm.plan(Stack, layout_map("data"), **options).verdict
    best = verdict.advice[0]
    taken = lm.LayoutMap(MESH, eval(f"dict({best.python})")["rules"], rest="replicated")
    again = lm.plan(Stack, taken, **options, advise=False).verdict
    return best.what, verdict.fits, again.fits, best.needed_bytes, again.needed_bytes


class Heads(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.into, self.out = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)

    def forward(self, x):
        heads = self.into(x).view(*x.shape[:2], 4, 16)
        return self.out(torch.tanh(heads).flatten(2))


def list_warnings_of_a_plan():
    """Warnings of a plan whose step does not fit, so that a mesh with more devices than heads is tried."""
    rules = {"into.weight": ("model", None), "into.bias": ("model",), "out.weight": (None, "model")}
    shape = Shape()
    shape.shape = (8, 16, 64)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        plan = lm.plan(
            Heads,
            lm.LayoutMap(MESH, rules, rest="replicated"),
            inputs=shape,
            on="h100",
            library="torch",
            device_memory=1000,
        )
    assert [each for each in plan.verdict.advice if "devices" in each.what], plan.verdict
    return [str(each.message) for each in found if issubclass(each.category, lm.LayoutMapWarning)]


def count_products():
    """Floating-point operations of a step with two column kernels, between which DTensor must gather."""

    def make():
        layers = torch.nn.Linear(64, 128), torch.nn.LayerNorm(128), torch.nn.Linear(128, 64)
        return torch.nn.Sequential(*layers)

    layout_map = lm.LayoutMap(MESH, {r"[02]\.weight": ("model", None)}, rest="replicated")
    options = {"inputs": Shape(), "on": "h100", "optimizer": "adamw", "loss": loss_of, "batch_dim": "data"}
    return lm.plan(make, layout_map, library="torch", **options).cost.step.flops


def causes_of_the_loss():
    """Causes of all large collectives where the loss needs all of what the last layer returns, or sums of it."""
    causes = set()
    for specs in (("model", None), (None, "model")):
        rules = lm.LayoutMap(MESH, {"head.weight": specs}, rest="replicated")
        plan = lm.plan(Stack, rules, inputs=Shape(), on="h100", library="torch")
        large = [each for each in plan.cost.step.collectives if each.tensor_bytes > 64]
        causes |= {each.cause for each in large if each.phase == "forward"}
    return sorted(causes)


def count_model_sums():
    """Return the number of sums over `model` by phase and cause, where up is a column and down a row."""
    step = lm.plan(
        Stack, layout_map("model"), inputs=Shape(), on="h100", loss=loss_of, library="torch"
    ).cost.step
    counts = Counter()
    for each in step.collectives:
        if each.dims == ("model",):
            counts[f"{each.kind} {each.phase} {each.cause}"] += each.calls
    return counts


class Named(Block):
    """Takes its input by name and a second argument."""

    def forward(self, *, x, scale=1.0):
        return super().forward(x) * scale


class Pair(Block):
    """Returns a tuple."""

    def forward(self, x):
        return super().forward(x), None


class Odd(Stack):
    """Calls equal blocks in some way."""

    def __init__(self, how):
        super().__init__(blocks=6)
        self.how = how
        kind = {"by name": Named, "as pairs": Pair}.get(how, Block)
        self.blocks = torch.nn.ModuleList([kind() for _ in range(6)])
        for n, block in enumerate(self.blocks):
            block.layer_idx = n  # as in models of transformers

    def forward(self, x):
        if self.how == "reading weights":
            x = x * self.blocks[2].up.weight.mean()
        for n, block in enumerate(self.blocks):
            if self.how == "by name":
                x = block(x=x, scale=0.5)
            elif self.how == "as pairs":
                x, _ = block(x)
            elif self.how != "one twice":
                x = block(x)
            else:
                x = block(block(x)) if n == 3 else block(x)
        return self.head(x)


def describe_step(step):
    """Return all that is counted of a step, with the blocks' numbers left out of causes."""
    collectives = Counter()
    for each in step.collectives:
        cause = re.sub(r"[.][0-9]+", ".*", each.cause)
        collectives[f"{each.kind} {each.dims} {each.tensor_bytes} {cause} {each.phase}"] += each.calls
    return collectives, dict(step.flops), step.traffic_bytes, step.argument_bytes, step.peak_bytes


def compare_extrapolation(how, rules):
    """Return what is counted of six blocks, extrapolated and of all, and the number of blocks that were run first."""
    options = {"inputs": Shape(), "on": "h100", "optimizer": "adamw", "loss": loss_of, "library": "torch"}
    find, ran = torch_module_step.find_stacks_of_equal_blocks, []
    count = torch_step.StepCostCounter._run_step

    def run(self, assignments, policy, groups, skipped):
        ran.append(6 - len(skipped))
        return count(self, assignments, policy, groups, skipped)

    torch_step.StepCostCounter._run_step = run
    extrapolated = lm.plan(lambda: Odd(how), layout_map(rules), **options).cost.step
    number = list(ran)
    torch_module_step.find_stacks_of_equal_blocks = lambda *_: []
    whole = lm.plan(lambda: Odd(how), layout_map(rules), **options).cost.step
    torch_module_step.find_stacks_of_equal_blocks, torch_step.StepCostCounter._run_step = find, count
    return describe_step(extrapolated), describe_step(whole), number


class Flat(torch.nn.Module):
    """Reads shards that are not contiguous: rows of the batch and columns of the model on one axis."""

    def __init__(self):
        super().__init__()
        self.up = torch.nn.Linear(64, 64)

    def forward(self, x):
        return torch.cumsum(self.up(x).transpose(1, 2).flatten(0, 1), 0)


class Experts(torch.nn.Module):
    """Multiplies groups of rows with a matrix each, in float32."""

    def __init__(self):
        super().__init__()
        self.up = torch.nn.Parameter(torch.empty(4, 64, 128))

    def forward(self, x):
        ends = torch.arange(1, 5, dtype=torch.int32) * 32
        return torch.nn.functional.grouped_mm(x.flatten(0, 1), self.up, offs=ends)


def count_other_operators():
    """Return kinds of collectives of strided shards, and FLOPs of products of experts on one device."""
    options = {"inputs": Shape(), "on": "h100", "library": "torch", "loss": loss_of}
    rules = {"up.weight": ("model", None)}
    step = lm.plan(Flat, lm.LayoutMap(MESH, rules, rest="replicated"), batch_dim="data", **options).cost.step
    alone = lm.plan(Experts, lm.LayoutMap("data=1", rest="replicated"), **options).cost.step
    return sorted({each.kind for each in step.collectives}), dict(alone.flops)


def count_flops_of_experts():
    """Return the FLOPs and notes of a Mixtral with replicated weights, and weights sharded by or within experts."""
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    heads = {
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    }
    config = transformers.MixtralConfig(**sizes, **heads)
    tokens = torch.zeros(8, 16, dtype=torch.int64)
    flops, notes = [], []
    for up, down in (((), ()), (("model", None, None),) * 2, ((None, "model", None), (None, None, "model"))):
        weights = {r".*experts\.gate_up_proj": up, r".*experts\.down_proj": down} if up else {}
        rules = lm.LayoutMap(MESH, weights, rest="replicated")
        options = {"inputs": {"input_ids": tokens, "labels": tokens}, "on": "h100", "library": "torch"}
        plan = lm.plan(lambda: transformers.MixtralForCausalLM(config), rules, batch_dim="data", **options)
        flops.append(plan.cost.step.flops["float32"])
        notes.append([note for note in plan.cost.step.notes if "experts" in note])
    return flops, notes


class ReadingValues(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(64, 64)

    def forward(self, x):
        return self.inner(x) * 2 if x.sum() > 0 else x


def find_line_and_fix_of_error():
    try:
        lm.plan(ReadingValues, lm.LayoutMap("data=8"), inputs=Shape(), on="h100", library="torch")
    except lm.LayoutMapError as error:
        return error.facts["line"], error.fix
    return "", ""


def main(names):
    if names[0] == "blocks":
        hows = ["", "by name", "as pairs", "reading weights", "one twice"]
        found = {f"{how} {rules}": compare_extrapolation(how, rules) for how in hows for rules in names[1:]}
        error = find_line_and_fix_of_error()
        more = {"operators": count_other_operators(), "experts": count_flops_of_experts(), "error": error}
        print(json.dumps({"blocks": found} | more))
        return
    counts = {name: counted(name) for name in names}
    more = {"attention": assumed_of_attention(), "advised": advised(), "of the loss": causes_of_the_loss()}
    more["products"] = count_products()
    more["sums"] = count_model_sums()
    more["warnings"] = list_warnings_of_a_plan()
    left = dist.is_initialized()
    propagator = torch.distributed.tensor.DTensor._op_dispatcher.sharding_propagator
    more["patched"] = [name for name in vars(propagator) if callable(getattr(type(propagator), name, None))]
    print(
        json.dumps({"counted": counts, "taken": {name: taken(name) for name in names}, "left": left} | more)
    )


if __name__ == "__main__":
    main(sys.argv[1:])
