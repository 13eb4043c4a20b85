"""Gradients end in the layouts of their parameters, whatever they wait for on the way."""

import copy

import pytest
import torch
from engines.torch.dtensors import MESH, place, run_on, whole
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode

from layoutmap.engines.torch.gather.gradients import GradientReducer
from layoutmap.engines.torch.placing import gather_if_sharded
from layoutmap.engines.torch.specs import get_local

PROCESSES = ("torch",)

LAYOUTS = {
    "0.weight": ("model", None),
    "0.bias": ("model",),
    "2.weight": (None, "model"),
    "4.weight": ("batch", None),
}


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 4)
    ).double()


def laid_out(model):
    model = copy.deepcopy(model)
    for name, parameter in list(model.named_parameters()):
        path, _, last = name.rpartition(".")
        specs = LAYOUTS.get(name, (None,) * parameter.ndim)
        setattr(model.get_submodule(path), last, nn.Parameter(place(parameter, *specs)))
    return model


def batch(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(8, size, generator=generator, dtype=torch.float64) for size in (6, 4)]


def loss_of(model, seed=0, *, on_mesh=False):
    x, y = batch(seed)
    if not on_mesh:
        return nn.functional.mse_loss(model(x), y)
    with run_on():
        return nn.functional.mse_loss(model(place(x, "batch", None)), place(y, "batch", None))


class Pair:
    """A plain model, and the same one laid out, whose gradients are finalized."""

    def __init__(self):
        self.plain = make_model()
        self.laid_out = laid_out(self.plain)
        self.gradients = GradientReducer(self.laid_out.parameters())

    def backward(self, seed=0, **options):
        plain, ours = loss_of(self.plain, seed), loss_of(self.laid_out, seed, on_mesh=True)
        plain.backward(**options)
        ours.backward(**options)
        return plain, ours

    def check(self):
        """Fail unless all gradients agree and lie as their parameters do."""
        for expected, actual in zip(self.plain.parameters(), self.laid_out.parameters(), strict=True):
            assert (expected.grad is None) == (actual.grad is None)
            if expected.grad is not None:
                assert actual.placements == actual.grad.placements
                torch.testing.assert_close(whole(actual.grad), expected.grad)


def test_gradients_are_added_up():
    """Several passes add up, also through one graph, and after gradients were set to none or zero."""
    pair = Pair()
    for seed in range(3):
        losses = pair.backward(seed, retain_graph=True)
        pair.check()
    for loss in losses:
        loss.backward()
    pair.check()
    for set_to_none in (True, False):
        for model in (pair.plain, pair.laid_out):
            model.zero_grad(set_to_none=set_to_none)
        pair.backward(5)
        pair.check()


def test_sums_are_made_together():
    """The gradients that wait to be summed up are summed up in one collective for each mesh dim, each pass."""
    pair = Pair()
    without = laid_out(pair.plain)
    for _ in range(2):
        loss, plain = loss_of(pair.laid_out, on_mesh=True), loss_of(without, on_mesh=True)
        with run_on(), CommDebugMode() as counted:
            loss.backward()
        with run_on(), CommDebugMode() as usual:
            plain.backward()
        added = {
            name.__name__: number - usual.get_comm_counts().get(name, 0)
            for name, number in counted.get_comm_counts().items()
            if number != usual.get_comm_counts().get(name, 0)
        }
        # The one that is scattered is of the weight that the batch's dim shards.
        assert {"all_reduce": len(MESH.shape), "reduce_scatter_tensor": 1} == added
        for parameter in without.parameters():
            parameter.grad = None


def test_a_pass_that_fails():
    """A pass that fails leaves the next one right."""
    pair = Pair()

    def fail(gradient):
        raise ZeroDivisionError

    hook = pair.laid_out[0].weight.register_hook(fail)
    with pytest.raises(ZeroDivisionError):
        loss_of(pair.laid_out, on_mesh=True).backward()
    hook.remove()
    pair.laid_out.zero_grad()
    pair.backward()

    pair.check()


def test_gradients_that_autograd_returns():
    """`torch.autograd.grad` leaves the gradients that there are."""
    pair = Pair()
    pair.backward()
    parameters = list(pair.laid_out.parameters())
    torch.autograd.grad(loss_of(pair.laid_out, 1, on_mesh=True), parameters)

    pair.check()


def test_removed():
    """Once removed, gradients are as they come."""
    pair = Pair()
    pair.gradients.remove()
    pair.backward()

    assert any(
        any(placement.is_partial() for placement in parameter.grad.placements)
        for parameter in pair.laid_out.parameters()
    )


def test_plain_parameters():
    """Plain parameters are passed over."""
    model = make_model()
    gradients = GradientReducer(model.parameters())
    loss_of(model).backward()

    assert all(type(parameter.grad) is torch.Tensor for parameter in model.parameters())
    gradients.remove()


def test_a_gathered_tensor_leaves_the_shards_of_its_source_without_gradient():
    """Autograd adds the gradient of a gather to its result, which could be a shard of the source."""
    with run_on():
        source = place(torch.arange(8.0), None).requires_grad_() * 1
        gathered = gather_if_sharded(source)

    assert gathered.requires_grad
    assert not any(piece.requires_grad for piece in get_local(source)._local_tensors.values())


def test_a_hook_that_changes_a_gradient_in_place_is_seen_by_later_operators():
    """Also by an operator of lists, whose changes torch does not count. A reduced gradient is kept until then."""
    seen = []

    def change(gradient):
        assert any(placement.is_partial() for placement in gradient.placements)
        other = torch.ones_like(whole(gradient))
        seen.append(whole(gradient + place(other, None, None)))
        torch._foreach_mul_([gradient], 2.0)
        seen.append(whole(gradient + place(other, None, None)))

    with run_on():
        x = place(torch.arange(48.0).view(8, 6), None, None).requires_grad_()
        weight = place(torch.arange(24.0).view(4, 6), "model", None)
        x.register_hook(change)
        nn.functional.linear(x, weight).sum().backward()

    expected = torch.arange(24.0).view(4, 6).sum(0).expand(8, 6)
    assert torch.equal(expected + 1, seen[0])
    assert torch.equal(2 * expected + 1, seen[1])
