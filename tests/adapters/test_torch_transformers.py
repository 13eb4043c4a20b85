"""Models of transformers, laid out by their tensor parallel plans, train as the plain models do."""

from __future__ import annotations

import resource

import pytest
import torch
import transformers
from cases import few
from transformers_models import FULL, WITH_A_PLAN, WITHOUT, on_meta

import layoutmap as lm
from layoutmap.engines.torch.engine import engine

MESH = "batch=2,model=4"
TOKENS = torch.randint(1, 64, (4, 8), generator=torch.Generator().manual_seed(0))
INPUTS = {
    "vit": {
        "pixel_values": torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(1)),
        "labels": torch.tensor([0, 1, 1, 0]),
    },
    "whisper": {
        "input_features": torch.randn(4, 8, 32, generator=torch.Generator().manual_seed(1)),
        "labels": TOKENS,
    },
}


def make_map(name, mesh=None, config=None):
    """The map of the model's own plan, or of the one that is written for it."""
    mesh = mesh or lm.create_mesh(MESH)
    if name in WITH_A_PLAN:
        kind, small, _ = WITH_A_PLAN[name]
        return lm.LayoutMap.from_tp_plan(on_meta(kind, config or small), mesh, batch_dim="batch")
    kind, small, plan = WITHOUT[name]
    config = config or small
    parameters = dict(on_meta(kind, config).named_parameters(remove_duplicate=False))
    return lm.LayoutMap.from_tp_plan(plan, mesh, batch_dim="batch", parameters=parameters)


def train(model, inputs):
    """The losses before and after a step, and the gradients that it took."""
    torch.manual_seed(7)  # dropout draws the same masks
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    first = model(**inputs).loss
    first.backward()
    gradients = {
        path: torch.from_numpy(engine().to_numpy(parameter.grad))
        for path, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    optimizer.step()
    with torch.no_grad():
        second = model(**inputs).loss
    return [first.item(), second.item()], gradients


@pytest.mark.parametrize(
    ("name", "rows"),
    few(
        [
            *((name, 4) for name in ("llama", "mixtral", "qwen3_moe", "gemma3", *WITHOUT)),
            ("llama", 3),
            ("bert", 3),
        ],
        ("llama", 4),
    ),
)
@pytest.mark.filterwarnings("ignore::layoutmap.LayoutMapWarning")  # rules for what a plan does not speak of
def test_losses_and_gradients_are_those_of_the_plain_model(name, rows):
    """With caches, masks, ties and dropout as transformers has them; also for a batch that does not divide."""
    kind, config, _ = {**WITH_A_PLAN, **WITHOUT}[name]
    given = INPUTS.get(name, {"input_ids": TOKENS, "labels": TOKENS})
    inputs = {argument: values[:rows] for argument, values in given.items()}
    layout_map = make_map(name)

    torch.manual_seed(0)
    losses, gradients = train(getattr(transformers, kind)(config()), inputs)
    torch.manual_seed(0)
    with layout_map.scope(batch_dim="batch", library="torch"):
        model = getattr(transformers, kind)(config())
    losses_here, gradients_here = train(model, inputs)

    assert pytest.approx(losses, rel=1e-5) == losses_here
    assert gradients.keys() == gradients_here.keys()
    for path, gradient in gradients.items():
        torch.testing.assert_close(gradients_here[path], gradient, rtol=1e-5, atol=1e-6, msg=path)


@pytest.mark.parametrize("name", few(FULL, "llama"))
@pytest.mark.filterwarnings("ignore::layoutmap.LayoutMapWarning")
def test_a_model_of_full_size_is_planned(name):
    """Each weight of it, on a mesh that no machine has, with what it takes on a device; no weight is made."""
    kind, _, _ = {**WITH_A_PLAN, **WITHOUT}[name]
    layout_map = make_map(name, lm.Mesh(None, "batch=64,model=4"), FULL[name])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    plan = lm.plan(lambda: getattr(transformers, kind)(FULL[name]()), layout_map, library="torch")
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    weights = {a.variable.path: a.variable.shape for a in plan.assignments if a.variable.kind == "weight"}

    assert {path: tuple(p.shape) for path, p in on_meta(kind, FULL[name]).named_parameters()} == weights
    assert () == plan.errors
    assert plan.global_bytes / 4 <= plan.device_bytes < plan.global_bytes / 2
    assert grown * 1024 < plan.global_bytes / 4
