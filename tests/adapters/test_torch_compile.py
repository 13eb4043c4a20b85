"""A laid out torch module that is compiled computes what one device computes, eagerly, in four processes."""

import copy
import pickle
from functools import partial
from pathlib import Path

import pytest
import torch
from engines import several_processes
from torch import nn
from torch_compiled_numbers import CASES, REFUSED
from torch_models import RULES, Transformer
from torch_pairs import Layers, X, pair, whole

import layoutmap as lm
from layoutmap.adapters.torch.structure import ModuleStructure
from layoutmap.engines.tested import is_older_than

PROCESSES = ("torch",)
pytestmark = pytest.mark.every_case

WORKER = Path(__file__).with_name("torch_compile_process.py")
# And the most graphs that it may take.
RECORDED = {"each block": 2}
RECORDED_LONG = {
    "torch.compile(model)": 1,
    "each block, model=4": 2,
    "each of twelve blocks": 2,
    "each block, which knows its number": 3,
    "the model": 1,
    "a model whose blocks gather": 2,
    "a model with BatchNorm": 1,
    "torch.compile(model), model=4": 1,
    "torch.compile(model) with BatchNorm": 1,
    "torch.compile(model) in parts": 2,
    "torch.compile(block)": 3,
    "by inductor": 2,
    "parts: one gathers inside of another": 2,
    **dict.fromkeys(("by tiles, aot_eager", "by tiles, inductor"), 2),
    **dict.fromkeys(("llama", "mixtral", "vit", "bert"), 2),
    **dict.fromkeys(("all of llama", "all of mixtral", "all of vit", "all of bert"), 1),
}
REASONS = {
    "sets a scale": "",
    "counts its calls": "its forward changes calls",
}
REASONS_LONG = {
    "assigns a buffer": "its forward changes mean",
    "reads a value": "recording the graph failed",
    # From torch 2.14 on it is part of the graph.
    "has a checkpoint": "an activation checkpoint recomputes" if is_older_than("torch", "2.14") else "",
    "keeps a tensor": "its forward changes kept",
    "reads a tensor of its file": "a tensor of shape (8,) is neither an argument",
    "takes an object": "an argument is a set",
}
VIEWED = "parts: one is given a view"
NUMBERS = ("mse_loss ('batch',)",)
# Of models, and of what DTensor alone gets wrong: each is four processes, which take longer to begin
PARTS = 4


def run(folder, *cases):
    """What each of four processes found, by case."""
    (port,) = several_processes.free_ports(1)
    results = several_processes.run(WORKER, folder, [{}] * 4, str(port), *cases)
    return [told for told, _ in results]


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    return run(tmp_path_factory.mktemp("compile"), *RECORDED, *REASONS, *NUMBERS, "one graph")


def assert_recorded(told, case, num_graphs):
    for each in told:
        assert each[case]["losses"] < 1e-5, case
        assert each[case]["values"] < 1e-5, case
        assert 0 == each[case]["breaks"], case
        assert 0 < each[case]["graphs"] <= num_graphs, case


@pytest.mark.parametrize("case", RECORDED)
def test_a_compiled_model_trains_as_on_one_device(told, case):
    """In one graph for equal modules that are given tensors in one layout, and without a break."""
    assert_recorded(told, case, RECORDED[case])


@pytest.mark.long
def test_a_part_that_is_given_a_view_trains_as_on_one_device(told_in_all):
    """Along one axis of two that are sharded its shards are strided, which torch takes for another order of them."""
    for each in told_in_all:
        assert each[VIEWED]["losses"] < 1e-5
        assert each[VIEWED]["values"] < 1e-5


def test_weights_are_gathered_outside_of_the_graph(told):
    """Once for the model, and for each of three blocks once forwards and once backwards, as it is without a graph."""
    assert [1 + 2 * 3] * 4 == [each["each block"]["gathers"] for each in told]


@pytest.mark.long
@pytest.mark.parametrize("part", range(PARTS))
def test_any_compiled_model_trains_as_on_one_device(tmp_path, part):
    """Models, BatchNorm, models of transformers and their layers, and code of inductor's too."""
    cases = list(RECORDED_LONG)[part::PARTS]
    told = run(tmp_path, *cases)
    for case in cases:
        assert_recorded(told, case, RECORDED_LONG[case])
        assert case != "torch.compile(model)" or [1 + 1] * 4 == [each[case]["gathers"] for each in told]


@pytest.fixture(scope="module")
def told_in_all(tmp_path_factory):
    return run(tmp_path_factory.mktemp("compile"), *REASONS_LONG, VIEWED, "a function that calls it")


@pytest.mark.long
def test_a_function_that_calls_a_model_has_a_graph_of_its_own(told_in_all):
    """The model is compiled apart from what is around it, which a graph break ends."""
    case = "a function that calls it"
    for each in told_in_all:
        assert each[case]["losses"] < 1e-5
        assert each[case]["values"] < 1e-5
        assert 1 == each[case]["breaks"]


def test_one_graph_or_an_error(told):
    """With fullgraph=True each shape has one graph, also a batch that does not divide; else the error says why."""
    for each in told:
        found = each["one graph"]
        assert (True, 2) == (found["right"], found["graphs"])
        assert "its forward changes calls" in found["said"]["counts its calls"]
        assert "leave dynamic=True out" in found["said"]["dynamic shapes"]
        assert "call torch.compile(module) or module.compile()" in found["said"]["a function"]


def assert_reason(told, case, reason):
    for each in told:
        assert each[case]["right"]
        assert bool(reason) == bool(each[case]["said"])
        assert reason in "".join(each[case]["said"])


@pytest.mark.parametrize("case", REASONS)
def test_a_graph_is_used_only_where_it_computes_the_same(told, case):
    """What is set between calls is another graph's; what is no function of tensors runs as it is, with a warning."""
    assert_reason(told, case, REASONS[case])


@pytest.mark.long
@pytest.mark.parametrize("case", REASONS_LONG)
def test_no_graph_is_used_where_it_computes_something_else(told_in_all, case):
    """It keeps tensors, reads those that are no attributes, or takes what is not a tensor: it runs as it is."""
    assert_reason(told_in_all, case, REASONS_LONG[case])


def assert_right(told, case):
    for each in told:
        if case in REFUSED:
            assert "max_norm on a table" in each[case]
        else:
            assert each[case]["right"], case
            assert each[case]["graphs"] == (not each[case]["said"]), case


@pytest.mark.parametrize("case", NUMBERS)
def test_what_dtensor_alone_gets_wrong_is_right_compiled(told, case):
    """Values, gradients, what is changed in place, and the next random numbers are those of one device."""
    assert_right(told, case)


@pytest.mark.long
@pytest.mark.parametrize("part", range(PARTS))
def test_all_that_dtensor_alone_gets_wrong_is_right_compiled(tmp_path, part):
    """Or it is refused, as it is where it is not compiled."""
    cases = [*CASES, *REFUSED][part::PARTS]
    told = run(tmp_path, *cases)
    for case in cases:
        assert_right(told, case)


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
        first, second = (ModuleStructure(block).parts for block in laid_out().blocks)

        assert first == second

    def test_what_computes_differently_has_another_key(self):
        """Whatever of a block is changed, but for one of its own hooks, which run outside of the graph."""
        for what, change in CHANGES.items():
            model = laid_out()
            block = model.blocks[0]
            before = tuple(ModuleStructure(block).parts)
            change(block)
            assert (what, what == "a wrapped method") == (what, before == tuple(ModuleStructure(block).parts))
        block = laid_out().blocks[0]
        before = tuple(ModuleStructure(block).parts)
        block.register_forward_hook(print)

        assert before == tuple(ModuleStructure(block).parts)


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
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # Dynamo's own imports
@pytest.mark.filterwarnings("ignore::layoutmap.LayoutMapWarning")
def test_compiled_steps_on_simulated_devices_are_refused():
    """Before a weight has changed. Steps of unsharded weights are compiled as ever."""
    _, model = pair(Layers)
    plain = nn.Linear(4, 4)
    before = whole(model.body[0].weight).detach().clone()
    for each, x in ((plain, X[:, :4]), (model, X)):
        each(x).sum().backward()
    torch.compile(torch.optim.SGD(plain.parameters(), lr=0.1).step, backend="eager")()
    with pytest.raises(lm.ScopeError, match=r"AdamW\.step on simulated devices cannot be compiled"):
        torch.compile(torch.optim.AdamW(model.parameters()).step, backend="eager")()

    assert torch.equal(before, whole(model.body[0].weight))


def test_copies_are_compiled_as_what_they_are():
    """A copy of a model is laid out, and compiled as that; one that is unpickled is plain code, and torch's matter."""
    model = laid_out(depth=1)
    with pytest.raises(lm.ScopeError, match="as with torchrun"):
        copy.deepcopy(model).blocks[0].compile()
    plain = pickle.loads(pickle.dumps(model.blocks[0].drop))
    plain.compile(backend="eager")

    assert plain._compiled_call_impl is not None
    assert model.blocks[0]._compiled_call_impl is None
