"""Operators that are not torch's own: values and gradients are those of one device, in every layout."""

import gc
import warnings

import pytest
import torch
import torch.nn.functional as F
from engines.torch.custom_operators import (
    CHUNKED,
    DIFFERENTIABLE,
    LABELS,
    OPS,
    TABLE,
    X,
    Y,
    accumulate,
    parts,
    ranks,
)
from engines.torch.dtensors import place, run_on, summands, whole
from engines.torch.operators_in_models import KINDS, Pointer, trained
from engines.torch.operators_in_models import Head as HeadOfKind
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard

import layoutmap as lm
from layoutmap.engines.torch import simulation
from layoutmap.engines.torch.dtensor_ops import gathered, memories

pytestmark = pytest.mark.filterwarnings("ignore:.*computed on gathered tensors")

LAYOUTS = {
    "rows": lambda x: place(x, "batch", *[None] * (x.ndim - 1)),
    "both": lambda x: place(x, *("batch", "model")[: x.ndim]),
    "two dims on one axis": lambda x: place(x, ("batch", "model"), *[None] * (x.ndim - 1)),
    "partial sum": lambda x: summands(x),
    "replicated": lambda x: place(x, *[None] * x.ndim),
}
BACKWARD = {
    "backward": lambda value, leaves: (value.backward(), [each.grad for each in leaves])[1],
    "grad": lambda value, leaves: torch.autograd.grad(value, leaves),
}


def outcome(function, leaves, backward):
    """What a function gives, and its gradients."""
    result = function(*leaves)
    return [result.detach(), *BACKWARD[backward](result.square().sum(), leaves)]


@pytest.mark.parametrize("backward", BACKWARD)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_values_and_gradients(name, layout, backward):
    """The values of a custom operator and its gradients are those of one device, in every layout."""
    function, arguments = DIFFERENTIABLE[name]
    expected = outcome(function, [each.clone().requires_grad_() for each in arguments], backward)
    with run_on():
        leaves = [LAYOUTS[layout](each).detach().requires_grad_() for each in arguments]
        actual = [whole(each) for each in outcome(function, leaves, backward)]

    torch.testing.assert_close(actual, expected)


COMPUTED = {
    "ranks": (OPS.ranks, [X]),
    "one of several": (OPS.twice, [X]),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", COMPUTED)
def test_values_without_gradients(name, layout):
    """The values of an operator that has no formula for gradients are those of one device, in calls and outside."""
    function, arguments = COMPUTED[name]
    expected = function(*arguments)
    placed = [LAYOUTS[layout](each) for each in arguments]
    with run_on():
        inside = function(*placed)
    with simulation.simulate_ranks_of_mesh(placed[0].device_mesh):
        outside = function(*placed)

    assert [expected.tolist()] * 2 == [whole(inside).tolist(), whole(outside).tolist()]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("function", [lambda x, y, n: accumulate(x, y, n), lambda x, y, n: OPS.twice(x, y=y)])
def test_changes_in_place(function, layout):
    """What a custom operator changes has the values of one device, in the layout that it had; plain tensors, too."""
    expected = [Y.clone(), torch.tensor([0, 0])]
    function(X, *expected)
    changed = LAYOUTS[layout](Y)
    plain, counts = Y.clone(), [torch.tensor([0, 0]) for _ in range(3)]
    before = changed.placements
    with run_on():
        function(LAYOUTS[layout](X), changed, place(counts[0], None))
        function(LAYOUTS[layout](X), plain, counts[1])
        sliced = LAYOUTS[layout](torch.cat([Y, Y], 1))
        function(LAYOUTS[layout](X), sliced[:, 6:], counts[2])

    assert before == changed.placements
    torch.testing.assert_close(whole(changed), expected[0])
    torch.testing.assert_close((plain, counts[1]), tuple(expected))
    torch.testing.assert_close(whole(sliced), torch.cat([Y, expected[0]], 1))


def test_a_gradient_without_a_formula_is_refused_as_on_one_device():
    """Nothing is made up where the program has registered no formula."""
    message = "no autograd formula was registered"
    with pytest.raises(RuntimeError, match=message):
        OPS.ranks(X.clone().requires_grad_()).sum().backward()
    with run_on(), pytest.raises(RuntimeError, match=message):
        OPS.ranks(place(X, "batch", None).requires_grad_()).sum().backward()


NUMBERS = torch.zeros(8, 6, dtype=torch.long)
OUT = {
    "function": lambda x, out: torch.mul(x, 3.0, out=out),
    "overload": lambda x, out: torch.ops.aten.mul.out(x, x, out=out),
    "in place": lambda x, out: torch.ops.aten.add_.Tensor(out, x),
    "several": lambda x, out: torch.sort(x, 0, out=(out, NUMBERS)),
    "other names": lambda x, out: torch.ops.aten.frexp.Tensor_out(x, mantissa=out, exponent=NUMBERS.int()),
}


@pytest.mark.parametrize("name", OUT)
def test_plain_tensors_that_are_written_into(name):
    """A plain tensor that a function of torch is told to write into has the values afterwards, and is returned."""
    expected, actual = torch.ones(8, 6), torch.ones(8, 6)
    OUT[name](X, expected)
    with run_on():
        result = OUT[name](place(X, "batch", "model"), actual)

    torch.testing.assert_close(actual, expected)
    assert actual is (result if isinstance(result, torch.Tensor) else result[0])


def test_an_operator_that_is_called_as_one_of_torch():
    """Names count in their namespace: another's `cumsum` has arguments of its own."""
    x = place(X, "batch", None)
    with simulation.simulate_ranks_of_mesh(x.device_mesh):
        actual = OPS.cumsum(x, -1)

    torch.testing.assert_close(whole(actual), -X)


def test_gradients_outside_of_calls_are_right_or_refused_by_name():
    """Where nobody saw the call, a formula that writes into plain memory is refused, and its operator is named."""
    x = place(X, "batch", None).requires_grad_()
    with simulation.simulate_ranks_of_mesh(x.device_mesh):
        place(X[:, 0], None).mul_(place(X[:, 0], "batch"))  # which DTensor remembers
        _, total = parts(x, [x], 4)
        total.sum().backward()
        loss = F.linear_cross_entropy(x, TABLE, LABELS, reduction="none", options=CHUNKED).sum()
        with pytest.raises(lm.EngineError) as found:
            loss.backward()

    torch.testing.assert_close(whole(x.grad), torch.full_like(X, 2.0))
    assert "GeneratedBackwardFor_torch_nn__linear_cross_entropy" in str(found.value)


def test_a_registered_sharding_is_used():
    """What the program says of its operator to DTensor is done, without a gather."""
    with run_on():
        y = OPS.negated(place(X, "batch", None))

    assert (Shard(0), Replicate()) == y.placements
    torch.testing.assert_close(whole(y), -X)


def test_the_warning():
    """An operator that is gathered is named, once, and not where every device has its arguments in full."""
    gathered._warned_functions.discard("torch.ops.layoutmap_custom.ranks")
    with run_on(), warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        OPS.ranks(place(X, None, None))
        ranks(place(X, "batch", None))
        OPS.ranks.default(place(X, "batch", None))

    assert ["torch.ops.layoutmap_custom.ranks is computed on gathered tensors, by each process"] == [
        str(each.message).partition("\n")[0] for each in found
    ]


SPECS = st.permutations([None, "batch", "model"]).map(lambda specs: tuple(specs[:2]))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore:.* is idle")  # maps are drawn, and a batch may be replicated
@given(up=SPECS, down=SPECS, batch_dim=st.sampled_from([None, "batch", "model"]))
def test_models_train_with_every_kind_of_operator(kind, up, down, batch_dim):
    """Outputs and weights of two steps of SGD are those of one device, whatever the operator is written with."""
    layout_map = lm.LayoutMap(lm.create_mesh("batch=2,model=2"), {r"up\.weight": up, r"down\.weight": down})
    x = X.double()

    def model():
        torch.manual_seed(0)
        return HeadOfKind(KINDS[kind])

    expected = trained(model(), x)
    actual = trained(layout_map.build(model, library="torch", batch_dim=batch_dim), x)

    torch.testing.assert_close([whole(each) for each in actual], expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch_dim", [None, "batch"])
def test_models_let_go_keep_no_copy(kind, batch_dim):
    """A model that was trained and is deleted leaves no copy of a weight in memory, whatever its operator."""
    rules = {r".*weight": ("model", "batch")}
    gc.collect()
    before = set(memories.copied)
    for _ in range(2):
        layout_map = lm.LayoutMap(lm.create_mesh("batch=2,model=2"), rules)
        model = layout_map.build(lambda: HeadOfKind(KINDS[kind]), library="torch", batch_dim=batch_dim)
        trained(model, X.double())
        del model
        gc.collect()

        assert set() == set(memories.copied) - before


@pytest.mark.parametrize("call", ["run_on", "alone"])
def test_the_address_of_a_tensor_is_refused(call):
    """A kernel that is no operator gets no address: that of a tensor on a mesh is 0, which it would read from."""
    x = place(X.double(), "batch", None)
    with run_on() if call == "run_on" else simulation.simulate_ranks_of_mesh(x.device_mesh):
        with pytest.raises(lm.EngineError, match=r"running_sums.*: reads the address of a tensor") as found:
            Pointer.apply(x)
        with pytest.raises(lm.EngineError, match="reads the address of a tensor on a mesh"):
            x.__dlpack__()

    assert "torch.library.custom_op" in found.value.fix
