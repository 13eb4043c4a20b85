"""Joins on a mesh are those of plain tensors, an empty tensor at the beginning included."""

import pytest
import torch
from engines.torch.dtensors import place, run_on, whole
from torch.distributed.tensor.debug import CommDebugMode

PROCESSES = ("torch",)
pytestmark = pytest.mark.every_case


@pytest.mark.parametrize("join", [torch.cat, torch.concat, torch.concatenate])
@pytest.mark.parametrize("by_name", [False, True])
def test_an_empty_tensor_of_one_axis_joins_with_any(join, by_name):
    """As a cache of keys and values begins; nothing is gathered, in the step forward and back."""
    x = torch.arange(24.0).view(2, 4, 3)
    cut = place(x, "batch", "model", None).requires_grad_()
    tensors = [torch.tensor([]), cut, cut]

    with run_on(), CommDebugMode() as counter:
        joined = join(tensors=tensors, dim=-1) if by_name else join(tensors, -1)
        joined.backward(torch.ones_like(joined))

    assert {} == counter.get_comm_counts()
    assert torch.equal(join([x, x], -1), whole(joined))
    assert torch.equal(torch.full_like(x, 2.0), whole(cut.grad))


def test_empty_tensors_among_themselves_stay():
    """A join of what has one axis at most is torch's own."""
    with run_on():
        assert (0,) == tuple(torch.cat([place(torch.tensor([]), None), torch.tensor([])]).shape)
        assert [1.0, 2.0] == whole(
            torch.cat([torch.tensor([]), place(torch.tensor([1.0, 2.0]), "model")])
        ).tolist()
