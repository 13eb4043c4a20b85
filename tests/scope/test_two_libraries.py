"""With Keras imported as well, what a function returns says which library it is of."""

import os
import subprocess
import sys

import jax.numpy as jnp
import keras  # noqa: F401 - it comes first
import numpy as np
import optax
import pytest
from flax import nnx

import layoutmap as lm
from layoutmap.adapters.jax import train_with

PROCESSES = ("jax",)
RULES = {r"(.*\.)?kernel": (None, "model")}


def make_pytree():
    return {"kernel": jnp.asarray(np.random.normal(size=(8, 16)).astype("float32"))}  # noqa: NPY002


def make_nnx():
    return nnx.Linear(8, 16, rngs=nnx.Rngs(0))


def make_trained():
    return train_with(
        make_nnx(), loss=lambda y, target: jnp.mean((y - target) ** 2), optimizer=optax.sgd(0.1)
    )


MODELS = {"pytree": make_pytree, "nnx": make_nnx}


def layout_map():
    return lm.LayoutMap(lm.create_mesh("batch=2,model=4"), RULES, rest="replicated")


@pytest.mark.every_case
@pytest.mark.parametrize("name", MODELS)
def test_a_jax_model_needs_no_library(name):
    """Plan and build are as with `library="jax"`, and so are values that are drawn by numpy."""
    expected = lm.plan(MODELS[name], layout_map(), library="jax")
    np.random.seed(3)  # noqa: NPY002
    unsharded = MODELS[name]()
    np.random.seed(3)  # noqa: NPY002
    built = layout_map().build(MODELS[name])

    assert expected.assignments == lm.plan(MODELS[name], layout_map()).assignments
    kernels = [model.kernel[...] if name == "nnx" else model["kernel"] for model in (unsharded, built)]
    np.testing.assert_array_equal(*kernels)
    assert (8, 4) == kernels[1].sharding.shard_shape((8, 16))


@pytest.mark.every_case
def test_every_function_that_takes_a_maker(tmp_path):
    """Loading, comparing with one device, and counting a step, too."""
    x = np.ones((4, 8), "float32")
    saved = layout_map().build(make_nnx)
    lm.save(saved, tmp_path)
    loaded = lm.load(make_nnx, tmp_path, layout_map=layout_map())
    cost = lm.step_cost(make_nnx, layout_map(), inputs=(x,), optimizer=optax.sgd(0.1))

    np.testing.assert_array_equal(saved.kernel[...], loaded.kernel[...])
    assert lm.check_parity(make_trained, layout_map(), (x, np.ones((4, 16), "float32")))
    assert cost.collectives is not None


@pytest.mark.every_case
def test_a_library_that_is_named_is_meant():
    """`library="keras"` refuses a model of JAX, and says what to pass."""
    with pytest.raises(lm.ScopeError, match="a jax model is built in a scope for keras models") as caught:
        layout_map().build(make_nnx, library="keras")

    assert "pass library='jax'" == caught.value.fix


IMPORTS_LATE = """
import jax, layoutmap as lm
lm.simulate_devices(8)
def make():
    import keras
    return keras.Sequential([keras.Input((8,)), keras.layers.Dense(16, name="up")])
layout_map = lm.LayoutMap("batch=2,model=4", {"up.kernel": (None, "model")}, rest="replicated")
print(lm.plan(make, layout_map)["up.kernel"].layout, layout_map.build(make).layers[0].kernel.value.sharding.spec)
"""


@pytest.mark.every_case
def test_a_function_may_import_its_library():
    """With only JAX imported, a model of Keras that its function imports is planned and built as one of Keras."""
    environment = {**os.environ, "KERAS_BACKEND": "jax"}
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS_LATE], capture_output=True, text=True, check=False, env=environment
    )
    assert "(unsharded, model) P(None, 'model')" == done.stdout.strip(), done.stderr
