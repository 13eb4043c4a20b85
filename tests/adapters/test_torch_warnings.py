"""A model in layouts that is trained otherwise than its plan says warns once, and the fix that it names is one."""

import warnings

import pytest
import torch
from torch import nn
from torch_pairs import assert_close

import layoutmap as lm
from layoutmap.adapters.torch import slow_calls

PROCESSES = ("torch",)
RULES = {r".*\.weight": ("model", None), r".*bias": (None,)}
REPLACED = """\
0.weight: the parameter was replaced by an unsharded one
  shape       (8, 4)
  layout was  (model, unsharded)
  why         every device holds all of it, and an existing optimizer still trains the former parameter
  fix         assign values in place: module.weight.data.copy_(values); or shard it: layout_map.apply(model)"""
UNEVEN = """\
Sequential: no batch was sharded over mesh dim 'batch'
  rows  7
  mesh  {}
  why   7 is not a multiple of 2, so every device computed with all rows
  fix   use a batch_size that is a multiple of 2"""


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8))


def build():
    layout_map = lm.LayoutMap(lm.create_mesh("batch=2,model=2"), RULES)
    return layout_map, layout_map.build(make_model, batch_dim="batch", library="torch")


def warned(compute, *arguments):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        compute(*arguments)
    assert all(each.filename == __file__ for each in found)
    return [str(each.message) for each in found]


def train(model, *rows):
    for number in rows:
        model(torch.ones(number, 4)).square().mean().backward()


@pytest.mark.parametrize("rows", [(7, 7), (7, 8, 7)])
def test_batches_that_do_not_divide(rows):
    """Trained with those alone, a model warns once; after one that divides, or without gradients, it does not."""
    layout_map, model = build()

    assert [] == warned(torch.no_grad()(model), torch.ones(7, 4))
    assert [UNEVEN.format(layout_map.mesh)] == warned(train, model, *rows)
    _, model = build()
    assert [] == warned(train, model, 8, *rows)


def test_a_parameter_that_was_replaced():
    """A model warns once of a plain parameter in the place of one in a layout; both fixes are right."""
    layout_map, model = build()
    values, plain = torch.ones(8, 4), make_model()
    plain[0].weight.data.copy_(values)
    model[0].weight = nn.Parameter(values.clone())

    assert [REPLACED] == warned(train, model, 8, 8)
    layout_map.apply(model, batch_dim="batch")
    assert [] == warned(train, model, 8)
    assert ("model", "unsharded") == lm.dtensor.fetch_layout(model[0].weight).sharding_specs
    _, other = build()
    other[0].weight.data.copy_(values)
    assert [] == warned(train, other, 8)
    train(plain, 8)
    assert_close(plain[0].weight.grad, other[0].weight.grad)


def test_parameters_that_are_not_replaced():
    """Adapters, parametrizations, and values of a state dict are no replaced parameters."""
    _, model = build()
    model[2] = nn.Sequential(model[2], nn.Linear(8, 2))
    nn.utils.parametrize.register_parametrization(model[0], "weight", nn.Tanh())
    model[2][0].load_state_dict(nn.Linear(8, 8).state_dict(), assign=True)

    assert [] == warned(train, model, 8)


def test_a_slow_step_on_simulated_devices_recommends_torchrun_once(capsys, monkeypatch):
    """The second slow call of a model says so, if a person sees stderr or asks for progress."""
    monkeypatch.setattr(slow_calls, "_PATIENCE_SECONDS", -1.0)
    told = []
    for progress in (True, None):
        layout_map = lm.LayoutMap(lm.create_mesh("batch=2,model=2"), RULES)
        model = layout_map.build(make_model, batch_dim="batch", library="torch", progress=progress)
        capsys.readouterr()
        for _ in range(3):
            train(model, 4)
        told.append(capsys.readouterr().err)

    assert "" == told[1]
    assert told[0].startswith("layoutmap: this call took 0 s, since one process computes the parts of ")
    assert told[0].endswith(" PROGRAM\n")
    assert 1 == told[0].count("\n")
