"""`check_parity` finds a wrong number of any size in a model of torch, and calls no rounding wrong."""

from functools import partial

import numpy as np
import pytest
import torch
from cases import few
from torch import nn
from torch.nn import functional as F

import layoutmap as lm
from layoutmap.adapters.torch import train_with

PROCESSES = ("torch",)
pytestmark = pytest.mark.filterwarnings("ignore::layoutmap.LayoutMapWarning")
STAGES = {"": None, "output": "forward", "gradient": "gradient", "step": "step 1"}
SEEDS = range(40)


class ScaledGradient(torch.autograd.Function):
    """The identity, with a gradient that is twice as large."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


class Net(nn.Module):
    """Two heads, the second of which has outputs, weights and a loss of drawn sizes."""

    def __init__(self, sizes, normalizes, fault):
        super().__init__()
        self.sizes, self.fault = sizes, fault
        self.up, self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(16, 8)
        self.norm = nn.LayerNorm(16) if normalizes else nn.Identity()
        with torch.no_grad():
            self.second.weight.mul_(sizes[1])
            self.second.bias.zero_()

    def forward(self, x):
        hidden = torch.tanh(self.norm(self.up(x)))
        second = self.second(hidden) * (self.sizes[0] / self.sizes[1])
        if self.fault == "gradient":
            second = ScaledGradient.apply(second)
        return self.first(hidden), second * (2.0 if self.fault == "output" else 1.0)


class DoubledStep(torch.optim.SGD):
    """An optimizer that steps twice as far for the last parameter."""

    def step(self, closure=None):
        last = self.param_groups[-1]["params"][-1]
        last.grad.mul_(2)
        return super().step(closure)


@pytest.mark.parametrize(
    ("seed", "fault"),
    few([(seed, fault) for seed in SEEDS for fault in STAGES], (0, ""), (0, "output")),
)
def test_a_wrong_number_of_any_size_is_found(seed, fault):
    """What is doubled is found in its stage, whatever its size; without a fault all agree."""
    random = np.random.default_rng(seed)
    output, weight, loss_size = map(float, 10 ** random.uniform(-7, 1, size=3))
    normalizes, num_builds = random.random() < 0.5, []
    specs = [(None, "model"), ("model", None), ("batch", "model"), (None, None)]
    rules = {rf"{name}\.weight": specs[random.integers(len(specs))] for name in ("up", "first", "second")}

    def compute_loss(outputs, targets):
        first, second = outputs
        return F.mse_loss(first, targets) + loss_size * F.mse_loss(second / output, targets)

    def make_model():
        torch.manual_seed(0)
        num_builds.append(1)
        is_wrong = fault if len(num_builds) == 1 else ""
        optimizer = partial(DoubledStep if is_wrong == "step" else torch.optim.SGD, lr=0.05)
        return train_with(Net((output, weight), normalizes, is_wrong), loss=compute_loss, optimizer=optimizer)

    batch = tuple(random.normal(size=(8, 8)).astype("float32") for _ in "xy")
    report = lm.check_parity(
        make_model,
        lm.LayoutMap("batch=2,model=4", rules, rest="replicated"),
        batch,
        batch_dim="batch",
        library="torch",
        raises=False,
    )
    first = report.first_difference

    assert STAGES[fault] == (first and first.stage), first


class Counting(nn.Module):
    """A bias whose gradient is only rounding, before a normalization that counts its calls, and dropout."""

    def __init__(self):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 8)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x):
        return self.down(self.dropout(torch.tanh(self.norm(self.up(x)))))


def test_a_measured_gradient_changes_no_state():
    """To measure the rounding in a tiny gradient changes no count of calls, and no draw of the steps after it."""

    def make_model():
        torch.manual_seed(0)
        return train_with(Counting(), loss=F.mse_loss, optimizer=partial(torch.optim.SGD, lr=0.05))

    batch = tuple(np.random.default_rng(0).normal(size=(8, 8)).astype("float32") for _ in "xy")
    layout_map = lm.LayoutMap("batch=2,model=4", {r"up\.weight": ("model", None)}, rest="replicated")
    report = lm.check_parity(make_model, layout_map, batch, library="torch", batch_dim="batch")

    assert report.only_rounding["up.bias"].all()
