"""Steps that a program writes itself are right for grouped convolutions, as those of drawn models are."""

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from flax import nnx

import layoutmap as lm

PROCESSES = ("jax",)
L = keras.layers
MESH = "batch=2,model=4"
RULES = {r"c\.kernel": (None, None, None, "model"), r"head\.kernel": ("model", None)}
pytestmark = pytest.mark.filterwarnings("ignore::layoutmap.LayoutMapWarning")


def batch():
    rng = np.random.default_rng(0)
    return rng.normal(size=(8, 8, 8, 8)).astype("float32"), rng.normal(size=(8, 4)).astype("float32")


def make_model():
    convolution = L.DepthwiseConv2D(3, padding="same", name="c")
    head = L.Dense(4, name="head")
    model = keras.Sequential([keras.Input((8, 8, 8)), convolution, L.Activation("gelu"), L.Flatten(), head])
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse")
    return model


def rules_on(rules):
    return lm.LayoutMap(MESH, rules, rest="replicated", uneven="replicate")


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
    plain = make_model()
    keras.utils.set_random_seed(0)
    model = rules_on(RULES).build(make_model, batch_dim="batch")
    x = lm.dtensor.relayout(x, lm.Layout.batch_sharded(lm.create_mesh(MESH), "batch", 4))

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


@pytest.mark.parametrize("how", ["lm.jit_step", "jax.jit", "pytree"])
def test_a_jax_step_of_ones_own(how):
    """So is a step that a program writes itself: compiled by `lm.jit_step`, by plain `jax.jit`, or of a pytree."""
    x, y = sequences()
    mesh = lm.create_mesh(MESH)
    plain = Net(nnx.Rngs(0))
    model = rules_on(NNX_RULES).build(lambda: Net(nnx.Rngs(0)), library="jax")
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
