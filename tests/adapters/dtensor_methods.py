"""DTensor's public methods, called in each place of a training step, and compared with the same step on one device."""

from __future__ import annotations

import itertools
import random
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

import layoutmap as lm
from layoutmap.core.errors import LayoutMapError

Change = Callable[[torch.Tensor], torch.Tensor]
WIDTH = 8


class Method(NamedTuple):
    """A use of DTensor's methods.

    Attributes:
        on_mesh: Computes a tensor from a DTensor.
        unsharded: Computes the same from an unsharded tensor.
    """

    on_mesh: Change
    unsharded: Change


def replicated(tensor):
    return [Replicate()] * tensor.device_mesh.ndim


def sharded(tensor, axis):
    return [*replicated(tensor)[1:], Shard(axis)]


def from_local(local, like):
    return DTensor.from_local(local, like.device_mesh, like.placements)


def constant(tensor):
    return torch.linspace(0.5, 1.5, tensor.numel()).view(tensor.shape)


def change_in_place(tensor):
    return tensor.mul_(1.5).add_(0.1)


def change_local(tensor):
    """Change the memory of a copy through its local tensor."""
    copy = tensor.detach().clone()
    copy.to_local().mul_(1.5)
    return tensor * copy


def same(tensor):
    return tensor


METHODS = {
    "to_local": Method(lambda t: t.to_local(), same),
    "to_local(grad_placements)": Method(lambda t: t.to_local(grad_placements=replicated(t)), same),
    "full_tensor": Method(lambda t: t.full_tensor(), same),
    "full_tensor(grad_placements)": Method(lambda t: t.full_tensor(grad_placements=replicated(t)), same),
    "redistribute to all": Method(lambda t: t.redistribute(placements=replicated(t)), same),
    "redistribute by rows": Method(lambda t: t.redistribute(t.device_mesh, sharded(t, 0)), same),
    "redistribute by columns": Method(lambda t: t.redistribute(placements=sharded(t, -1)), same),
    "redistribute and wait": Method(lambda t: t.redistribute(placements=replicated(t), async_op=True), same),
    "redistribute, to_local": Method(lambda t: t.redistribute(placements=replicated(t)).to_local(), same),
    "to_local, from_local": Method(lambda t: from_local(t.to_local(), t), same),
    "shards, from_local": Method(lambda t: from_local(t.to_local() * 1.5, t), lambda t: t * 1.5),
    "shards with the full tensor": Method(
        lambda t: from_local(t.to_local() * t.full_tensor().mean(), t), lambda t: t * t.mean()
    ),
    "full tensor in shards": Method(
        lambda t: DTensor.from_local(t.full_tensor(), t.device_mesh, replicated(t)), same
    ),
    "distribute_tensor by rows": Method(
        lambda t: t * distribute_tensor(constant(t), t.device_mesh, sharded(t, 0)), lambda t: t * constant(t)
    ),
    "distribute_tensor by columns": Method(
        lambda t: t * distribute_tensor(constant(t), t.device_mesh, sharded(t, t.ndim - 1)),
        lambda t: t * constant(t),
    ),
    "from_local of a constant": Method(
        lambda t: t * DTensor.from_local(constant(t), t.device_mesh, replicated(t)), lambda t: t * constant(t)
    ),
    "clone": Method(lambda t: t.clone(), same),
    "detach": Method(lambda t: t + t.detach(), lambda t: t + t.detach()),
    "in place": Method(lambda t: change_in_place(t.clone()), lambda t: change_in_place(t.clone())),
    "in place, gathered": Method(
        lambda t: change_in_place(t.full_tensor().clone()), lambda t: change_in_place(t.clone())
    ),
    "in place, by shards": Method(change_local, lambda t: t * t.detach() * 1.5),
}


class Through(torch.autograd.Function):
    """A function of the program's own, with its own gradient."""

    @staticmethod
    def forward(ctx, tensor, change):
        ctx.save_for_backward(tensor)
        ctx.change = change
        with torch.no_grad():
            return change(tensor.detach())

    @staticmethod
    def backward(ctx, gradient):
        (tensor,) = ctx.saved_tensors
        with torch.enable_grad():
            leaf = tensor.detach().requires_grad_()
            found = ctx.change(leaf)
        return *torch.autograd.grad(found, leaf, gradient), None


class Probe(nn.Module):
    """A product with a weight that methods are called on."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.4)
        self.change_weight: Change = same
        self.change_input: Change = same

    def forward(self, x):
        return self.change_input(x) @ self.change_weight(self.w)


class Model(nn.Module):
    """A probe between two layers, whose steps show whether gradients are scaled."""

    def __init__(self):
        super().__init__()
        self.first, self.probe, self.last = nn.Linear(4, WIDTH), Probe(), nn.Linear(WIDTH, 2)
        self.call: Callable[..., torch.Tensor] = lambda module, x: module(x)

    def forward(self, x):
        return self.last(self.call(self.probe, self.first(x).tanh()))


def in_forward(model, optimizer, change):
    model.probe.change_weight = change


def on_input(model, optimizer, change):
    model.probe.change_input = change


def in_pre_hook(model, optimizer, change):
    model.probe.register_forward_pre_hook(lambda module, args: (change(args[0]),))


def in_hook(model, optimizer, change):
    model.probe.register_forward_hook(lambda module, args, output: change(output))


def in_hook_of_weight(model, optimizer, change):
    model.probe.register_forward_hook(lambda module, args, output: output * (1 + change(module.w).mean()))


def unsharded_mean(tensor, weight):
    """The mean of a tensor as a plain tensor, also outside of the model's call."""
    if isinstance(weight, DTensor) and not isinstance(tensor, DTensor):
        # On simulated devices, a local tensor has a tensor for each of them.
        tensor = DTensor.from_local(tensor, weight.device_mesh, replicated(weight))
    mean = tensor.mean()
    return mean.full_tensor() if isinstance(mean, DTensor) else mean


def in_models_pre_hook(model, optimizer, change):
    model.register_forward_pre_hook(
        lambda module, args: (args[0] * (1 + unsharded_mean(change(module.probe.w), module.probe.w)),)
    )


def in_models_hook(model, optimizer, change):
    model.register_forward_hook(
        lambda module, args, output: output * (1 + unsharded_mean(change(module.probe.w), module.probe.w))
    )


def in_backward_hook(model, optimizer, change):
    model.probe.register_full_backward_hook(
        lambda module, inputs, outputs: tuple(None if each is None else change(each) for each in inputs)
    )


def in_tensor_hook(model, optimizer, change):
    def hook(x):
        x.register_hook(change)
        return x

    model.probe.change_input = hook


def in_function(model, optimizer, change):
    model.probe.change_weight = lambda tensor: Through.apply(tensor, change)


def in_checkpoint(model, optimizer, change):
    model.probe.change_weight = change
    model.call = lambda module, x: checkpoint(module, x, use_reentrant=False)


def in_reentrant_checkpoint(model, optimizer, change):
    model.probe.change_weight = change
    model.call = lambda module, x: checkpoint(module, x, use_reentrant=True)


def compiled(model, optimizer, change):
    model.probe.change_weight = change
    if isinstance(model.probe.w, DTensor):
        model.probe.compile(backend="aot_eager")


def in_optimizer_hook(model, optimizer, change):
    def step(*_):
        for each in model.parameters():
            each.grad.copy_(change(each.grad))

    optimizer.register_step_pre_hook(step)


def after_optimizer(model, optimizer, change):
    def step(*_):
        with torch.no_grad():
            model.probe.w.copy_(change(model.probe.w) * 0.9)

    optimizer.register_step_post_hook(step)


PLACES = {
    "forward": in_forward,
    "forward, on an input": on_input,
    "forward pre-hook": in_pre_hook,
    "forward hook": in_hook,
    "forward hook, on a weight": in_hook_of_weight,
    "the model's pre-hook": in_models_pre_hook,
    "the model's hook": in_models_hook,
    "backward hook": in_backward_hook,
    "tensor hook": in_tensor_hook,
    "autograd.Function": in_function,
    "checkpoint": in_checkpoint,
    "reentrant checkpoint": in_reentrant_checkpoint,
    "compiled": compiled,
    "optimizer hook": in_optimizer_hook,
    "after the optimizer": after_optimizer,
    "run_on": None,
}


SIMULATED = [place for place in PLACES if place != "compiled"]
MESHES = {2: ["model=2", "batch=2"], 4: ["batch=2,model=2", "model=4"]}
"""By the number of devices."""
LOCAL = ("to_local", "to_local(grad_placements)")
OUTSIDE = ("after the optimizer", "the model's pre-hook", "the model's hook")


class Case(NamedTuple):
    """One drawn case."""

    method: str
    place: str
    mesh: str
    batch_dim: str | None
    weight: tuple
    others: tuple
    seed: int


def layouts(mesh):
    """Layouts of a matrix on a mesh."""
    dims = [text.split("=")[0] for text in mesh.split(",")]
    single = [(None, None), *((dim, None) for dim in dims), *((None, dim) for dim in dims)]
    pairs = list(itertools.permutations(dims, 2))
    return [*single, *pairs, *((pair, None) for pair in pairs[:1]), *((None, pair) for pair in pairs[:1])]


def draw(seed, meshes, places=PLACES) -> Case:
    """Draw a case; consecutive seeds visit each pair of a method and a place once, in an order that mixes them."""
    rng = random.Random(seed)
    mesh = rng.choice(meshes)
    batch_dim = rng.choice(["batch", "batch", None]) if "batch" in mesh else None
    pairs = list(itertools.product(METHODS, places))
    method, place = pairs[97 * seed % len(pairs)]
    weight, others = rng.choices(layouts(mesh), k=2)
    if method in LOCAL and place in OUTSIDE:
        weight = None, None  # outside of a model's call a program computes with shards as it likes
    return Case(method, place, mesh, batch_dim, weight, others, seed)


def may_be_refused(case) -> bool:
    """Whether a part may stand where the global tensor is needed."""
    return case.method in LOCAL


def make_model(seed):
    torch.manual_seed(seed)
    return Model()


def train(case, model, optimizer, on_mesh):
    """Train two steps; returns the outputs."""
    method = METHODS[case.method]
    change = method.on_mesh if on_mesh else method.unsharded
    if case.place != "run_on":
        PLACES[case.place](model, optimizer, change)
    rng = torch.Generator().manual_seed(case.seed)
    outputs = []
    for _ in range(2):
        x, y = torch.randn(8, 4, generator=rng), torch.randn(8, 2, generator=rng)
        output = model(x)
        assert type(output) is torch.Tensor, type(output)
        loss = nn.functional.mse_loss(output, y)
        if case.place == "run_on":
            loss = loss + penalty(case, model.probe.w, change, on_mesh)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        outputs.append(output.detach())
    return outputs


def penalty(case, weight, change, on_mesh):
    if not on_mesh:
        return (change(weight) * constant(weight)).mean()
    with lm.dtensor.run_on(lm.create_mesh(case.mesh), engine="torch"):
        found = (change(weight) * constant(weight)).mean()
        return found.full_tensor() if isinstance(found, DTensor) else found


def laid_out(case):
    rules = {r"probe\.w": case.weight, r".*weight": case.others}
    layout_map = lm.LayoutMap(lm.create_mesh(case.mesh), rules, uneven="replicate")
    return layout_map.build(lambda: make_model(case.seed), library="torch", batch_dim=case.batch_dim)


def difference(case) -> str:
    """Compare a case with one device: empty if it is equal, or a text that tells how it differs or was refused."""
    expected = make_model(case.seed)
    expected_outputs = train(case, expected, torch.optim.SGD(expected.parameters(), lr=0.3), on_mesh=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = laid_out(case)
        before = {name: each.full_tensor() for name, each in model.state_dict().items()}
        try:
            outputs = train(case, model, torch.optim.SGD(model.parameters(), lr=0.3), on_mesh=True)
        except LayoutMapError as error:
            text = str(error)
            changed = [
                n for n, each in model.state_dict().items() if not torch.equal(each.full_tensor(), before[n])
            ]
            is_complete = "  why " in text and "  fix " in text
            return f"{'refused' if is_complete and not changed else 'REFUSED LATE'}: {text}"
        except Exception as error:
            frames = traceback.extract_tb(error.__traceback__)
            where = " < ".join(f"{f.filename.rsplit('/', 1)[-1]}:{f.lineno}" for f in frames[-6:][::-1])
            return f"raised {type(error).__name__}: {str(error)[:200]} [{where}]"
        found = {name: each.full_tensor() for name, each in model.state_dict().items()}
    wrong = [
        f"{name} {float((found[name] - each).abs().max()):.1e}"
        for name, each in expected.state_dict().items()
        if not torch.allclose(found[name], each, rtol=1e-4, atol=2e-6)
    ]
    for n, (one, other) in enumerate(zip(expected_outputs, outputs, strict=True)):
        if not torch.allclose(one, other, rtol=1e-4, atol=2e-6):
            wrong.append(f"output {n} {float((one - other).abs().max()):.1e}")
    return f"wrong: {', '.join(wrong)}" if wrong else ""


def differences(cases: Iterable[Case]) -> dict[int, str]:
    """Compare cases."""
    return {case.seed: difference(case) for case in cases}


ROWS_OR_COLUMNS = {(None, None): Replicate(), ("model", None): Shard(0), (None, "model"): Shard(1)}


def locals_of(tensor):
    """Return what a process holds of a tensor."""
    with torch.no_grad():
        is_dtensor = isinstance(tensor, DTensor)
        return tensor.placements if is_dtensor else None, (
            tensor.to_local() if is_dtensor else tensor
        ).clone()


def results_of_plain_dtensors(num_processes):
    """Call each method on weights that torch has distributed; returns what this process holds, by layout and method."""
    mesh = dist.init_device_mesh("cpu", (num_processes,), mesh_dim_names=("model",))
    weight = make_model(0).probe.w.detach()
    return {
        specs: {
            name: locals_of(method.on_mesh(distribute_tensor(weight, mesh, [placement])))
            for name, method in METHODS.items()
        }
        for specs, placement in ROWS_OR_COLUMNS.items()
    }


def differences_from_plain_dtensors(expected, num_processes):
    """Call each method in `forward`, a hook and outside of calls: what this process holds otherwise than torch does."""
    wrong = []
    for specs in ROWS_OR_COLUMNS:
        case = Case("", "", f"model={num_processes}", None, specs, (None, None), 0)
        model, found = laid_out(case), {}

        def note(place, weight, found=found):
            found[place] = {name: locals_of(method.on_mesh(weight)) for name, method in METHODS.items()}

        def note_in_forward(weight, note=note):
            note("forward", weight)
            return weight

        model.probe.change_weight = note_in_forward
        model.probe.register_forward_hook(lambda module, *_, note=note: note("hook", module.w))
        model(torch.ones(2, 4))
        with lm.dtensor.run_on(lm.create_mesh(case.mesh), engine="torch"):
            note("run_on", model.probe.w)
        note("outside", model.probe.w)
        assert ["forward", "hook", "run_on", "outside"] == [*found]
        wrong += [
            f"{name} of {specs}, {place}: {held} instead of {plain}"
            for place, results in found.items()
            for (name, held), plain in zip(results.items(), expected[specs].values(), strict=True)
            if held[0] != plain[0] or not torch.equal(held[1], plain[1])
        ]
    return wrong


def main(first, number):
    """Print the cases that differ, drawn from a seed on, on simulated devices."""
    lm.simulate_devices(4)
    found = [draw(seed, MESHES[4], SIMULATED) for seed in range(first, first + number)]
    texts = [(case, difference(case)) for case in found]
    for case, text in texts:
        if text and not (text.startswith("refused: ") and may_be_refused(case)):
            print(case, text)
    print(f"{number} cases, {sum(text.startswith('refused: ') for _, text in texts)} of them refused")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
