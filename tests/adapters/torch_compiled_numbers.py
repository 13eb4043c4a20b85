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
X = normal(8, 6)


def changes(change):
    def function(x):
        changed = x.detach() * 1
        change(changed)
        return changed + 0 * x

    return function, [(X, ("batch", "model"))]


# What is computed, and with which arguments in which layouts.
CASES = {
    **tables.CASES,
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
