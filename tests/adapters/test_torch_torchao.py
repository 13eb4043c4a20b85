"""Optimizers and quantized weights of torchao are refused by name before anything changes."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch_pairs import assert_close, whole
from torchao.optim import AdamW4bit, AdamW8bit, AdamWFp8
from torchao.quantization import Int8WeightOnlyConfig, quantize_

import layoutmap as lm
from layoutmap.adapters.torch import train_with

pytestmark = pytest.mark.filterwarnings("ignore::layoutmap.LayoutMapWarning")

RULES = {r".*weight": ("model", None)}


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))


def make_quantized():
    model = make_model()
    quantize_(model, Int8WeightOnlyConfig())
    return model


def step(model, optimizer):
    model(torch.ones(2, 64)).square().mean().backward()
    with torch.compiler.set_stance("force_eager"):
        optimizer.step()


@pytest.mark.every_case
@pytest.mark.parametrize("make_optimizer", [AdamW8bit, AdamW4bit, AdamWFp8])
@pytest.mark.parametrize("mesh", ["batch=2,model=4", "batch=1,model=2"])
def test_state_in_fewer_bits_is_refused_before_the_first_step(make_optimizer, mesh):
    """Shards of 2,048 elements have float32 state, those of 4,096 blocks of their own: neither is one device's."""
    model = lm.LayoutMap(mesh, RULES).build(make_model, library="torch")
    before = [whole(each.detach()).clone() for each in model.parameters()]
    with pytest.raises(lm.ScopeError, match=f"^{make_optimizer.__name__}: its state exp_avg for a "):
        step(model, make_optimizer(model.parameters(), lr=0.1))

    for old, each in zip(before, model.parameters(), strict=True):
        assert torch.equal(old, whole(each.detach()))


def test_weights_too_small_for_fewer_bits_step_as_on_one_device():
    """Below 4,096 elements torchao keeps float32, on one device, too."""

    def make():
        torch.manual_seed(0)
        return nn.Linear(32, 32)

    models = make(), lm.LayoutMap("batch=2,model=4", {"weight": ("model", None)}).build(make, library="torch")
    for model in models:
        optimizer = AdamW8bit(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(2, 32)).square().mean().backward()
            with torch.compiler.set_stance("force_eager"):
                optimizer.step()

    assert_close(models[0].weight, models[1].weight)


def test_check_parity_names_the_optimizer():
    """The comparison of steps ends with its name."""

    def make():
        return train_with(make_model(), loss=F.mse_loss, optimizer=partial(AdamW8bit, lr=0.1))

    batch = torch.ones(4, 64), torch.zeros(4, 64)
    with (
        torch.compiler.set_stance("force_eager"),
        pytest.raises(lm.ScopeError, match=r"^AdamW8bit: its state exp_avg for a sharded weight"),
    ):
        lm.check_parity(make, lm.LayoutMap("batch=2,model=4", RULES), batch, library="torch")


def test_quantized_weights_are_refused_in_the_plan():
    """By their class, with the size of what they store; `build` and `apply` raise the plan's error."""
    layout_map = lm.LayoutMap("batch=2,model=4", RULES)
    plan = lm.plan(make_quantized, layout_map, library="torch")
    what = r"weight: it is a torchao\.quantization\.Int8Tensor, which consists of other tensors"

    assert ["0.weight", "2.weight"] == [problem.subject for problem in plan.errors]
    assert 64 * 128 == plan["0.weight"].variable.global_bytes
    with pytest.raises(lm.PlanError, match=what):
        layout_map.build(make_quantized, library="torch")
    with pytest.raises(lm.PlanError, match=what):
        layout_map.apply(make_quantized())


def test_neither_quantized_weights_nor_such_state_can_be_saved(tmp_path):
    """The error names the tensor and its class."""
    model = make_model()
    optimizer = AdamW8bit(model.parameters(), lr=0.1)
    step(model, optimizer)
    state = r"optimizer\.0\.weight\.exp_avg: a tensor that is a torchao\.optim\.subclass_8bit\.OptimState8bit"

    with pytest.raises(lm.CheckpointError, match=state):
        lm.save(model, tmp_path / "state", optimizer=optimizer)
    with pytest.raises(
        lm.CheckpointError, match=r"0\.weight: a tensor that is a torchao\.quantization\.Int8Tensor"
    ):
        lm.save(make_quantized(), tmp_path / "weights")
