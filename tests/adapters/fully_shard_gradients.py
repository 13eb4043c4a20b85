"""Scenarios of torch_fully_shard_process.py: gradients, steps and states are those of one device."""

import copy
import functools
import io
import itertools
import shutil
import tempfile
import warnings

import torch
import torch.distributed as dist
import torch.distributed.checkpoint
import torch.utils.checkpoint
from cases import EVERYTHING, some
from fully_shard_pairs import (
    BY_BATCH,
    ROWS,
    RULES,
    SEVERAL,
    TARGETS,
    TOKENS,
    Several,
    all_of,
    apart,
    clear,
    gradient,
    optimizers_of,
    pair,
    passes,
    refusal,
)
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch_models import Transformer, token_loss

import layoutmap as lm

SMALL = functools.partial(Transformer, size=16, heads=4, depth=1)


def steps():
    torch.manual_seed(0)
    SMALL()
    drawn = torch.get_rng_state()
    plain, model = pair(SMALL)
    draws_next = torch.equal(drawn, torch.get_rng_state())
    both = optimizers_of(plain, model)
    norms = []
    for step in range(24 if EVERYTHING else 2):
        for optimizer in both:
            optimizer.zero_grad()
        losses = passes(plain, model, seed=step, rows=8 - step % 2)
        norms.append(
            [float(torch.nn.utils.clip_grad_norm_(each.parameters(), 1.0)) for each in (plain, model)]
        )
        for optimizer in both:
            optimizer.step()
    layouts = [lm.dtensor.fetch_layout(p) == lm.dtensor.fetch_layout(p.grad) for p in model.parameters()]
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    _, other = pair(SMALL)
    other.load_state_dict(torch.load(io.BytesIO(file.getvalue()), weights_only=False))
    return {
        "draws next": draws_next,
        "saved": apart(model, other),
        "weights": apart(plain, model),
        "losses": abs(losses[0] - losses[1]),
        "norms": max(abs(a - b) for a, b in norms),
        "layouts": all(layouts),
        "planned": all(
            lm.dtensor.fetch_layout(p) == model.plan[n].layout for n, p in model.named_parameters()
        ),
    }


def other_optimizers():
    """Steps that look at a whole weight, or compute the loss again, of weights that are all over the batch's dim."""
    found = {}
    makers = {
        "Adafactor": torch.optim.Adafactor,
        "LBFGS": functools.partial(torch.optim.LBFGS, lr=0.1, max_iter=2),
    }
    plain, model = pair(SMALL, BY_BATCH, "batch=4")
    for name, make in makers.items():
        for each in (plain, model):
            optimizer = make(each.parameters())
            for step in range(2):

                def backward(each=each, optimizer=optimizer, step=step):
                    torch.manual_seed(step)
                    optimizer.zero_grad()
                    loss = token_loss(each(TOKENS), TARGETS)
                    loss.backward()
                    return loss

                optimizer.step(backward)
        found[name] = apart(plain, model)
    return found


def unsharded_head():
    """A layer without a layout beside a sharded model: one optimizer and one norm; another seed in one process."""
    found = {}
    for name in some(["foreach", "fused"], "foreach"):
        both = []
        for model in pair(SMALL):
            torch.manual_seed(3)
            head = torch.nn.Linear(256, 4)
            weights = [*model.parameters(), *head.parameters()]
            optimizer = torch.optim.AdamW(weights, lr=1e-2, eps=1e-3, **{name: True})
            for _ in range(2):
                optimizer.zero_grad()
                head(model(TOKENS)).square().mean().backward()
                torch.nn.utils.clip_grad_norm_(weights, 0.01, foreach=True)
                optimizer.step()
            both.append((model, head))
        (plain, plain_head), (model, head) = both
        found[name] = [apart(plain, model), apart(plain_head, head)]
    head.weight.data.add_(dist.get_rank())
    found["said"] = refusal(torch.optim.SGD(weights, lr=0.1).step)
    return found


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
    def forward(self, tokens):
        length = tokens.shape[1]
        x = self.tokens(tokens) + self.positions[:length] * self.mask[:length]
        for block in self.blocks:
            x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(self.norm(x) * self.scale)


def called(reentrant):
    model = Checkpointed()
    model.reentrant = reentrant
    return model


def wrapped(reentrant):
    """A transformer whose blocks compute themselves again, with dropout."""
    kind = CheckpointImpl.REENTRANT if reentrant else CheckpointImpl.NO_REENTRANT
    model = Transformer()
    for number, block in enumerate(model.blocks):
        again = checkpoint_wrapper(torch.nn.Sequential(block, torch.nn.Dropout(0.1)), checkpoint_impl=kind)
        model.blocks[number] = again
    return model


def checkpoints_gathered_by_layoutmap():
    return checkpoints(gather="own")


def checkpoints(**options):
    found = {}
    for reentrant, kind in itertools.product((False, True), (called, wrapped)):
        plain, model = pair(functools.partial(kind, reentrant), **options)
        both = optimizers_of(plain, model)
        for step in range(3):
            for optimizer in both:
                optimizer.zero_grad()
            passes(plain, model, seed=step)
            found[f"{kind.__name__} {reentrant} {step}"] = apart(plain, model, gradient)
            for optimizer in both:
                optimizer.step()
        found[f"{kind.__name__} {reentrant} weights"] = apart(plain, model)
    return found


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


def losses_in_other_ways():
    """Losses beside what a block returns, blocks in another order, twice, left out, called alone, and penalties."""
    found = {}
    ways = {
        "order": lambda m: m(ROWS, (2, 0, 1)).square().mean(),
        "twice": lambda m: m(ROWS, (0, 1, 0, 1)).square().mean(),
        "left out": lambda m: m(ROWS, (0, 2)).square().mean(),
        "all": lambda m: m(ROWS).square().mean(),
        "alone": lambda m: m.blocks[1](ROWS).square().mean(),
        "one by one": lambda m: m.last(m.blocks[1](m.blocks[0](ROWS))).square().mean(),
        "layer of a block": lambda m: m.blocks[1].up(ROWS).square().mean(),
        "penalty": lambda m: m(ROWS).square().mean() + sum(all_of(p.square().sum()) for p in m.parameters()),
    }
    plain, model = pair(Several, SEVERAL)
    both = optimizers_of(plain, model)
    for name, way in ways.items():
        clear(plain, model)
        for each in (plain, model):
            way(each).backward()
        found[name] = apart(plain, model, gradient)
        for optimizer in both:
            optimizer.step()
        found[f"{name}: after"] = apart(plain, model)
        with torch.no_grad():
            found[f"{name}: again"] = (plain(ROWS, (0, 2)) - model(ROWS, (0, 2))).abs().max().item()
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


def gradients_of_all_strides():
    """Gradients that autograd would copy, and weights that are also used beside their module; a step with SGD, too."""
    found = {}
    plain, model = pair(Used, USED)
    ways = {
        "all": lambda m: m(ROWS).square().mean(),
        "beside": lambda m: (m(ROWS) @ m.linear.weight).square().mean(),
        "before": lambda m: (m(ROWS @ m.linear.weight)).square().mean(),
        "transposed": lambda m: (m(ROWS) @ m.back @ m.linear.weight.T[:8] @ m.one).square().mean(),
    }
    for name, way in ways.items():
        clear(plain, model)
        for each in (plain, model):
            way(each).backward()
            torch.optim.SGD(each.parameters(), lr=1e-4).step()
        found[name] = apart(plain, model, gradient)
        found[f"{name}: after"] = apart(plain, model)
    return found


def aside():
    """What a block keeps of its inside is the loss: nothing that it returns has a gradient."""
    plain, model = pair(Several, SEVERAL)
    for each in (plain, model):
        each(ROWS)
        all_of(sum(block.seen for block in each.blocks)).backward()
    return apart(plain, model, gradient)


def state_dicts():
    plain, model = pair()
    both = optimizers_of(plain, model)
    passes(plain, model)
    for optimizer in both:
        optimizer.step()
    _, other = pair()
    other.load_state_dict(plain.state_dict())
    found = {"plain": apart(plain, other)}
    clear(plain, other)
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
    clear(plain, other)
    passes(plain, other)
    found["dcp"] = apart(plain, other, gradient)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder[0])
    return found


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
        clear(plain, model)
        passes(plain, model)
        found[f"after {kind}"] = apart(plain, model, gradient)
    return found


def what_fully_shard_cannot():
    """Gradients of gradients are refused; by layoutmap's own way they, and gradients by weights, are right."""
    found = {}
    for gather in ("fully_shard", "own"):
        plain, model = pair(Several, SEVERAL, gather=gather)
        results = []
        for each in (plain, model):
            given = ROWS.clone().requires_grad_()

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
            lambda m=model, w=weights[1]: torch.autograd.grad(m(ROWS).square().sum(), w, allow_unused=True)
        )
        found[f"{gather}: by weights"] = said
        said = refusal(lambda m=model, w=weights[1]: m(ROWS).square().sum().backward(inputs=[w]))
        found[f"{gather}: inputs="] = said
        for each in (plain, model):
            each.zero_grad()
            each(ROWS).square().mean().backward()
        found[f"{gather}: after"] = apart(plain, model, gradient)
    return found


def other_meshes():
    """The batch's dim is the last, and one of size 1; a rule has it outside of another dim."""
    found = {}
    rules = {r".*\.key\.weight": (("batch", "model"), None)} | RULES
    for mesh in ("model=2,batch=2", "batch=1,model=4"):
        plain, model = pair(rules=rules, mesh=mesh)
        passes(plain, model)
        found[mesh] = apart(plain, model, gradient)
    return found


def replicated_groups():
    """Batches go over two mesh dims, and weights are sharded over one of them (HSDP), or some over both."""
    found = {}
    both = {r".*\.(up|down)\.weight": (("replica", "batch"), None)} | BY_BATCH
    ways = {
        "one dim": (BY_BATCH, {}),
        "both dims": (both, {}),
        "gathered by layoutmap": (BY_BATCH, {"gather": "own"}),
    }
    for name in some(ways, "both dims"):
        rules, options = ways[name]
        plain, model = pair(rules=rules, mesh="replica=2,batch=2", batch_dim=("replica", "batch"), **options)
        found[name] = passes(plain, model)
        found[name] = [abs(found[name][0] - found[name][1]), apart(plain, model, gradient)]
        for each in (plain, model):
            torch.optim.SGD(each.parameters(), lr=0.1).step()
        found[name].append(apart(plain, model))
    return found


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
    clear(plain, model)
    with torch.autograd.graph.save_on_cpu():
        passes(plain, model)
    found["on the CPU"] = apart(plain, model, gradient)
    return found
