"""A laid out torch module that is compiled computes what one device computes, eagerly, in four processes."""

import copy
import pickle
from functools import partial
from pathlib import Path

import pytest
import torch
from engines import several_processes
from torch_models import RULES, Transformer

import layoutmap as lm
from layoutmap.adapters.torch.structure import Structure

PROCESSES = ("torch",)

WORKER = Path(__file__).with_name("torch_compile_process.py")
RECORDED = {"each block": 2}  # and the most graphs that it may take
LEFT_OUT = ("a function that calls it",)
RECORDED_LONG = {
    "each block, model=4": 2,
    "the model": 1,
    "a model whose blocks gather": 2,
    "a model with BatchNorm": 1,
    "by inductor": 2,
    **dict.fromkeys(("llama", "mixtral", "vit", "bert"), 2),
}
LEFT_OUT_LONG = ("torch.compile(model)",)
REASONS = {
    "sets a scale": "",
    "counts its calls": "its forward changes calls",
    "keeps a tensor": "its forward changes kept",
    "reads a tensor of its file": "a tensor of shape (8,) is no argument",
    "reads a value": "recording it failed",
    "takes an object": "an argument is a set",
}


def run(folder, *cases):
    """What each of four processes found, by case."""
    (port,) = several_processes.free_ports(1)
    results = several_processes.run(WORKER, folder, [{}] * 4, str(port), *cases)
    return [told for told, _ in results]


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    return run(tmp_path_factory.mktemp("compile"), *RECORDED, *LEFT_OUT, *REASONS)


@pytest.fixture(scope="module")
def told_long(tmp_path_factory):
    return run(tmp_path_factory.mktemp("compile"), *RECORDED_LONG, *LEFT_OUT_LONG)


def assert_recorded(told, case, num_graphs):
    for each in told:
        assert each[case]["losses"] < 1e-5
        assert each[case]["values"] < 1e-5
        assert 0 == each[case]["breaks"]
        assert 0 < each[case]["graphs"] <= num_graphs


def assert_left_out(told, case):
    for each in told:
        assert each[case]["losses"] < 1e-5
        assert each[case]["values"] < 1e-5


@pytest.mark.parametrize("case", RECORDED)
def test_a_compiled_model_trains_as_on_one_device(told, case):
    """In one graph for equal modules that are given tensors in one layout, and without a break."""
    assert_recorded(told, case, RECORDED[case])


def test_weights_are_gathered_outside_of_the_graph(told):
    """Once for the model, and for each of three blocks once forwards and once backwards, as it is without a graph."""
    assert [1 + 2 * 3] * 4 == [each["each block"]["gathers"] for each in told]


@pytest.mark.long
@pytest.mark.parametrize("case", RECORDED_LONG)
def test_any_compiled_model_trains_as_on_one_device(told_long, case):
    """Whole models, BatchNorm, the layers of models of transformers, and code of inductor's too."""
    assert_recorded(told_long, case, RECORDED_LONG[case])


@pytest.mark.parametrize("case", LEFT_OUT)
def test_what_dynamo_meets_is_left_out_of_it(told, case):
    """Where Dynamo traces what is around a model, the model runs as it is."""
    assert_left_out(told, case)


@pytest.mark.long
@pytest.mark.parametrize("case", LEFT_OUT_LONG)
def test_any_model_that_dynamo_meets_is_left_out_of_it(told_long, case):
    """A model that torch.compile is called with, too."""
    assert_left_out(told_long, case)


@pytest.mark.parametrize("case", REASONS)
def test_a_graph_is_used_only_where_it_computes_the_same(told, case):
    """What is set between calls is another graph's; what is no function of tensors runs as it is, with a warning."""
    for each in told:
        assert each[case]["right"]
        assert bool(REASONS[case]) == bool(each[case]["said"])
        assert REASONS[case] in "".join(each[case]["said"])


def laid_out(**options):
    return lm.LayoutMap("batch=2,model=4", RULES["transformer"]).build(
        partial(Transformer, **options), batch_dim="batch", library="torch"
    )


CHANGES = {
    "a mode": lambda block: block.eval(),
    "the mode of a layer": lambda block: block.drop.eval(),
    "an attribute": lambda block: setattr(block.drop, "p", 0.2),
    "a hook": lambda block: block.up.register_forward_hook(print),
    "a layer": lambda block: setattr(block, "up", block.down),
    "a tied weight": lambda block: setattr(block.key, "weight", block.query.weight),
    "no bias": lambda block: setattr(block.up, "bias", None),
    "a list": lambda block: block.__dict__.setdefault("sizes", [1]),
    "a wrapped method": lambda block: setattr(block, "forward", block.forward),
}


@pytest.mark.filterwarnings("ignore::layoutmap.LayoutMapWarning")
class TestStructure:
    """The key of a graph."""

    def test_equal_blocks_have_equal_keys(self):
        """So they share a graph."""
        first, second = (Structure(block).parts for block in laid_out().blocks)

        assert first == second

    def test_what_computes_differently_has_another_key(self):
        """Whatever of a block is changed, but for one of its own hooks, which run outside of the graph."""
        for what, change in CHANGES.items():
            model = laid_out()
            block = model.blocks[0]
            before = tuple(Structure(block).parts)
            change(block)
            assert (what, what == "a wrapped method") == (what, before == tuple(Structure(block).parts))
        block = laid_out().blocks[0]
        before = tuple(Structure(block).parts)
        block.register_forward_hook(print)

        assert before == tuple(Structure(block).parts)


@pytest.mark.filterwarnings("ignore::layoutmap.LayoutMapWarning")
@pytest.mark.parametrize("options", [{}, {"dynamic": True}])
def test_simulated_devices_are_refused(options):
    """A graph is for one device, and the error says what to start."""
    model = laid_out(depth=1)
    with pytest.raises(lm.ScopeError, match="as with torchrun"):
        model.compile(**options)
    with pytest.raises(lm.ScopeError, match="as with torchrun"):
        torch.compile(model, backend="aot_eager")(torch.zeros(2, 4, dtype=torch.int64))


@pytest.mark.filterwarnings("ignore::layoutmap.LayoutMapWarning")
def test_copies_are_compiled_as_what_they_are():
    """A copy of a model is laid out, and compiled as that; one that is unpickled is plain code, and torch's matter."""
    model = laid_out(depth=1)
    with pytest.raises(lm.ScopeError, match="as with torchrun"):
        copy.deepcopy(model).blocks[0].compile()
    plain = pickle.loads(pickle.dumps(model.blocks[0].drop))
    plain.compile(backend="eager")

    assert plain._compiled_call_impl is not None
    assert model.blocks[0]._compiled_call_impl is None
