"""Optimizers whose state depends on the shard that they see are refused by name before the first step."""

import random
from functools import partial

import numpy as np
import pytest
import torch
from cases import few, some
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch_models import Lion
from torch_pairs import assert_close

import layoutmap as lm

pytestmark = pytest.mark.filterwarnings("ignore::layoutmap.LayoutMapWarning")

LAYOUTS = [(None, None), ("model", None), (None, "model"), ("batch", "model"), (("batch", "model"), None)]


FIX = "use an optimizer whose state is plain tensors of the weight's shape, such as torch.optim.AdamW"


class Momentum(torch.optim.Optimizer):
    """SGD with momentum, kept as `choose` says of the tensor that `see` makes of a parameter."""

    def __init__(self, params, choose, see, lr=0.1):
        super().__init__(params, {"lr": lr})
        self.choose, self.see, self.counts = choose, see, {"steps": 0}

    @torch.no_grad()
    def step(self, closure=None):
        self.counts["steps"] += 1
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["count"] = 0
                    name, dtype = self.choose(tuple(self.see(p).shape))
                    if name:
                        state[name] = torch.zeros_like(p, dtype=dtype)
                state["count"] += 1
                update = p.grad
                for name in [n for n in state if n != "count"]:
                    state[name].mul_(0.5).add_(p.grad.to(state[name].dtype))
                    update = state[name].to(p.dtype)
                p.add_(update, alpha=-group["lr"])


class Around(torch.optim.Optimizer):
    """An optimizer that has another one step."""

    def __init__(self, params, make):
        params = list(params)
        super().__init__(params, {})
        self.inner = make(params)

    def step(self, closure=None):
        self.inner.step()


class OwnShards(torch.optim.Optimizer):
    """SGD with momentum, which it keeps as plain tensors of the size of a shard."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                gradient, weight = local(p.grad), local(p)
                kept = self.state[p].setdefault("momentum", torch.zeros_like(weight))
                kept.mul_(0.5).add_(gradient)
                weight.add_(kept, alpha=-group["lr"])


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def as_global(tensor):
    return tensor


CHOICES = {
    "dtype": lambda shape: ("momentum", torch.bfloat16 if np.prod(shape) >= 64 else torch.float32),
    "name": lambda shape: ("large" if np.prod(shape) >= 64 else "small", torch.float32),
    "none": lambda shape: ("momentum" if shape[0] >= 8 else None, torch.float32),
    "tall": lambda shape: ("momentum", torch.float64 if shape[0] > shape[-1] else torch.float32),
}
OF_TORCH = {
    "adadelta": partial(torch.optim.Adadelta, eps=1e-2),
    "adafactor": partial(torch.optim.Adafactor, lr=0.1),
    "adagrad": partial(torch.optim.Adagrad, eps=1e-2),
    "adam": partial(torch.optim.Adam, eps=1e-2, amsgrad=True),
    "adamax": partial(torch.optim.Adamax, eps=1e-2),
    "adamw": partial(torch.optim.AdamW, eps=1e-2),
    "adamw fused": partial(torch.optim.AdamW, eps=1e-2, fused=True),
    "asgd": partial(torch.optim.ASGD, lr=0.1),
    "muon": partial(torch.optim.Muon, lr=0.1),
    "nadam": partial(torch.optim.NAdam, eps=1e-2),
    "radam": partial(torch.optim.RAdam, eps=1e-2),
    "rmsprop": partial(torch.optim.RMSprop, eps=1e-2, momentum=0.5, centered=True),
    "rprop": torch.optim.Rprop,
    "sgd": partial(torch.optim.SGD, lr=0.1),
    "sgd momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
}
OWN = {"lion": Lion, "own shards": OwnShards}
for _name, _choose in CHOICES.items():
    OWN[f"{_name} by shard"] = partial(Momentum, choose=_choose, see=local)
    OWN[f"{_name} by weight"] = partial(Momentum, choose=_choose, see=as_global)
OWN["around adamw"] = partial(Around, make=OF_TORCH["adamw"])


class Weights(nn.Module):
    def __init__(self, shapes):
        super().__init__()
        self.each = nn.ParameterList(torch.randn(shape) for shape in shapes)


def draw_model(seed):
    """Return shapes of one to three weights, and a layout for each."""
    drawn = random.Random(seed)
    shapes = [(8 * drawn.randint(1, 3), 8 * drawn.randint(1, 3)) for _ in range(drawn.randint(1, 3))]
    return shapes, [drawn.choice(LAYOUTS) for _ in shapes]


def make_models(shapes, layouts):
    torch.manual_seed(0)
    plain = Weights(shapes)
    torch.manual_seed(0)
    rules = {rf"each\.{number}$": layout for number, layout in enumerate(layouts)}
    return plain, lm.LayoutMap("batch=2,model=4", rules).apply(Weights(shapes))


def set_gradients(plain, model, scale):
    for expected, actual in zip(plain.parameters(), model.parameters(), strict=True):
        expected.grad = torch.randn_like(expected) * scale
        actual.grad = lm.dtensor.relayout(expected.grad, lm.dtensor.fetch_layout(actual))


def is_refused(name, shapes, layouts):
    """Whether the law expects an optimizer to be refused: worked out from the shapes of shards alone."""
    mesh = lm.create_mesh("batch=2,model=4")
    shards = [
        lm.Layout(specs, mesh).local_shape_from_global_shape(shape)
        for specs, shape in zip(layouts, shapes, strict=True)
    ]
    if name == "own shards":
        return any(tuple(shard) != shape for shard, shape in zip(shards, shapes, strict=True))
    choose = CHOICES.get(name.removesuffix(" by shard"))
    return choose is not None and any(
        choose(tuple(a)) != choose(b) for a, b in zip(shards, shapes, strict=True)
    )


@pytest.mark.every_case
@pytest.mark.parametrize(
    "name",
    few(
        [*OF_TORCH, *OWN], "adamw", "muon", "dtype by shard", "dtype by weight", "own shards", "around adamw"
    ),
)
def test_an_optimizer_steps_as_on_one_device_or_is_refused_by_name(name):
    """Steps equal those of one device at gradients of any scale; other optimizers are refused and change nothing."""
    for seed in some(range(20), 0, 1, 2):
        shapes, layouts = draw_model(20261128_000 + seed)
        plain, model = make_models(shapes, layouts)
        optimizers = [(OF_TORCH | OWN)[name](each.parameters()) for each in (plain, model)]
        set_gradients(plain, model, 1.0)
        if is_refused(name, shapes, layouts):
            for _ in range(2):  # also when the error was caught
                with pytest.raises(lm.ScopeError, match=f"^{type(optimizers[1]).__name__}: "):
                    optimizers[1].step()
            for expected, actual in zip(plain.parameters(), model.parameters(), strict=True):
                assert_close(expected, actual, 0.0)
            assert not any(optimizers[1].state.values())
            continue
        # Plain slots of unsharded weights become DTensors before the second step, which then refuses to mix the two.
        for step in range(1 if name == "own shards" else 3):
            set_gradients(plain, model, 10.0**step)
            for optimizer in optimizers:
                optimizer.step()
        for expected, actual in zip(plain.parameters(), model.parameters(), strict=True):
            assert_close(expected, actual, 2e-5)


def test_the_comparison_changes_nothing_of_the_program():
    """Random states, counts, tensors and inner optimizers are as if only the real step had run."""
    _, model = make_models([(8, 16), (16, 8)], [("model", None), (None, "batch")])
    seen = torch.zeros(())
    calls = []

    class Counted(Around):
        def step(self, closure=None):
            calls.append(torch.rand(()).item())
            seen.add_(1)
            self.inner.step()

    optimizer = Counted(model.parameters(), partial(torch.optim.SGD, lr=0.1, momentum=0.9))
    optimizer.register_step_post_hook(lambda *_: seen.add_(10))
    of_all = register_optimizer_step_post_hook(lambda *_: seen.add_(100))
    before = [each.detach().clone() for each in model.parameters()]
    for each in model.parameters():
        each.grad = torch.ones_like(each)
    torch.manual_seed(3)
    optimizer.step()
    of_all.remove()

    torch.manual_seed(3)
    assert calls[-1] == torch.rand(()).item()
    assert 211 == seen.item()  # of the optimizer and of the inner one
    for old, each in zip(before, model.parameters(), strict=True):
        assert_close(old - 0.1, each)


def test_a_group_that_is_added_later_is_compared():
    """As when weights are unfrozen after some steps."""
    _, model = make_models([(8, 8), (16, 8)], [(None, None), ("model", None)])
    first, second = model.parameters()
    optimizer = OWN["dtype by shard"]([first])
    for each in (first, second):
        each.grad = torch.ones_like(each)
    optimizer.step()
    optimizer.add_param_group({"params": [second]})

    with pytest.raises(lm.ScopeError, match="Momentum: its state momentum for a sharded weight"):
        optimizer.step()


def test_the_error_names_optimizer_weight_and_both_kinds_of_state():
    """In four parts."""
    _, model = make_models([(16, 16)], [("model", None)])
    optimizer = OWN["dtype by shard"](
        model.parameters(),
        choose=lambda shape: ("momentum", torch.float16 if shape[0] > 4 else torch.float32),
    )
    with pytest.raises(lm.ScopeError) as caught:
        optimizer.step()

    assert str(caught.value).splitlines() == [
        "Momentum: its state momentum for a sharded weight differs in form from that on one device",
        "  weight      (16, 16)  (model, unsharded)",
        "  one device  Tensor of float16, (16, 16)",
        "  sharded     Tensor of float32, (16, 16)",
        (
            "  why         it chooses its state from the shape of the shard, so its steps would differ from those "
            "on one device"
        ),
        "  fix         leave this weight unsharded; or " + FIX,
    ]
