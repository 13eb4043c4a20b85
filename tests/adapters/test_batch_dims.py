"""Batches over several mesh dims: HSDP, where weights are sharded over one of the dims of the batch."""

import keras
import numpy as np
import pytest

import layoutmap as lm

PROCESSES = ("jax", "torch", "tensorflow")
pytestmark = [
    pytest.mark.every_backend,
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),  # Keras's own
]

MESH, DIMS = "replica=2,fsdp=2,model=2", ("replica", "fsdp")
X = np.random.default_rng(0).normal(size=(8, 16)).astype("float32")
Y = np.random.default_rng(1).normal(size=(8, 4)).astype("float32")
ON_TENSORFLOW = keras.backend.backend() == "tensorflow"


def make_model():
    layers = [
        keras.Input((16,)),
        keras.layers.Dense(32, "relu", name="up"),
        keras.layers.Dense(4, name="down"),
    ]
    model = keras.Sequential(layers)
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


def make_map():
    rules = {"up.kernel": ("fsdp", "model"), "down.kernel": ("model", "fsdp")}
    layout_map = lm.LayoutMap(lm.create_mesh(MESH), rules)
    layout_map.activations["up"] = (DIMS, "model") if not ON_TENSORFLOW else ("fsdp", "model")
    return layout_map


@pytest.mark.skipif(ON_TENSORFLOW, reason="TensorFlow shards an axis over one mesh dim")
def test_keras_models_train_as_on_one_device():
    assert lm.check_parity(make_model, make_map(), (X, Y), batch_dim=DIMS, library="keras")
    model = make_map().build(make_model, batch_dim=[*DIMS], library="keras")
    model.fit(X, Y, batch_size=8, verbose=0)
    assert DIMS == lm.inspect(model).batches
    assert not [p for p in lm.inspect(model).problems if p.kind == "unused dim"]


@pytest.mark.skipif(not ON_TENSORFLOW, reason="others shard an axis over several mesh dims")
def test_tensorflow_refuses_several_dims():
    with pytest.raises(lm.ScopeError, match=r"has 2 dims(?s:.*)one mesh dim at most"):
        make_map().build(make_model, batch_dim=DIMS)


@pytest.mark.parametrize(
    ("dims", "why"), [(("fsdp", "fsdp"), "named twice"), (("fsdp", "data"), "not a dim")]
)
def test_wrong_dims_are_refused(dims, why):
    with pytest.raises(lm.ScopeError, match=f"batch_dim '{dims[1]}' is {why}"):
        make_map().build(make_model, batch_dim=dims, library="keras")


def test_a_layout_and_a_preset_take_several_dims():
    mesh = lm.Mesh(MESH)
    assert (DIMS, "unsharded") == lm.Layout.batch_sharded(mesh, DIMS, rank=2).sharding_specs
    preset = lm.LayoutMap.preset("llama", mesh, fsdp_dim="fsdp", batch_dim=DIMS)
    assert (DIMS, "unsharded", "unsharded") == next(iter(preset.activations.values())).sharding_specs


@pytest.mark.skipif(keras.backend.backend() == "jax", reason="JAX has explicit axes")
def test_explicit_axes_are_refused_elsewhere():
    layout_map = lm.LayoutMap(lm.create_mesh(MESH, axis_types="explicit"), rest="replicated")
    with pytest.raises(lm.MeshError, match=r"'replica' has explicit axes(?s:.*)without axis_types"):
        layout_map.build(make_model, library="keras")
