"""How torch models get their first values: those of the plain model, bit for bit, each device its shard."""

import copy
import gc
import pickle

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import layoutmap as lm
from layoutmap.adapters import get_adapter
from layoutmap.adapters.torch import optimizer_hooks
from layoutmap.engines import get_engine
from layoutmap.testing.engine_contract import list_all_specs

pytestmark = pytest.mark.filterwarnings("ignore::layoutmap.LayoutMapWarning")
torch.set_num_threads(1)


def make_map(mesh="batch=2,model=4", rules=None):
    return lm.LayoutMap(lm.create_mesh(mesh), rules)


def rules_for(model):
    """A rule for each tensor of a plain model that shards what divides."""
    rules = {}
    for path, tensor in (*model.named_parameters(), *model.named_buffers()):
        dims = ["model", "batch"]
        rules[path.replace(".", r"\.") + "$"] = tuple(
            dims.pop(0) if dims and size % 8 == 0 else None for size in tensor.shape
        )
    return rules


def variables(model):
    return get_adapter("torch").variables(model)


def bits(value):
    return value.dtype, value.shape, value.tobytes()


def seeded(make_model):
    torch.manual_seed(3)
    np.random.seed(3)  # noqa: NPY002
    return make_model()


def assert_as_plain(make_model, mesh="batch=2,model=4"):
    """The model is bit for bit what it is without a scope, and so is what is drawn after it."""
    plain = seeded(make_model)
    expected_state = torch.get_rng_state()
    layout_map = make_map(mesh, rules_for(plain))
    with layout_map.scope(library="torch") as scope:
        model = seeded(make_model)
    assert torch.equal(expected_state, torch.get_rng_state())
    expected, actual = variables(plain), variables(model)

    assert list(expected) == list(actual)
    assert list(plain.state_dict()) == list(model.state_dict())
    for path, variable in expected.items():
        assert bits(variable.read()) == bits(actual[path].read()), path
        assert variable.tensor.requires_grad == actual[path].tensor.requires_grad, path
        assert isinstance(variable.tensor, nn.Parameter) == isinstance(actual[path].tensor, nn.Parameter), (
            path
        )
        assert layout_map[path] == actual[path].layout, path
    return model, scope


def zoo():
    """Every initializer of torch, and tensors of every sort."""
    model = nn.Module()
    initializers = {
        "xavier_uniform": nn.init.xavier_uniform_,
        "xavier_normal": nn.init.xavier_normal_,
        "kaiming_uniform": nn.init.kaiming_uniform_,
        "kaiming_normal": nn.init.kaiming_normal_,
        "trunc_normal": nn.init.trunc_normal_,
        "orthogonal": nn.init.orthogonal_,
        "eye": nn.init.eye_,
        "sparse": lambda tensor: nn.init.sparse_(tensor, 0.1),
        "constant": lambda tensor: nn.init.constant_(tensor, 3.0),
    }
    for name, initialize in initializers.items():
        model.register_parameter(name, nn.Parameter(initialize(torch.empty(96, 64))))
    model.concatenated = nn.Parameter(torch.cat([torch.randn(64, 64), torch.zeros(8, 64)]))
    model.transposed = nn.Parameter(torch.randn(64, 128).t() * 0.02)
    model.of_bfloat16 = nn.Parameter(torch.randn(64, 128, dtype=torch.bfloat16))
    model.of_float64 = nn.Parameter(torch.rand(64, 128, dtype=torch.float64), requires_grad=False)
    model.of_complex = nn.Parameter(torch.randn(64, 64, dtype=torch.complex64))
    model.register_buffer("integers", torch.randint(0, 100, (80, 80)))
    model.register_buffer("unsaved", torch.arange(8192).view(64, 128), persistent=False)
    return model


def rewritten():
    """Values that depend on values: read, indexed, copied from numpy, loaded."""
    first, second = nn.Linear(96, 96), nn.Linear(96, 96)
    scale = first.weight.abs().max().item()
    with torch.no_grad():
        first.weight[3].zero_()
        second.weight.copy_(torch.from_numpy(np.random.randn(96, 96)) * scale)  # noqa: NPY002
    third = nn.Linear(96, 96)
    third.load_state_dict({name: value * 2 for name, value in first.state_dict().items()})
    return nn.ModuleList([first, second, third, copy.deepcopy(third)])


class TestFirstValues:
    """What a plain program draws, whatever it does to build a model."""

    def test_they_are_those_of_the_plain_model(self):
        """Copies, conversions and reads inside of a scope give the plain model's values."""
        assert_as_plain(rewritten)

    def test_little_is_initialized_globally_and_the_plan_names_it(self):
        """Values are the plain ones; what cannot be drawn in pieces is initialized globally, as the plan says."""
        _, scope = assert_as_plain(zoo)
        whole = {a.variable.path: a.global_init for a in scope.plan.assignments if a.global_init}

        assert {"orthogonal", "eye"} <= set(whole)
        assert {"xavier_uniform", "kaiming_normal", "trunc_normal", "of_bfloat16"}.isdisjoint(whole)
        assert all(whole.values())

    def test_a_model_that_exists_keeps_its_values(self):
        """`apply` changes no value, nor what is drawn next."""
        model = seeded(zoo)
        expected = {path: bits(variable.read()) for path, variable in variables(model).items()}
        state = torch.get_rng_state()
        make_map(rules=rules_for(model)).apply(model)

        assert expected == {path: bits(variable.read()) for path, variable in variables(model).items()}
        assert torch.equal(state, torch.get_rng_state())


INITIALIZERS = {
    "uniform": nn.init.uniform_,
    "normal": nn.init.normal_,
    "trunc_normal": nn.init.trunc_normal_,
    "kaiming": nn.init.kaiming_uniform_,
    "orthogonal": nn.init.orthogonal_,
}


@settings(max_examples=12, deadline=None)
@given(
    sizes=st.tuples(st.sampled_from([8, 24, 64, 200]), st.sampled_from([8, 40, 64, 512])),
    specs=st.sampled_from(list_all_specs(lm.Mesh(None, "a=2,b=4"), 2)),
    names=st.lists(st.sampled_from(list(INITIALIZERS)), min_size=1, max_size=3),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
)
def test_any_layout_of_any_size(sizes, specs, names, dtype):
    """Weights of any size in any layout, small ones and large ones in turn, are those of the plain program."""

    def make_model():
        return nn.ParameterList(
            INITIALIZERS[name](torch.empty(sizes)).to(dtype).requires_grad_() for name in names
        )

    plain = seeded(make_model)
    state = torch.get_rng_state()
    model = make_map("a=2,b=4", {".*": specs}).build(lambda: seeded(make_model), library="torch")

    assert torch.equal(state, torch.get_rng_state())
    for (path, expected), actual in zip(variables(plain).items(), variables(model).values(), strict=True):
        assert bits(expected.read()) == bits(actual.read()), path
        assert lm.Layout(specs, lm.create_mesh("a=2,b=4")) == actual.layout


SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "vocab_size": 256,
    "pad_token_id": 0,
}


def llama():
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, tie_word_embeddings=True))


class TestTies:
    """One tensor under several names."""

    def test_a_tied_weight_is_one_parameter(self):
        """It has one path and aliases, one layout, and all its places hold the same parameter."""

        def make_model():
            model = nn.ModuleDict({"tokens": nn.Embedding(128, 64), "head": nn.Linear(64, 128, bias=False)})
            model["head"].weight = model["tokens"].weight
            return model

        model, scope = assert_as_plain(make_model)

        assert model["head"].weight is model["tokens"].weight
        assert [("head.weight",)] == [a.variable.aliases for a in scope.plan.assignments]

    def test_a_shared_layer_is_one(self):
        """A module that two attributes hold has its weights once."""

        def make_model():
            layer = nn.Linear(96, 96)
            return nn.ModuleList([layer, layer])

        _, scope = assert_as_plain(make_model)

        assert [("1.weight",), ("1.bias",)] == [a.variable.aliases for a in scope.plan.assignments]


class TestWhatElseRefersToATensor:
    """A parameter in a layout is another object; nothing that a program made keeps the old one."""

    def test_an_optimizer_made_inside_of_the_scope(self):
        """It trains the parameters in their layouts, and its slots lie in these layouts."""
        with make_map(rules={"weight": ("model", None)}).scope(library="torch"):
            model = nn.Linear(96, 96)
            optimizer = torch.optim.Adagrad(model.parameters(), initial_accumulator_value=0.5)

        assert [id(p) for p in model.parameters()] == [id(p) for p in optimizer.param_groups[0]["params"]]
        assert {id(p) for p in model.parameters()} == {id(p) for p in optimizer.state}
        slot = optimizer.state[model.weight]["sum"]
        assert lm.dtensor.fetch_layout(model.weight) == lm.dtensor.fetch_layout(slot)
        assert {0.5} == set(get_engine("torch").to_numpy(slot).flat)

    def test_optimizers_are_known_without_a_search(self, monkeypatch):
        """Each is noted as it is given parameters: a search of the heap is slow, and has made torch abort."""
        for search in ("get_objects", "get_referrers"):
            monkeypatch.setattr(gc, search, lambda *_: pytest.fail("the heap was searched"))
        with make_map(rules={"weight": ("model", None)}).scope(library="torch"):
            model = nn.Linear(96, 96)
            groups = [{"params": [model.weight]}, {"params": [model.bias], "lr": 0.0}]
            optimizers = [torch.optim.SGD(groups), torch.optim.Adam([model.weight])]
            optimizers[1].add_param_group({"params": [model.bias]})

        held = [[id(p) for g in optimizer.param_groups for p in g["params"]] for optimizer in optimizers]
        assert [[id(model.weight), id(model.bias)]] * 2 == held

    def test_an_optimizer_made_before_apply(self):
        """It is refused before it steps, and a new one goes on with its state, as the message says."""

        def step(model, optimizer, times=1):
            for _ in range(times):
                optimizer.zero_grad()
                model(torch.ones(2, 96)).square().sum().backward()
                optimizer.step()

        def make():
            model = seeded(lambda: nn.Linear(96, 96))
            return model, torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9)

        (plain, its), (model, old) = make(), make()
        step(plain, its, 2)
        step(model, old)
        make_map(rules={"weight": ("model", None)}).apply(model)
        before = get_engine("torch").to_numpy(model.weight)
        with pytest.raises(lm.ScopeError) as caught:
            step(model, old)

        assert (
            "SGD was created before its weights were sharded\n"
            "  weight  weight\n"
            "  why     the model now has a sharded tensor in place of the weight, which this step would not train\n"
            "  fix     create the optimizer after apply, and copy its state: "
            "new = SGD(model.parameters(), ...); new.load_state_dict(old.state_dict())"
        ) == str(caught.value)
        assert (before == get_engine("torch").to_numpy(model.weight)).all()

        new = torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9)
        new.load_state_dict(old.state_dict())
        step(model, new)
        torch.testing.assert_close(
            torch.as_tensor(get_engine("torch").to_numpy(model.weight)), plain.weight.data
        )
        slot = new.state[model.weight]["momentum_buffer"]
        assert lm.dtensor.fetch_layout(model.weight) == lm.dtensor.fetch_layout(slot)

    def test_gradients_made_before_apply(self):
        """They go along, in the layouts of their weights."""
        model = nn.Linear(96, 96)
        model(torch.ones(2, 96)).sum().backward()
        expected = model.weight.grad.numpy()
        make_map(rules={"weight": ("model", None)}).apply(model)

        assert lm.dtensor.fetch_layout(model.weight) == lm.dtensor.fetch_layout(model.weight.grad)
        assert (expected == get_engine("torch").to_numpy(model.weight.grad)).all()

    def test_an_optimizer_of_tensors_that_are_gone_from_memory(self):
        """Nothing is kept of the tensors that were replaced, so that no new tensor is taken for one."""
        model = nn.Linear(96, 96)
        make_map(rules={"weight": ("model", None)}).apply(model)
        gc.collect()

        assert not [path for ref, path in optimizer_hooks._replaced_tensors.values() if ref() is None]

    def test_lists_and_attributes_of_a_module(self):
        """Parameters in lists and dicts are the new ones; a tensor that is no buffer has its value, plain."""

        def make_model():
            model = nn.Linear(96, 96)
            model.mine = [model.weight, {"bias": model.bias}]
            model.table = torch.randn(96, 96)
            return model

        plain = seeded(make_model)
        model = make_map(rules={"weight": ("model", None)}).build(lambda: seeded(make_model), library="torch")

        assert model.mine[0] is model.weight
        assert model.mine[1]["bias"] is model.bias
        assert torch.equal(plain.table, model.table)
        assert torch.Tensor is type(model.table)

    def test_attributes_and_hooks_of_a_parameter(self):
        """What a program sets on a parameter is on the laid out one."""
        seen = []
        with make_map(rules={"weight": ("model", None)}).scope(library="torch"):
            model = nn.Linear(96, 96)
            for parameter in model.parameters():
                parameter.no_decay = True
                parameter.register_hook(lambda gradient: seen.append(tuple(gradient.shape)))
        model(torch.ones(2, 96)).sum().backward()

        assert all(parameter.no_decay for parameter in model.parameters())
        assert [(96,), (96, 96)] == sorted(seen)


class TestScopes:
    """What a scope sees."""

    def test_several_models(self):
        """Each has paths of its own, and its name."""
        with make_map(rules={"weight": ("model", None)}).scope(library="torch") as scope:
            models = [nn.Linear(96, 96), nn.Linear(96, 96), nn.Embedding(128, 64)]

        assert ["Linear", "Linear_1", "Embedding"] == list(
            dict.fromkeys(a.variable.model for a in scope.plan.assignments)
        )
        for model in models:
            assert ("model", "unsharded") == variables(model)["weight"].layout.sharding_specs

    def test_layers_that_were_thrown_away_are_not_planned(self):
        """What a model is built from and does not keep is no model."""

        def make_model():
            model = nn.Sequential(nn.Linear(96, 96))
            model[0] = nn.Linear(96, 64)
            return model

        plan = lm.plan(make_model, make_map(), library="torch")

        assert {"0.weight": (64, 96), "0.bias": (64,)} == {
            a.variable.path: a.variable.shape for a in plan.assignments
        }

    def test_a_model_around_one_of_an_inner_scope(self):
        """What an inner scope laid out keeps its layout."""
        with make_map(rules={"1.weight": (None, "model")}).scope(library="torch"):
            with make_map(rules={"weight": ("model", None)}).scope(library="torch"):
                inner = nn.Linear(96, 96)
            model = nn.Sequential(inner, nn.Linear(96, 96))

        layouts = {path: v.layout.sharding_specs for path, v in variables(model).items()}
        assert ("model", "unsharded") == layouts["0.weight"]
        assert ("unsharded", "model") == layouts["1.weight"]

    def test_a_plan_of_a_large_model_takes_no_memory(self):
        """A model far larger than this machine is planned."""
        config = transformers.LlamaConfig(num_hidden_layers=4)
        plan = lm.plan(
            lambda: transformers.LlamaForCausalLM(config), make_map("batch=512,model=8"), library="torch"
        )

        assert plan.global_bytes > 4e9
        assert not plan.largest_variable_initialized_unsharded

    def test_the_tape_is_let_go(self):
        """After a scope nothing of what it recorded is alive."""
        from layoutmap.engines.torch.deferred_init.tape import Tape

        model = make_map().build(lambda: nn.Linear(96, 96), library="torch")
        gc.collect()

        assert model.weight.shape == (96, 96)
        tapes = [thing for thing in gc.get_objects() if type(thing) is Tape]
        assert all(not tape._operations for tape in tapes)


class TestCopies:
    """A laid out model as an object."""

    def test_a_copy_is_laid_out_and_apart(self):
        """A deep copy has the layouts and values, computes, and shares nothing."""
        model, _ = assert_as_plain(lambda: nn.Sequential(nn.Linear(96, 96), nn.ReLU()))
        other = copy.deepcopy(model)
        x = torch.ones(2, 96)

        assert torch.equal(model(x), other(x))
        with torch.no_grad():
            other[0].weight.zero_()
            other[0].bias.zero_()
        assert 0 == other(x).abs().sum()
        assert model(x).abs().sum() > 0
        for path, variable in variables(model).items():
            assert variable.layout == variables(other)[path].layout

    def test_what_is_pickled_of_it_is_plain_code(self):
        """A layer without tensors pickles, and computes afterwards as its class says."""
        model, _ = assert_as_plain(lambda: nn.Sequential(nn.Linear(96, 96), nn.ReLU()))
        layer = pickle.loads(pickle.dumps(model[1]))

        assert torch.equal(torch.ones(2), layer(torch.tensor([1.0, 1.0])))

    def test_the_signature_of_forward_stays(self):
        """Tools that look at the arguments of a model of transformers, which has its plain values, see its class's."""
        import inspect

        model, _ = assert_as_plain(llama)

        assert inspect.signature(llama().forward) == inspect.signature(model.forward)


def test_draws_by_tiles_are_the_same_on_every_mesh_and_not_the_plain_ones():
    """A model that is drawn by tiles has one set of values on all meshes, another than that of the plain model."""
    found = []
    for dims in ("batch=2,model=4", "model=8", "batch=4,model=2"):
        torch.manual_seed(0)
        layout_map = lm.LayoutMap(lm.create_mesh(dims), {r"weight": ("model", None)})
        model = layout_map.build(
            lambda: torch.nn.Linear(512, 512, bias=False), draws="tiles", library="torch"
        )
        found.append(get_engine("torch").to_numpy(model.weight))
    torch.manual_seed(0)
    plain = torch.nn.Linear(512, 512, bias=False).weight.detach().numpy()

    assert (found[0] == found[1]).all()
    assert (found[0] == found[2]).all()
    assert not np.isclose(found[0], plain).all()
    assert np.isclose(found[0].std(), plain.std(), rtol=0.02)


def test_a_way_to_draw_that_is_not_known_is_refused():
    """Another word for `draws` is refused, with the ways that there are."""
    layout_map = lm.LayoutMap(lm.create_mesh("model=8"))
    with pytest.raises(lm.ScopeError, match="'exact', 'tiles'"):
        layout_map.build(lambda: torch.nn.Linear(8, 8), draws="fast", library="torch")
