"""Weights that are not used, and optimizers that round or that DTensor does not know, are those of one device.

What modules compute is tried on drawn ones: `layoutmap.testing.laws`.
"""

import itertools

import pytest
import torch
from cases import few
from torch import nn
from torch_pairs import assert_close

import layoutmap as lm

pytestmark = pytest.mark.filterwarnings("ignore::layoutmap.LayoutMapWarning")

RULES = {
    "columns": {r"[ab]\.weight": ("model", None)},
    "rows": {r"a\.weight": ("model", None), r"b\.weight": (None, "model")},
    "batch": {r"[ab]\.weight|spare": ("batch", None)},
}


class Two(nn.Module):
    """Two layers, what is computed with their output, and a weight that is not used."""

    def __init__(self, function):
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
        self.spare = nn.Parameter(torch.ones(6, 6))
        self.function = function

    def forward(self, x):
        return self.function(self.b(torch.relu(self.a(x))))


def test_a_weight_that_is_not_used():
    """A weight over the batch's dim that a forward pass does not use has no gradient, as on one device."""
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(9))
    found = []
    for build in (lambda make, **_: make(), lm.LayoutMap("batch=2,model=2", RULES["batch"]).build):
        torch.manual_seed(0)
        model = build(lambda: Two(torch.relu), batch_dim="batch", library="torch")
        model(x).square().sum().backward()
        found.append([each.grad for each in model.parameters()])

    for expected, actual in zip(*found, strict=True):
        assert (expected is None) == (actual is None)
        if expected is not None:
            assert_close(expected, actual)


@pytest.mark.every_case
@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
def test_muon_rounds_as_on_one_device(rules):
    """It computes in bfloat16, where sums of shards have other last digits, which its iterations multiply."""
    layout_map = lm.LayoutMap("batch=2,model=2", rules)
    ends = []
    for build in (lambda make, **_: make(), layout_map.build):
        torch.manual_seed(2)
        model = build(lambda: Two(torch.tanh), library="torch")
        weights = [each for each in model.parameters() if each.ndim == 2]
        optimizer = torch.optim.Muon(weights, lr=0.01)
        for number in range(3):
            for each in weights:
                generator = torch.Generator().manual_seed(number)
                each.grad = torch.zeros_like(each)
                each.grad.copy_(torch.randn(each.shape, generator=generator))
            optimizer.step()
        ends.append(weights)

    for expected, actual in zip(*ends, strict=True):
        assert_close(expected, actual, 1e-7)


@pytest.mark.parametrize(
    ("name", "rules"),
    few(
        itertools.product(("Rprop", "SGD", "Adagrad"), RULES),
        *zip(("Rprop", "SGD", "Adagrad"), RULES, strict=True),
    ),
)
def test_optimizers_that_dtensor_does_not_know(name, rules):
    """Rprop, and the fused forms of SGD and Adagrad, which plain DTensor refuses, step as on one device."""
    options = {} if name == "Rprop" else {"fused": True}
    x = torch.linspace(-1, 1, 48).reshape(8, 6)
    layout_map = lm.LayoutMap("batch=2,model=2", RULES[rules])
    ends = []
    for build in (lambda make, **_: make(), layout_map.build):
        torch.manual_seed(2)
        model = build(lambda: Two(torch.tanh), library="torch")
        optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.01, **options)
        for _ in range(3):
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()
        ends.append(list(model.parameters()))

    for expected, actual in zip(*ends, strict=True):
        assert_close(expected, actual)
