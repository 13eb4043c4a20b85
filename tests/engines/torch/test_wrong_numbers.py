"""What DTensor alone gets wrong without a word: right here, or refused, and still wrong there.

A test that fails because DTensor alone is right tells that torch has fixed it: what fixes it here can then go.
"""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from engines import several_processes
from engines.torch.dtensors import alone, place, run_on, whole
from engines.torch.masked import drawn_on
from torch import nn

from layoutmap.core.errors import EngineError
from layoutmap.engines.tested import is_before

PROCESSES = ("torch",)
pytestmark = [
    pytest.mark.every_case,
    pytest.mark.filterwarnings("ignore::layoutmap.LayoutMapWarning"),  # of what is gathered, which is right
]

MENDED = "torch computes this right by now, or no longer; see docs/torch-operators.md for what can go"
WORKER = Path(__file__).with_name("wrong_numbers_process.py")

BATCH, BOTH, CHANNELS = ("batch",), ("batch", "model"), (None, "model")


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def fractions(*shape, seed=0):
    return torch.sigmoid(normal(*shape, seed=seed))


def value_and_gradient(function, x, *others):
    """What a function gives for tensors, and the gradient of its first one."""
    x = x.detach().requires_grad_()
    value = function(x, *others)
    value.backward()
    return value, x.grad


def assert_right_here_and_wrong_alone(run, expected, right_from=None):
    """Fail unless something that is run gives what is expected here, and something else in DTensor alone.

    From a release of torch on it may be right in DTensor, too.
    """
    with run_on():
        right = [whole(each) for each in run()]
    with alone():
        wrong = [whole(each) for each in run()]

    torch.testing.assert_close(right, [each.detach() for each in expected])
    is_wrong = right_from is None or is_before("torch", right_from)
    assert is_wrong != all(torch.allclose(a, b) for a, b in zip(wrong, expected, strict=True)), MENDED


MEANS = {
    "mse_loss": (F.mse_loss, normal(8, 6), normal(8, 6, seed=1)),
    "smooth_l1_loss": (F.smooth_l1_loss, normal(8, 6), normal(8, 6, seed=1)),
    "huber_loss": (F.huber_loss, normal(8, 6), normal(8, 6, seed=1)),
    "binary_cross_entropy": (F.binary_cross_entropy, fractions(8, 6), fractions(8, 6, seed=1)),
    "soft_margin_loss": (F.soft_margin_loss, normal(8, 6), normal(8, 6, seed=1).sign()),
}


@pytest.mark.parametrize(("specs", "pieces"), [(BATCH, 2), (BOTH, 4), (CHANNELS, 2)])
@pytest.mark.parametrize("name", MEANS)
def test_gradients_of_means(name, specs, pieces):
    """The gradient of a mean of a sharded tensor is that of the global tensor; alone it is a multiple of it."""
    loss, x, target = MEANS[name]
    specs = (*specs, None)[:2]
    _, expected = value_and_gradient(loss, x, target)

    def run():
        return value_and_gradient(loss, place(x, *specs), place(target, *specs))

    with run_on():
        right = whole(run()[1])
    with alone():
        wrong = whole(run()[1])

    torch.testing.assert_close(right, expected)
    torch.testing.assert_close(wrong, expected * pieces, msg=MENDED)


IGNORED = torch.tensor([-100, -100, 3, -100, 2, 0, -100, 5])
WEIGHTS = torch.tensor([0.5, 1, 2, 0.1, 3, 1])
OF_CLASSES = {
    "cross_entropy": lambda x, t: F.cross_entropy(x, t),
    "nll_loss": lambda x, t: F.nll_loss(F.log_softmax(x, -1), t),
    "weights": lambda x, t: F.cross_entropy(x, t, WEIGHTS),
    "smoothing": lambda x, t: F.cross_entropy(x, t, label_smoothing=0.1),
}


@pytest.mark.parametrize("name", OF_CLASSES)
def test_ignored_labels(name):
    """Labels that are ignored do not count, on whichever device they are."""
    x, function = normal(8, 6), OF_CLASSES[name]
    expected = value_and_gradient(function, x, IGNORED)

    assert_right_here_and_wrong_alone(
        lambda: value_and_gradient(function, place(x, "batch", None), place(IGNORED, "batch")),
        expected,
        right_from="2.14",
    )


@pytest.mark.parametrize(
    ("make", "specs"),
    [
        (nn.BatchNorm1d, ("batch", None)),
        (nn.BatchNorm1d, (None, "model")),
        (nn.InstanceNorm1d, ("batch", None)),
    ],
)
def test_running_statistics(make, specs):
    """Running statistics are those of the global batch."""
    x = normal(8, 4, 6) * torch.arange(1.0, 9)[:, None, None]
    plain = make(4, track_running_stats=True)
    plain(x)

    def run():
        laid_out = make(4, track_running_stats=True)
        for name in ("running_mean", "running_var"):
            setattr(laid_out, name, place(getattr(laid_out, name), None))
        if laid_out.affine:
            laid_out.weight = nn.Parameter(place(laid_out.weight, None))
            laid_out.bias = nn.Parameter(place(laid_out.bias, None))
        laid_out(place(x, *specs, None))
        return laid_out.running_mean, laid_out.running_var

    assert_right_here_and_wrong_alone(run, (plain.running_mean, plain.running_var))


def test_a_loss_of_cosines():
    """The cosine embedding loss of tensors whose features are sharded is that of the global tensor."""
    x, y, signs = normal(8, 6), normal(8, 6, seed=1), normal(8, seed=2).sign()
    expected = value_and_gradient(F.cosine_embedding_loss, x, y, signs)

    assert_right_here_and_wrong_alone(
        lambda: value_and_gradient(
            F.cosine_embedding_loss, place(x, None, "model"), place(y, None, "model"), place(signs, None)
        ),
        expected,
    )


def test_gradients_by_frequency():
    """An embedding's gradient is scaled by how often a token is in the whole batch."""
    tokens, table = torch.randint(4, (8, 4), generator=torch.Generator().manual_seed(0)), normal(4, 6)

    def embed(table, tokens):
        return F.embedding(tokens, table, scale_grad_by_freq=True).square().sum()

    assert_right_here_and_wrong_alone(
        lambda: value_and_gradient(embed, place(table, None, None), place(tokens, "batch", None)),
        value_and_gradient(embed, table, tokens),
    )


@pytest.mark.parametrize("name", ["amax", "infinity norm"])
def test_gradients_of_the_largest(name):
    """The gradient of a largest value is where that value is; alone it is not a number."""
    function = torch.amax if name == "amax" else lambda x: torch.linalg.vector_norm(x, float("inf"))
    x = normal(8, 6)

    assert_right_here_and_wrong_alone(
        lambda: value_and_gradient(function, place(x, "batch", None)), value_and_gradient(function, x)
    )


@pytest.mark.parametrize("name", ["scatter_add", "index_add_"])
def test_additions_at_an_index(name):
    """What is added to some rows of a tensor has its gradient, however it is sharded."""
    width = 2 if name == "scatter_add" else 6
    x, y = normal(8, 6), normal(8, width, seed=1)
    rows = torch.randint(8, (8, width), generator=torch.Generator().manual_seed(0))

    def function(y, x, rows):
        if name == "scatter_add":
            return torch.scatter_add(x, 0, rows, y).cumsum(0).square().sum()
        return (x * 1).index_add_(0, rows[:, 0], y).square().sum()

    x_specs = ("batch", None) if name == "scatter_add" else (None, "batch")
    assert_right_here_and_wrong_alone(
        lambda: value_and_gradient(
            function, place(y, "batch", "model"), place(x, *x_specs), place(rows, "batch", "model")
        ),
        value_and_gradient(function, y, x, rows),
    )


def assign_rows(x, y):
    x[2:4] = y[:2]


def assign_columns(x, y):
    x[:, 1:3] = y[:, :2]


@pytest.mark.parametrize("assign", [assign_rows, assign_columns])
def test_assignments_to_parts(assign):
    """What is assigned to a part of a sharded axis is there; alone it is lost."""
    x, y = normal(8, 6), normal(8, 6, seed=1)
    expected = x.clone()
    assign(expected, y)

    def run():
        laid_out = place(x, "batch", "model")
        assign(laid_out, place(y, "batch", "model"))
        return [laid_out]

    assert_right_here_and_wrong_alone(run, [expected])


def test_gradients_through_changed_views():
    """The gradient of a tensor of which a view was changed is right, however the gradient arrives."""
    x, rows, scale = normal(8, 6), normal(2, 6, seed=1), normal(8, 6, seed=2)

    def function(x, rows, scale):
        changed = x * 1
        changed[2:4] = rows
        return (changed * scale).sum()

    assert_right_here_and_wrong_alone(
        lambda: value_and_gradient(
            function, place(x, None, None), place(rows, None, None), place(scale, "batch", None)
        ),
        value_and_gradient(function, x, rows, scale),
    )


FLATTENED = {
    "a quantile": lambda x: torch.quantile(x * x, 0.3) * x,
    "changed in part": lambda x: (x * 1).index_fill_(0, torch.tensor([3, 17]), 2.0),
    "changed through a view": lambda x: multiplied(x * 1),
    "random numbers": lambda x: F.dropout(x, 0.5),
}


def multiplied(x):
    x[3:20].mul_(2)
    return x


@pytest.mark.parametrize("name", FLATTENED)
@pytest.mark.parametrize(
    "specs", [(None, None, ("batch", "model")), (None, "batch", "model"), (None, "model", "batch")]
)
def test_gradients_of_what_is_flattened(name, specs):
    """A flattened tensor is sharded as no other tensor can be asked to be, and its gradient need not be."""

    def run(x):
        torch.manual_seed(7)
        x.requires_grad_()
        result = FLATTENED[name](x.view(-1))
        (result * result).sum().backward()
        return [result.detach(), x.grad]

    with run_on():
        found = [whole(each) for each in run(place(normal(2, 4, 8), *specs))]

    torch.testing.assert_close(found, run(normal(2, 4, 8)))


DRAWS = {
    "dropout": lambda x: F.dropout(x, 0.4),
    "rand_like": torch.rand_like,
    "normal_": lambda x: torch.empty_like(x).normal_(),
    "bernoulli": lambda x: torch.bernoulli(torch.sigmoid(x)),
}


@pytest.mark.parametrize("name", DRAWS)
def test_random_numbers(name):
    """Random numbers are those of one device, and so are the next ones."""
    x = normal(8, 4, 6)

    def run(x):
        torch.manual_seed(7)
        return DRAWS[name](x), torch.get_rng_state()

    expected, state = run(x)
    with run_on():
        right, state_here = run(place(x, "batch", "model", None))
    with alone():
        wrong, _ = run(place(x, "batch", "model", None))

    assert torch.equal(expected, whole(right))
    assert torch.equal(state, state_here)
    assert not torch.equal(expected, whole(wrong)), MENDED


def test_max_norm_is_refused():
    """An embedding that changes its table while it reads it is refused."""
    tokens, table = torch.arange(8), normal(8, 6)

    with run_on(), pytest.raises(EngineError, match="max_norm on a table that is on a mesh"):
        F.embedding(place(tokens, "batch"), place(table, None, None), max_norm=1.0)


def test_real_processes(tmp_path):
    """On four processes the main wrong numbers are right here and wrong alone, and values that are read are global."""
    (port,) = several_processes.free_ports(1)
    results = several_processes.run(WORKER, tmp_path, [{}] * 4, str(port))

    for told, _ in results:
        assert [] == [name for name, (right, _) in told["compared"].items() if not right]
        right_alone = [] if is_before("torch", "2.14") else ["cross_entropy"]
        assert right_alone == [name for name, (_, fixed) in told["compared"].items() if fixed], MENDED
        assert [28.0] * 5 == told["read"]
        assert 28.0 != told["read alone"], MENDED
        assert 28.0 == told["read later"], "a loss is read when the mesh is left"
        assert [] == told["slices"]
        assert 96.0 == told["kept by one"]
        for name, drawn in told["drawn by tiles"].items():
            for found, expected in zip(drawn, drawn_on("batch=1", (), name), strict=True):
                torch.testing.assert_close(torch.tensor(found, dtype=expected.dtype), expected)
