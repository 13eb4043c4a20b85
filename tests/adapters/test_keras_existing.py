"""Objects that existed before a scope or a plan: refused where they would get variables in it, and left as they are."""

import keras
import numpy as np
import pytest
from quiet import OF_ARRAYS, OF_MAPS

import layoutmap as lm
from layoutmap.adapters import get_adapter

PROCESSES = ("jax", "tensorflow", "torch")
L = keras.layers
pytestmark = [OF_MAPS, OF_ARRAYS]
X, Y = np.ones((4, 8), "float32"), np.ones((4, 4), "float32")


def layout_map():
    rules = {r"(.*\.)?d\d\.kernel": (None, "model"), "table": ("model", None)}
    return lm.LayoutMap(lm.create_mesh("batch=2,model=4"), rules)


def make_model(optimizer="adam"):
    model = keras.Sequential([keras.Input((8,)), L.Dense(16, name="d1"), L.Dense(4, name="d2")], name="mlp")
    model.compile(optimizer, "mse")
    return model


class Unbuilt(keras.Model):
    """A model that makes its weights at its first call."""

    def __init__(self):
        super().__init__(name="unbuilt")
        self.d1 = L.Dense(4)

    def call(self, x):
        return self.d1(x)


def assert_plain(model):
    """It has no layout, and trains as if nothing had been."""
    model.fit(X, Y, verbose=0)

    assert not any(hasattr(variable, "layout") for variable in [*model.weights, *model.optimizer.variables])


def refused(who):
    return pytest.raises(lm.ScopeError, match=rf"(?s)^{who} existed before")


def first_called():
    model = Unbuilt()
    return model, lambda: model(keras.Input((8,)))


def compiled():
    model = make_model()
    return model, lambda: model.compile("adam", "mse", metrics=["mae"])


def trained():
    model = make_model()
    return model, lambda: model.fit(X, Y, verbose=0)


@pytest.mark.parametrize("case", [first_called, compiled, trained], ids=lambda case: case.__name__)
def test_a_model_that_existed_makes_nothing_in_a_scope(case):
    """The first call, `compile` and `fit` of a model from before are refused by its name, and it stays as it was."""
    model, use = case()
    with layout_map().scope() as scope, refused(f"model '{model.name}'"):
        use()

    assert 0 == len(scope.plan)
    model.compile("adam", "mse")
    assert_plain(model)


def test_an_optimizer_that_existed_is_not_planned():
    """A plan would leave it without values; the model that it then trains is a plain one."""
    optimizer = keras.optimizers.Adam()
    with refused("optimizer 'adam.*'"):
        lm.plan(lambda: make_model(optimizer), layout_map())

    assert_plain(make_model(optimizer))


def test_a_plan_leaves_the_layers_that_a_model_shares():
    """A layer from before may be in a model that is planned if it has its weights, and is refused if it has none."""
    base = make_model()
    plan = lm.plan(lambda: keras.Sequential([base, L.Dense(4, name="d3")]), layout_map())

    assert ("unsharded", "model") == plan["mlp.d1.kernel"].layout.sharding_specs
    assert_plain(base)
    layer = L.Dense(4, name="later")
    with refused("layer 'later'"):
        lm.plan(lambda: keras.Sequential([keras.Input((8,)), layer]), layout_map())
    assert not layer.built


def test_a_scope_lays_out_the_layers_that_a_model_shares():
    """A model from before that is part of one made in a scope is laid out with it, and looked after from then on."""
    base = make_model()
    base.fit(X, Y, verbose=0)
    before = [np.asarray(keras.ops.convert_to_numpy(w)) for w in base.get_weights()]
    with layout_map().scope(batch_dim="batch"):
        model = keras.Sequential([base, L.Dense(4, name="d3")])
        model.compile("sgd", "mse")
    after = base.get_weights()

    assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))
    assert ("unsharded", "model") == base.layers[0].kernel.layout.sharding_specs
    base.layers[0].enable_lora(2)
    assert ("unsharded", "model") == base.layers[0].lora_kernel_b.layout.sharding_specs
    model.fit(X, Y, verbose=0)


def test_parity_is_not_that_of_a_model_with_itself():
    """A function that returns parts of its first model again has nothing to compare."""
    made = []

    def make_once():
        made.append(make_model()) if not made else None
        return made[0]

    with pytest.raises(lm.ParityError, match=r"(?s)^d1\.kernel: the second model.*compared with itself"):
        lm.check_parity(make_once, layout_map(), (X, Y))


@pytest.mark.parametrize("is_laid_out", [False, True])
def test_gradients_leave_metrics_as_they_were(is_laid_out):
    """Trackers of several losses are made before the gradients, in layouts, and count nothing for them."""

    def make():
        x = keras.Input((8,))
        model = keras.Model(x, [L.Dense(4, name="d1")(x), L.Dense(4, name="d2")(x)])
        model.compile("sgd", ["mse", "mae"])
        return model

    adapter = get_adapter("keras")
    model = lm.build(make, layout_map(), batch_dim="batch", progress=False) if is_laid_out else make()
    adapter.gradients(model, (X, [Y, Y]))

    trackers = model._compile_loss.variables
    assert [0.0] * 4 == [float(adapter.read(each)) for each in trackers]


def test_a_variable_of_its_own_has_a_rule():
    """A `keras.Variable` that belongs to no layer goes by its name, or by a number that does not change."""

    def make():
        named = keras.Variable(np.ones((8, 4)), name="table")
        return named, [keras.Variable("zeros", shape=(8,), dtype="float32") for _ in range(2)]

    paths = []
    for _ in range(2):
        with layout_map().scope() as scope:
            table, others = make()
        paths.append([(a.variable.path, str(a.variable.kind)) for a in scope.plan.assignments])

    assert [("table", "weight"), ("variable", "weight"), ("variable_1", "weight")] == paths[0] == paths[1]
    assert ("model", "unsharded") == table.layout.sharding_specs
    assert all(other.layout.is_fully_replicated() for other in others)


class Trainer(keras.Model):
    """A model whose method opens a scope, in which it makes others."""

    def make(self):
        with layout_map().scope() as scope:
            self.inner = make_model()
            self.rate = keras.Variable(1.0, name="rate")
        return scope


def test_whoever_opens_the_scope_may_have_existed():
    """A method of a model makes other models in a scope; the model itself is not refused for it."""
    trainer = Trainer()
    plan = trainer.make().plan

    assert ("unsharded", "model") == plan["d1.kernel"].layout.sharding_specs
    assert "weight" == plan["rate"].variable.kind
