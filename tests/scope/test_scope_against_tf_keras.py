"""tf_keras: refused by name, and where its own scope and ours can be compared, they agree.

tf_keras's `LayoutMap.scope()` is the system that this library revives. Its models are not laid out here; the same model
in Keras 3 is, and must land in the same layouts and train to the same numbers.
"""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import layoutmap as lm
from layoutmap.engines import get_engine

PROCESSES = ("tensorflow",)
dtensor = tf.experimental.dtensor
MESH = lm.Mesh(None, "batch=2,model=4")
RULES = {
    r"d1\.kernel": (None, "model"),
    r"d1\.bias": ("model",),
    r"d2\.kernel": ("model", None),
    r"d2\.bias": (None,),
}
X = np.random.default_rng(0).normal(size=(8, 16)).astype("float32")
Y = np.random.default_rng(1).normal(size=(8, 8)).astype("float32")


def two_layers(library, style):
    """The same two layers in the documents' three styles, in either library."""
    dense = library.layers.Dense
    if style == "sequential":
        return library.Sequential(
            [library.layers.InputLayer((16,)), dense(32, activation="relu", name="d1"), dense(8, name="d2")]
        )
    if style == "functional":
        x = library.Input((16,))
        return library.Model(x, dense(8, name="d2")(dense(32, activation="relu", name="d1")(x)))

    class Net(library.Model):
        def __init__(self):
            super().__init__()
            self.d1 = dense(32, activation="relu")
            self.d2 = dense(8)

        def call(self, x):
            return self.d2(self.d1(x))

    return Net()


def laid_out_by_tf_keras(style):
    """A model in tf_keras's own scope, on the layouts that this library gives."""
    engine = get_engine("tensorflow")
    replicated = engine.make_native_layout(lm.Layout.replicated(MESH, 0), 0)
    theirs = tf_keras.dtensor.experimental.LayoutMap(mesh=replicated.mesh)
    for pattern, layout in lm.LayoutMap(MESH, RULES).items():
        theirs[pattern] = engine.make_native_layout(layout, layout.rank)
    tf_keras.backend.experimental.enable_tf_random_generator()
    tf_keras.utils.set_random_seed(1)
    with theirs.scope():
        model = two_layers(tf_keras, style)
    model(lm.dtensor.relayout(X, lm.Layout.batch_sharded(MESH, "batch", 2)))
    return model, replicated.mesh


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("style", ["sequential", "functional", "subclassed"])
def test_our_scope_does_what_theirs_did(style):
    """Each weight lies where tf_keras puts it, and three steps with momentum give tf_keras's losses."""
    theirs, mesh = laid_out_by_tf_keras(style)
    with lm.LayoutMap(MESH, RULES).scope(batch_dim="batch"):
        ours = two_layers(keras, style)
        ours(keras.Input((16,)))
    for their_weight, weight in zip(theirs.variables, ours.variables, strict=True):
        assert dtensor.fetch_layout(their_weight).sharding_specs == list(weight.layout.sharding_specs)
        weight.assign(get_engine("tensorflow").to_numpy(their_weight))

    ours.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    optimizer = tf_keras.dtensor.experimental.optimizers.SGD(0.1, momentum=0.9, mesh=mesh)

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(theirs(x) - y))
        optimizer.apply_gradients(
            zip(tape.gradient(loss, theirs.trainable_variables), theirs.trainable_variables, strict=True)
        )
        return loss

    x, y = (lm.dtensor.relayout(a, lm.Layout.batch_sharded(MESH, "batch", 2)) for a in (X, Y))
    expected = [float(get_engine("tensorflow").to_numpy(step(x, y))) for _ in range(3)]
    np.testing.assert_allclose([float(ours.train_on_batch(X, Y)) for _ in range(3)], expected, rtol=1e-5)


def test_a_model_of_tf_keras_is_refused():
    """By name, with the reason and the way out; `library=` too."""
    layout_map = lm.LayoutMap(MESH, RULES)
    for refused in (
        lambda: layout_map.apply(two_layers(tf_keras, "sequential")),
        lambda: layout_map.build(lambda: two_layers(tf_keras, "functional")),
        lambda: layout_map.apply(two_layers(tf_keras, "subclassed")),
        lambda: layout_map.build(lambda: None, library="tf_keras"),
    ):
        with pytest.raises(lm.ScopeError, match="layout maps do not work with tf_keras") as caught:
            refused()

        assert "unset TF_USE_LEGACY_KERAS" in caught.value.fix


def test_a_model_of_tf_keras_in_a_scope_is_not_passed_over_in_silence():
    """A scope cannot see tf_keras's layers; if it saw nothing at all, it says so."""
    with (
        pytest.warns(lm.LayoutMapWarning, match="models of tf_keras are not laid out"),
        lm.LayoutMap(MESH, RULES).scope(),
    ):
        two_layers(tf_keras, "sequential")
    with warnings.catch_warnings(), lm.LayoutMap(MESH, RULES).scope():
        warnings.simplefilter("error")
        two_layers(keras, "sequential")
