"""Drawn models of torch are models, each kind and each pair of kinds of parts comes, and what is printed runs."""

import itertools
from collections import Counter

import numpy as np
import pytest
import torch
from testing.drawn_kinds import counted, layouts_not_drawn, pairs_not_drawn

import layoutmap as lm
from layoutmap.adapters import get_adapter
from layoutmap.adapters.torch.training import call_model, compute_loss
from layoutmap.testing import models
from layoutmap.testing.models.cases import Case
from layoutmap.testing.models.maps import DrawnLayoutMap
from layoutmap.testing.models.torch.drawing import HOOKS
from layoutmap.testing.models.torch.kinds import KINDS
from layoutmap.testing.models.torch.model import CHECKPOINT_SIDES, Checkpoint, Class, Model, Part
from layoutmap.testing.models.values import ModelValue

PROCESSES = ("torch",)
pytestmark = pytest.mark.filterwarnings("ignore")  # of models that nobody would write


def test_every_kind_and_every_pair_of_kinds_is_drawn():
    """Of 5,000 models none lacks, as attributes, in containers, and in an `nn.Sequential`."""
    drawn = [models.draw_model(seed, "torch") for seed in range(5000)]
    kinds, pairs = counted(set(model.layer_kinds) for model in drawn)
    styles = Counter("sequential" if each.is_sequential else each.classes[-1].style for each in drawn)

    assert set(KINDS) < set(kinds)
    assert [] == pairs_not_drawn(KINDS, pairs)
    assert min(styles.values()) > 300
    assert set(HOOKS) == {hook for each in drawn for hook in each.hooks}
    assert {1, 2, 3} == {each.num_passes for each in drawn if each.hooks}
    assert 1000 < sum(bool(each.hooks) for each in drawn) < 1500
    assert 2000 < sum(each.returns_loss for each in drawn) < 3000
    checkpoints = [
        {part.checkpoint for own in each.classes for part in own.parts if part.checkpoint} for each in drawn
    ]
    sides = itertools.product(CHECKPOINT_SIDES, (False, True))
    assert {Checkpoint(*each) for each in sides} == set().union(*checkpoints)
    assert 1000 < sum(map(bool, checkpoints)) < 1600


@pytest.mark.parametrize("side", CHECKPOINT_SIDES)
@pytest.mark.parametrize("is_reentrant", [False, True])
def test_a_drawn_checkpoint_computes_again(side, is_reentrant):
    """The module is called a second time in the backward pass, and the gradients are those without a checkpoint."""
    gradients, calls = [], []
    for checkpoint in (None, Checkpoint(side, is_reentrant)):
        part = Part(
            "l0",
            ("Linear",),
            "nn.Sequential(nn.Linear(8, 4))",
            (),
            ("x1 = {l0}(x0)",),
            "x1",
            (4,),
            checkpoint,
        )
        net = Class("Net", "attributes", ("x0",), (part,), ("x1",))
        output = ModelValue("x1", (4,), loss="F.mse_loss(o, t)")
        model = Model(False, (ModelValue("x0", (8,)),), (net,), (output,))
        case = Case(model, DrawnLayoutMap("batch=8", (), (), "error", None), next(iter(Model.optimizers)), 8)
        torch.manual_seed(0)
        made = case.make_model()
        (linear,) = (each for each in made.modules() if isinstance(each, torch.nn.Linear))
        linear.register_forward_pre_hook(lambda *_, checkpoint=checkpoint: calls.append(checkpoint))
        gradients.append(get_adapter("torch").gradients(made, case.batch)[1].values())

    assert [None, *[Checkpoint(side, is_reentrant)] * 2] == calls
    assert [] == [pair for pair in zip(*gradients, strict=True) if not np.array_equal(*pair)]


@pytest.mark.long
def test_every_kind_of_layout_is_drawn_for_every_kind_of_part():
    """Weights of several axes are replicated, and sharded over one dim, two, and two along one axis."""

    def kinds_by_path(model):
        own, around = model.classes[-1], "net." * model.returns_loss
        return {
            f"{around}{own.get_module_path(part.name)}": part.kinds[0] for part in own.parts if part.module
        }

    assert [] == layouts_not_drawn((models.draw(seed, "torch") for seed in range(1200)), kinds_by_path)


@pytest.mark.parametrize("seed", range(24))
def test_outputs_have_the_shapes_that_are_described(seed):
    """So do targets, which a loss would broadcast without a word."""
    case = models.draw(seed, "torch")
    outputs = call_model(case.make_model(), case.batch)
    loss, outputs = outputs if case.model.returns_loss else (None, outputs)
    found = outputs if isinstance(outputs, tuple) else (outputs,)

    described = [(*each.shape, each.classes) if each.classes else each.shape for each in case.model.outputs]
    assert loss is None or () == loss.shape
    assert described == [tuple(each.shape[1:]) for each in found]


@pytest.mark.parametrize("seed", range(8))
def test_modules_return_the_shapes_that_rules_for_activations_are_drawn_for(seed):
    """Each of them is a module of the model."""
    case = models.draw(seed, "torch")
    made, found = case.make_model(), {}
    for path in case.model.layer_output_shapes:
        made.get_submodule(path).register_forward_hook(
            lambda module, inputs, output, path=path: found.update({path: tuple(output.shape[1:])})
        )
    call_model(made, case.batch)

    assert dict(case.model.layer_output_shapes) == found


@pytest.mark.parametrize("first", [0, 100, 200])
def test_a_plain_model_computes_on_the_device_of_its_weights(first):
    """No part makes a tensor elsewhere, and the batch is put there: on torch's device without values, too."""
    refused = set()
    for seed in range(first, first + 100):
        case = models.draw(seed, "torch")
        try:
            assert "meta" == compute_loss(case.make_model().to("meta"), case.batch).device.type
        except RuntimeError as error:  # some outputs are read as numbers, and there are none
            refused.add(str(error))

    assert {"Tensor.item() cannot be called on meta tensors"} >= refused


def test_a_plain_model_is_on_a_device_of_the_meshs_type():
    """Torch makes it on the CPU; beside a mesh of GPUs it is moved to one, which torch refuses where there is none."""

    def make(device_type):
        mesh = lm.Mesh([f"{device_type}:0"], "model=1")
        return get_adapter("torch").build_model_on_one_device(lambda: torch.nn.Linear(4, 4), mesh)

    assert {"cpu"} == {each.device.type for each in make("CPU").parameters()}
    if torch.cuda.is_available():
        moved = make("GPU")
        assert {"cuda"} == {each.device.type for each in moved.parameters()}
    else:
        with pytest.raises((AssertionError, RuntimeError), match=r"(?i)cuda"):
            make("GPU")
