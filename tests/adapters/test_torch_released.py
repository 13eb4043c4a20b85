"""Gathered weights are freed after a call, and a model that is let go is freed with them."""

import gc
import re
import weakref

import pytest
import torch
from torch import nn

import layoutmap as lm
from layoutmap.engines.torch.dtensor_ops import memories

PROCESSES = ("torch",)
pytestmark = pytest.mark.filterwarnings("ignore::layoutmap.LayoutMapWarning")


class Keeping(nn.Linear):
    """A layer that keeps the weight of its last call."""

    def forward(self, x):
        self.last = [self.weight]
        return super().forward(x)


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.cell = kind(8, 8, batch_first=True)

    def forward(self, x):
        return self.cell(x[:, None])[0]


MODELS = {
    "GRU": lambda: Recurrent(nn.GRU),
    "LSTM": lambda: Recurrent(nn.LSTM),
    "RNN": lambda: Recurrent(nn.RNN),
    "a cell": lambda: nn.Sequential(nn.Linear(8, 8), nn.GRUCell(8, 8)),
    "a layer that keeps its weight": lambda: nn.Sequential(Keeping(8, 8), nn.Tanh()),
    "blocks": lambda: nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)) for _ in range(2))),
}


def shard(model):
    layout_map = lm.LayoutMap(lm.create_mesh("batch=2,model=4"))
    for name, weight in model.named_parameters():
        layout_map[re.escape(name)] = ("batch", *[None] * (weight.ndim - 1))
    layout_map.apply(model, batch_dim="batch")


def train(name, backward):
    model = MODELS[name]()
    shard(model)
    for _ in range(2):
        loss = model(torch.randn(4, 8)).square().mean()
        if backward:
            loss.backward()
    return model


@pytest.mark.every_case
@pytest.mark.parametrize("backward", [True, False], ids=["with a backward pass", "without"])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_that_is_let_go_is_freed(name, backward):
    """Its weights, and the copies of them in other layouts."""
    gc.collect()
    before = len(memories.copied)
    weights = [weakref.ref(each) for each in train(name, backward).parameters()]
    gc.collect()

    assert [None] * len(weights) == [each() for each in weights]
    assert before == len(memories.copied)


@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM, nn.RNN])
def test_a_recurrent_layer_keeps_its_own_weights(kind):
    """After a call, torch's list of its weights has the sharded parameters, not the gathered ones."""
    model = Recurrent(kind)
    shard(model)
    model(torch.randn(4, 8))

    assert all(a is b for a, b in zip(model.cell._flat_weights, model.cell.parameters(), strict=True))
