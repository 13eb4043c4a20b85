"""What only torch's tensors have: gradients asked for when one is made, and sums that are pending."""

import pytest
import torch
from torch.distributed.tensor import DTensor, Partial

import layoutmap as lm

MESH = lm.Mesh(None, "x=2")


@pytest.mark.parametrize("function", [torch.ones, torch.randn])
@pytest.mark.parametrize("requires_grad", [True, False])
def test_a_tensor_made_in_a_layout_may_require_a_gradient(function, requires_grad):
    """`call_with_layout` makes a leaf that requires a gradient if that is asked for."""
    tensor = lm.dtensor.call_with_layout(function, lm.Layout(["x"], MESH), [8], requires_grad=requires_grad)

    assert requires_grad == tensor.requires_grad
    if requires_grad:
        (tensor * 2).sum().backward()
        assert torch.equal(torch.full((8,), 2.0), tensor.grad.full_tensor())


def test_a_tensor_of_partial_sums_is_said_to_be_one():
    """The message names the pending sum, for the tensor is on the mesh; `relayout` computes the sum."""
    replicated = lm.dtensor.relayout(torch.ones(4), lm.Layout.replicated(MESH, rank=1))
    tensor = DTensor.from_local(replicated.to_local(), replicated.device_mesh, [Partial()])

    with pytest.raises(lm.LayoutError, match="each device has a summand of it"):
        lm.dtensor.fetch_layout(tensor)
