"""Products of DTensors are those of plain tensors, wherever their rows, columns and summands are."""

import pytest
import torch
from cases import few
from engines.torch.dtensors import place, run_on, whole
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn import functional as F

PROCESSES = ("torch",)
c10d = torch.ops.c10d_functional

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


def test_residual_blocks_make_one_all_reduce_per_pass():
    """With more rows than features, too, where DTensor would gather the weights, which are smaller."""
    widths = {"gate": (16, 8), "up": (16, 8), "down": (8, 16)}
    weights = [
        {name: torch.linspace(-1, 1, 128).view(shape).sin() for name, shape in widths.items()}
        for _ in range(3)
    ]
    x = torch.linspace(-1, 2, 512 * 8).view(8, 64, 8).sin()

    def compute(x, blocks):
        for block in blocks:
            normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
            hidden = F.silu(F.linear(normed, block["gate"])) * F.linear(normed, block["up"])
            x = x + F.linear(hidden, block["down"])
        return x

    plain = [{name: w.clone().requires_grad_() for name, w in block.items()} for block in weights]
    compute(x, plain).pow(3).sum().backward()
    with run_on():
        rules = {"gate": ("model", None), "up": ("model", None), "down": (None, "model")}
        sharded = [
            {name: place(w, *rules[name]).requires_grad_() for name, w in block.items()} for block in weights
        ]
        batch = place(x, "batch", None, None).requires_grad_()
        with CommDebugMode() as forward:
            result = compute(batch, sharded)
        upstream = 3 * result.detach().pow(2)
        with CommDebugMode() as backward:
            result.backward(upstream)

    assert {c10d.all_reduce: 3} == forward.get_comm_counts() == backward.get_comm_counts()
    for ours, expected in zip(sharded, plain, strict=True):
        for name, w in ours.items():
            torch.testing.assert_close(whole(w.grad), expected[name].grad, rtol=1e-4, atol=1e-4)


def test_autocast_reaches_a_product():
    """The type of the result is that which torch computes in."""
    with run_on(), torch.autocast("cpu", torch.bfloat16):
        x, weight, bias = arguments([("batch", "rows"), ("model", "columns")], torch.float32)
        assert torch.bfloat16 == F.linear(x, weight, bias).dtype
