"""What a laid-out torch module computes in its forward pass is what one device computes, and so are the gradients.

The backward pass runs outside of the module's call, as in any loop.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch_pairs import assert_close

import layoutmap as lm

pytestmark = [pytest.mark.every_case, pytest.mark.filterwarnings("ignore::layoutmap.LayoutMapWarning")]

CAPTURED = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
COLUMNS = {r"[ab]\.weight": ("model", None)}
ROWS = {r"a\.weight": ("model", None), r"b\.weight": (None, "model")}
BATCH = {r"[ab]\.weight|spare": ("batch", None)}


class Two(nn.Module):
    """Two layers, what is computed with their output, and a weight that is not used."""

    def __init__(self, function):
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
        self.spare = nn.Parameter(torch.ones(6, 6))
        self.function = function

    def forward(self, x):
        return self.function(self.b(torch.relu(self.a(x))))


class Grouped(nn.Module):
    """Attention with four heads for queries and two for keys and values."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = nn.Linear(8, 16), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(16, 8)

    def forward(self, x):
        q, k, v = (
            layer(x).unflatten(2, (heads, 4)).transpose(1, 2)
            for layer, heads in ((self.q, 4), (self.k, 2), (self.v, 2))
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o(y.transpose(1, 2).flatten(2))


def outcome(model, x):
    """What a model gives, and the gradients of its input and weights."""
    torch.manual_seed(3)
    x = x.clone().requires_grad_()
    result = model(x)
    (result * torch.linspace(-1, 2, result.numel()).reshape(result.shape)).sum().backward()
    return [result, x.grad, *(each.grad for each in model.parameters())]


def assert_as_one_device(make_model, x, mesh, rules):
    def seeded():
        torch.manual_seed(0)
        return make_model()

    expected = outcome(seeded(), x)
    actual = outcome(lm.LayoutMap(mesh, rules).build(seeded, batch_dim="batch", library="torch"), x)
    assert [each is None for each in expected] == [each is None for each in actual]
    for one, other in zip(expected, actual, strict=True):
        if one is not None:
            assert_close(one, other, 1e-4)


FUNCTIONS = {
    "logits": lambda y: F.binary_cross_entropy_with_logits(y, torch.sigmoid(CAPTURED)),
    "logits, weighted": lambda y: F.binary_cross_entropy_with_logits(
        y, torch.sigmoid(CAPTURED), pos_weight=torch.full((6,), 2.0)
    ),
    "new_ones": lambda y: y * y.new_ones(y.shape),
    "new_full": lambda y: y * y.new_full(y.shape, 2.0),
    "a number over it": lambda y: 2.0 / (y + 5),
    "lerp": lambda y: torch.lerp(y, torch.ones(y.shape), y),
    "a captured tensor": lambda y: F.mse_loss(y, CAPTURED),
    "an index in a list": lambda y: y[[2, 0, 1]],
    "dropout, channels last": lambda y: F.dropout(
        y.view(2, 2, 2, 6).contiguous(memory_format=torch.channels_last), 0.4
    ),
}


@pytest.mark.parametrize("rules", [ROWS, COLUMNS, {}], ids=["rows", "columns", "none"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_an_output(name, rules):
    """A function of a layer's output is right, however the layer is sharded."""
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(9))

    assert_as_one_device(lambda: Two(FUNCTIONS[name]), x, "batch=2,model=2", rules)


@pytest.mark.parametrize(
    ("mesh", "shape"),
    [("batch=2,model=4", (4, 8)), ("batch=2,model=2", (6, 5, 6)), ("batch=2,model=2", (6,))],
)
def test_rows_that_not_all_devices_divide(mesh, shape):
    """Rows that each dim divides and their product does not, in several axes or in none, are as on one device."""
    x, size = torch.randn(shape, generator=torch.Generator().manual_seed(9)), shape[-1]
    rules = {r"0\.weight": ("model", None), r"1\.weight": (None, "model")}

    assert_as_one_device(
        lambda: nn.Sequential(nn.Linear(size, size), nn.Linear(size, size), nn.LayerNorm(size)),
        x,
        mesh,
        rules,
    )


def test_attention_of_which_only_queries_can_be_sharded():
    """Heads of keys that the dim does not divide are gathered, and the gradients are those of one device."""
    x = torch.randn(4, 3, 8, generator=torch.Generator().manual_seed(9))
    rules = {r"[qkv]\.weight": ("model", None), r"o\.weight": (None, "model")}

    assert_as_one_device(Grouped, x, "batch=2,model=4", rules)


def test_a_weight_that_is_not_used():
    """A weight over the batch's dim that a forward pass does not use has no gradient, as on one device."""
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(9))

    assert_as_one_device(lambda: Two(torch.relu), x, "batch=2,model=2", BATCH)


@pytest.mark.parametrize("rules", [COLUMNS, ROWS, BATCH], ids=["columns", "rows", "batch"])
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


@pytest.mark.parametrize("name", ["Rprop", "SGD", "Adagrad"])
@pytest.mark.parametrize("rules", [COLUMNS, ROWS, BATCH], ids=["columns", "rows", "batch"])
def test_optimizers_that_dtensor_does_not_know(name, rules):
    """Rprop, and the fused forms of SGD and Adagrad, which plain DTensor refuses, step as on one device."""
    options = {} if name == "Rprop" else {"fused": True}
    x = torch.linspace(-1, 1, 48).reshape(8, 6)
    layout_map = lm.LayoutMap("batch=2,model=2", rules)
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
