"""What DTensor alone gets wrong without a word: right here, or refused, and still wrong there.

A test that fails because DTensor alone is right tells that torch has fixed it: what fixes it here can then go.
"""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from engines import several_processes
from engines.torch.beside_plain import outcome
from engines.torch.dtensors import alone, place, run_on, whole
from engines.torch.masked import drawn_on

from layoutmap.core.errors import EngineError
from layoutmap.engines.tested import is_older_than

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


MEANS = {
    "mse_loss": (F.mse_loss, normal(8, 6), normal(8, 6, seed=1)),
    "smooth_l1_loss": (F.smooth_l1_loss, normal(8, 6), normal(8, 6, seed=1)),
    "huber_loss": (F.huber_loss, normal(8, 6), normal(8, 6, seed=1)),
    "binary_cross_entropy": (F.binary_cross_entropy, fractions(8, 6), fractions(8, 6, seed=1)),
    "soft_margin_loss": (F.soft_margin_loss, normal(8, 6), normal(8, 6, seed=1).sign()),
}
IGNORED = torch.tensor([-100, -100, 3, -100, 2, 0, -100, 5])
WEIGHTS = torch.tensor([0.5, 1, 2, 0.1, 3, 1])
OF_CLASSES = {
    "cross_entropy": lambda x, t: F.cross_entropy(x, t),
    "nll_loss": lambda x, t: F.nll_loss(F.log_softmax(x, -1), t),
    "weights": lambda x, t: F.cross_entropy(x, t, WEIGHTS),
    "smoothing": lambda x, t: F.cross_entropy(x, t, label_smoothing=0.1),
}


def of_first(loss):
    """A loss that has a gradient for its first argument only."""
    return lambda x, target: loss(x, target.detach())


def statistics(norm, *specs):
    """Running statistics of a batch whose rows differ in scale."""

    def function(x, mean, variance):
        norm(x, mean, variance)
        return mean, variance

    x = normal(8, 4, 6) * torch.arange(1.0, 9)[:, None, None]
    return function, [(x, (*specs, None)), (torch.zeros(4), (None,)), (torch.ones(4), (None,))]


def embed_by_frequency(table, tokens):
    return F.embedding(tokens, table, scale_grad_by_freq=True).square().sum()


def scatter_rows(y, x, rows):
    return torch.scatter_add(x, 0, rows, y).cumsum(0).square().sum()


def add_rows(y, x, rows):
    return (x * 1).index_add_(0, rows[:, 0], y).square().sum()


def assign_rows(x, y):
    x[2:4] = y[:2]


def assign_columns(x, y):
    x[:, 1:3] = y[:, :2]


def assigned_by(assign):
    def function(x, y):
        x = x * 1
        assign(x, y)
        return x

    return function, [(normal(8, 6), ("batch", "model")), (normal(8, 6, seed=1), ("batch", "model"))]


def change_a_view(x, rows, scale):
    changed = x * 1
    changed[2:4] = rows
    return (changed * scale).sum()


def numbers(most, *shape):
    return torch.randint(most, shape, generator=torch.Generator().manual_seed(0))


ROWS, OF_CHANNELS = ("batch", None), (None, "model")
COSINES = [
    (normal(8, 6), OF_CHANNELS),
    (normal(8, 6, seed=1), OF_CHANNELS),
    (normal(8, seed=2).sign(), (None,)),
]
CASES = {
    **{
        f"{name} {specs}": (of_first(loss), [(x, (*specs, None)[:2]), (target, (*specs, None)[:2])])
        for name, (loss, x, target) in MEANS.items()
        for specs in (BATCH, BOTH, CHANNELS)
    },
    **{
        f"ignored labels, {name}": (function, [(normal(8, 6), ROWS), (IGNORED, ("batch",))])
        for name, function in OF_CLASSES.items()
    },
    "statistics of rows": statistics(lambda *of: F.batch_norm(*of, training=True), "batch", None),
    "statistics of channels": statistics(lambda *of: F.batch_norm(*of, training=True), None, "model"),
    "statistics of instances": statistics(F.instance_norm, "batch", None),
    "a loss of cosines": (F.cosine_embedding_loss, COSINES),
    "gradients by frequency": (
        embed_by_frequency,
        [(normal(4, 6), (None, None)), (numbers(4, 8, 4), ROWS)],
    ),
    "amax": (torch.amax, [(normal(8, 6), ROWS)]),
    "infinity norm": (lambda x: torch.linalg.vector_norm(x, float("inf")), [(normal(8, 6), ROWS)]),
    "scatter_add": (
        scatter_rows,
        [
            (normal(8, 2, seed=1), ("batch", "model")),
            (normal(8, 6), ROWS),
            (numbers(8, 8, 2), ("batch", "model")),
        ],
    ),
    "index_add_": (
        add_rows,
        [
            (normal(8, 6, seed=1), ("batch", "model")),
            (normal(8, 6), (None, "batch")),
            (numbers(8, 8, 6), ("batch", "model")),
        ],
    ),
    "rows are assigned": assigned_by(assign_rows),
    "columns are assigned": assigned_by(assign_columns),
    "a changed view": (
        change_a_view,
        [(normal(8, 6), (None, None)), (normal(2, 6, seed=1), (None, None)), (normal(8, 6, seed=2), ROWS)],
    ),
}
"""What is computed, and with which arguments in which layouts."""


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(name):
    """They are those of plain tensors; in DTensor alone they are not, but for what a release of torch has fixed."""
    function, arguments = CASES[name]
    expected = outcome(function, [tensor.clone() for tensor, _ in arguments])
    with run_on():
        right = outcome(function, [place(tensor, *specs) for tensor, specs in arguments])
    with alone():
        wrong = outcome(function, [place(tensor, *specs) for tensor, specs in arguments])

    torch.testing.assert_close(right, expected)
    is_wrong = not name.startswith("ignored labels") or is_older_than("torch", "2.14")
    assert is_wrong != all(map(torch.allclose, wrong, expected)), MENDED


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
        right_alone = [] if is_older_than("torch", "2.14") else ["cross_entropy"]
        assert right_alone == [name for name, (_, fixed) in told["compared"].items() if fixed], MENDED
        assert [28.0] * 5 == told["read"]
        assert 28.0 != told["read alone"], MENDED
        assert 28.0 == told["read later"], "a loss is read when the mesh is left"
        assert [] == told["slices"]
        assert 96.0 == told["kept by one"]
        for name, drawn in told["drawn by tiles"].items():
            for found, expected in zip(drawn, drawn_on("batch=1", (), name), strict=True):
                torch.testing.assert_close(torch.tensor(found, dtype=expected.dtype), expected)
