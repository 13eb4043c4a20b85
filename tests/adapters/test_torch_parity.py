"""A transformer and an MLP train as on one device: five steps of three kinds of optimizers, on every kind of mesh.

Their rules cut weights by both dims of a mesh. On a mesh of one dim they sharded by what is left: by `model` as tensor
parallelism does, by `batch`, which the rows are sharded by, too, as FSDP does.
"""

from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch_models import Lion, Transformer, token_loss

import layoutmap as lm
from layoutmap.adapters.torch import train_with

pytestmark = pytest.mark.filterwarnings("ignore::layoutmap.LayoutMapWarning")
torch.set_num_threads(1)


class MLP(nn.Sequential):
    """A perceptron of one hidden layer."""

    def __init__(self):
        super().__init__(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 16))


MODELS = {"transformer": partial(Transformer, size=16, heads=8, vocabulary=64, depth=1), "mlp": MLP}
LOSSES = {"transformer": token_loss, "mlp": F.mse_loss}
OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adamw": partial(torch.optim.AdamW, lr=1e-3),
    "lion": Lion,
}
RULES = {
    "transformer": {
        r"tokens\.weight": ("model", "batch"),
        r".*\.(query|up)\.weight": ("model", "batch"),
        r".*\.(key|value)\.weight": ("model", None),
        r".*\.(out|down)\.weight": ("batch", "model"),
        r".*\.up\.bias": (("batch", "model"),),
        r".*\.norm1\.weight": ("batch",),
    },
    "mlp": {
        r"0\.weight": ("model", "batch"),
        r"0\.bias": (("batch", "model"),),
        r"2\.weight": ("batch",),
        r"3\.weight": ("batch", "model"),
        r"3\.bias": ("model",),
    },
}


MESHES = ("model=8", "batch=2,model=4", "batch=4,model=2")


def layout_map(name, dims):
    """The rules of a model on a mesh, without the dims that it does not have."""
    mesh = lm.create_mesh(dims)

    def here(spec):
        names = spec if isinstance(spec, tuple) else (spec,)
        return tuple(dim for dim in names if dim in mesh.dim_names) or None

    return lm.LayoutMap(mesh, {path: tuple(map(here, specs)) for path, specs in RULES[name].items()})


def batch(name):
    """Inputs and targets, eight rows of them."""
    random = np.random.default_rng(0)
    if name == "transformer":
        return random.integers(0, 64, (8, 8)), random.integers(0, 64, (8, 8))
    return random.normal(size=(8, 16)).astype("float32"), random.normal(size=(8, 16)).astype("float32")


@pytest.mark.long  # that a model trains as on one device is a law of the contract
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    ("optimizer", "mesh"), [*((name, mesh) for name in OPTIMIZERS for mesh in MESHES), ("adamw", "batch=8")]
)
def test_five_steps_give_the_numbers_of_one_device(model, optimizer, mesh):
    """First weights bit for bit; outputs, gradients, and losses, weights and slots of each step within 1e-5."""
    report = lm.check_parity(
        lambda: train_with(MODELS[model](), loss=LOSSES[model], optimizer=OPTIMIZERS[optimizer]),
        layout_map(model, mesh),
        batch(model),
        steps=5,
        batch_dim="batch" if "batch" in mesh else None,
        library="torch",
        tolerance=1e-5,
    )
    last = [row for row in report.rows if row.stage == "step 5" and not row.name.startswith("optimizer.")]

    assert report.agrees
    assert 0.0 == report.worst("weights")
    assert max(abs(plain - ours) for plain, ours in report.losses) <= 1e-5
    assert {"loss", *dict(MODELS[model]().named_parameters())} <= {row.name for row in last}
    # What `check_parity` does not compare, because its gradient is only rounding, is next to nothing.
    assert sum(row.left_out for row in last) <= 0.01 * sum(p.numel() for p in MODELS[model]().parameters())
