"""Drawn programs with hooks on gradients and optimizers: each trains a plain model and the same one in layouts."""

import gc
import random
from collections import defaultdict

import torch
from cases import some
from torch import nn
from torch.autograd.graph import register_multi_grad_hook
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_
from torch.utils.checkpoint import checkpoint

import layoutmap as lm
from layoutmap.engines.torch import changes

MESHES = {1: "batch=2,model=4", 2: "batch=2", 4: "batch=2,model=2"}
REFUSED = "a weight was given a hook on its gradient between the forward pass and the backward pass"
SIZE, NUM_BLOCKS, ROWS, RATE = 8, 3, 8, 0.2


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(SIZE, 16), nn.LayerNorm(16), nn.Linear(16, SIZE)

    def forward(self, x):
        return x + self.down(torch.tanh(self.norm(self.up(x))))


class Net(nn.Module):
    """Blocks, the first of which may be called twice or be checkpointed, and a weight that is used at both ends."""

    def __init__(self, twice, saving):
        super().__init__()
        self.twice, self.saving = twice, saving
        self.inner = nn.Parameter(torch.randn(SIZE, SIZE) / 3)
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))
        self.unused = nn.Linear(SIZE, SIZE)

    def forward(self, x):
        x = x @ self.inner
        for number, block in enumerate((*self.blocks, *self.blocks[: self.twice])):
            if self.saving == "none" or number != 1:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.saving == "reentrant")
        return x @ self.inner


def number_of(tensor):
    return float(tensor.full_tensor() if isinstance(tensor, DTensor) else tensor)


class Log:
    """The numbers that hooks have seen, and whether each gradient was in the layout of its weight."""

    def __init__(self):
        self.seen = defaultdict(list)
        self.elsewhere = []
        self.changed = set()  # weights that have a hook which may return the gradient in another layout

    def note(self, name, weight, gradient, *, is_first=True):
        if gradient is None:
            self.seen[name].append(None)
            return
        self.seen[name].append(number_of(gradient.detach().norm()))
        if isinstance(weight, DTensor) and weight.placements != gradient.placements and is_first:
            self.elsewhere.append((name, str(gradient.placements), str(weight.placements)))


CHANGES = {  # of the gradient that a pass adds
    "halved": lambda gradient: gradient * 0.5,
    "clamped": lambda gradient: gradient.clamp(-0.01, 0.01),
    "normalized": lambda gradient: gradient / (1 + gradient.norm()),
    "squashed": lambda gradient: gradient.tanh(),
    "centred": lambda gradient: gradient - gradient.mean(),
    "orthogonal": lambda gradient: gradient if gradient.ndim < 2 else gradient @ gradient.mT @ gradient,
    "read": lambda gradient: None,
}


@torch.no_grad()
def halve(weight):
    weight.grad.mul_(0.5)


@torch.no_grad()
def clip(weight):
    clip_grad_norm_([weight], 0.05)


@torch.no_grad()
def descend(weight):
    weight.add_(weight.grad, alpha=-RATE)
    weight.grad = None


@torch.no_grad()
def keep_elsewhere(weight):
    kept = getattr(weight, "kept", None)
    weight.kept = weight.grad.clone() if kept is None else kept + weight.grad
    weight.grad.mul_(0)


AFTERWARDS = {"halve": halve, "clip": clip, "descend": descend, "keep": keep_elsewhere}


def on_gradient(weights, how, log):
    change = CHANGES[how]
    for name, weight in weights.items():
        is_first = name not in log.changed
        log.changed.add(name)

        def hook(gradient, name=name, weight=weight, is_first=is_first):
            log.note(f"{how} {name}", weight, gradient, is_first=is_first)
            return change(gradient)

        yield weight.register_hook(hook)


def after_accumulation(weights, how, log):
    change = AFTERWARDS[how]
    for name, weight in weights.items():

        def hook(weight, name=name):
            log.note(f"{how} {name}", weight, weight.grad)
            if weight.grad is not None:  # no earlier hook has taken it
                change(weight)

        yield weight.register_post_accumulate_grad_hook(hook)


def on_several(weights, how, log):
    is_first = {name: name not in log.changed for name in weights}

    def hook(gradients):
        for name, gradient in zip(weights, gradients, strict=True):
            log.note(f"all {name}", weights[name], gradient, is_first=is_first[name])

    def hook_of_any(gradient):
        log.seen["any"].append(1.0)

    yield register_multi_grad_hook(list(weights.values()), hook_of_any if how == "any" else hook, mode=how)


KINDS = {on_gradient: list(CHANGES), after_accumulation: list(AFTERWARDS), on_several: ["all", "any"]}


def clip_all(optimizer, *_):
    clip_grad_norm_([each for group in optimizer.param_groups for each in group["params"]], 0.1)


@torch.no_grad()
def keep_small(optimizer, *_):
    for group in optimizer.param_groups:
        for weight in group["params"]:
            weight.clamp_(-0.4, 0.4)


class Program:
    """A drawn program: a net, its layouts, hooks on some of its weights, passes and steps."""

    def __init__(self, seed, num_processes=1):
        rng = random.Random(seed)
        self.seed = seed
        self.mesh = MESHES[num_processes]
        self.twice, self.saving = rng.choice([0, 0, 1]), rng.choice(["none", "none", "reentrant", "other"])
        dims = [None, "batch", "batch"] + ["model", ("model", "batch")] * ("model" in self.mesh)
        self.rules = {}
        for number in range(NUM_BLOCKS):
            for name, axes in {"up.weight": 2, "up.bias": 1, "norm.weight": 1, "down.weight": 2}.items():
                specs = [None] * axes
                specs[rng.randrange(axes)] = rng.choice(dims)
                if axes == 2 and "model" in self.mesh and rng.random() < 0.3:
                    specs = rng.choice([["model", "batch"], ["batch", "model"]])
                self.rules[rf"blocks\.{number}\.{name}"] = tuple(specs)
        self.rules["inner"] = (rng.choice(dims), None)
        self.gather = rng.choice(["fully_shard", "own"])
        self.hooks = []
        for _ in range(rng.choice([1, 1, 2, 3])):
            kind = rng.choice(list(KINDS))
            self.hooks.append((kind, rng.choice(KINDS[kind]), rng.choice([0.2, 0.6, 1.0])))
        if any(kind is on_several for kind, *_ in self.hooks) and self.saving == "reentrant":
            self.saving = "other"  # torch counts the calls of both passes together
        self.hooked = rng.choice(["before the first call", "after a step", "between the passes"])
        self.num_passes, self.num_steps = rng.choice([1, 2, 2, 3, 4]), 2
        self.rows = [rng.choice([ROWS, ROWS, 6, 7]) for _ in range(self.num_passes)]
        self.steps_by_hooks = rng.sample([clip_all, keep_small], rng.randrange(3))
        self.frozen = rng.sample(range(NUM_BLOCKS), rng.choice([0, 0, 1]))
        self.to_none = rng.random() < 0.7
        self.picks = rng.random()

    def __repr__(self):
        hooks = [(kind.__name__, how, part) for kind, how, part in self.hooks]
        return (
            f"<{self.seed}: {hooks}, {self.num_passes} passes of {self.rows}, {self.gather}, {self.saving}, "
            f"{self.twice}, hooked {self.hooked}, frozen={self.frozen}, to_none={self.to_none}>"
        )

    def make(self):
        torch.manual_seed(self.seed)
        net = Net(self.twice, self.saving).double()
        for number in self.frozen:
            net.blocks[number].up.weight.requires_grad_(False)
        return net

    def run(self, net):
        """The losses, what hooks have seen, gradients and weights."""
        log, losses = Log(), []
        weights = {name: weight for name, weight in net.named_parameters() if weight.requires_grad}
        optimizer = torch.optim.SGD(net.parameters(), lr=RATE, momentum=0.5)
        for hook in self.steps_by_hooks:
            add = optimizer.register_step_pre_hook if hook is clip_all else optimizer.register_step_post_hook
            add(hook)
        if self.hooked == "before the first call":
            self.add_hooks(weights, log)
        for number in range(self.num_steps):
            for rows in self.rows:
                torch.manual_seed(100 * self.seed + number)
                x, y = torch.randn(2, rows, SIZE, dtype=torch.float64)
                loss = (net(x.requires_grad_(self.saving == "reentrant")) - y).square().mean()
                if self.hooked == "between the passes" and not losses:
                    self.add_hooks(weights, log)
                loss.backward()
                losses.append(loss.item())
            if self.hooked == "after a step" and not number:
                self.add_hooks(weights, log)
            gradients = [None if each.grad is None else each.grad.clone() for each in weights.values()]
            optimizer.step()
            optimizer.zero_grad(set_to_none=self.to_none)
        found = {f"loss {number}": each for number, each in enumerate(losses)}
        found |= {f"{name} {number}": v for name, seen in log.seen.items() for number, v in enumerate(seen)}
        found |= {f"gradient {name}": each for name, each in zip(weights, gradients, strict=True)}
        found |= dict(net.named_parameters())
        found |= {f"kept {name}": each.kept for name, each in weights.items() if hasattr(each, "kept")}
        return found, log.elsewhere

    def add_hooks(self, weights, log):
        rng = random.Random(self.picks)
        for kind, how, part in self.hooks:
            chosen = {name: each for name, each in weights.items() if rng.random() < part}
            if chosen:
                list(kind(chosen, how, log))

    def differences(self):
        """What differs from the plain model, or is not in its layout."""
        expected, _ = self.run(self.make())
        layout_map = lm.LayoutMap(lm.create_mesh(self.mesh), self.rules)
        options = {"gather": self.gather}
        net = layout_map.build(self.make, batch_dim="batch", library="torch", **options)
        actual, elsewhere = self.run(net)
        wrong = [f"in another layout: {each}" for each in elsewhere]
        if set(expected) != set(actual):
            return [*wrong, f"not the same calls: {set(expected) ^ set(actual)}"]
        for name, one in expected.items():
            other = actual[name]
            if (one is None) != (other is None):
                wrong.append(f"{name}: {one is None} {other is None}")
            elif one is not None:
                one, other = (torch.as_tensor(whole(each)) for each in (one, other))
                apart = float((one - other).abs().max() / max(float(one.abs().max()), 1e-2))
                if not apart < 1e-9:
                    wrong.append(f"{name}: {apart:.2g}")
        return wrong


def whole(value):
    value = value.detach() if isinstance(value, torch.Tensor) else value
    return value.full_tensor() if isinstance(value, DTensor) else value


def wrong_programs(seeds, num_processes=1):
    """Of the programs of some seeds, those that differ, and by what; `fully_shard` may refuse hooks that come late."""
    found = []
    for seed in seeds:
        program = Program(seed, num_processes)
        try:
            wrong = program.differences()
        except Exception as error:
            if program.hooked == "between the passes" and REFUSED in str(error):
                continue
            wrong = [f"{type(error).__name__}: {error}"]
        if wrong:
            found.append(f"{program}: {len(wrong)}: {wrong[:4]}")
    return found


class Fails(torch.autograd.Function):
    """The same value, whose gradient raises."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        raise ZeroDivisionError


def fail(*_):
    raise ZeroDivisionError


WAYS_TO_FAIL = {
    "a hook on a gradient": lambda net: net.blocks[0].norm.bias.register_hook(fail),
    "a hook after accumulation": lambda net: net.blocks[1].up.weight.register_post_accumulate_grad_hook(fail),
    "a function": lambda net: net.blocks[0].register_forward_hook(lambda *args: Fails.apply(args[-1])),
    "a backward hook": lambda net: net.blocks[1].down.register_full_backward_hook(fail),
}


def is_placed(weight):
    return weight.grad is not None and weight.grad.placements == weight.placements


def left_by_failed_passes(num_processes=1):
    """What is wrong after backward passes that failed, and when their models are gone."""
    # On simulated devices the library gathers, whatever is asked for; between processes torch does.
    ways = some(("own", "fully_shard"), "own" if num_processes == 1 else "fully_shard")
    gc.collect()
    gc.freeze()  # else each count walks the objects of torch and transformers, which takes half a second
    wrong = []
    for number, (name, make_fail) in enumerate(WAYS_TO_FAIL.items()):
        for how in ways:
            wrong += [f"{name}, {how}: {each}" for each in failed_pass(number, num_processes, make_fail, how)]
            left = num_tensors()
            if left or changes._installed:
                wrong.append(f"{name}, {how}: {left} tensors are left, and {len(changes._installed)} changes")
    return wrong


def num_tensors():
    gc.collect()
    return sum(issubclass(type(each), DTensor) for each in gc.get_objects())


def failed_pass(seed, num_processes, make_fail, gather):
    program = Program(seed, num_processes)
    layout_map = lm.LayoutMap(lm.create_mesh(program.mesh), program.rules)
    net = layout_map.build(program.make, batch_dim="batch", library="torch", gather=gather)
    plain = program.make()
    x = torch.ones(ROWS, SIZE, dtype=torch.float64, requires_grad=True)
    # On busy machines a count was seen to be higher once, for one call or for all that follow. A leak grows again.
    before = [net(x).requires_grad and num_tensors() for _ in range(9)]
    if min(before[:3]) < min(before[3:6]) < min(before[6:]):
        yield f"calls without a backward pass leave tensors: {before}"
    net(x).square().sum().backward()
    had = [each for each in net.parameters() if each.grad is not None]
    hook = make_fail(net)
    for _ in range(3):
        try:
            net(x).square().sum().backward()
            yield "it did not fail"
        except ZeroDivisionError:
            pass
        if not all(map(is_placed, had)):
            yield "gradients that there were are gone, or in another layout"
    hook.remove()
    for each in (net, plain):
        each.zero_grad()
        each(x).square().sum().backward()
    for (name, one), other in zip(plain.named_parameters(), net.parameters(), strict=True):
        if one.grad is not None and not torch.allclose(one.grad, whole(other.grad)):
            yield f"{name}: another gradient after passes that failed"
