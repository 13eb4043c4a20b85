"""Layouts for layers' outputs, where batches do not divide and layers put out several tensors."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import layoutmap as lm

RULES = {
    r"0\.weight": ("model", None),
    r"0\.bias": ("model",),
    r"1\.weight": (None, "model"),
    r"1\.bias": (None,),
}


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))


@pytest.mark.parametrize("rows", [4, 3])
def test_a_batch_that_does_not_divide_is_replicated(rows):
    """Outputs and gradients are those of one device for the last batch, too."""
    layout_map = lm.LayoutMap(lm.create_mesh("batch=2,model=4"), RULES, {"1": ("batch", None)})
    model = layout_map.build(make_model, batch_dim="batch", library="torch")
    plain = make_model()
    x = torch.randn(rows, 8, generator=torch.Generator().manual_seed(1))
    seen = []
    model[1].register_forward_hook(
        lambda _, __, out: seen.append(lm.dtensor.fetch_layout(out).sharding_specs)
    )

    for each in (plain, model):
        each(x).square().sum().backward()

    assert [("batch" if rows == 4 else "unsharded", "unsharded")] == seen
    torch.testing.assert_close(model(x), plain(x))
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad)


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
