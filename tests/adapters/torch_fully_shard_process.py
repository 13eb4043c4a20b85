"""One of four processes in which torch's fully_shard gathers weights; run by test_torch_fully_shard.py."""

import collections
import contextlib
import copy
import dataclasses
import functools
import io
import json
import os
import shutil
import sys
import tempfile
import traceback
import warnings
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint
import torch.utils.checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch_models import Transformer, batch, token_loss

import layoutmap as lm
from layoutmap.engines import get_engine

MESH = "batch=2,model=2"
RULES = {
    r"tokens\.weight": ("model", "batch"),
    r"positions": (None, "batch"),
    r".*\.(query|key|value)\.weight": (("model", "batch"), None),
    r".*\.out\.weight": ("batch", "model"),
    r".*\.up\.weight": ("model", "batch"),
    r".*\.up\.bias": (("model", "batch"),),
    r".*\.down\.weight": ("batch", "model"),
    r".*norm\d?\.(weight|bias)|.*\.down\.bias": ("batch",),
    "scale": (None,),
    "mask": (None, None),
}
TOKENS, TARGETS = map(torch.from_numpy, batch("transformer"))
SCENARIOS = {}


def scenario(function):
    SCENARIOS[function.__name__] = function
    return function


def plain_of(tensor):
    return torch.from_numpy(get_engine("torch").to_numpy(tensor))


def pair(make=Transformer, rules=RULES, mesh=MESH, **options):
    """A plain model, and the same model laid out."""
    torch.manual_seed(0)
    plain = make()
    torch.manual_seed(0)
    layout_map = lm.LayoutMap(lm.create_mesh(mesh), rules)
    with layout_map.scope(batch_dim="batch", **options) as scope:
        model = make()
    model.plan = scope.plan
    return plain, model


def optimizers_of(*models):
    return [torch.optim.AdamW(each.parameters(), lr=1e-2, eps=1e-3) for each in models]


def apart(plain, model, of=lambda parameter: parameter):
    """How far the parameters of two models are apart, or what is made of them."""
    found = 0.0
    for (name, a), b in zip(plain.named_parameters(), model.parameters(), strict=True):
        if (of(a) is None) != (of(b) is None):
            return f"{name}: {of(a) is None}, {of(b) is None}"
        if of(a) is not None:
            found = max(found, (of(a) - plain_of(of(b))).abs().max().item())
    return found


def gradient(parameter):
    return parameter.grad


def passes(*models, rows=8, seed=0):
    """The losses of a forward and a backward pass of each model."""
    losses = []
    for each in models:
        torch.manual_seed(seed)
        loss = token_loss(each(TOKENS[:rows]), TARGETS[:rows])
        loss.backward()
        losses.append(loss.item())
    return losses


@scenario
def steps():
    plain, model = pair(functools.partial(Transformer, size=16, heads=4, depth=1))
    both = optimizers_of(plain, model)
    norms = []
    for step in range(24):
        for optimizer in both:
            optimizer.zero_grad()
        losses = passes(plain, model, seed=step, rows=8 - step % 2)
        norms.append(
            [float(torch.nn.utils.clip_grad_norm_(each.parameters(), 1.0)) for each in (plain, model)]
        )
        for optimizer in both:
            optimizer.step()
    layouts = [lm.dtensor.fetch_layout(p) == lm.dtensor.fetch_layout(p.grad) for p in model.parameters()]
    return {
        "weights": apart(plain, model),
        "losses": abs(losses[0] - losses[1]),
        "norms": max(abs(a - b) for a, b in norms),
        "layouts": all(layouts),
        "planned": all(
            lm.dtensor.fetch_layout(p) == model.plan[n].layout for n, p in model.named_parameters()
        ),
    }


@scenario
def accumulated():
    """Two passes before a step, a graph that is walked twice, two graphs at a time."""
    found = []
    plain, model = pair()
    passes(plain, model)
    passes(plain, model, rows=7)
    found.append(apart(plain, model, gradient))
    for each in (plain.eval(), model.eval()):
        loss = token_loss(each(TOKENS), TARGETS)
        loss.backward(retain_graph=True)
        loss.backward()
        first, second = token_loss(each(TOKENS[:4]), TARGETS[:4]), token_loss(each(TOKENS[4:]), TARGETS[4:])
        first.backward()
        second.backward()
        (token_loss(each(TOKENS), TARGETS) + token_loss(each(TOKENS.flip(0)), TARGETS)).backward()
    return [*found, apart(plain, model, gradient)]


class Checkpointed(Transformer):
    reentrant = False

    def forward(self, tokens):
        length = tokens.shape[1]
        x = self.tokens(tokens) + self.positions[:length] * self.mask[:length]
        for block in self.blocks:
            x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(self.norm(x) * self.scale)


@scenario
def checkpoints():
    found = {}
    for reentrant in (False, True):
        plain, model = pair(Checkpointed)
        plain.reentrant = model.reentrant = reentrant
        both = optimizers_of(plain, model)
        for step in range(3):
            for optimizer in both:
                optimizer.zero_grad()
            passes(plain, model, seed=step)
            found[f"{reentrant} {step}"] = apart(plain, model, gradient)
            for optimizer in both:
                optimizer.step()
        found[f"{reentrant} weights"] = apart(plain, model)
    return found


@scenario
def frozen():
    """Blocks that are not trained, before and after others, and then trained again."""
    found = []
    plain, model = pair()
    for number in (0, 1):
        for each in (plain, model):
            each.zero_grad()
            each.requires_grad_(True)
            each.blocks[number].requires_grad_(False)
        passes(plain, model)
        found.append(apart(plain, model, gradient))
    for each in (plain, model):
        each.zero_grad()
        each.requires_grad_(True)
        each.blocks[0].up.weight.requires_grad_(False)
        each.tokens.requires_grad_(False)
    passes(plain, model)
    return [*found, apart(plain, model, gradient)]


class Several(torch.nn.Module):
    """A loss that does not come by the way of what blocks return, weights of a block outside of it, blocks left out."""

    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(Odd() for _ in range(3))
        self.last = torch.nn.Linear(16, 16)

    def forward(self, x, order=(0, 1, 2)):
        for number in order:
            x = self.blocks[number](x)
        return self.last(x)


class Odd(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(16, 16), torch.nn.Linear(16, 16)

    def forward(self, x):
        x = x * 1.5
        y = torch.nn.functional.gelu(self.up(x.add_(1)))
        self.seen = y.square().mean()
        return (x + self.down(y)).view(x.shape)


SEVERAL = {r".*weight": ("batch", "model"), r".*bias": (("model", "batch"),)}


def all_of(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@scenario
def losses_in_other_ways():
    """Losses beside what a block returns, blocks in another order, twice, left out, called alone, and penalties."""
    found = {}
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))
    ways = {
        "order": lambda m: m(x, (2, 0, 1)).square().mean(),
        "twice": lambda m: m(x, (0, 1, 0, 1)).square().mean(),
        "left out": lambda m: m(x, (0, 2)).square().mean(),
        "all": lambda m: m(x).square().mean(),
        "alone": lambda m: m.blocks[1](x).square().mean(),
        "one by one": lambda m: m.last(m.blocks[1](m.blocks[0](x))).square().mean(),
        "layer of a block": lambda m: m.blocks[1].up(x).square().mean(),
        "penalty": lambda m: m(x).square().mean() + sum(all_of(p.square().sum()) for p in m.parameters()),
    }
    plain, model = pair(Several, SEVERAL)
    both = optimizers_of(plain, model)
    for name, way in ways.items():
        for each in (plain, model):
            each.zero_grad()
            way(each).backward()
        found[name] = apart(plain, model, gradient)
        for optimizer in both:
            optimizer.step()
        found[f"{name}: after"] = apart(plain, model)
        with torch.no_grad():
            found[f"{name}: again"] = (plain(x, (0, 2)) - model(x, (0, 2))).abs().max().item()
    return found


class Used(torch.nn.Module):
    """Weights whose gradients have the axes of memory in another order, are shared, or come by two ways."""

    def __init__(self):
        super().__init__()
        self.experts = torch.nn.Parameter(torch.randn(4, 16, 8) * 0.3)
        self.back = torch.nn.Parameter(torch.randn(16, 8) * 0.3)
        self.one, self.other = (torch.nn.Parameter(torch.randn(16, 16) * 0.3) for _ in range(2))
        self.linear = torch.nn.Linear(16, 16)

    def forward(self, x):
        x = torch.einsum("bd,edf->bef", x, self.experts).mean(1) @ self.back.T
        x = x @ (self.one + self.other)
        return self.linear(x)


USED = {
    "experts": (None, "model", "batch"),
    "back|one|other|linear.weight": ("model", "batch"),
    ".*": (None,),
}


@scenario
def gradients_of_all_strides():
    """Gradients that autograd would copy, and weights that are also used beside their module; a step with SGD, too."""
    found = {}
    plain, model = pair(Used, USED)
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))
    ways = {
        "all": lambda m: m(x).square().mean(),
        "beside": lambda m: (m(x) @ m.linear.weight).square().mean(),
        "before": lambda m: (m(x @ m.linear.weight)).square().mean(),
        "transposed": lambda m: (m(x) @ m.back @ m.linear.weight.T[:8] @ m.one).square().mean(),
    }
    for name, way in ways.items():
        for each in (plain, model):
            each.zero_grad()
            way(each).backward()
            torch.optim.SGD(each.parameters(), lr=1e-4).step()
        found[name] = apart(plain, model, gradient)
        found[f"{name}: after"] = apart(plain, model)
    return found


@scenario
def aside():
    """What a block keeps of its inside is the loss: nothing that it returns has a gradient."""
    plain, model = pair(Several, SEVERAL)
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))
    for each in (plain, model):
        each(x)
        all_of(sum(block.seen for block in each.blocks)).backward()
    return apart(plain, model, gradient)


@scenario
def state_dicts():
    plain, model = pair()
    both = optimizers_of(plain, model)
    passes(plain, model)
    for optimizer in both:
        optimizer.step()
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    saved = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
    _, other = pair()
    other.load_state_dict(saved)
    found = {"torch.save": apart(plain, other)}
    _, other = pair()
    other.load_state_dict(plain.state_dict())
    found["plain"] = apart(plain, other)
    for each in (plain, other):
        each.zero_grad()
    passes(plain, other)
    found["trained on"] = apart(plain, other, gradient)
    simple, other = pair(Several, SEVERAL)
    other.load_state_dict({name: value * 0.5 for name, value in other.state_dict().items()}, assign=True)
    simple.load_state_dict({name: value * 0.5 for name, value in simple.state_dict().items()})
    for each in (simple, other):
        each(torch.ones(8, 16)).square().mean().backward()
    found["assigned"] = apart(simple, other, gradient)
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.distributed.checkpoint.save({"model": model.state_dict()}, checkpoint_id=folder[0])
        _, other = pair()
        passes(other)  # gathered once before
        values = {"model": other.state_dict()}
        torch.distributed.checkpoint.load(values, checkpoint_id=folder[0])
    other.load_state_dict(values["model"])
    for each in (plain, other):
        each.zero_grad()
    passes(plain, other)
    found["dcp"] = apart(plain, other, gradient)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder[0])
    return found


@scenario
def changes_between_the_passes():
    _, model = pair()
    loss = token_loss(model(TOKENS), TARGETS)
    with torch.no_grad():
        model.blocks[1].up.weight.mul_(2)
    said = refusal(loss.backward)
    plain, model = pair()
    with torch.inference_mode():
        model(TOKENS)
    with torch.no_grad():
        token_loss(model(TOKENS[:7]), TARGETS[:7])
    model(TOKENS)  # never followed by a backward pass
    with torch.no_grad():
        for each in (plain, model):
            for parameter in each.parameters():
                parameter.mul_(1.1)
    passes(plain, model)
    return {"said": said, "gradients": apart(plain, model, gradient)}


@scenario
def after_a_failure():
    """A forward and a backward pass that fail leave nothing to the next."""
    found = {}
    plain, model = pair()
    for kind in ("forward", "backward"):

        def fail(*_):
            raise ZeroDivisionError

        if kind == "forward":
            handle = model.blocks[1].up.register_forward_hook(fail)
            found["forward"] = refusal(lambda: model(TOKENS))
        else:
            handle = model.blocks[0].norm1.register_full_backward_hook(fail)
            found["backward"] = refusal(lambda: token_loss(model(TOKENS), TARGETS).backward())
        handle.remove()
        for each in (plain, model):
            each.zero_grad()
        passes(plain, model)
        found[f"after {kind}"] = apart(plain, model, gradient)
    return found


@scenario
def what_fully_shard_cannot():
    """Gradients of gradients are refused; by layoutmap's own way they, and gradients by weights, are right."""
    found = {}
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))
    for gather in ("fully_shard", "own"):
        plain, model = pair(Several, SEVERAL, gather=gather)
        results = []
        for each in (plain, model):
            given = x.clone().requires_grad_()

            def penalty(each=each, given=given):
                (slope,) = torch.autograd.grad(each(given).square().sum(), given, create_graph=True)
                return slope

            if each is model:
                found[f"{gather}: second"] = refusal(penalty)
                each.zero_grad()
            results.append(torch.autograd.grad(each(given).square().sum(), given)[0])
            if gather == "own":
                each.zero_grad()
                (penalty() * 0.1).square().mean().backward()
        if gather == "own":
            found["own: gradients of gradients"] = apart(plain, model, gradient)
        expected, actual = results
        found[f"{gather}: by inputs"] = ((expected - actual).abs().max() / expected.abs().max()).item()
        weights = [each.blocks[0].up.weight for each in (plain, model)]
        said = refusal(
            lambda m=model, w=weights[1]: torch.autograd.grad(m(x).square().sum(), w, allow_unused=True)
        )
        found[f"{gather}: by weights"] = said
        said = refusal(lambda m=model, w=weights[1]: m(x).square().sum().backward(inputs=[w]))
        found[f"{gather}: inputs="] = said
        for each in (plain, model):
            each.zero_grad()
            each(x).square().mean().backward()
        found[f"{gather}: after"] = apart(plain, model, gradient)
    return found


@scenario
def other_meshes():
    """The batch's dim is the last, the only one, and one of size 1; a rule has it outside of another dim."""
    found = {}
    rules = {r".*\.key\.weight": (("batch", "model"), None)} | RULES
    by_batch = {
        "mask": (None, None),
        "scale": (None,),
        r".*norm\d?\.\w+|.*bias": ("batch",),
        ".*": ("batch", None),
    }
    tries = {"model=2,batch=2": rules, "batch=4": by_batch, "batch=1,model=4": rules}
    for mesh, each in tries.items():
        plain, model = pair(rules=each, mesh=mesh)
        passes(plain, model)
        found[mesh] = apart(plain, model, gradient)
    return found


@scenario
def copies_and_conversions():
    found = {}
    plain, model = pair()
    passes(model)
    model.zero_grad()
    copied = copy.deepcopy(model)
    passes(plain, copied)
    found["copied"] = apart(plain, copied, gradient)
    found["copied with gradients"] = apart(plain, copy.deepcopy(copied), gradient)
    passes(model)
    found["copied with gradients of fully_shard"] = apart(model, copy.deepcopy(model), gradient)
    for each in (plain, model):
        each.zero_grad()
        each.double()
    passes(plain, model)
    found["converted"] = apart(plain, model, gradient)
    plain, model = pair()
    for each in (plain, model):
        each.blocks[0].up.weight.register_hook(lambda gradient: gradient * 3)
    passes(plain, model)
    found["hooked"] = apart(plain, model, gradient)
    for each in (plain, model):
        each.zero_grad()
    with torch.autograd.graph.save_on_cpu():
        passes(plain, model)
    found["on the CPU"] = apart(plain, model, gradient)
    return found


class Shared(Several):
    """A weight that two blocks share, and one of another element type."""

    def __init__(self):
        super().__init__()
        self.blocks[0].up.weight = self.blocks[1].up.weight
        self.blocks[2].double()

    def forward(self, x, order=(0, 1, 2)):
        x = self.blocks[1](self.blocks[0](x))
        return self.last(self.blocks[2](x.double()).float())


@scenario
def what_the_plan_says():
    rules = SEVERAL | {r"blocks\.2\.up.weight": (None, ("batch", "model"))}
    rules = dict(reversed(rules.items()))
    plain, model = pair(Shared, rules)
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))
    for each in (plain, model):
        each(x).square().mean().backward()
    notes = [
        line for line in str(model.plan).splitlines() if line.startswith("note: ") and "gathered" in line
    ]
    return {"notes": notes, "gradients": apart(plain, model, gradient)}


CHAIN_RULES = {r".*weight": ("batch", None), r".*bias": ("batch",)}


def refusal(function):
    """The first line of what an error says."""
    try:
        function()
    except Exception as error:
        return str(error).partition("\n")[0] or type(error).__name__
    return ""


def collectives(step):
    """How many collectives a step makes, by kind."""
    with warnings.catch_warnings(), CommDebugMode() as counter:
        warnings.simplefilter("ignore", UserWarning)  # its hooks are called where no input has a gradient
        step()
    counts = collections.Counter()
    for operation, number in counter.get_comm_counts().items():
        name = (
            str(operation)
            .rpartition(".")[2]
            .replace("allgather", "all_gather")
            .replace("allreduce", "all_reduce")
        )
        counts[next((k for k in ("all_gather", "all_reduce", "reduce_scatter") if k in name), name)] += number
    return dict(counts)


class Net(torch.nn.Module):
    """Blocks as those of a decoder, and what is outside of them."""

    def __init__(self, blocks=3):
        super().__init__()
        self.first, self.last = torch.nn.Linear(16, 16), torch.nn.Linear(16, 16)
        self.blocks = torch.nn.ModuleList(NetBlock() for _ in range(blocks))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class NetBlock(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(16)
        self.up, self.down = torch.nn.Linear(16, 32), torch.nn.Linear(32, 16)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


NET = {r".*norm\.weight": (None,), **CHAIN_RULES}
NET_BOTH = {
    r".*norm\.weight": ("batch",),
    r".*up\.weight": ("model", "batch"),
    r".*up\.bias": (("model", "batch"),),
    r".*down\.weight": ("batch", "model"),
    **CHAIN_RULES,
}
ROWS = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))


def peer(mesh, policy, blocks=3):
    """`Net` by torch's own `parallelize_module`, where the mesh has a dim for it, and `fully_shard`."""
    torch.manual_seed(0)
    model = Net(blocks)
    if "model" in mesh.mesh_dim_names:
        plan = {f"blocks.{i}.up": ColwiseParallel() for i in range(blocks)}
        plan |= {f"blocks.{i}.down": RowwiseParallel() for i in range(blocks)}
        parallelize_module(model, mesh["model"], plan)
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view", UserWarning)
    for block in model.blocks:
        fully_shard(block, mesh=mesh["batch"], mp_policy=dataclasses.replace(policy, output_dtype=None))
    return fully_shard(model, mesh=mesh["batch"], mp_policy=policy)


def rows_of(mesh):
    return ROWS.chunk(mesh["batch"].size())[mesh["batch"].get_local_rank()]


def step_of(model, x):
    model.zero_grad()
    model(x).float().square().mean().backward()


@scenario
def as_many_collectives():
    """A step of this library's, forward, backward and optimizer, beside torch's own ways; of many blocks and of one."""
    return [collectives_of(blocks) for blocks in (3, 1)]


def collectives_of(blocks):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("batch", "model"))
    layout_map = lm.LayoutMap(lm.create_mesh(MESH), NET_BOTH)
    layout_map.activations[r".*(norm|down)"] = ("batch", None)
    torch.manual_seed(0)
    model = layout_map.build(lambda: Net(blocks), batch_dim="batch", check_batches=False)
    rows = lm.dtensor.relayout(ROWS, lm.Layout(["batch", None], layout_map.mesh))
    found = []
    for each, x in ((model, rows), (peer(mesh, MixedPrecisionPolicy(), blocks), rows_of(mesh))):
        optimizer = torch.optim.AdamW(each.parameters())

        def step(each=each, x=x, optimizer=optimizer):
            optimizer.zero_grad()
            with lm.dtensor.run_on(layout_map.mesh) if each is model else contextlib.nullcontext():
                loss = each(x).square().mean()
            loss.backward()
            if each is not model:  # a loss of all rows, as that of the other
                dist.all_reduce(loss.detach().clone(), group=mesh["batch"].get_group())
            optimizer.step()

        step()
        found.append(collectives(step))
    return found


BF16 = torch.bfloat16
POLICIES = {
    "reduced in float32": MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32),
    "all": MixedPrecisionPolicy(param_dtype=BF16),
    "outputs": MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32, output_dtype=torch.float32),
}


@scenario
def mixed_precision():
    """Steps in two element types, beside those of torch's own `fully_shard`."""
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("batch",))
    found = {}
    for name, policy in POLICIES.items():
        own = peer(mesh, policy)
        _, model = pair(Net, NET, "batch=4", fully_shard={"mp_policy": policy})
        both = [torch.optim.SGD(each.parameters(), 0.1) for each in (own, model)]
        with torch.no_grad():
            dtypes = [each(x).dtype for each, x in ((own, rows_of(mesh)), (model, ROWS))]
        for number in range(3):
            step_of(own, rows_of(mesh))
            step_of(model, ROWS)
            found[f"{name}: {number}"] = apart_from_peer(own, model, gradient)
            for optimizer in both:
                optimizer.step()
        found[f"{name}: weights"] = apart_from_peer(own, model)
        found[f"{name}: types"] = float(
            dtypes[0] != dtypes[1] or any(p.dtype != torch.float32 for p in model.parameters())
        )
    return found


def apart_from_peer(own, model, of=lambda parameter: parameter):
    """How far parameters are apart; of those that nothing shards, as multiples of what bfloat16 tells apart."""
    found = 0.0
    for (name, a), b in zip(own.named_parameters(), model.parameters(), strict=True):
        expected = of(a).detach().full_tensor()
        each = (expected - plain_of(of(b).detach())).abs().max()
        if name.endswith("norm.weight"):  # which are summed up in float32
            each = max(0.0, each - 2**-7 * expected.abs().max())
        found = max(found, float(each))
    return found


@scenario
def mixed_precision_gathered_in_other_ways():
    """What the library gathers itself computes in the same types: copies, checkpoints, weights that are left to it."""
    policy = POLICIES["reduced in float32"]
    rules = {r".*norm\.weight": (None,), r"blocks\.1\.up.weight": (("batch", "model"), None), **NET_BOTH}
    found = {}
    for name, make in {"blocks": Net, "checkpoints": CheckpointedNet}.items():
        plain, (_, model) = Net(), pair(make, rules, fully_shard={"mp_policy": policy})
        plain.load_state_dict({name: plain_of(each) for name, each in model.state_dict().items()})
        names = dict(plain.named_parameters())
        as_cast = {name: each.to(BF16) for name, each in names.items()}
        torch.func.functional_call(plain, as_cast, ROWS.to(BF16)).float().square().mean().backward()
        copied = copy.deepcopy(model)
        model.blocks[0].register_forward_pre_hook(lambda _, args: assert_is(args[0].dtype, BF16))
        for way, each in {"fully_shard": model, "copy": copied}.items():
            step_of(each, ROWS)
            found[f"{name}: {way}"] = max(
                ((a.grad - plain_of(b.grad)).abs().max() / a.grad.abs().max()).item()
                for a, b in zip(plain.parameters(), each.parameters(), strict=True)
            )
        found[f"{name}: alone"] = float(copied.last(ROWS).dtype != BF16 or model.last(ROWS).dtype != BF16)
    return found


def assert_is(a, b):
    assert a is b, (a, b)


class WithCheckpoints:
    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
        return self.last(x)


class CheckpointedNet(WithCheckpoints, Net):
    pass


@scenario
def freed_or_kept():
    """The collectives and the gradients of a step with each value of reshard_after_forward, and with both ways."""
    found = {}
    for value in (None, True, False):
        options = {} if value is None else {"fully_shard": {"reshard_after_forward": value}}
        plain, model = pair(Net, NET, "batch=4", check_batches=False, **options)
        for each in (plain, model):
            step_of(each, ROWS)
        found[f"{value}: gathers"] = collectives(lambda model=model: step_of(model, ROWS))["all_gather"]
        found[f"{value}: gradients"] = apart(plain, model, gradient)
        model.zero_grad()
        copied = copy.deepcopy(model)
        step_of(copied, ROWS)
        found[f"{value}: copy"] = apart(plain, copied, gradient)
        with torch.no_grad():
            for each in (plain, model):
                for parameter in each.parameters():
                    parameter.mul_(1.5)
            found[f"{value}: after a change"] = (plain(ROWS) - model(ROWS)).abs().max().item()
    return found


@scenario
def off_loaded():
    """Weights in the CPU's memory, where they are anyway: nothing changes, and each parameter is the same object."""
    layout_map = lm.LayoutMap(lm.create_mesh("batch=4"), NET)
    torch.manual_seed(0)
    plain = Net()
    torch.manual_seed(0)
    options = {"offload_policy": CPUOffloadPolicy(pin_memory=False)}
    with layout_map.scope(batch_dim="batch", fully_shard=options):
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2, eps=1e-3)
    both = [torch.optim.AdamW(plain.parameters(), 1e-2, eps=1e-3), optimizer]
    for _ in range(3):
        for each in (plain, model):
            step_of(each, ROWS)
        for each in both:
            each.step()
    return apart(plain, model)


@scenario
def refused_options():
    """What is said of options that cannot be passed on."""
    tries = [
        {"mesh": None},
        {"shard": True},
        {"reshard_after_forward": 2},
        {"mp_policy": torch.bfloat16},
        {"offload_policy": CPUOffloadPolicy()},
        ["mp_policy"],
    ]
    layout_map = lm.LayoutMap(lm.create_mesh("batch=4"), NET)
    said = []
    for each in tries:
        try:
            layout_map.build(Net, batch_dim="batch", fully_shard=each)
        except lm.ScopeError as error:
            said.append(str(error))
    torch.manual_seed(dist.get_rank())
    value = dist.get_rank() == 0
    said.append(
        refusal(
            lambda: layout_map.build(Net, batch_dim="batch", fully_shard={"reshard_after_forward": value})
        )
    )
    return said


class Late(dist._Work):
    """A collective on a slow link: it is done 40 ms after it was asked for, by the clock of `Link`."""

    def __init__(self, work, link):
        super().__init__()
        self._work, self._link = work, link
        self._name, self._ready = f"gather {link.num_gathers}", link.now + 40

    def wait(self, timeout=None):
        self._link.events.append(f"wait for {self._name}")
        self._link.waited += max(0, self._ready - self._link.now)
        self._link.now = max(self._link.now, self._ready)
        return self._work.wait()


class Link:
    """A clock in milliseconds that goes on while layers compute, and for who waits; and what happened."""

    def begin(self):
        self.now = self.waited = self.num_gathers = 0
        self.events = []

    def install(self):
        """Have the gathers of all process groups be late, from now on."""
        gather = dist.ProcessGroup.all_gather_single
        self.install = lambda: None

        def late(group, *args):
            self.num_gathers += 1
            self.events.append(f"gather {self.num_gathers}")
            return Late(gather(group, *args), self)

        dist.ProcessGroup.all_gather_single = late

    def compute(self, what):
        self.events.append(f"compute {what}")
        self.now += 50


LINK = Link()


class Noted(torch.nn.Linear):
    name = ""

    def forward(self, x):
        LINK.compute(self.name)
        if x.requires_grad:
            x.register_hook(lambda _: LINK.compute(f"{self.name} backward"))
        return super().forward(x)


class Chain(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = Noted(16, 16), Noted(16, 16)
        self.blocks = torch.nn.ModuleList(Noted(16, 16) for _ in range(4))
        for number, block in enumerate(self.blocks):
            block.name = number
        self.first.name, self.last.name = "first", "last"

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


@scenario
def ahead():
    return {gather: gathered_late(Chain, gather) for gather in ("fully_shard", "own")}


def gathered_late(make, gather):
    """What happens in a step on a slow link."""
    plain, model = pair(make, CHAIN_RULES, gather=gather)
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))
    LINK.begin()
    plain(x).square().mean().backward()
    LINK.install()
    for _ in range(2):  # the order is learned in the first
        LINK.begin()
        model.zero_grad()
        model(x).square().mean().backward()
    return {
        "events": list(LINK.events),  # not those of reading gradients
        "hidden": 1 - LINK.waited / (40 * LINK.num_gathers),
        "gradients": apart(plain, model, gradient),
    }


class CheckpointedChain(WithCheckpoints, Chain):
    pass


@scenario
def ahead_in_other_ways():
    """What is on its way is used for its own values only: checkpoints, other orders, changes in between, failures."""
    found = {}
    late = gathered_late(CheckpointedChain, "own")
    found["checkpointed"] = [late["gradients"], late["hidden"] < 0.8]
    plain, model = pair(Several, SEVERAL, gather="own")
    both = optimizers_of(plain, model)
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))
    for number, order in enumerate([(0, 1, 2), (2, 0, 1), (0, 1, 0, 1), (1,), (0, 1, 2)]):
        for each in (plain, model):
            each.zero_grad()
            each.blocks[1].requires_grad_(number != 1)
            each(x, order).square().mean().backward()
        found[f"order {order}"] = apart(plain, model, gradient)
        for optimizer in both:
            optimizer.step()
    handle = model.blocks[0].register_forward_hook(lambda *_: 1 / 0)
    found["said"] = refusal(lambda: model(x)) != "division by zero"
    handle.remove()
    with torch.no_grad():
        for each in (plain, model):
            for parameter in each.parameters():
                parameter.data.mul_(1.1)  # of which autograd counts nothing
    found["changed"] = (plain(x) - model(x)).abs().max().item()
    for each in (plain, model):
        each.zero_grad()
        (each(x).square().mean() + each(x * 2, (2, 1)).square().mean()).backward()
    found["two graphs"] = apart(plain, model, gradient)
    return found


def main():
    number, folder, port, size = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], sys.argv[4]
    warnings.simplefilter("ignore", lm.LayoutMapWarning)
    # What torchrun would set; the engine joins the group by itself.
    os.environ |= {"RANK": str(number), "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    told = {}
    for name, function in SCENARIOS.items():
        if len(sys.argv) > 5 and name not in sys.argv[5:]:
            continue
        try:
            told[name] = function()
        except Exception:
            told[name] = traceback.format_exc()
    (folder / f"{number}.json").write_text(json.dumps(told))
    np.savez(folder / f"{number}.npz")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
