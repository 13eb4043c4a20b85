"""What only Keras on JAX can do: loops of pure functions, reads under `jax.jit`."""

from contextlib import nullcontext

import jax
import keras
import numpy as np
import pytest
from jax.sharding import AxisType
from keras_models import assert_held, batch
from quiet import OF_ARRAYS, OF_MAPS

import layoutmap as lm
from layoutmap.adapters.keras.backends.jax_steps import _make_batch_placing_step, place_on_mesh
from layoutmap.adapters.keras.wraps import get_session

L = keras.layers
pytestmark = [OF_MAPS, OF_ARRAYS]


def mlp():
    layers = [keras.Input((16,)), L.Dense(32, name="d1", activation="relu"), L.Dense(64, name="d2")]
    return keras.Sequential(layers)


def make_map():
    rules = {r"d1\.kernel": (None, "model"), r"d2\.kernel": ("model", "batch")}
    return lm.LayoutMap(lm.create_mesh("batch=2,model=4"), rules)


def test_a_loop_by_hand_works():
    """`stateless_call` under `jax.jit` and `stateless_apply` keep values right, and `assign` keeps layouts."""
    x, y = batch("sequential")
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def train(model):
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
        optimizer.build(model.trainable_variables)

        @jax.jit
        def step(trainable, other, slots):
            def loss_of(trainable):
                out, new = model.stateless_call(trainable, other, x)
                return loss(y, out), new

            (value, new), gradients = jax.value_and_grad(loss_of, has_aux=True)(trainable)
            return value, *optimizer.stateless_apply(slots, gradients, trainable), new

        losses = []
        for _ in range(3):
            groups = (model.trainable_variables, model.non_trainable_variables, optimizer.variables)
            value, trainable, slots, other = step(*([v.value for v in group] for group in groups))
            for group, new in zip(groups, (trainable, other, slots), strict=True):
                for variable, array in zip(group, new, strict=True):
                    variable.assign(array)
            losses.append(float(value))
        return losses

    keras.utils.set_random_seed(1)
    expected = train(mlp())
    keras.utils.set_random_seed(1)
    with make_map().scope():
        model = mlp()

    np.testing.assert_allclose(train(model), expected, rtol=1e-5)
    for variable in model.variables:
        assert_held(variable)


def test_an_optimizer_by_hand_after_the_scope():
    """Slots that are built by hand outside follow at once on JAX, since Keras hands the weight's sharding on."""
    with make_map().scope():
        model = mlp()
    optimizer = keras.optimizers.Adam()
    optimizer.build(model.trainable_variables)
    momentum = next(v for v in optimizer.variables if v.name.endswith("kernel_momentum"))

    assert momentum.value.sharding.is_equivalent_to(model.layers[0].kernel.value.sharding, 2)


def test_states_of_a_recurrent_layer_are_placed():
    """States of a stateful layer are arrays from the start; they join the mesh, and outputs are the plain ones."""
    x = np.ones((4, 3, 8), "float32")

    def make_model():
        return keras.Sequential([keras.Input((3, 8), batch_size=4), L.LSTM(8, stateful=True, name="r")])

    keras.utils.set_random_seed(11)
    expected = make_model()
    expected(x)
    with make_map().scope() as scope:
        keras.utils.set_random_seed(11)
        model = make_model()
    model(x)

    np.testing.assert_allclose(np.asarray(model(x)), np.asarray(expected(x)), rtol=1e-5, atol=1e-6)
    assert {"r.states.0", "r.states.1"} <= {a.variable.path for a in scope.plan.assignments}
    assert all(hasattr(v, "layout") for v in model.variables)


MESHES = {
    "explicit": lambda: jax.make_mesh((2, 4), ("batch", "model"), axis_types=(AxisType.Explicit,) * 2),
    "auto": lambda: jax.make_mesh((2, 4), ("batch", "model"), axis_types=(AxisType.Auto,) * 2),
    "one device": lambda: jax.sharding.Mesh(jax.devices()[:1], ("x",)),
}


def fitted(model):
    x, y = (array[:8] for array in batch("sequential"))
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    history = model.fit(x, y, batch_size=4, shuffle=False, verbose=0).history["loss"]
    return [*history, model.evaluate(x, y, verbose=0), *np.ravel(model.predict(x, verbose=0))]


def test_a_distribution_of_keras_changes_nothing():
    """A model built while Keras's own is set has the layouts of its map, and Keras's holds for models made outside."""
    mesh = keras.distribution.DeviceMesh((2, 4), ("batch", "model"), keras.distribution.list_devices())
    theirs = keras.distribution.LayoutMap(mesh)
    theirs[".*kernel"] = ("model", None)
    distribution = keras.distribution.ModelParallel(layout_map=theirs, batch_dim_name="batch")
    with distribution.scope():
        model, outside = make_map().build(mlp, batch_dim="batch"), mlp()

    assert ["(unsharded, model)", "(model, batch)"] == [
        str(lm.dtensor.fetch_layout(layer.kernel)) for layer in model.layers
    ]
    assert {"model"} == {layer.kernel.value.sharding.spec[0] for layer in outside.layers}


@pytest.mark.parametrize("mesh", MESHES.values(), ids=MESHES.keys())
def test_a_mesh_that_jax_has_set_changes_nothing(mesh):
    """Inside `jax.set_mesh`, of whatever mesh, a model is built and trained with the numbers of one device."""
    keras.utils.set_random_seed(1)
    expected = fitted(mlp())
    keras.utils.set_random_seed(1)
    with jax.set_mesh(mesh()):
        with make_map().scope(batch_dim="batch"):
            model = mlp()
        actual = fitted(model)
        assert not jax.sharding.get_abstract_mesh().empty

    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)
    assert make_map()["d1.kernel"] == model.layers[0].kernel.layout


@pytest.mark.parametrize("name", ["explicit", "one device"])
def test_a_call_on_another_mesh_is_refused(name):
    """A model that is called with arrays while another mesh is set says so, and how to call it."""
    x, _ = batch("sequential")
    with make_map().scope():
        model = mlp()
    with jax.set_mesh(MESHES[name]()):
        with pytest.raises(lm.ScopeError) as caught:
            model(x)
        with jax.set_mesh(None):
            model(x)

    what, _, mesh, why, fix = str(caught.value).splitlines()
    assert f"{model.name}: the layer cannot be called on the mesh of jax.set_mesh" == what
    assert "  mesh      batch=2, model=4" == mesh
    assert (
        "  why       JAX cannot combine arrays of different meshes, and a layout map needs axes of type Auto"
        == why
    )
    call = "with jax.set_mesh(None): model(x)"
    assert f"  fix       unset that mesh: {call}; fit, evaluate, and predict do so themselves" == fix


def test_without_compilation_first_weights_are_the_same():
    """Under `jax.disable_jit` a model is built with the first weights that it has without."""
    keras.utils.set_random_seed(1)
    expected = mlp().get_weights()
    keras.utils.set_random_seed(1)
    with jax.disable_jit(), make_map().scope():
        model = mlp()

    for one, two in zip(expected, model.get_weights(), strict=True):
        np.testing.assert_array_equal(one, two)


def test_weights_that_a_failed_step_has_taken_are_named_as_lost(tmp_path):
    """Where a program fails after it has begun, the error says that weights are lost, and loading brings them back."""

    class Failing(L.Layer):
        def call(self, x):
            def fail(values):
                raise ValueError("in the middle")

            wanted = jax.ShapeDtypeStruct((), x.dtype)
            return (
                x if x.shape[0] != 4 else x + jax.pure_callback(fail, wanted, jax.lax.stop_gradient(x[0, 0]))
            )

    x, y = (array[:8] for array in batch("sequential"))
    # Of several, those that go on wait for the one that failed
    one_device = lm.LayoutMap(lm.create_mesh("batch=1"))
    with one_device.scope(batch_dim="batch"):
        model = mlp()
        model.add(Failing())
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.fit(x, y, verbose=0)
    model.save_weights(tmp_path / "own.weights.h5")
    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        model.fit(x[:4], y[:4], verbose=0)
    model.load_weights(tmp_path / "own.weights.h5")

    assert caught.value.__notes__[-1] == (
        f"{model.name}: the step had begun and taken the memory of the weights, so their values are lost: "
        "load them again, or build the model again"
    )
    assert np.isfinite(model.fit(x, y, verbose=0).history["loss"]).all()


def test_a_batch_is_copied():
    """An array of numpy that changes after it was passed on changes no batch on the mesh."""
    x = np.ones((8, 16), np.float32)
    with make_map().scope(batch_dim="batch"):
        model = mlp()
    placed_batch, nothing = place_on_mesh((x, None), get_session(model))
    x[:] = 0

    assert nothing is None
    assert 1.0 == float(np.asarray(placed_batch).min())
    assert ("batch", None) == tuple(placed_batch.sharding.spec)


def test_a_batch_on_one_device_is_copied():
    """A mesh of one device leaves numpy batches to `jax.jit`, copied, and `fit` computes what plain Keras computes."""
    x, y = np.random.default_rng(0).normal(size=(64, 16)).astype("float32"), np.ones((64, 64), np.float32)
    losses = []
    for scope in (
        nullcontext(),
        lm.LayoutMap(jax.sharding.Mesh(jax.devices()[:1], "batch")).scope(batch_dim="batch"),
    ):
        keras.utils.set_random_seed(0)
        with scope:
            model = mlp()
        model.compile("adam", "mse")
        losses.append(model.fit(x, y, batch_size=8, epochs=2, verbose=0).history["loss"])
    np.testing.assert_allclose(*losses, rtol=1e-6)
    given, seen = (x[:8], y[:8], None), []
    _make_batch_placing_step(lambda state, data: seen.append(next(data)), get_session(model), "train", None)(
        None, iter([given])
    )
    assert seen[0][2] is None
    assert not any(np.shares_memory(new, old) for new, old in zip(seen[0][:2], given[:2], strict=True))
