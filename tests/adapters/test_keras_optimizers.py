"""Optimizers: whose slot each of their variables is, whatever things are called."""

import collections

import keras
import numpy as np
import pytest
from cases import few
from keras_models import assert_held
from quiet import OF_ARRAYS, OF_MAPS

import layoutmap as lm
from layoutmap.adapters import get_adapter

PROCESSES = ("jax", "tensorflow", "torch")
L = keras.layers
pytestmark = [OF_MAPS, OF_ARRAYS]
X = np.ones((8, 8), "float32")
X8, Y8 = np.random.default_rng(0).normal(size=(2, 8, 8)).astype("float32")


class Block(L.Layer):
    """A block that gives itself and its layer the same names as all others of its kind."""

    def __init__(self):
        super().__init__(name="block")
        self.d = L.Dense(8, name="d")

    def call(self, x):
        return self.d(x)


class Twins(keras.Model):
    """Two blocks of one name."""

    def __init__(self):
        super().__init__(name="twins")
        self.blocks = [Block(), Block()]

    def call(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def trained(make=Twins, optimizer="adam"):
    keras.utils.set_random_seed(2)
    model = make()
    model.compile(optimizer, "mse")
    model.train_on_batch(X, X)
    return model


def make_map():
    rules = {r"blocks\.0\.d\.kernel": (None, "model"), r"blocks\.1\.d\.kernel": ("model", None)}
    return lm.LayoutMap(lm.create_mesh("batch=2,model=4"), rules)


def slots_of(model):
    found = get_adapter("keras").variables(model)
    return {path.removeprefix("optimizer."): v for path, v in found.items() if path.startswith("optimizer.")}


@pytest.mark.parametrize("how", ["built in a scope", "laid out later"])
def test_slots_follow_weights_that_share_a_name(how):
    """Where two weights have one Keras name, the slots of each lie where that one lies."""
    if how == "laid out later":
        model = make_map().apply(trained())
    else:
        with make_map().scope():
            model = trained()
    slots = slots_of(model)

    assert len(slots) == len(model.optimizer.variables)
    for number, specs in enumerate([("unsharded", "model"), ("model", "unsharded")]):
        for kind in ("momentum", "velocity"):
            slot = slots[f"blocks.{number}.d.kernel.{kind}"]

            assert specs == slot.layout.sharding_specs == model.blocks[number].d.kernel.layout.sharding_specs
            assert_held(slot)


@pytest.mark.parametrize(
    "optimizer", few(["sgd", "adam", "adafactor", "muon", "ftrl", "nadam", "lion"], "adam", "muon")
)
def test_every_variable_of_an_optimizer_has_a_path_of_its_own(optimizer):
    """The plan and the adapter call an optimizer's variables by the same names, none of them twice."""
    with make_map().scope() as scope:
        model = trained(optimizer=optimizer)
    planned = collections.Counter(
        a.variable.path for a in scope.plan.assignments if a.variable.kind == "slot"
    )

    assert {1} == set(planned.values())
    assert set(planned) == {f"optimizer.{path}" for path in slots_of(model)}
    assert {"optimizer.iteration", "optimizer.learning_rate"} <= set(planned)


SPECIAL = {
    "SGD": lambda: keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True),
    "LossScaleOptimizer": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(1e-3)),
    "MultiOptimizer": lambda: keras.optimizers.MultiOptimizer(
        keras.optimizers.OptimizerMap(keras.optimizers.Adam(1e-3), {r".*bias": keras.optimizers.Lion(1e-4)})
    ),
}


def optimizers_of_keras():
    """The name of each optimizer that Keras has, and a function that makes one."""
    kinds = [kind for kind in vars(keras.optimizers).values() if isinstance(kind, type)]
    kinds = [k for k in kinds if issubclass(k, keras.Optimizer) and k is not keras.Optimizer]
    return {kind.__name__: SPECIAL.get(kind.__name__, kind) for kind in kinds}


@pytest.mark.parametrize("name", few(sorted(optimizers_of_keras()), "AdamW", "MultiOptimizer"))
def test_every_optimizer_of_keras_trains_like_one_device(name):
    """Losses, weights and slots of three steps are those of the plain model, and slots lie where their weights lie."""

    def train(model):
        return [float(model.train_on_batch(X8, Y8)) for _ in range(3)]

    def make_model():
        keras.utils.set_random_seed(4)
        model = keras.Sequential([keras.Input((8,)), L.Dense(8, name="d1")])
        model.compile(optimizers_of_keras()[name](), "mse")
        # Built by the first step, plain ScheduleFreeAdamW on TensorFlow starts from other slots, and goes astray.
        model.optimizer.build(model.trainable_variables)
        return model

    plain = make_model()
    losses = train(plain)
    with lm.LayoutMap(lm.create_mesh("batch=2,model=4"), {r"d1\.kernel": ("batch", "model")}).scope(
        batch_dim="batch"
    ):
        model = make_model()

    np.testing.assert_allclose(train(model), losses, rtol=1e-5)
    pairs = zip(
        [*plain.variables, *plain.optimizer.variables],
        [*model.variables, *model.optimizer.variables],
        strict=True,
    )
    for expected, actual in pairs:
        np.testing.assert_allclose(
            actual.numpy(), expected.numpy(), rtol=1e-5, atol=1e-5, err_msg=f"{expected.path}"
        )
    for path, slot in slots_of(model).items():
        if path.startswith("d1.kernel.") and slot.shape == (8, 8):
            assert ("batch", "model") == slot.layout.sharding_specs
            assert_held(slot)


def test_optimizers_in_an_optimizer_that_were_made_outside():
    """The slots of the optimizers in a `MultiOptimizer` follow their weights, wherever those were made."""
    optimizer = SPECIAL["MultiOptimizer"]()
    with lm.LayoutMap(lm.create_mesh("batch=2,model=4"), {r"d1\.kernel": ("batch", "model")}).scope():
        model = keras.Sequential([keras.Input((8,)), L.Dense(8, name="d1")])
        model.compile(optimizer, "mse")
    model.train_on_batch(X8, Y8)
    slots = [v for v in optimizer.variables if v.shape == (8, 8)]

    assert [("batch", "model")] * 2 == [v.layout.sharding_specs for v in slots]
    for slot in slots:
        assert_held(slot)


def test_a_sequential_model_that_grows():
    """Layers that are added to a model that is already built are laid out with it, inside the scope and after."""
    layout_map = lm.LayoutMap(lm.create_mesh("model=4"), {r"[abc]\.kernel": (None, "model")})
    with layout_map.scope() as scope:
        model = keras.Sequential([keras.Input((8,)), L.Dense(8, name="a")])
        model(X)
        model.add(L.Dense(8, name="b"))
        model(X)
    model.add(L.Dense(8, name="c"))
    model(X)

    assert ["a.kernel", "a.bias", "b.kernel", "b.bias", "c.kernel", "c.bias"] == [
        a.variable.path for a in scope.plan.assignments
    ]
    assert [layout_map["a.kernel"]] * 3 == [layer.kernel.layout for layer in model.layers]
