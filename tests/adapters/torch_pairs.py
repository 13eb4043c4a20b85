"""A plain torch model and the same model laid out, to be trained side by side."""

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch_models import Perceptron, batch

import layoutmap as lm

torch.set_num_threads(1)

CUT = {
    r".*\.0\.weight": ("model", "batch"),
    r".*\.0\.bias": ("model",),
    r".*\.3\.weight": ("batch", "model"),
    r"frozen|heads.*weight": (None, "model"),
}
BY_BATCH = {r".*\.0\.weight": ("batch", None), r".*\.3\.weight": (None, "batch"), r".*bias": ("batch",)}
X = torch.from_numpy(batch("perceptron")[0])
Y = torch.from_numpy(batch("perceptron")[1])


def make_map(rules=CUT, mesh="batch=2,model=4"):
    return lm.LayoutMap(lm.create_mesh(mesh), rules)


def seeded(make_model):
    torch.manual_seed(7)
    return make_model()


def pair(make_model=Perceptron, rules=CUT, mesh="batch=2,model=4", batch_dim="batch"):
    """A plain model, and the same model laid out."""
    layout_map = make_map(rules, mesh)
    plain = seeded(make_model)
    return plain, layout_map.build(lambda: seeded(make_model), batch_dim=batch_dim, library="torch")


def whole(tensor):
    if not isinstance(tensor, DTensor):
        return tensor
    plain = lm.Layout.replicated(lm.dtensor.fetch_layout(tensor).mesh, tensor.ndim)
    return torch.as_tensor(lm.dtensor.unpack(lm.dtensor.relayout(tensor, plain).float())[0]).to(tensor.dtype)


def assert_close(expected, actual, tolerance=1e-5):
    expected, actual = whole(expected.detach()), whole(actual.detach())
    assert expected.dtype == actual.dtype
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def assert_models_close(plain, model, tolerance=1e-5):
    for (path, expected), actual in zip(plain.state_dict().items(), model.state_dict().values(), strict=True):
        assert_close(expected, actual, tolerance), path


def step(model, optimizer, x=X, y=Y):
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    return loss


class Layers(nn.Module):
    """A perceptron in which every gradient is more than rounding."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 128), nn.LayerNorm(128), nn.GELU(), nn.Linear(128, 64))

    def forward(self, x):
        return self.body(x)


def assert_trains_as_plain(make_optimizer, steps=3, tolerance=1e-5, **options):
    plain, model = pair(Layers, **options)
    optimizers = [make_optimizer(each.parameters()) for each in (plain, model)]
    for _ in range(steps):
        losses = [step(each, optimizer) for each, optimizer in zip((plain, model), optimizers, strict=True)]
        assert_close(*losses, tolerance)
    assert_models_close(plain, model, tolerance)
    return model, optimizers[1]
