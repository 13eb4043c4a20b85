"""Slices that are copies on a mesh, and views on one device: what is changed in place is changed there, too."""

import copy
import gc
import pickle
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from engines.torch.dtensors import MESH, alone, place, run_on, whole
from engines.torch.test_wrong_numbers import MENDED, normal
from torch.distributed.tensor import DTensor

from layoutmap.core.errors import EngineError
from layoutmap.core.layout import Layout
from layoutmap.engines.torch.dtensor_ops import memories, slices
from layoutmap.engines.torch.dtensor_ops.outside import look_after
from layoutmap.engines.torch.engine import engine
from layoutmap.engines.torch.private import dtensor, spec_of

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
    """A slice that nobody uses is not followed."""
    with run_on():
        x = place(normal(8, 6), "batch", "model")
        part = x[1:]
        assert [part] == [each for each in slices.copies.values() if each is part]
        del part
        assert [] == list(slices.copies.values())


def outside():
    """A tensor whose axes are sharded, and on which no function mode looks."""
    laid_out = place(normal(8, 6), "batch", "model")
    look_after(laid_out.device_mesh)  # `alone` may have been open before
    return laid_out


OUTSIDE = {
    **CHANGES,
    "several at once": lambda x: torch._foreach_mul_([x[2:4], x[5:, 1]], 2.0),
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
    "after the tensor": lambda x: (lambda part: (x.mul_(2), part.add_(1)))(x[:, 0]),
    "after a slice across it": lambda x: (lambda part, row: (row.zero_(), part.add_(1)))(
        x[2:5], x[3].detach()
    ),
    "pieces in turn": lambda x: (lambda a, b: [a.zero_(), b.mul_(2), a.add_(3), b.T[1].mul_(4)])(
        x[:, :3], x[:, 4:]
    ),
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_changes_of_slices_outside_of_calls(name):
    """Where no function mode looks, operators tell what they have changed, also of slices that were taken together."""
    expected, laid_out = normal(8, 6), outside()
    OUTSIDE[name](expected)
    OUTSIDE[name](laid_out)

    torch.testing.assert_close(whole(laid_out), expected)


def test_slices_that_overlap_are_not_changed_at_once():
    """On one device one is changed after the other, and here each by itself: nothing is changed."""
    laid_out = outside()
    with pytest.raises(EngineError) as caught:
        torch._foreach_mul_([laid_out[2:4], laid_out[:, 0]], 2.0)

    assert {"shape": (2, 6), "the other's": (8,)} == caught.value.facts
    assert "change them one after the other" == caught.value.fix
    torch.testing.assert_close(whole(laid_out), normal(8, 6))


def test_slices_of_an_expanded_tensor_are_not_changed():
    """Its elements lie in one place; the slice has its values again when it is next used."""
    expanded = outside().unsqueeze(0).expand(3, 8, 6)
    part = expanded[:, 0]
    with pytest.raises(EngineError, match="a slice of an expanded tensor") as caught:
        part.zero_()

    assert "clone the tensor first: x = x.clone()" == caught.value.fix
    torch.testing.assert_close(whole(part), normal(8, 6)[0].expand(3, 6))


READ = {
    "sums": lambda part: part.sum(),
    "gathered": lambda part: (part.full_tensor() if isinstance(part, DTensor) else part).clone(),
    "a view of it": lambda part: part.unsqueeze(0).transpose(0, -1) * 1,
    "in a list": lambda part: torch.stack([part, part]),
    "all values": lambda part: whole(part).clone() if isinstance(part, DTensor) else part.clone(),
    "in another layout": lambda part: (
        (engine().relayout(part, Layout.replicated(MESH, part.ndim)) if isinstance(part, DTensor) else part)
        * 1
    ),
    "by an operator": lambda part: torch.ops.aten.mul.Tensor(part, 2),
    "shards": lambda part: (
        whole(dtensor(part.to_local(), spec_of(part))) if isinstance(part, DTensor) else part.clone()
    ),
}


def read_slices(name, x):
    """Slices, slices of those and detached ones, whose tensor and each other are changed meanwhile; and the tensor."""
    parts = [x[0], x[:, 1:3], x.view(-1)[5:], x[1:][:, 2], x.detach().T[3], x[2:5].detach()[1:, 0]]
    x.mul_(2)
    parts[0].add_(1)
    found = [READ[name](each) for each in parts]
    parts[-1].zero_()
    return [x, *found, *(each * 1 for each in parts)]


@pytest.mark.parametrize("name", READ)
def test_slices_outside_of_calls_have_the_values_of_now(name):
    """However they are read; and when all are read, torch's functions are called as they were."""
    gc.collect()  # outdated slices of other tests, which nobody has read, are in cycles
    expected, found = read_slices(name, normal(8, 6)), read_slices(name, outside())

    torch.testing.assert_close([whole(each) for each in found], expected)
    assert DTensor.__torch_function__ is torch._C._disabled_torch_function_impl


def test_a_slice_is_shown_with_the_values_of_now():
    """Where one process may print alone, nothing is gathered: it says so; see `wrong_numbers_process`."""
    laid_out = place(torch.ones(4, 2), "batch", None)
    look_after(laid_out.device_mesh)
    part = laid_out[0]
    laid_out.mul_(2)

    assert "tensor([2., 2.])" in repr(part)
    assert "outdated" not in repr(part)


def test_no_process_gathers_what_nobody_uses():
    """A slice that is outdated, and is let go, is not gathered: other processes may have done so before."""
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
        laid_out.add_(1)
    copied, stored = copy.deepcopy(part), pickle.loads(pickle.dumps(part))
    copied.zero_()
    stored.zero_()
    part.mul_(2)
    expected.add_(1)[:, 0].mul_(2)

    torch.testing.assert_close(whole(laid_out), expected)
    laid_out.add_(1)
    part.mul_(2)
    expected.add_(1)[:, 0].mul_(2)
    torch.testing.assert_close(whole(laid_out), expected)


def test_a_program_that_used_dtensor_before():
    """Torch keeps some of DTensor's methods from their first call on, be it before this library is imported."""
    done = subprocess.run([sys.executable, str(WORKER)], capture_output=True, text=True)

    assert (0, "[0.0, 0.0, 1.0, 1.0]\n") == (done.returncode, done.stdout), done.stderr
