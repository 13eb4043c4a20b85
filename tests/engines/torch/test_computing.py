"""Functions of DTensors give what they give on plain tensors, in value and gradient."""

import contextlib
import itertools
import threading

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from engines.torch.beside_plain import (
    LAYOUTS,
    assert_as_plain,
)
from engines.torch.dtensors import MESH, place, run_on, summands, whole
from engines.torch.function_cases import CASES
from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.experimental import register_sharding
from torch.nn.attention import SDPBackend, sdpa_kernel

from layoutmap.core.errors import EngineError, LayoutMapWarning
from layoutmap.core.layout import Layout
from layoutmap.engines.torch import simulation
from layoutmap.engines.torch.dtensor_ops import gathered
from layoutmap.engines.torch.dtensor_ops.mode import enable_dtensor_ops_temporarily
from layoutmap.engines.torch.engine import engine
from layoutmap.engines.torch.modes import list_function_modes
from layoutmap.engines.torch.placing import redistribute_if_needed
from layoutmap.engines.torch.specs import get_local

PROCESSES = ("torch",)


@pytest.mark.filterwarnings("ignore::layoutmap.LayoutMapWarning")
@pytest.mark.parametrize("name", CASES)
def test_functions_give_plain_numbers(name):
    """A function of DTensors gives the value and the gradients of plain tensors, in whatever layout they are."""
    function, tensors = CASES[name]
    counts_pieces = "loss" in name or "norm" in name or "entropy" in name
    for layout in (*LAYOUTS, "batch over both") if counts_pieces else LAYOUTS:
        assert_as_plain(function, tensors, layout)


# -- the scope


def test_plain_tensors_are_left_alone():
    """Plain tensors among themselves give plain tensors, in the scope as outside of it."""
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
    native, _ = engine().make_native_layout(Layout.replicated(MESH, 0), 0)
    expected = F.mse_loss(F.dropout(x, 0.0), x * 2)

    with enable_dtensor_ops_temporarily(native):
        inside = F.mse_loss(F.dropout(x, 0.0), x * 2)

    assert type(inside) is torch.Tensor
    assert torch.equal(expected, inside)


def test_the_scope_opens_inside_itself():
    """The scope can be opened in itself, and an exception closes it."""
    native, _ = engine().make_native_layout(Layout.replicated(MESH, 0), 0)
    x, y = place(torch.ones(8, 6), "batch", None), torch.ones(6)
    with run_on(), enable_dtensor_ops_temporarily(native):
        with contextlib.suppress(ZeroDivisionError), enable_dtensor_ops_temporarily(native):
            raise ZeroDivisionError
        inside = x + y

    assert torch.equal(torch.full((8, 6), 2.0), whole(inside))
    assert [] == list_function_modes()


def test_the_scope_is_of_its_thread():
    """Another thread is not in the scope."""
    x, y, said = place(torch.ones(8, 6), "batch", None), torch.ones(6), []

    def other():
        try:
            x + y
        except RuntimeError as error:
            said.append(str(error))

    with run_on():
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()

    assert "got mixed" in said[0]


def test_values_are_read_gathered():
    """Whatever reads values reads those of the global tensor, of a sum that waits or of a tensor that is sharded."""
    values = torch.arange(8.0)
    with run_on():
        total, cut = place(values, "batch").sum(), place(values, ("batch", "model"))

        assert [28.0] * 4 == [float(total), total.item(), total.tolist(), float(total.detach().numpy())]
        assert (28, "28.00", True) == (int(total), f"{total:.2f}", bool(total > 27))
        assert values.tolist() == cut.tolist() == cut.numpy().tolist() == np.asarray(cut).tolist()
        assert values.tolist() == [float(each) for each in cut]
        assert 3.0 in cut
        assert torch.equal(cut, values)
        assert torch.allclose(cut, values)


def test_backward_inside_and_outside():
    """A backward pass may run in the scope or after it, also where plain tensors took part."""
    x, y = (torch.randn(8, 6, generator=torch.Generator().manual_seed(seed)) for seed in range(2))
    gradients = []
    for inside in (True, False):
        laid_out, plain = place(x, "batch", None).requires_grad_(), y.clone().requires_grad_()
        with run_on():
            loss = F.mse_loss(torch.relu(laid_out * plain) + plain, plain.detach())
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        gradients.append((whole(laid_out.grad), plain.grad))
        assert type(plain.grad) is torch.Tensor
    x, y = x.requires_grad_(), y.requires_grad_()
    F.mse_loss(torch.relu(x * y) + y, y.detach()).backward()

    torch.testing.assert_close(gradients[0], (x.grad, y.grad))
    torch.testing.assert_close(gradients[1], (x.grad, y.grad))


def changed_in_part(x):
    changed = x * 1
    changed[2:4].squeeze().mul_(3)
    return changed * x.detach()


@pytest.mark.filterwarnings("ignore::layoutmap.LayoutMapWarning")  # some are gathered
@pytest.mark.parametrize(
    "name",
    ["attention", "conv1d", "group_norm", "prod", "batch_norm", "cross_entropy", "nll_loss", "changed"],
)
def test_gradients_of_gradients(name):
    """Gradients have gradients."""
    generator = torch.Generator().manual_seed(0)
    shape = (8, 4) if name == "batch_norm" else (8, 4, 6)
    x = torch.randn(*shape, generator=generator, dtype=torch.float64)
    weight = torch.randn(6, 4, 3, generator=generator, dtype=torch.float64)
    labels = torch.arange(48).view(8, 6) % 4
    function = {
        "attention": lambda x: F.scaled_dot_product_attention(x, x, x),
        "conv1d": lambda x: F.conv1d(x, weight),
        "group_norm": lambda x: F.group_norm(x, 2),
        "prod": lambda x: torch.prod(x, 1),
        "batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
        "cross_entropy": lambda x: F.cross_entropy(x, labels, weight=torch.arange(1.0, 5.0).double()) * x,
        "nll_loss": lambda x: F.nll_loss(x, labels, reduction="sum") * x,
        "changed": changed_in_part,
    }[name]

    def penalty(x):
        x = x.requires_grad_()
        with sdpa_kernel(SDPBackend.MATH):
            (gradient,) = torch.autograd.grad(function(x).square().sum(), x, create_graph=True)
            gradient.square().sum().backward()
        return x.grad

    expected = penalty(x.clone())
    with run_on():
        actual = penalty(place(x, "batch", *[None] * (x.ndim - 1)))

    torch.testing.assert_close(whole(actual), expected)


def test_attention_with_dropout_uses_no_fused_kernel():
    """Where only a fused kernel is allowed, sharded attention with dropout draws the mask of the unfused one."""
    x = torch.randn(8, 4, 6, 2, generator=torch.Generator().manual_seed(0))

    def attend(x, backend):
        torch.manual_seed(1)
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(x, x, x, dropout_p=0.3)

    with pytest.raises(RuntimeError, match="No available kernel"):
        attend(x, SDPBackend.FLASH_ATTENTION)  # drops nothing on CPUs
    with run_on():
        actual = attend(place(x, "batch", "model", None, None), SDPBackend.FLASH_ATTENTION)

    torch.testing.assert_close(whole(actual), attend(x, SDPBackend.MATH))


# -- what it costs


def collectives(function):
    with run_on(), CommDebugMode() as counted:
        function()
    return {name.__name__: number for name, number in counted.get_comm_counts().items() if number}


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_attention_moves_nothing(dropout_p):
    """Attention that is sharded along the batch and the heads moves nothing, forwards or backwards."""
    heads = [place(torch.randn(8, 4, 6, 2), "batch", "model", None, None).requires_grad_() for _ in range(3)]
    mask = torch.zeros(8, 1, 6, 6)

    def attend():
        output = F.scaled_dot_product_attention(*heads, attn_mask=mask, dropout_p=dropout_p)
        output.backward(torch.ones_like(output))

    assert {} == collectives(attend)


@pytest.mark.parametrize("name", ["max_pool2d", "group_norm", "conv2d", "dropout", "lstm"])
def test_what_is_apart_moves_nothing(name):
    """What treats the examples of a batch apart moves nothing forwards."""
    x, sequence = (
        place(torch.randn(8, 4, 6, 6), "batch", None, None, None),
        place(torch.randn(8, 6, 4), "batch", None, None),
    )
    weight, layer = place(torch.randn(6, 4, 3, 3), "model", None, None, None), nn.LSTM(4, 4, batch_first=True)
    function = {
        "max_pool2d": lambda: F.max_pool2d(x, 2),
        "group_norm": lambda: F.group_norm(x, 2),
        "conv2d": lambda: F.conv2d(x, weight),
        "dropout": lambda: F.dropout(x, 0.3),
        "lstm": lambda: layer(sequence),
    }[name]

    assert {} == collectives(function)


@pytest.mark.parametrize(
    ("name", "batch", "expected"),
    [("batch_norm", "batch", 2), ("cross_entropy", "batch", 1), ("cross_entropy", None, 0)],
)
def test_each_statistic_is_one_sum(name, batch, expected):
    """What is summed up along a sharded batch takes one collective, and none where nothing is sharded."""
    x, labels = place(torch.randn(8, 4), batch, None), place(torch.arange(8) % 4, batch)
    running = [place(torch.ones(4), None) for _ in range(2)]
    function = {
        "batch_norm": lambda: F.batch_norm(x, *running, training=True),
        "cross_entropy": lambda: F.cross_entropy(x, labels),
    }[name]

    assert expected == sum(collectives(function).values())


def test_what_has_no_rule_is_computed_gathered(monkeypatch):
    """A function that nobody has a rule for is computed on global tensors, and a warning says so once."""
    monkeypatch.setattr(gathered, "_warned_functions", set())
    x = torch.randint(5, (8,), generator=torch.Generator().manual_seed(0))
    laid_out = place(x, "batch")
    with run_on():
        with pytest.warns(LayoutMapWarning, match=r"aten.bincount is computed on gathered tensors") as caught:
            counts = torch.bincount(laid_out)
        again = torch.bincount(laid_out)

    assert torch.equal(torch.bincount(x), whole(counts))
    assert torch.equal(torch.bincount(x), whole(again))
    assert __file__ == caught[0].filename


def test_mistakes_raise_what_torch_raises():
    """What plain tensors cannot compute fails with the error of plain tensors."""
    x = place(torch.ones(8, 6), "batch", None)
    with (
        run_on(),
        pytest.raises(RuntimeError, match=r"mat1 and mat2 shapes cannot be multiplied \(8x6 and 5x4\)"),
    ):
        x @ torch.ones(5, 4)


LAID_IN_MEMORY = {
    "redistributed": lambda x, y: redistribute_if_needed(x.mT, y.placements).mT.flatten(0, 1),
    "a result of what was redistributed": lambda x, y: (
        redistribute_if_needed(x.movedim(0, 1), y.placements).exp().movedim(1, 0)[1]
    ),
    "operands": lambda x, y: torch.maximum(x.mT, y.mT).mT.flatten(1),
    "a slice": lambda x, y: redistribute_if_needed(x.mT, y.placements)[1].mT.flatten(),
    "slices": lambda x, y: redistribute_if_needed(x.movedim(0, 1), y.placements).unbind(1)[2].flatten(),
    "arguments after a shape": lambda x, y: torch.layer_norm(x.mT, (4, 8), y.mT[1], y.mT[2]),
    "three operands": lambda x, y: torch.addcmul(x.permute(2, 0, 1), y.permute(2, 0, 1), x.permute(2, 0, 1)),
}


@pytest.mark.filterwarnings("ignore::layoutmap.LayoutMapWarning")
@pytest.mark.parametrize("name", LAID_IN_MEMORY)
def test_shards_lie_in_memory_as_on_one_device(name):
    """The axes of shards have the order in memory that they have on one device, by whose strides views are made."""
    a, b = torch.randn(2, 4, 8, 4, generator=torch.Generator().manual_seed(0))
    placed = (None, None, None), ("batch", None, None), (None, None, "batch"), (None, "model", "batch")
    layouts = list(itertools.product(placed, placed))
    for _ in range(2):  # DTensor remembers, and asks no second time
        for one, other in layouts:
            with run_on():
                found = LAID_IN_MEMORY[name](place(a, *one), place(b, *other))
                expected = LAID_IN_MEMORY[name](place(a, None, None, None), place(b, *layouts[0][1]))
            with simulation.simulate_ranks_of_mesh(found.device_mesh):
                order = sorted(range(found.ndim), key=lambda axis: -found.stride(axis))
                assert simulation.get_first_local_tensor(get_local(found)).permute(order).is_contiguous(), (
                    one,
                    other,
                )
            assert torch.equal(whole(expected), whole(found)), (one, other)


@pytest.mark.filterwarnings("ignore::layoutmap.LayoutMapWarning")
def test_transposed_operands_in_two_layouts():
    """The axes of a result whose operands DTensor redistributes can be joined, as on one device, and written to."""
    a, b = torch.randn(2, 4, 8, 4, generator=torch.Generator().manual_seed(0))
    placed = (None, None, None), ("batch", None, None), (None, None, "batch"), (None, "model", "batch")

    def joined(one: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        product = (one.mT * other.mT).mT
        return product, product.reshape(4, -1)

    expected, view = joined(a, b)
    view.mul_(2)
    for one, other in itertools.product(placed, placed):
        with run_on():
            product, view = joined(place(a, *one), place(b, *other))
            view.mul_(2)
            assert torch.equal(expected, whole(product)), (one, other)
            assert torch.equal(expected.reshape(4, -1), whole(view)), (one, other)


def test_memory_that_is_not_there():
    """What lies between the elements of a slice cannot be read once that was summed up, and an error says so."""
    x = torch.ones(8, 6)
    with run_on(), pytest.raises(EngineError, match=r"as_strided cannot view a slice[\s\S]*x.contiguous\(\)"):
        summands(x)[::2].as_strided((3, 2), (1, 12))
    with run_on():
        assert (3, 2) == tuple(place(x, None, None)[::2].as_strided((3, 2), (1, 12)).shape)


# -- errors


calls = []


@torch.library.custom_op("layoutmap_tests::refuse", mutates_args=())
def refuse(x: torch.Tensor) -> torch.Tensor:
    calls.append("refuse")
    raise ValueError("the program's own")


@torch.library.custom_op("layoutmap_tests::refuse_", mutates_args=("x",))
def refuse_(x: torch.Tensor) -> None:
    x.add_(1)
    raise RuntimeError("the program's own")


@refuse.register_fake
def _(x):
    return torch.empty_like(x)


for _op, _outputs in ((refuse, [Replicate()]), (refuse_, [])):

    @register_sharding(_op._opoverload)
    def _rule(x, outputs=tuple(_outputs)):
        return [(list(outputs), [Replicate()])]


torch.library.define("layoutmap_tests::add_tril_", "(Tensor(a!) x) -> Tensor(a!)")


@torch.library.impl("layoutmap_tests::add_tril_", "CompositeImplicitAutograd")
def _add_tril(x):
    return x.add_(1).tril_()


def test_an_error_of_the_program_is_raised_once():
    """An error that is not DTensor's is no reason to compute again, gathered."""
    calls.clear()
    with run_on(), pytest.raises(ValueError, match="the program's own"):
        torch.ops.layoutmap_tests.refuse(place(torch.ones(8, 6), None, None))

    assert ["refuse"] == calls


def test_no_change_in_place_is_made_twice():
    """What changes its target before an error, or before what DTensor has no rule for, changes it once."""
    x, y = (place(torch.ones(8, 6), None, None) for _ in range(2))
    with run_on():
        with pytest.raises(RuntimeError, match="the program's own"):
            torch.ops.layoutmap_tests.refuse_(x)
        torch.ops.layoutmap_tests.add_tril_(y)

    assert torch.equal(torch.full((8, 6), 2.0), whole(x))
    assert torch.equal(torch.full((8, 6), 2.0).tril(), whole(y))


@pytest.mark.parametrize(
    ("shape", "specs", "to"),
    [
        ((0,), (None,), (0, 2, 2)),
        ((0, 4), ("batch", None), (0,)),
        ((0, 3, 4), (None, None, "model"), (0, 12)),
    ],
)
def test_a_tensor_without_elements_is_reshaped(shape, specs, to):
    """DTensor's own rule for views never ends for some of them."""
    x = place(torch.zeros(shape), *specs).requires_grad_()
    with run_on():
        y = x.reshape(to)
        y.sum().backward()

    assert (to, shape) == (tuple(y.shape), tuple(x.grad.shape))


@pytest.mark.filterwarnings("ignore:size_average and reduce args will be deprecated")
@pytest.mark.parametrize("options", [{"size_average": False}, {"reduce": False}, {"size_average": True}])
def test_losses_that_are_reduced_in_the_old_way(options):
    """The names that reductions had before are understood."""
    x, y = torch.randn(8, 6), torch.randn(8, 6)
    with run_on():
        found = whole(F.mse_loss(place(x, "batch", "model"), place(y, "batch", None), **options))

    torch.testing.assert_close(found, F.mse_loss(x, y, **options))


CHANGES_OF_SHAPE = {
    "t_": lambda x: x.t_(),
    "transpose_": lambda x: x.transpose_(0, -1),
    "swapaxes_": lambda x: x.swapaxes_(1, 0),
    "unsqueeze_": lambda x: x.unsqueeze_(1),
    "squeeze_": lambda x: x.unsqueeze_(0).squeeze_(),
    "squeeze_ of an axis": lambda x: x.unsqueeze_(-1).squeeze_(-1),
    "orthogonal_": nn.init.orthogonal_,
}


@pytest.mark.every_case
@pytest.mark.filterwarnings("ignore::layoutmap.LayoutMapWarning")
@pytest.mark.parametrize("in_call", [True, False], ids=["in a call", "outside of calls"])
@pytest.mark.parametrize(
    "specs", [("batch", None), (None, "model"), ("model", "batch"), (("batch", "model"), None)]
)
@pytest.mark.parametrize("name", CHANGES_OF_SHAPE)
def test_the_shape_is_changed_in_place(name, specs, in_call):
    """A tensor on a mesh has another shape after it, with its values, its layout and gradients."""
    values = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))

    def changed(x):
        x.requires_grad_()
        torch.manual_seed(0)
        y = x * 2
        with torch.no_grad() if name == "orthogonal_" else contextlib.nullcontext():
            CHANGES_OF_SHAPE[name](y)
        (y.sin() * torch.arange(y.numel()).view(y.shape)).sum().backward()
        return y, x.grad

    expected = changed(values.clone())
    with run_on() if in_call else contextlib.nullcontext():
        actual = changed(place(values, *specs))

    assert actual[0].shape == expected[0].shape
    torch.testing.assert_close([whole(each) for each in actual], [each.detach() for each in expected])


@pytest.mark.filterwarnings("ignore::layoutmap.LayoutMapWarning")
def test_the_shape_is_changed_in_place_of_what_has_a_slice():
    """The slice that is a copy stays one of the same rows: what changes it changes the tensor in its new shape."""
    values = torch.arange(16.0).view(4, 4)

    def changed(x):
        part = x[1:]
        x.t_()
        part.mul_(torch.arange(12.0).view(3, 4))
        return x, part

    with run_on():
        actual = changed(place(values, "batch", None))

    for each, one in zip(actual, changed(values.clone()), strict=True):
        torch.testing.assert_close(whole(each), one)


@pytest.mark.filterwarnings("ignore::layoutmap.LayoutMapWarning")
def test_shapes_that_are_not_changed_in_place():
    """An axis that is sharded in another order than the mesh's is gathered for a view of it, which is then a copy."""
    with run_on():
        x = place(torch.eye(4), ("model", "batch"), None)
        part = x[0]
        with pytest.raises(EngineError, match="would change its shape in place"):
            x.t_()

    assert torch.equal(torch.eye(4)[0], whole(part))
    assert torch.equal(torch.eye(4), whole(x))
