"""Rules keep weights of Keras models in host memory: JAX trains them as on devices, the others refuse by name."""

import keras
import numpy as np
import pytest

import layoutmap as lm

PROCESSES = ("jax", "torch", "tensorflow")
pytestmark = [
    pytest.mark.every_backend,
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),  # Keras's own
]

ON_JAX = keras.backend.backend() == "jax"
X = np.random.default_rng(0).normal(size=(8, 16)).astype("float32")
Y = np.random.default_rng(1).normal(size=(8, 4)).astype("float32")


def make_model():
    keras.utils.set_random_seed(0)
    layers = [
        keras.Input((16,)),
        keras.layers.Dense(32, "relu", name="up"),
        keras.layers.Dense(4, name="down"),
    ]
    model = keras.Sequential(layers)
    model.compile(keras.optimizers.AdamW(0.01), "mse")
    return model


def make_map(memory):
    layout_map = lm.LayoutMap(lm.create_mesh("batch=2,model=4"), rest="replicated")
    layout_map.add("up.kernel", (None, "model"), memory=memory)
    return layout_map


def list_kinds(model):
    variables = [*model.variables, *model.optimizer.variables]
    return {variable.path: variable._value.sharding.memory_kind for variable in variables}


@pytest.mark.skipif(not ON_JAX, reason="only JAX stores arrays in host memory")
@pytest.mark.parametrize("memory", ["pinned_host", "unpinned_host"])
def test_host_memory_changes_no_number(memory, tmp_path):
    """Training, predictions, and calls have the numbers of device memory, and each variable stays in its memory."""
    host, device = (make_map(each).build(make_model, batch_dim="batch") for each in (memory, None))
    assert (
        host.fit(X, Y, shuffle=False, verbose=0).history == device.fit(X, Y, shuffle=False, verbose=0).history
    )
    before = list_kinds(host)
    assert 3 == [*before.values()].count(memory)  # the kernel and its moments
    assert (
        host.fit(X, Y, epochs=2, shuffle=False, verbose=0).history
        == device.fit(X, Y, epochs=2, shuffle=False, verbose=0).history
    )
    np.testing.assert_array_equal(device.predict(X, verbose=0), host.predict(X, verbose=0))
    np.testing.assert_array_equal(device(X), host(X))
    lm.save(host, tmp_path)
    host.set_weights(host.get_weights())
    lm.load(host, tmp_path)
    assert before == list_kinds(host)
    assert memory == lm.inspect(host)["up.kernel"].layout.memory


@pytest.mark.skipif(ON_JAX, reason="JAX stores arrays in host memory")
def test_host_memory_is_refused_elsewhere():
    """The plan names the weight, the reason, and the fix, before anything is made."""
    plan = lm.plan(make_model, make_map("pinned_host"), library="keras")
    (error,) = plan.errors
    assert "up.kernel" == error.subject
    assert "cannot store an array in pinned_host" in error.what
    assert error.fix.startswith("leave memory out, ")
    assert error.fix.endswith("or use JAX")
    assert ("CPUOffloadPolicy()" in error.fix) == (keras.backend.backend() == "torch")
    with pytest.raises(lm.PlanError, match="pinned_host"):
        make_map("pinned_host").build(make_model, library="keras")
    with pytest.raises(lm.EngineError, match="pinned_host"):
        lm.dtensor.relayout(X, make_map("pinned_host")["up.kernel"])
