"""Values that are changed through `data`, which autograd does not see: gradients are right, or refused."""

import pytest
import torch
import torch.nn.functional as F
from engines.torch.dtensors import place, run_on, whole

from layoutmap.core.errors import EngineError

PROCESSES = ("torch",)
pytestmark = [
    pytest.mark.every_case,
    pytest.mark.filterwarnings("ignore::layoutmap.LayoutMapWarning"),
    pytest.mark.filterwarnings("ignore:Found a non-scalar tensor"),  # torch, of its own gradient of `prod`
]

FUNCTIONS = {
    "prod": lambda x: x.prod(0),
    "torch.prod": lambda x: torch.prod(x),
    "softmax": lambda x: x.softmax(0),
    "norm": lambda x: x.norm(),
    "largest": lambda x: x.amax(),
    "rms_norm": lambda x: F.rms_norm(x, x.shape[-1:]),
    "square": lambda x: x * x,
    "slice": lambda x: x[1:].sin(),
}


def values():
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(0))


def gradient(function, x, change):
    """The gradient of a function of a tensor, after `change` was called with that and with the function's result."""
    x.requires_grad_()
    y = function(x)
    change(x, y)
    (y * torch.ones_like(y).cumsum(-1)).sum().backward()
    return x.grad


@pytest.mark.parametrize("specs", [("batch", None), (None, "model"), ("model", "batch"), (None, None)])
@pytest.mark.parametrize("of_result", [False, True], ids=["argument", "result"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_no_gradient_is_another_one(name, of_result, specs):
    """The gradient is the one that plain tensors have after the change, or there is an error."""

    def change(x, y):
        (y if of_result else x).data.add_(2)

    expected = gradient(FUNCTIONS[name], values(), change)
    with run_on():
        try:
            actual = gradient(FUNCTIONS[name], place(values(), *specs), change)
        except EngineError:
            return
        except RuntimeError as error:
            if name != "slice" or "modified by an inplace operation" not in str(error):
                raise
            return  # torch's own error: the slice is a copy, and has former values

    torch.testing.assert_close(whole(actual), expected, equal_nan=True)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_that_are_assigned(name):
    """So it is where `data` is assigned to, whose new values autograd has where it has saved a parameter."""

    def change(x, y):
        x.data = x.detach() + 2

    expected = gradient(FUNCTIONS[name], values(), change)
    with run_on():
        try:
            actual = gradient(FUNCTIONS[name], place(values(), "model", "batch"), change)
        except EngineError:
            return

    torch.testing.assert_close(whole(actual), expected, equal_nan=True)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_steps_by_hand(name):
    """An optimizer that changes parameters through `data`, between a backward pass and the next forward pass."""

    def trained(x):
        for _ in range(3):
            x.grad = None
            x.data.sub_(0.1 * gradient(FUNCTIONS[name], x, lambda x, y: None))
        return x

    expected = trained(values())
    with run_on():
        actual = trained(place(values(), "batch", "model"))

    torch.testing.assert_close(whole(actual), expected.detach())


def test_products_outside_of_calls():
    """A product of a weight in a loss is refused as one in a call is."""
    weight = place(values(), "batch", "model").requires_grad_()
    product = weight.prod()
    weight.data.add_(2)

    with pytest.raises(EngineError, match="after the backward pass"):
        product.backward()


def test_a_change_that_autograd_sees_is_its_error():
    """A change of a tensor itself is refused by torch, as on one device, not by us."""
    with run_on():
        x = place(values(), "batch", "model").requires_grad_() * 2
        product = x.prod(keepdim=True, dim=0)
        x.add_(2)
        with pytest.raises(RuntimeError, match="modified inplace"):
            product.sum().backward()
