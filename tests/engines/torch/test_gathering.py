"""Weights gathered by one collective are those gathered one by one, and so are their gradients."""

import itertools

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate

import layoutmap as lm
from layoutmap.dtensor import relayout
from layoutmap.engines import get_engine
from layoutmap.engines.torch.gather.fsdp import GatheredTensors, can_gather_by_concatenation
from layoutmap.testing.engine_contract import list_all_specs

MESH = lm.Mesh(None, "batch=2,model=4")


def weights(specs):
    torch.manual_seed(0)
    return [relayout(torch.randn(16, 8, 8), lm.Layout(each, MESH)).requires_grad_() for each in specs]


def whole(tensor):
    return get_engine("torch").to_numpy(tensor)


CUT_BY_BATCH = [
    specs
    for specs in list_all_specs(MESH, 3)
    if any(spec == "batch" or (isinstance(spec, tuple) and "batch" in spec) for spec in specs)
]


def test_what_can_be_gathered_is_gathered():
    """Weights that a mesh dim shards, by itself or within what another shards, have their values and gradients."""
    fitting = [specs for specs in CUT_BY_BATCH if can_gather_by_concatenation(weights([specs])[0], 0)]
    cut = weights(fitting)
    together = GatheredTensors(cut, 0).make_gathered_tensors()
    factor = torch.arange(16.0).reshape(16, 1, 1)
    sum((tensor * relayout(factor, lm.Layout([None] * 3, MESH))).sum() for tensor in together).backward()

    assert not any(spec == ("batch", "model") for specs in fitting for spec in specs)
    assert 3 == sum(("model", "batch") in specs for specs in fitting)
    assert 12 == len(fitting)
    for before, tensor in zip(cut, together, strict=True):
        assert tensor.placements[0].is_replicate()
        assert before.placements[1] == tensor.placements[1]
        assert before.placements == before.grad.placements
        assert (whole(before) == whole(tensor)).all()
        assert (factor.expand(16, 8, 8).numpy() == whole(before.grad)).all()


def test_what_is_not_used_has_no_gradient():
    """As on one device, also beside what is used, and is gathered with it."""
    used, unused = weights([("batch", None, None), ("batch", "model", None)])
    GatheredTensors([used, unused], 0).make_gathered_tensors()[0].sum().backward()

    assert (whole(used.grad) == 1).all()
    assert unused.grad is None


@pytest.mark.parametrize(("placement", "times"), [(Partial(), 2.0), (Replicate(), 1.0)])
def test_a_gradient_is_summed_up_once(placement, times):
    """A gradient whose parts wait to be summed up is their sum, and one that every device has whole is itself."""
    (weight,) = weights([("batch", "model", None)])
    (together,) = GatheredTensors([weight], 0).make_gathered_tensors()
    ones = relayout(torch.ones(16, 8, 8), lm.Layout([None, "model", None], MESH))
    upstream = type(ones).from_local(ones.to_local(), ones.device_mesh, [placement, ones.placements[1]])
    together.backward(upstream)

    assert (times == whole(weight.grad)).all()


def test_what_another_dim_shards_too_is_left():
    """An axis that two dims shard is not gathered over the first dim alone where the second shards more finely."""
    for specs in itertools.permutations((("batch", "model"), None, None)):
        assert not can_gather_by_concatenation(weights([specs])[0], 0)
