"""Models on JAX with grouped convolutions train on data x model as on one device, whoever takes their gradients."""

import jax
import jax.numpy as jnp
import keras
import numpy as np
import optax
import pytest
from cases import few
from flax import nnx

import layoutmap as lm
from layoutmap.adapters.jax import train_with

PROCESSES = ("jax",)
L = keras.layers
MESHES = ("batch=2,model=4", "batch=4,model=2", "a=2,batch=2,model=2")
LAYERS = {
    "depthwise": lambda: L.DepthwiseConv2D(3, padding="same"),
    "depthwise strides": lambda: L.DepthwiseConv2D(3, strides=2, depth_multiplier=2),
    "depthwise dilation": lambda: L.DepthwiseConv2D(3, dilation_rate=2),
    "depthwise large": lambda: L.DepthwiseConv2D(8),
    "separable": lambda: L.SeparableConv2D(8, 3),
    "grouped": lambda: L.Conv2D(16, 3, groups=4, padding="same"),
    "fewer groups than shards": lambda: L.Conv2D(16, (1, 3), groups=2),
    "grouped 1 x 1": lambda: L.Conv2D(16, 1, groups=2),
}
RULES = {
    "replicated": {},
    "features": {
        r"c\.(depthwise_)?kernel": (None, None, None, "model"),
        r"c\.pointwise_kernel": (None, None, None, "model"),
        r"head\.kernel": ("model", None),
    },
}
pytestmark = pytest.mark.filterwarnings("ignore::layoutmap.LayoutMapWarning")


def batch():
    rng = np.random.default_rng(0)
    return rng.normal(size=(8, 8, 8, 8)).astype("float32"), rng.normal(size=(8, 4)).astype("float32")


def make_model(layer):
    def make():
        convolution = LAYERS[layer]()
        convolution.name = "c"
        model = keras.Sequential(
            [keras.Input((8, 8, 8)), convolution, L.Activation("gelu"), L.Flatten(), L.Dense(4, name="head")]
        )
        model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse")
        return model

    return make


def rules_on(mesh, rules):
    return lm.LayoutMap(lm.create_mesh(mesh), rules, rest="replicated", uneven="replicate")


CASES = [(layer, rules, mesh) for layer in LAYERS for rules in RULES for mesh in MESHES]


@pytest.mark.parametrize(
    ("layer", "rules", "mesh"),
    few(CASES, *(case for case in CASES if case[2] == MESHES[0] and case[1] == "features")),
)
def test_keras_layers(layer, rules, mesh):
    """Outputs, gradients and steps of SGD with momentum are those of one device."""
    report = lm.check_parity(make_model(layer), rules_on(mesh, RULES[rules]), batch(), batch_dim="batch")

    assert report.agrees


def test_a_keras_step_of_ones_own():
    """Gradients that a program takes itself, compiled or not, are those of one device."""
    x, y = batch()

    def gradients(model, compiled):
        def loss(weights):
            found, _ = model.stateless_call(weights, [v.value for v in model.non_trainable_variables], x)
            return ((found - y) ** 2).mean()

        gradient = jax.grad(loss)
        return (jax.jit(gradient) if compiled else gradient)([v.value for v in model.trainable_variables])

    keras.utils.set_random_seed(0)
    plain = make_model("depthwise")()
    keras.utils.set_random_seed(0)
    model = rules_on(MESHES[0], RULES["features"]).build(make_model("depthwise"), batch_dim="batch")
    x = lm.dtensor.relayout(x, lm.Layout.batch_sharded(lm.create_mesh(MESHES[0]), "batch", 4))

    for compiled in (True, False):
        expected, actual = gradients(plain, compiled), gradients(model, compiled)
        for one, other in zip(expected, actual, strict=True):
            np.testing.assert_allclose(other, one, rtol=1e-4, atol=1e-5)


class Net(nnx.Module):
    def __init__(self, rngs):
        self.mixer = nnx.Conv(8, 8, (4,), padding="CAUSAL", feature_group_count=8, rngs=rngs)
        self.head = nnx.Linear(8, 4, rngs=rngs)

    def __call__(self, x):
        return self.head(nnx.silu(self.mixer(x)))


def loss_of(model, x, y):
    return ((model(x) - y) ** 2).mean()


def sequences():
    rng = np.random.default_rng(0)
    return rng.normal(size=(8, 16, 8)).astype("float32"), rng.normal(size=(8, 16, 4)).astype("float32")


NNX_RULES = {r"mixer\.kernel": (None, None, "model"), r"head\.kernel": ("model", None)}


def test_nnx_in_check_parity():
    """A module with a causal convolution of each channel, as hybrid attention has it, trains as on one device."""

    def make():
        return train_with(
            Net(nnx.Rngs(0)), loss=lambda y, t: ((y - t) ** 2).mean(), optimizer=optax.sgd(0.1, momentum=0.9)
        )

    report = lm.check_parity(
        make, rules_on(MESHES[0], NNX_RULES), sequences(), batch_dim="batch", library="jax"
    )

    assert report.agrees


@pytest.mark.parametrize("how", ["lm.jit_step", "jax.jit", "pytree"])
def test_a_jax_step_of_ones_own(how):
    """So is a step that a program writes itself: compiled by `lm.jit_step`, by plain `jax.jit`, or of a pytree."""
    x, y = sequences()
    mesh = lm.create_mesh(MESHES[0])
    plain = Net(nnx.Rngs(0))
    model = rules_on(MESHES[0], NNX_RULES).build(lambda: Net(nnx.Rngs(0)), library="jax")
    placed = lm.dtensor.relayout(x, lm.Layout.batch_sharded(mesh, "batch", 3))
    (graph, expected), (_, state) = nnx.split(plain), nnx.split(model)
    del model

    def step(state, x, y):
        gradients = jax.grad(lambda state: loss_of(nnx.merge(graph, state), x, y))(state)
        return jax.tree.map(lambda weight, gradient: weight - 0.1 * gradient, state, gradients)

    if how == "pytree":
        expected, state = (nnx.to_pure_dict(each) for each in (expected, state))
    compiled = lm.jit_step(step) if how == "lm.jit_step" else jax.jit(step)
    for _ in range(2):
        expected, state = jax.jit(step)(expected, x, y), compiled(state, placed, jnp.asarray(y))

    for one, other in zip(jax.tree.leaves(expected), jax.tree.leaves(state), strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-4, atol=1e-6)
