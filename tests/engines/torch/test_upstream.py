"""What DTensors compute wrongly without this package: a test that fails says which correction is no longer needed."""

import re
import signal
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from cases import few
from engines.torch.beside_plain import assert_as_plain
from engines.torch.dtensors import MESH, alone, place, run_on, whole
from engines.torch.function_cases import CASES
from torch.distributed.tensor import Replicate, distribute_tensor

from layoutmap.core.layout import Layout
from layoutmap.engines.torch.engine import engine
from layoutmap.engines.torch.private import is_before, set_replicates_plain_tensors

PROCESSES = ("torch",)
ROOT = Path(__file__).parents[3]
TABLE = ROOT / "docs" / "torch-operators.md"
SOURCE = ROOT / "src" / "layoutmap" / "engines" / "torch"
# Modules that correct nothing by themselves; `sums` is about when, not what, and `linear` and `softmax` save time.
MACHINERY = {"__init__", "linear", "masks", "mode", "proven", "shards", "softmax", "sums", "unwrap_python"}
# why: decisions/0088; what -> the module of engines.torch, torch's issue or "none found", the version last seen on, and
# the one from which on torch is right, if there is one, and whether the correction is kept then for another reason.
CORRECTIONS = {
    name: others
    for name, *others in re.findall(
        r"^\| (.+?) \| `([\w.]+)` \| .+ \| (?:\[pytorch/pytorch)?(#\d+|none found).* \| (2\.\d+\.\d+) "
        r"\| (?:(2\.\d+)(, kept: .+)? )?\|$",
        TABLE.read_text(),
        re.MULTILINE,
    )
}
X = torch.arange(48.0).view(8, 6).sin()
SECONDS = 60  # of a search that never ends
BATCH, LAST, SUMS = "batch and channels", "last axes", "summands"


def same(expected, actual):
    return torch.equal(expected, actual)


def assignment():
    expected, changed = X.clone(), place(X, "batch", None)
    expected[2:4] = 1
    changed[2:4] = place(torch.ones(2, 6), None, None)
    return same(expected, whole(changed))


def changed_view():
    changed = place(X, "batch", None)
    changed[2:4].zero_()
    return not bool(whole(changed)[2:4].any())


def changed_gradient():
    x = place(X, None, None).requires_grad_()
    changed = x * 1
    changed[2:4] = place(X[:2], None, None)
    (changed * place(X, "batch", None)).sum().backward()
    expected = X.clone()
    expected[2:4] = 0
    return torch.allclose(expected, whole(x.grad))


def joined():
    x = place(torch.ones(2, 4, 3), "batch", "model", None)
    return (2, 4, 6) == tuple(torch.cat([place(torch.zeros(0), None), x, x], -1).shape)


def plain_among_them():
    x = place(X, "batch", None).requires_grad_()
    loss = F.mse_loss(x, torch.ones(8, 6), reduction="sum")
    set_replicates_plain_tensors(False)  # as where a scope has ended
    loss.backward()
    return True


def view_without_elements():
    signal.alarm(3)
    return (0, 2, 2) == tuple(place(torch.zeros(0), None).reshape(0, 2, 2).shape)


def narrow_index():
    rows = torch.tensor([[0, 1], [2, 3]])
    taken = torch.gather(place(X, None, "model"), 0, place(rows, None, "model"))
    return same(torch.gather(X, 0, rows), whole(taken))


def out_of_range():
    try:
        F.embedding(place(torch.tensor([8]), None), place(X, "model", None))
    except IndexError:
        return True
    return False


def two_lookups():
    x, index = place(X, None, "model"), torch.zeros(8, 1, dtype=torch.int64)
    first, last = (x.gather(1, place(index + number, None, None)) for number in (0, 5))
    return same(X[:, :1] + X[:, -1:], whole(first + last))


def axis_from_the_end():
    return same(X.cumsum(-1), whole(place(X, None, "model").cumsum(-1)))


def placements_of_a_view():
    flattened = place(torch.arange(96.0).view(3, 4, 8), None, None, ("batch", "model")).view(-1)
    other = flattened.redistribute(placements=[Replicate(), Replicate()])
    again = other.redistribute(placements=flattened.placements)
    return same(torch.arange(96.0), whole(again.redistribute(placements=[Replicate(), Replicate()])))


def order_of_dims():
    layout = Layout((("model", "batch"), None), MESH)
    return same(X, whole(distribute_tensor(X, *engine().native(layout, 2))))


def data_of_a_tensor():
    changed = place(X, "batch", None)
    changed.data = place(X * 2, "batch", None)
    return same(X * 2, whole(changed))


# A case of `function_cases` and its layout, or what says whether DTensor is right.
PROBES = {
    "means of losses": ("mse_loss mean", BATCH),
    "losses of classes": ("cross_entropy, labels ignored mean", BATCH),
    "batch norm": ("batch_norm of rank 2", BATCH),
    "instance norm": ("instance_norm, tracked", BATCH),
    "group norm": ("group_norm", BATCH),
    "attention": ("attention", BATCH),
    "multi-head attention": ("multi_head_attention", BATCH),
    "convolutions": ("conv1d", BATCH),
    "recurrent layers": ("lstm", BATCH),
    "random numbers": ("dropout", BATCH),
    "activations": ("hardtanh", BATCH),
    "pooling": ("avg_pool2d", BATCH),
    "padding": ("pad reflect", BATCH),
    "windows": ("unfold", BATCH),
    "embeddings": ("embedding, used twice", BATCH),
    "embeddings by frequency": ("embedding, scaled gradient", "batch over both"),
    "indices out of range": out_of_range,
    "lookups that are partial sums": two_lookups,
    "joins with an empty tensor": joined,
    "assignments": assignment,
    "changes of views": changed_view,
    "gradients of changed views": changed_gradient,
    "values that are read": lambda: 28.0 == place(torch.arange(8.0), "batch").sum().item(),
    "quantiles": ("quantile", BATCH),
    "plain tensors": plain_among_them,
    "sums through operators": ("lerp by itself", SUMS),
    "changes of shape": ("reshaped twice", BATCH),
    "views without elements": view_without_elements,
    "axes from the end": axis_from_the_end,
    "narrow indices": narrow_index,
    "changes at an index": ("index_add_", BATCH),
    "gradients of the largest": ("vector_norm inf", BATCH),
    "truths along a sharded axis": ("any, times a number", BATCH),
    "data of a tensor": data_of_a_tensor,
    "placements of views": placements_of_a_view,
    "orders of mesh dims": order_of_dims,
}
SLOW = {"group norm", "attention", "multi-head attention", "recurrent layers", "changes of shape"}


def is_right(probe, scope=alone):
    """Whether DTensor computes in a scope what plain tensors do; not if it fails, or does not end."""
    signal.signal(signal.SIGALRM, _stop)
    signal.alarm(SECONDS)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if isinstance(probe, tuple):
                assert_as_plain(*CASES[probe[0]], probe[1], scope=scope)
                return True
            with scope():
                return probe()
    except Exception:
        return False
    finally:
        signal.alarm(0)


def _stop(*_):
    raise TimeoutError


@pytest.mark.parametrize("name", few(PROBES, *(name for name in PROBES if name not in SLOW)))
def test_a_correction_is_needed(name):
    """DTensor does wrongly what a correction says, on each version of torch before the one that is right."""
    module, issue, _, release, _ = CORRECTIONS[name]
    is_wrong = not release or is_before(release)
    assert is_wrong != is_right(PROBES[name]), (
        f"{name} (in {module}, issue of pytorch/pytorch: {issue}): torch {torch.__version__} is to be "
        + ("wrong, and is right: no longer needed from it on" if is_wrong else "right, and is wrong")
        + "; correct docs/torch-operators.md, and `is_before` there"
    )


HERE = (
    assignment,
    axis_from_the_end,
    changed_gradient,
    data_of_a_tensor,
    joined,
    narrow_index,
    out_of_range,
    plain_among_them,
    two_lookups,
    view_without_elements,
)


def test_probes_can_come_out_right():
    """What DTensor computes right is no longer needed, and what a probe tries is right with this package."""
    assert is_right(("l1_loss mean", BATCH))
    assert [] == [probe.__name__ for probe in HERE if not is_right(probe, run_on)]


def test_each_correction_has_a_probe():
    """The probes are those of the corrections, and each module that corrects something says what and has a probe."""
    modules = {path.stem for path in (SOURCE / "dtensor_ops").glob("*.py")} - MACHINERY
    named = {module for module, *_ in CORRECTIONS.values()}

    assert set(CORRECTIONS) == set(PROBES)
    installed_before = sorted(
        release for _, _, _, release, is_kept in CORRECTIONS.values() if release and not is_kept
    )
    asked = [
        found
        for path in SOURCE.rglob("*.py")
        for found in re.findall(r'is_before\("([\d.]+)"\)', path.read_text())
    ]
    assert installed_before == sorted(asked)
    assert {f"dtensor_ops.{module}" for module in modules} <= named
    assert [] == [module for module in named if not (SOURCE / f"{module.replace('.', '/')}.py").exists()]
