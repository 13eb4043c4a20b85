"""Keras on JAX trains, saves, and reads variables with axes that do not divide as on one device."""

from __future__ import annotations

import jax
import keras
import numpy as np
import pytest

import layoutmap as lm

RULES = {
    "table.embeddings": ("model", None),
    "up.kernel": (None, "model"),
    "up.bias": ("model",),
    "norm.*": ("model",),
    "head.kernel": ("model", None),
    "head.bias": ("model",),  # of three elements over four devices, so that one has none
}
OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.1, momentum=0.9, clipnorm=1.0),
    "adamw": lambda: keras.optimizers.AdamW(1e-2, global_clipnorm=0.5),
    "adafactor": lambda: keras.optimizers.Adafactor(1e-2),
    "muon": lambda: keras.optimizers.Muon(1e-2),
}
X = np.random.default_rng(0).integers(0, 13, (24, 5))
Y = np.random.default_rng(1).integers(0, 3, (24,))


def make_model(optimizer="adamw"):
    keras.utils.set_random_seed(3)
    layers = [
        keras.layers.Embedding(13, 6, name="table"),
        keras.layers.Flatten(name="flatten"),
        keras.layers.Dense(11, activation="gelu", name="up"),
        keras.layers.BatchNormalization(name="norm"),
        keras.layers.Dense(3, name="head"),
    ]
    model = keras.Sequential([keras.Input((5,), dtype="int32"), *layers])
    model.compile(OPTIMIZERS[optimizer](), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def make_map():
    return lm.LayoutMap(lm.create_mesh("data=2,model=4"), RULES, uneven="pad")


def build(optimizer="adamw"):
    return make_map().build(lambda: make_model(optimizer), batch_dim="data")


def read(variable):
    return np.asarray(variable.value)


def list_values(model):
    return [read(variable) for variable in [*model.variables, *model.optimizer.variables]]


def assert_close(expected, actual):
    for a, b in zip(list_values(expected), list_values(actual), strict=True):
        np.testing.assert_allclose(b, a, rtol=2e-4, atol=2e-5)


def test_initial_values_are_those_of_one_device():
    """Bit for bit, with logical shapes."""
    expected, model = make_model(), build()

    for a, b in zip(expected.variables, model.variables, strict=True):
        assert (a.shape, read(a).tobytes()) == (b.shape, read(b).tobytes())
        assert tuple(b.shape) != b._value.array.shape
    assert expected.count_params() == model.count_params()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_fit_evaluate_and_predict_agree_with_one_device(optimizer: str):
    """Weights and slots as well, and padding is zero afterwards."""
    expected, model = make_model(optimizer), build(optimizer)
    options = {"batch_size": 8, "epochs": 2, "shuffle": False, "verbose": 0}

    losses = [each.fit(X, Y, **options).history["loss"] for each in (expected, model)]

    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)
    np.testing.assert_allclose(model.evaluate(X, Y, verbose=0), expected.evaluate(X, Y, verbose=0), rtol=1e-5)
    np.testing.assert_allclose(model.predict(X, verbose=0), expected.predict(X, verbose=0), atol=1e-5)
    np.testing.assert_allclose(
        model.train_on_batch(X[:8], Y[:8]), expected.train_on_batch(X[:8], Y[:8]), rtol=1e-5
    )
    np.testing.assert_allclose(np.asarray(model(X)), np.asarray(expected(X)), atol=1e-5)
    assert_close(expected, model)
    for variable in [*model.variables, *model.optimizer.variables]:
        if hasattr(variable._value, "array"):
            values = np.array(variable._value.array)
            values[tuple(slice(0, size) for size in variable.shape)] = 0
            assert not values.any()


def test_values_are_assigned_and_read():
    """A value of the logical shape is stored padded, and one of the padded shape is refused."""
    model = build()
    kernel = model.get_layer("up").kernel
    kernel.assign(np.ones(kernel.shape))

    assert read(kernel).all()
    assert (30, 12) == kernel._value.array.shape
    assert (30, 11) == kernel.value.shape
    with pytest.raises((ValueError, lm.LayoutError)):
        kernel.assign(np.ones((30, 12)))
    kernel.assign_add(keras.ops.ones(kernel.shape))
    assert 2 == read(kernel).min() == read(kernel).max()


def test_files_have_no_padding(tmp_path):
    """Keras's own files and checkpoints load in an unsharded model and back."""
    model = build()
    model.fit(X, Y, batch_size=8, verbose=0)
    model.save_weights(tmp_path / "model.weights.h5")
    lm.save(model, tmp_path / "checkpoint")
    plain, restored, again = make_model(), make_model(), build()
    plain.optimizer.build(plain.trainable_variables)
    plain.load_weights(tmp_path / "model.weights.h5")
    lm.load(restored, tmp_path / "checkpoint")
    lm.load(again, tmp_path / "checkpoint")

    for a, b, c, d in zip(*(each.variables for each in (model, plain, restored, again)), strict=True):
        assert 1 == len({read(each).tobytes() for each in (a, b, c, d)})
    assert_close(model, again)


def test_a_failing_step_changes_nothing():
    """Variables have their values back after an error, and train on."""
    model, expected = build(), make_model()

    class Fail(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if batch:
                raise RuntimeError("on purpose")

    options = {"batch_size": 24, "shuffle": False, "verbose": 0}
    with pytest.raises(RuntimeError, match="on purpose"):
        model.fit(np.concatenate([X, X]), np.concatenate([Y, Y]), callbacks=[Fail()], **options)
    expected.fit(X, Y, **options)

    assert_close(expected, model)
    model.fit(X, Y, **options)


def test_rows_that_do_not_divide_are_sharded():
    """Devices share the 5 rows of a last batch, and fit, evaluate, and predict agree with one device."""
    found = {}

    class Spy(keras.layers.Layer):
        def call(self, x):
            if isinstance(x, jax.core.Tracer):
                jax.debug.inspect_array_sharding(
                    x, callback=lambda s: found.setdefault(x.shape, []).append(s)
                )
            return x

    def make_normalized():
        keras.utils.set_random_seed(0)
        layers = [
            keras.layers.Dense(16, name="d1"),
            keras.layers.LayerNormalization(),
            Spy(),
            keras.layers.Dense(4),
        ]
        model = keras.Sequential([keras.Input((8,)), *layers])
        model.compile("sgd", "mse", weighted_metrics=["mae"])
        return model

    rng = np.random.default_rng(0)
    x, y, weights = (rng.normal(size=(13, *shape)).astype("float32") for shape in ((8,), (4,), ()))
    one, layout_map = (
        make_normalized(),
        lm.LayoutMap("batch=4,model=2", {"d1.kernel": (None, "model")}, rest="replicated"),
    )
    with layout_map.scope(batch_dim="batch"):
        sharded = make_normalized()
    results = []
    for model in (one, sharded):
        found.clear()
        logs = model.fit(x, y, sample_weight=weights, batch_size=8, shuffle=False, verbose=0).history
        results.append([*logs.values(), model.evaluate(x, y, batch_size=8, verbose=0)])
        results[-1].append(model.predict(x, batch_size=8, verbose=0))

    assert {((5, 16), ("batch", "model"))} <= {
        (shape, tuple(getattr(s, "spec", ()))) for shape in found for s in found[shape]
    }
    for expected, actual in zip(*results, strict=True):
        np.testing.assert_allclose(expected, actual, rtol=1e-5, atol=1e-6)
