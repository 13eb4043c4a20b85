"""What the torch adapter refuses, by name, before anything is made; and what is left when it has refused."""

import copy

import pytest
import torch
from torch import nn

import layoutmap as lm
from layoutmap.adapters import get_adapter
from layoutmap.adapters.torch import train_with

PROCESSES = ("torch",)
pytestmark = [pytest.mark.every_case, pytest.mark.filterwarnings("ignore::layoutmap.LayoutMapWarning")]
torch.set_num_threads(1)


def make_map(rules=None, mesh="batch=2,model=4"):
    return lm.LayoutMap(lm.create_mesh(mesh), rules)


def build(make_model, rules=None):
    return make_map(rules).build(make_model, library="torch")


def make_model_with_a_loss():
    return train_with(nn.Linear(8, 8), loss=nn.functional.mse_loss)


def variables(model):
    return get_adapter("torch").variables(model)


class TestRefusedBeforeAnythingIsMade:
    """Each is reported with what, why and the fix."""

    def test_a_tensor_on_the_meta_device(self):
        """It has no value; the scope is what defers values here."""

        def make_model():
            with torch.device("meta"):
                return nn.Linear(64, 64)

        with pytest.raises(lm.PlanError, match="is on the meta device") as caught:
            build(make_model)

        assert {"weight", "bias"} == {problem.subject for problem in caught.value.problems}

    def test_two_parameters_in_the_same_memory(self):
        """They would part in training: one must be the other."""

        def make_model():
            model = nn.ModuleDict({"a": nn.Linear(96, 96, bias=False), "b": nn.Linear(96, 96, bias=False)})
            model["b"].weight = nn.Parameter(model["a"].weight.detach())
            return model

        with pytest.raises(lm.PlanError, match=r"b\.weight: it shares its memory with a\.weight"):
            build(make_model)

    def test_a_lazy_layer(self):
        """Its size is not known when the scope ends; a plan says so, too."""

        def make_model():
            return nn.Sequential(nn.Linear(8, 8), nn.LazyLinear(4))

        with pytest.raises(lm.ScopeError, match="1: the size of a lazy layer is unknown"):
            build(make_model)
        plan = lm.plan(make_model, make_map(), library="torch")

        assert ["0.weight", "0.bias"] == [a.variable.path for a in plan.assignments]
        assert ["not built"] == [p.kind for p in plan.problems if "no weights yet" in p.what]

    def test_a_sparse_tensor(self):
        """A layout shards dense tensors."""

        def make_model():
            model = nn.Linear(8, 8)
            model.register_buffer("graph", torch.eye(8).to_sparse())
            return model

        with pytest.raises(lm.PlanError, match=r"graph: it is torch\.sparse_coo"):
            build(make_model)

    def test_a_scope_in_a_compiled_function(self):
        """Inside a trace there are no real tensors; the scope says so and the function is not compiled."""
        from torch._subclasses.fake_tensor import FakeTensorMode

        with FakeTensorMode(), pytest.raises(lm.ScopeError, match="opened under a FakeTensorMode"):
            build(lambda: nn.Linear(8, 8))

    def test_no_model(self):
        """A function that returns something else is refused."""
        with pytest.raises(lm.ScopeError, match="returned no model"):
            build(lambda: None)
        with pytest.raises(lm.ScopeError, match="is not a model"):
            build(lambda: nn.Parameter(torch.ones(2)))


class TestModelsWithoutValues:
    """What was only planned, or whose scope failed, cannot be used by mistake."""

    def test_a_planned_model(self):
        """It can neither be called nor read nor written, nor can its layers."""
        kept = []

        def make_model():
            kept.append(nn.Sequential(nn.Linear(96, 96), nn.Linear(4, 4)))
            return kept[0]

        lm.plan(make_model, make_map(), library="torch")

        for call in (lambda: kept[0](torch.ones(1, 96)), lambda: kept[0][1](torch.ones(1, 4))):
            with pytest.raises(lm.PlanError, match="it has no values"):
                call()
        variable = variables(kept[0])["1.weight"]
        for use in (variable.read, lambda: variable.write(torch.ones(4, 4))):
            with pytest.raises(lm.PlanError, match=r"1\.weight: this tensor has no values"):
                use()

    def test_a_model_whose_scope_failed(self):
        """It says so when it is called."""
        kept = []
        with pytest.raises(lm.PlanError), make_map({"weight": ("model",)}).scope(library="torch"):
            kept.append(nn.Linear(96, 96))

        with pytest.raises(lm.PlanError, match="its scope failed, so it has no values"):
            kept[0](torch.ones(1, 96))


class TestWhatIsSaid:
    """Warnings and messages."""

    def test_a_parameter_of_a_class_of_its_own(self):
        """It becomes a DTensor, and the plan says that its class is lost."""

        class Mine(nn.Parameter):
            pass

        def make_model():
            model = nn.Module()
            model.weight = Mine(torch.ones(8, 8))
            return model

        problems = lm.plan(make_model, make_map({"weight": ("model", None)}), library="torch").problems

        assert [("unsupported", "warning", "weight")] == [(p.kind, p.severity, p.subject) for p in problems]

    def test_a_plain_variable_has_no_layout(self):
        """A model that no scope made has tensors without layouts."""
        assert not hasattr(variables(nn.Linear(4, 4))["weight"], "layout")
        with pytest.raises(lm.LayoutError, match="has no layout"):
            lm.dtensor.fetch_layout(nn.Linear(4, 4).weight)

    def test_parity_without_a_loss_or_an_optimizer(self):
        """`check_parity` needs to be told how a torch model is trained, and says with what."""
        batch = torch.ones(2, 8), torch.ones(2, 8)
        with pytest.raises(lm.ScopeError, match="the loss of this model is unknown") as caught:
            lm.check_parity(lambda: nn.Linear(8, 8), make_map(), batch, library="torch")
        assert "train_with" in str(caught.value.fix)
        with pytest.raises(lm.ScopeError, match="the optimizer of this model is unknown"):
            lm.check_parity(make_model_with_a_loss, make_map(), batch, library="torch")

    @pytest.mark.parametrize("batch", [torch.ones(4, 8), (torch.ones(4, 8),)])
    def test_parity_without_targets(self, batch):
        """One tensor is no pair of rows, and not taken for inputs and targets."""
        with pytest.raises(lm.ScopeError, match="no targets for its loss"):
            lm.check_parity(make_model_with_a_loss, make_map(), batch, library="torch")


class TestActivations:
    """Rules for layers' outputs."""

    def test_a_rule_for_no_layer(self):
        """It is a warning, and an error of a strict scope."""
        layout_map = make_map({r"0\.weight": (None, None), r"0\.bias": (None,)})
        layout_map.activations["1"] = (None, None)

        with pytest.raises(lm.PlanError, match="layer"):
            layout_map.build(lambda: nn.Sequential(nn.Linear(8, 8)), strict=True, library="torch")

    @pytest.mark.parametrize(
        ("specs", "said"),
        [((None, None, "model"), "rank"), (("model", None), "axis 0 cannot be split evenly")],
    )
    def test_a_layout_that_does_not_fit(self, specs, said):
        """It is refused when the layer puts something out, by the layer's name."""
        layout_map = make_map()
        layout_map.activations["0"] = specs
        model = layout_map.build(lambda: nn.Sequential(nn.Linear(8, 8)), library="torch")

        with pytest.raises(lm.LayoutError, match=f"the output of 0: .*{said}"):
            model(torch.ones(3, 8))


TRANSFORMS = {
    "vmap": lambda function, x: torch.func.vmap(function)(x),
    "grad": lambda function, x: torch.func.grad(lambda given: function(given).sum())(x),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_transform_of_a_function(name):
    """A module that torch.func calls is refused with what computes the same, which is right."""
    torch.manual_seed(0)
    plain, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh()), torch.randn(4, 8)
    model = copy.deepcopy(plain)
    model = make_map({r"0\.weight": ("model", None)}).apply(model)
    with pytest.raises(lm.EngineError) as caught:
        TRANSFORMS[name](model, x)
    assert str(caught.value).splitlines() == [
        "Sequential: torch.func is applied to a sharded module",
        f"  transform  {name}",
        "  why        its collectives have custom gradients, which torch.func cannot transform",
        (
            "  fix        use torch.autograd.grad or torch.autograd.functional for gradients, and pass the whole batch "
            "instead of vmap"
        ),
    ]

    torch.testing.assert_close(model(x), plain(x))
    for compute in (torch.autograd.functional.jacobian, torch.autograd.functional.jvp):
        given = (x, x) if compute is torch.autograd.functional.jvp else (x,)
        torch.testing.assert_close(compute(model, *given), compute(plain, *given))


EXPORTS = {
    "torch.export": lambda model, x: torch.export.export(model, (x,)).module(),
    "torch.jit.trace": torch.jit.trace,
    "torch.jit.script": lambda model, _: torch.jit.script(model),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.torch.jit:FutureWarning")
@pytest.mark.parametrize("name", EXPORTS)
def test_a_graph_for_one_device(name):
    """A module in layouts that is exported is refused, and the plain one that the error advises has its values."""
    plain, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh()), torch.randn(4, 8)
    model = make_map({r"0\.weight": ("model", None)}).apply(copy.deepcopy(plain))
    with pytest.raises(lm.ScopeError, match=f"Sequential: {name} cannot trace a sharded module") as caught:
        EXPORTS[name](model, x)
    assert not hasattr(model.forward, "__code__")

    nn.init.zeros_(plain[0].weight)
    exec(caught.value.fix.rpartition("the new one: ")[2], {"plain": plain, "model": model})
    torch.testing.assert_close(EXPORTS[name](plain, x)(x), model(x))


class TestOtherLibraries:
    """With Keras imported too, a scope is for Keras, and what it would not see is refused."""

    def test_a_torch_module_in_a_scope_for_keras(self):
        """A torch module is refused at its first parameter; lists of parameters that Keras keeps are its own."""
        import keras

        assert keras.backend.backend() in ("jax", "tensorflow", "torch")
        for run in (lm.plan, lm.build):
            with pytest.raises(lm.ScopeError, match=r"Linear: a torch module .* keras") as caught:
                run(lambda: nn.Linear(8, 8), make_map())
            assert 'pass library="torch" to the scope, or build the module outside of it' == caught.value.fix
        assert isinstance(nn.Linear(8, 8).weight, nn.Parameter)

    def test_a_keras_layer_in_a_scope_for_torch(self):
        """A Keras layer, which would stay plain, is refused at once in a scope for torch modules."""
        import keras

        with pytest.raises(lm.ScopeError, match="Dense: a Keras layer is built in a scope for torch models"):
            lm.build(lambda: keras.Sequential([keras.layers.Dense(4)]), make_map(), library="torch")
        with (
            pytest.raises(lm.ScopeError, match="Dense: a Keras layer is built"),
            make_map().scope(library="torch"),
        ):
            keras.layers.Dense(4).build((2, 4))
