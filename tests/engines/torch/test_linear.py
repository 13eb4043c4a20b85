"""Products of DTensors are those of plain tensors, wherever their rows, columns and summands are."""

import pytest
import torch
from cases import few
from engines.torch.dtensors import place, run_on, whole
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn import functional as F

PROCESSES = ("torch",)

# What a mesh dim shards: an axis of the input, and one of the weight.
WAYS = {
    "rows": (0, None),
    "columns": (None, 0),
    "summands": (2, 1),
    "nothing": (None, None),
    "half of the summands": (2, None),
    "rows and columns": (0, 0),
}
CASES = {f"{one}, {other}": (one, other) for one in WAYS for other in WAYS}


def specs(rank, ways, tensor):
    found = [[dim for dim, way in ways if WAYS[way][tensor] == axis] for axis in range(rank)]
    return [tuple(dims) if dims else None for dims in found]


def arguments(ways, dtype=torch.float64):
    values = [torch.linspace(-1, 2, 4 * n, dtype=dtype).sin() for n in (6 * 8, 8, 1)]
    x, weight, bias = values[0].view(4, 6, 8), values[1].view(4, 8), values[2]
    if ways is None:
        return [each.clone().requires_grad_() for each in (x, weight, bias)]
    of_weight = specs(2, ways, 1)
    return [
        place(each, *of).requires_grad_()
        for each, of in ((x, specs(3, ways, 0)), (weight, of_weight), (bias, of_weight[:1]))
    ]


def computed(given, has_bias):
    """A product, the gradients of a loss, and those of its gradient."""
    x, weight, bias = given
    result = F.linear(x, weight, bias if has_bias else None)
    loss = (result * result * result).sum()
    trained = given if has_bias else given[:2]
    first = torch.autograd.grad(loss, trained, create_graph=True)
    second = torch.autograd.grad((first[0] * first[0]).sum(), trained[:2])
    return [result, *first, *second]


@pytest.mark.filterwarnings("ignore::layoutmap.LayoutMapWarning")
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("case", few(CASES, "rows, columns", "rows, summands"))
def test_a_product_is_that_of_plain_tensors(case, has_bias):
    """Also its gradients and their gradients, whatever each mesh dim shards."""
    ways = list(zip(("batch", "model"), CASES[case], strict=True))
    expected = computed(arguments(None), has_bias)
    with run_on():
        actual = computed(arguments(ways), has_bias)

    for plain, ours in zip(expected, actual, strict=True):
        torch.testing.assert_close(whole(ours), plain.detach(), rtol=1e-9, atol=1e-9)


def test_a_layer_that_is_sharded_by_columns_makes_no_collective():
    """Gradients of its input, and of its weight by rows, wait to be summed up."""
    with run_on():
        x, weight, bias = arguments([("batch", "rows"), ("model", "columns")])
        with CommDebugMode() as counter:
            result = F.linear(x, weight, bias)
            result.backward(result.detach())

    assert {} == counter.get_comm_counts()
    assert ["S(0)", "P(sum)"] == [str(each) for each in x.grad.placements]
    assert ["P(sum)", "S(0)"] == [str(each) for each in weight.grad.placements]


def test_autocast_reaches_a_product():
    """The type of the result is that which torch computes in."""
    with run_on(), torch.autocast("cpu", torch.bfloat16):
        x, weight, bias = arguments([("batch", "rows"), ("model", "columns")], torch.float32)
        assert torch.bfloat16 == F.linear(x, weight, bias).dtype
