"""Slices that are copies on a mesh, and views on one device: a change of one is one of its tensor, or is refused."""

import copy
import gc
import pickle
from contextlib import nullcontext, suppress
from pathlib import Path

import forked
import pytest
import torch
from engines.torch.dtensors import MESH, alone, place, run_on, whole
from engines.torch.test_wrong_numbers import MENDED, normal
from torch.distributed.tensor import DTensor

from layoutmap.core.errors import EngineError
from layoutmap.core.layout import Layout
from layoutmap.engines.torch.dtensor_ops import memories
from layoutmap.engines.torch.dtensor_ops.outside import install_patches_for_mesh
from layoutmap.engines.torch.engine import engine

PROCESSES = ("torch",)
# What is written back is gathered.
pytestmark = pytest.mark.filterwarnings("ignore::layoutmap.LayoutMapWarning")
WORKER = Path(__file__).with_name("slices_process.py")


CHANGES = {
    "rows": lambda x: x[2:4].zero_(),
    "a row": lambda x: x[0].mul_(2),
    "columns": lambda x: x.narrow(1, 1, 3).add_(1),
    "columns of rows": lambda x: x[1:3][:, 2].fill_(1),
    "a view": lambda x: x.view(-1)[3].zero_(),
    "a piece": lambda x: x.chunk(4)[0].neg_(),
    "the diagonal": lambda x: x.diagonal().zero_(),
    "reshaped": lambda x: x.reshape(3, 16)[:, ::2].mul_(3),
    "transposed": lambda x: x[1:3].T.sub_(1),
    "detached": lambda x: x[1:].detach().exp_(),
    "with out=": lambda x: torch.add(x[:, 0], 1, out=x[:, 0]),
    "with out= and names": lambda x: torch.add(input=x[:, 0], other=x[:, 1], out=x[:, 0]),
    "twice": lambda x: x[3:].add_(1)[:, 2].mul_(x[0, 0]),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changes_of_slices_that_are_copies(name):
    """A slice along a sharded axis is a copy, and a change of it changes the tensor; alone it is lost."""
    expected, laid_out = normal(8, 6), place(normal(8, 6), "batch", "model")
    CHANGES[name](expected)

    with run_on():
        CHANGES[name](laid_out)
    torch.testing.assert_close(whole(laid_out), expected)
    laid_out = place(normal(8, 6), "batch", "model")
    with alone(), suppress(RuntimeError):
        CHANGES[name](laid_out)
    assert not torch.equal(expected, whole(laid_out)), MENDED


def test_a_slice_under_no_grad():
    """It requires gradients if its tensor does, as views do."""
    plain, laid_out = normal(8, 6).requires_grad_(), place(normal(8, 6), "batch", None).requires_grad_()
    with run_on(), torch.no_grad():
        assert [each[0].requires_grad for each in (plain, laid_out)] == [True, True]


def test_slices_are_not_kept():
    """A slice that nobody uses takes no memory."""
    gc.collect()  # what errors of other tests hold
    with run_on():
        x = place(normal(8, 6), "batch", "model")
        part = x[1:]
        assert 1 == len(memories.copied)
        del part
        assert 0 == len(memories.copied)


def outside():
    """A tensor whose axes are sharded, and on which no function mode looks."""
    laid_out = place(normal(8, 6), "batch", "model")
    install_patches_for_mesh(laid_out.device_mesh)  # `alone` may have been open before
    return laid_out


OUTSIDE = {
    **CHANGES,
    "several rows": lambda x: torch._foreach_mul_(x[2:7].unbind()[1:4], 2.0),
    "initialized": lambda x: torch.nn.init.constant_(x[2:4], 2.0),
    "by an index": lambda x: x[:4].index_copy_(0, torch.tensor([3, 1]), torch.ones(2, 6)),
    "by a mask": lambda x: x[:, 3:].masked_fill_(x[:, 3:] > 0, 1),
    "copied to": lambda x: x[2:4].copy_(torch.ones(2, 6)),
    "computed on gathered tensors": lambda x: x[2:7].cumsum_(0),
    "by a view of another name": lambda x: torch.einsum("ij->ji", x[2:7]).mul_(3),
    "data": lambda x: x.data[1:].detach().data[:, 3:].T.exp_(),
    "one row after the other": lambda x: [row.mul_(number) for number, row in enumerate(x)],
    "one piece after the other": lambda x: [
        *(each.fill_(1) for each in torch.chunk(x, 3)),
        *(each.add_(2) for each in x.T.split(4)),
    ],
    "one piece, twice": lambda x: (lambda part: part.add_(1).data.mul_(part[0].clone()))(x[1:5]),
    "of other bits": lambda x: x[2:4].detach().view(torch.int32).zero_(),
    "pieces of one call, in turn": lambda x: (
        lambda a, b: [a.zero_(), b.mul_(2), a.add_(3), b.T[1].mul_(4), b.add_(a)]
    )(*x.chunk(2, 1)),
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_changes_of_slices_outside_of_calls(name):
    """Where no function mode looks, operators tell what they have changed, also of slices that were taken together."""
    expected, laid_out = normal(8, 6), outside()
    OUTSIDE[name](expected)
    OUTSIDE[name](laid_out)

    torch.testing.assert_close(whole(laid_out), expected)


VIEWS = {
    **{
        f"[{text}]": eval(f"lambda x: x[{text}]")
        for text in ("1", "-2:", ":, 1", "::3", "..., None, 2", "1:5, -1")
    },
    "narrow": lambda x: x.narrow(0, 3, 2),
    "select": lambda x: torch.select(x, 1, -1),
    "split": lambda x: torch.split(x, 3)[1],
    "split with sizes": lambda x: x.split_with_sizes([2, 4], 1)[1],
    "tensor_split": lambda x: x.tensor_split(3, 1)[1],
    "unbind": lambda x: x.unbind(1)[2],
    "unfold": lambda x: x.unfold(0, 2, 3),
    "diagonal": lambda x: torch.diagonal(x, 1),
    "hsplit": lambda x: x.hsplit(2)[1],
    "vsplit": lambda x: torch.vsplit(x, 2)[0],
    "view": lambda x: x.view(4, -1)[1],
    "view_as": lambda x: x.view_as(torch.empty(6, 8))[2],
    "unflatten": lambda x: x.unflatten(0, (4, 2))[:, 1],
    "reshape": lambda x: torch.reshape(x, (16, 3))[:, 1],
    "flatten": lambda x: x.flatten()[3:],
    "ravel": lambda x: torch.ravel(x)[::2],
    "transposes": lambda x: x.T.mT.t().swapaxes(0, 1)[1:4].permute(1, 0).movedim(0, 1)[0],
    "squeezed": lambda x: x.unsqueeze(1)[2:3].squeeze(),
    "strides": lambda x: x.as_strided((3, 2), (6, 2), 7),
    "einsum": lambda x: torch.einsum("ij->ji", x)[3],
    "atleast_3d": lambda x: torch.atleast_3d(x)[1],
    "other bits": lambda x: x.detach().view(torch.int32)[1].view(torch.float32),
    "data": lambda x: x.data[1:].data,
    "detached": lambda x: x[:3].detach()[1],
}
IN_CALL = pytest.mark.parametrize("in_call", [True, False], ids=["in a call", "outside of calls"])
LAYOUTS = [
    ("batch", "model"),
    ("model", "batch"),
    (("batch", "model"), None),
    (("model", "batch"), None),
    (None, "model"),
]


@IN_CALL
@pytest.mark.parametrize("name", VIEWS)
def test_views_change_their_tensor(name, in_call):
    """Whatever makes them, in whatever layout."""
    for specs in LAYOUTS:
        expected, laid_out = normal(8, 6), place(normal(8, 6), *specs)
        VIEWS[name](expected).mul_(3)
        with run_on() if in_call else nullcontext():
            VIEWS[name](laid_out).mul_(3)

        torch.testing.assert_close(whole(laid_out), expected, msg=str(specs))


@IN_CALL
@pytest.mark.parametrize("name", VIEWS)
def test_views_are_not_used_with_former_values(name, in_call):
    """They have those that their tensor was changed to, or their use is refused."""
    expected = normal(8, 6)
    part = VIEWS[name](expected)
    expected.mul_(3)
    refused = []
    for specs in LAYOUTS:
        laid_out, used = place(normal(8, 6), *specs), []
        with run_on() if in_call else nullcontext():
            view = VIEWS[name](laid_out)
            laid_out.mul_(3)
            try:
                used = [view + 1]
            except EngineError as error:
                refused.append(error.fix)
        for each in used:
            torch.testing.assert_close(whole(each), part + 1, msg=str(specs))

    assert {"take the slice where it is used, x[...], or clone it before the change: x[...].clone()"} == set(
        refused
    )


USES = {
    "a function": lambda part: part.sum(),
    "in a list": lambda part: torch.stack([part, part]),
    "gathered": lambda part: part.full_tensor(),
    "all values": whole,
    "in another layout": lambda part: engine().relayout(part, Layout.replicated(MESH, part.ndim)),
    "an operator": lambda part: torch.ops.aten.mul.Tensor(part, 2),
    "shards": lambda part: part.to_local(),
    "redistributed": lambda part: part.redistribute(part.device_mesh, part.placements),
    "changed": lambda part: part.add_(1),
    "copied": copy.deepcopy,
}
CHANGED = {
    "after the tensor": lambda x: (x[:, 0], x.mul_(2))[0],
    "after a slice across it": lambda x: (x[2:5], x[3].detach().zero_())[0],
    "after another slice": lambda x: (x[:, :3], x[:, 4:].zero_())[0],
    "a slice of a slice": lambda x: (x[1:][:, 2], x[1:].zero_())[0],
    "a slice of a call": lambda x: (slice_of_call(x), x.mul_(2))[0],
}


def slice_of_call(x):
    with run_on():
        return x[:, 1]


@IN_CALL
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("name", CHANGED)
def test_an_outdated_slice_is_refused(name, use, in_call):
    """Its tensor was changed, or another slice of that; questions for its shape are answered, and others as before."""
    x = outside()
    with run_on() if in_call else nullcontext():
        part = CHANGED[name](x)
        assert (part.shape, part.dim()) == (part.size(), part.ndim)
        assert part in {part}
        assert repr(part).endswith("(outdated: take it again)")
        with pytest.raises(
            EngineError, match="got a slice of a tensor that was changed after the slice was taken"
        ) as caught:
            USES[use](part)
        assert {"shape": tuple(part.shape), "tensor": (8, 6)}.items() & caught.value.facts.items()
        del part, caught
    gc.collect()
    x.add_(1)

    assert DTensor.__torch_function__ is torch._C._disabled_torch_function_impl


TOGETHER = {
    "slices that overlap": lambda x: [x[2:4], x[:, 0]],
    "other slices": lambda x: [x[2:4], x[5:, 1]],
    "the tensor and a slice": lambda x: [x[0], x],
}


@pytest.mark.parametrize("name", TOGETHER)
def test_slices_are_not_changed_by_one_call(name):
    """On one device one is changed after the other, and here each by itself."""
    with pytest.raises(
        EngineError, match="_foreach_mul_ cannot change a slice along a sharded axis"
    ) as caught:
        torch._foreach_mul_(TOGETHER[name](outside()), 2.0)

    assert "change one slice after the other" == caught.value.fix


def test_slices_of_an_expanded_tensor_are_not_changed():
    """Its elements lie in one place; the slice, which was changed, is not used any more."""
    expanded = outside().unsqueeze(0).expand(3, 8, 6)
    part = expanded[:, 0]
    with pytest.raises(EngineError, match="cannot change a slice along a sharded axis in place") as caught:
        part.zero_()

    assert "clone the tensor first: x = x.clone()" == caught.value.fix
    torch.testing.assert_close(whole(expanded), normal(8, 6).expand(3, 8, 6))
    with pytest.raises(EngineError, match="a slice of a tensor that was changed"):
        whole(part)


@IN_CALL
def test_a_gradient_of_former_values_is_refused(in_call):
    """A slice that autograd has saved is not the one that a change through `data` would have changed."""
    for specs in LAYOUTS[:4]:
        x = place(normal(8, 6), *specs).requires_grad_()
        with run_on() if in_call else nullcontext():
            loss = x[1:].sin().sum()
            x.data.add_(2)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()


def test_no_process_keeps_what_nobody_uses():
    """A slice that is outdated, and is let go, is forgotten."""
    gc.collect()  # what errors of other tests hold
    laid_out = outside()
    part = laid_out[0]
    laid_out.mul_(2)
    assert 1 == len(memories.outdated)
    del part
    laid_out.mul_(2)

    assert 0 == len(memories.outdated) == len(memories.copied)


def test_a_slice_of_a_call_is_changed_after_it():
    """It goes on to be a slice of its tensor, and a copy of it is not one."""
    expected, laid_out = normal(8, 6), outside()
    with run_on():
        part = laid_out[:, 0]
    copied, stored = copy.deepcopy(part), pickle.loads(pickle.dumps(part))
    copied.zero_()
    stored.zero_()
    part.mul_(2)
    part.add_(1)
    expected[:, 0].mul_(2).add_(1)

    torch.testing.assert_close(whole(laid_out), expected)


def test_a_program_that_used_dtensor_before():
    """Torch keeps some of DTensor's methods from their first call on, be it before this library is imported."""
    done = forked.run(WORKER)

    assert (0, "[0.0, 0.0, 1.0, 1.0]\n") == (done.returncode, done.stdout), done.stderr
