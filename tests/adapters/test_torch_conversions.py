"""Conversions of a model convert all of its weights, also while outputs of earlier calls are alive."""

import random
import weakref

import pytest
import torch
from cases import examples
from torch import nn
from torch_pairs import assert_close, assert_models_close

import layoutmap as lm

PROCESSES = ("torch",)
pytestmark = pytest.mark.filterwarnings("ignore::layoutmap.LayoutMapWarning")

CONVERSIONS = {
    "double": lambda model: model.double(),
    "half": lambda model: model.half(),
    "bfloat16": lambda model: model.bfloat16(),
    "float": lambda model: model.float(),
    "to": lambda model: model.to(torch.float64),
    "to like": lambda model: model.to(torch.empty(0, dtype=torch.bfloat16)),
    "apply": lambda model: model._apply(lambda tensor: tensor.double() * 2),
}
ALIVE = {
    "nothing": lambda model, x: None,
    "an output": lambda model, x: model(x),
    "a loss": lambda model, x: model(x).square().mean(),
    "a graph": lambda model, x: [model(x).square().mean().backward(retain_graph=True), model(x)],
    "a reference": lambda model, x: [weakref.ref(each) for each in model.parameters()],
    "views": lambda model, x: [each[:2] for each in model.parameters()],
}


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.head = nn.GRU(8, 8, batch_first=True), nn.Linear(8, 8)

    def forward(self, x):
        return self.head(self.cell(x[:, None])[0][:, 0])


def make_blocks():
    blocks = [
        nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 8)) for _ in range(2)
    ]
    return nn.Sequential(*blocks)


@pytest.mark.parametrize("seed", range(examples(40)))
def test_all_weights_are_converted(seed):
    """Weights, gradients, hooks and the next step are those of the plain model; weights stay the same objects."""
    rng = random.Random(seed)
    names = rng.choices(list(CONVERSIONS), k=rng.choice([1, 2]))
    alive = rng.choice(list(ALIVE)[1:])
    make_model = rng.choice([make_blocks, make_blocks, Recurrent])
    rules = {
        r"\d\.1\.weight": (None,),
        r".*weight.*": rng.choice([("batch", None), ("model", "batch"), (None, "model")]),
        r".*bias.*": (rng.choice(["batch", "model"]),),
    }
    x, steps = torch.randn(4, 8), {}
    plain, model = (torch.manual_seed(seed) and make_model() for _ in range(2))
    lm.LayoutMap(lm.create_mesh("batch=2,model=4"), rules).apply(model, batch_dim="batch")
    for each in (plain, model):
        weights = list(each.parameters())
        weights[0].register_hook(lambda gradient, each=each: steps.setdefault(each, gradient.dtype) and None)
        weights[0].mark = "mark"
        each(x).square().mean().backward()
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9)
        kept = ALIVE[alive](each, x)
        for name in names:
            CONVERSIONS[name](each)
        assert all(a is b for a, b in zip(weights, each.parameters(), strict=True))
        assert "mark" == weights[0].mark
        del kept
        steps.clear()
        dtype = weights[0].dtype
        each(x.to(dtype)).square().mean().backward()
        optimizer.step()
        assert {each: dtype} == steps
    tolerance = 1e-5 if dtype in (torch.float32, torch.float64) else 3e-2
    assert_models_close(plain, model, tolerance)
    for expected, actual in zip(plain.parameters(), model.parameters(), strict=True):
        assert_close(expected.grad, actual.grad, tolerance)
        assert actual.placements == actual.grad.placements


def test_a_graph_of_the_values_before_is_refused():
    """Its backward pass raises, as on one device, and changes no gradient."""
    model = lm.LayoutMap("batch=2,model=2", {r".*\.0\.weight": ("batch", None)}).build(
        make_blocks, batch_dim="batch", library="torch"
    )
    loss = model(torch.randn(4, 8)).square().mean()
    model.double()

    with pytest.raises((RuntimeError, lm.EngineError)):
        loss.backward()
    assert all(each.grad is None or each.grad.dtype == torch.float64 for each in model.parameters())
