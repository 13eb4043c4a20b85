"""One small model for the tests of training, and how it is compared with itself on one device."""

import keras
import numpy as np
from keras_models import ON_TORCH, assert_held, batch

import layoutmap as lm

L = keras.layers
MESH = "batch=2,model=4"


def mlp(optimizer="adam", **options):
    layers = [keras.Input((16,)), L.Dense(32, name="d1", activation="relu"), L.Dense(64, name="d2")]
    model = keras.Sequential(layers)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=optimizer, loss=loss, metrics=["accuracy"], **options)
    return model


MLP_RULES = {r"d1\.kernel": (None, "model"), r"d2\.kernel": ("model", "batch")}


def mlp_map():
    return lm.LayoutMap(lm.create_mesh(MESH), MLP_RULES)


def both(make_model, train, the_map=None):
    """What training gives plainly and in layouts, from one seed; and the second model."""
    keras.utils.set_random_seed(1)
    expected = train(make_model())
    keras.utils.set_random_seed(1)
    with (the_map or mlp_map()).scope(batch_dim="batch"):
        model = make_model()
    return expected, train(model), model


ROWS = 7 if ON_TORCH else 22  # where each simulated device computes after the other


def fit(model, rows=ROWS, **options):
    """What `fit` reports; the last batch does not divide."""
    x, y = batch("sequential", rows)
    options = {"batch_size": 4, "epochs": 1, "verbose": 0, "shuffle": False} | options
    return model.fit(x, y, **options).history


def fit_and_use(model, rows=ROWS, **options):
    """The same, and what `evaluate` and `predict` then give."""
    history = fit(model, rows, **options)
    x, y = batch("sequential", rows)
    return history | {
        "evaluate": model.evaluate(x, y, batch_size=4, verbose=0),
        "predict": model.predict(x, verbose=0),
    }


def assert_close(expected, actual, tolerance=1e-5):
    assert expected.keys() == actual.keys()
    for name in expected:
        np.testing.assert_allclose(actual[name], expected[name], rtol=tolerance, atol=tolerance, err_msg=name)


def assert_in_layouts(model, the_map):
    """Every weight is still in the layout of its rule, and every slot of its shape where its weight is."""
    for variable in model.variables:
        assert_held(variable)
    for number, name in ((0, "d1"), (1, "d2")):
        kernel = model.layers[number].kernel
        assert the_map[f"{name}.kernel"] == kernel.layout
        for slot in model.optimizer.variables:
            if slot.name.startswith(kernel.path.replace("/", "_")) and slot.shape == kernel.shape:
                assert kernel.layout == slot.layout, slot.name
                assert_held(slot)
