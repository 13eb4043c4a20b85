"""What DTensor alone gets wrong, compiled, in one of four processes; see engines/torch/test_wrong_numbers.py."""

import warnings

import torch
import torch.nn.functional as F
from engines.torch import test_slices
from engines.torch import test_wrong_numbers as tables
from engines.torch import wrong_numbers_process as others
from engines.torch.dtensors import place
from engines.torch.wrong_numbers_process import outcome
from torch import nn
from torch._dynamo.utils import counters

import layoutmap as lm
from layoutmap.core.errors import EngineError

normal = tables.normal
X, Y, ROWS = normal(8, 6), normal(8, 6, seed=1), ("batch", None)


def of_first(loss):
    """A loss that has a gradient for its first argument only."""
    return lambda x, target: loss(x, target.detach())


def cosines():
    tensors = [normal(8, 6), normal(8, 6, seed=1), normal(8, seed=2).sign()]
    return F.cosine_embedding_loss, list(zip(tensors, [(None, "model")] * 2 + [(None,)], strict=True))


def by_frequency():
    def embed(table, tokens):
        return F.embedding(tokens, table, scale_grad_by_freq=True).square().sum()

    tokens = torch.randint(4, (8, 4), generator=torch.Generator().manual_seed(0))
    return embed, [(normal(4, 6), (None, None)), (tokens, ROWS)]


def additions(name, width):
    rows = torch.randint(8, (8, width), generator=torch.Generator().manual_seed(0))

    def function(y, x, rows):
        if name == "scatter_add":
            return torch.scatter_add(x, 0, rows, y).cumsum(0).square().sum()
        return (x * 1).index_add_(0, rows[:, 0], y).square().sum()

    both = ("batch", "model")
    specs = ROWS if name == "scatter_add" else (None, "batch")
    return function, [(normal(8, width, seed=1), both), (normal(8, 6), specs), (rows, both)]


def assigned_by(assign):
    def function(x, y):
        x = x * 1
        assign(x, y)
        return x

    return function, [(X, ("batch", "model")), (Y, ("batch", "model"))]


def changed_view(x, rows, scale):
    changed = x * 1
    changed[2:4] = rows
    return (changed * scale).sum()


def statistics_of(make, *specs):
    def function(x, mean, var):
        if make is nn.InstanceNorm1d:
            return F.instance_norm(x, mean, var), mean, var
        return F.batch_norm(x, mean, var, training=True), mean, var

    x = normal(8, 4, 6) * torch.arange(1.0, 9)[:, None, None]
    return function, [(x, (*specs, None)), (torch.zeros(4), (None,)), (torch.ones(4), (None,))]


def changes(change):
    def function(x):
        changed = x.detach() * 1
        change(changed)
        return changed + 0 * x

    return function, [(X, ("batch", "model"))]


# What is computed, and with which arguments in which layouts.
CASES = {
    **{
        f"{name} {specs}": (of_first(loss), [(x, (*specs, None)[:2]), (target, (*specs, None)[:2])])
        for name, (loss, x, target) in tables.MEANS.items()
        for specs in (tables.BATCH, tables.BOTH, tables.CHANNELS)
    },
    **{
        f"ignored labels, {name}": (function, [(X, ROWS), (tables.IGNORED, ("batch",))])
        for name, function in tables.OF_CLASSES.items()
    },
    "statistics of rows": statistics_of(nn.BatchNorm1d, "batch", None),
    "statistics of channels": statistics_of(nn.BatchNorm1d, None, "model"),
    "statistics of instances": statistics_of(nn.InstanceNorm1d, "batch", None),
    "a loss of cosines": cosines(),
    "gradients by frequency": by_frequency(),
    "amax": (torch.amax, [(X, ROWS)]),
    "infinity norm": (lambda x: torch.linalg.vector_norm(x, float("inf")), [(X, ROWS)]),
    "scatter_add": additions("scatter_add", 2),
    "index_add_": additions("index_add_", 6),
    "rows are assigned": assigned_by(tables.assign_rows),
    "columns are assigned": assigned_by(tables.assign_columns),
    "a changed view": (
        changed_view,
        [(X, (None, None)), (normal(2, 6, seed=1), (None, None)), (normal(8, 6, seed=2), ROWS)],
    ),
    **{
        f"drawn: {name}": (draw, [(normal(8, 4, 6), ("batch", "model", None))])
        for name, draw in tables.DRAWS.items()
    },
    **{f"a change of {name}": changes(change) for name, change in test_slices.CHANGES.items()},
    **others.CASES,
    **others.MORE,
}
REFUSED = {
    "max_norm": (
        lambda tokens, table: F.embedding(tokens, table, max_norm=1.0),
        [(torch.arange(8), ("batch",)), (X, (None, None))],
    ),
}


class Computes(nn.Module):
    """What a function computes, as a module in a layout."""

    def __init__(self, function):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.function = function

    def forward(self, *tensors):
        return self.function(*tensors)


def compiled(function):
    """A function of DTensors, compiled, and returning a list."""
    model = lm.LayoutMap(lm.create_mesh("batch=2,model=2")).build(
        lambda: Computes(function), batch_dim="batch"
    )
    model.compile(backend="aot_eager")
    return model


def compared(case):
    """Whether a case is right, the next random numbers among it, how many graphs it took, and what was said."""
    function, arguments = case
    counters.clear()
    expected = [*outcome(function, [tensor.clone() for tensor, _ in arguments]), torch.rand(3)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tensors = [place(tensor.clone(), *specs) for tensor, specs in arguments]
        found = [*outcome(compiled(function), tensors), torch.rand(3)]
    said = [str(each.message) for each in caught if "cannot be compiled" in str(each.message)]
    return {
        "right": all(
            torch.allclose(a, b, rtol=1e-5, atol=1e-5) for a, b in zip(expected, found, strict=True)
        ),
        "graphs": counters["stats"].get("unique_graphs", 0),
        "said": "".join(said).replace("\n", " "),
    }


def refused(case):
    """What the error says."""
    function, arguments = case
    try:
        compiled(function)(*(place(tensor.clone(), *specs) for tensor, specs in arguments))
    except EngineError as error:
        return str(error)
    return ""
