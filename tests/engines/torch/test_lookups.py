"""Elements that are looked up by their number, however the tensor and the numbers are sharded."""

import pytest
import torch
import torch.nn.functional as F
from engines.torch.dtensors import place, run_on, whole

from layoutmap.core.errors import EngineError

PROCESSES = ("torch",)
pytestmark = pytest.mark.filterwarnings("ignore::layoutmap.LayoutMapWarning")  # what is gathered is right

LOOKUPS = {
    "embedding": (lambda x, index: F.embedding(index, x), 0),
    "embedding with padding": (lambda x, index: F.embedding(index.reshape(4, 2), x, padding_idx=4), 0),
    "embedding of one": (lambda x, index: F.embedding(index[1], x), 0),
    "gather": (lambda x, index: torch.gather(x, 1, index[:, None]), 1),
    "gather of all": (lambda x, index: x.gather(dim=-2, index=index[:, None].expand(8, 6)), 0),
    "take_along_dim": (lambda x, index: x.take_along_dim(index[:, None], 1), 1),
    "take_along_dim of one row": (lambda x, index: torch.take_along_dim(x, index[None, :6], dim=0), 0),
    "one_hot": (lambda x, index: F.one_hot(index, 6) * x, 1),
    "index_select": (lambda x, index: x.index_select(0, index), 0),
    "an index": (lambda x, index: x[torch.arange(8), index], 1),
    "scatter": (lambda x, index: x.scatter(1, index[:, None], 1.0), 1),
}
LAYOUTS = [
    (("model", None), "batch"),
    (("batch", "model"), "batch"),
    (("model", "batch"), None),
    (("model", "batch"), "batch"),
    ((None, "model"), None),
]


@pytest.mark.parametrize("name", LOOKUPS)
def test_lookups(name):
    """A lookup gives what it gives on one device, its gradient too, on all layouts; or the same kind of error."""
    look_up, axis = LOOKUPS[name]
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
    size = x.shape[axis]
    inside = torch.tensor([0, 5, 3, 1, 4, 4, 2, 0])
    indices = {"inside": inside, "above": inside.clone().fill_(size), "below": inside - 1}

    found, expected = {}, {}
    for case, index in indices.items():
        expected[case] = outcome(look_up, x, index)
        for specs, index_spec in LAYOUTS:
            with run_on():
                found[case, specs, index_spec] = outcome(look_up, place(x, *specs), place(index, index_spec))

    assert dict.fromkeys(found, True) == {key: same(value, expected[key[0]]) for key, value in found.items()}


def outcome(look_up, x, index):
    """The value and the gradient of a lookup, or the type of its error."""
    x = x.detach().requires_grad_()
    try:
        value = look_up(x, index)
        value.square().sum().backward()
    except (IndexError, RuntimeError):
        return "an error"
    return value, x.grad


def same(found, expected):
    if isinstance(found, str) or isinstance(expected, str):
        return isinstance(found, str) and isinstance(expected, str)
    return all(torch.allclose(whole(a), b.detach()) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("specs", [spec for spec, _ in LAYOUTS])
def test_two_lookups(specs):
    """A lookup does not depend on another one, made before it and not yet read or never used."""
    x = torch.arange(48.0).reshape(8, 6)
    ones, fives = (torch.full((8, 1), number) for number in (1, 5))

    with run_on():
        x_here = place(x, *specs)
        unused = x_here.gather(1, ones)
        both = torch.stack([x_here.gather(1, fives), x_here.take_along_dim(ones, 1)])

    assert unused.shape == (8, 1)
    assert torch.equal(torch.stack([x[:, 5:], x[:, 1:2]]), whole(both))


def test_the_gradient_of_a_scatter():
    """A gather in a backward pass, along a sharded axis, takes what is there, and warns that it is slow."""
    x, index = torch.arange(48.0).reshape(8, 6), torch.tensor([[0], [5], [3], [1], [4], [4], [2], [0]])
    plain = torch.ones(8, 1, requires_grad=True)
    (x.scatter_add(1, index, plain) * x).sum().backward()

    with run_on():
        source = place(torch.ones(8, 1), None, None).requires_grad_()
        x_here = place(x, None, "model")
        (x_here.scatter_add(1, place(index, None, None), source) * x_here).sum().backward()

    assert torch.equal(plain.grad, whole(source.grad))


@pytest.mark.parametrize("specs", [spec for spec, _ in LAYOUTS])
@pytest.mark.parametrize("name", ["embedding", "gather", "take_along_dim"])
def test_gradients_of_gradients(name, specs):
    """The gradient of a lookup's gradient is what it is on one device, on all layouts."""
    x, other = torch.arange(48.0).reshape(8, 6).cos(), torch.arange(6.0).sin()
    index = torch.tensor([0, 5, 3, 1, 4, 4, 2, 0])

    def second(x, other, index):
        value = (LOOKUPS[name][0](x, index) * other[:1] * other).sum()
        first = torch.autograd.grad(value, x, create_graph=True)[0]
        return torch.autograd.grad((first * first).sum(), other)[0]

    expected = second(x.clone().requires_grad_(), other.clone().requires_grad_(), index)
    with run_on():
        found = second(place(x, *specs).requires_grad_(), place(other, None).requires_grad_(), index)

    assert torch.allclose(whole(found), expected)


def test_the_error_of_a_lookup():
    """An index that is out of range is an IndexError that names the function, the axis and its size."""
    with run_on(), pytest.raises(IndexError, match="embedding: index out of range: axis 0 has size 8"):
        F.embedding(place(torch.tensor([1, 8]), "batch"), place(torch.ones(8, 6), "model", None))


def test_sparse_gradients_of_a_sharded_table_are_refused():
    """An embedding with sparse gradients is refused before it computes, where its table is sharded."""
    with run_on(), pytest.raises(EngineError, match="sparse=True on a table that is sharded"):
        F.embedding(place(torch.tensor([1]), None), place(torch.ones(8, 6), "model", None), sparse=True)
