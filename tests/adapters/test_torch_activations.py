"""Layouts for outputs of layers that put out several tensors."""

from __future__ import annotations

import torch
from torch import nn

import layoutmap as lm


class Pair(nn.Module):
    """Puts out a tuple of tensors with different numbers of axes."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x):
        y = self.up(x)
        return y, y.sum(-1)


class Whole(nn.Module):
    """Has a layer that puts out two tensors."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.pair = Pair()

    def forward(self, x):
        y, total = self.pair(x)
        return y + total[:, None]


def test_of_several_outputs_those_of_the_layouts_rank_are_laid_out():
    """The others stay as they come."""
    rules = {r".*weight": ("model", None), r".*bias": ("model",)}
    layout_map = lm.LayoutMap(lm.create_mesh("batch=2,model=4"), rules, {"pair": ("batch", None)})
    model = layout_map.build(Whole, batch_dim="batch", library="torch")
    seen = []
    model.pair.register_forward_hook(
        lambda _, __, out: seen.append(lm.dtensor.fetch_layout(out[0]).sharding_specs)
    )
    x = torch.ones(4, 8)

    torch.testing.assert_close(model(x), Whole()(x))
    assert [("batch", "unsharded")] == seen
