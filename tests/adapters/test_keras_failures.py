"""What fails in the middle of training leaves a model that goes on, and sparse data trains as with plain Keras."""

import keras
import numpy as np
import pytest
import scipy.sparse
from keras_models import ON_TORCH, batch
from keras_training import assert_close, assert_in_layouts, both, fit, mlp, mlp_map
from quiet import OF_ARRAYS, OF_MAPS

from layoutmap.adapters.keras import make_adapter

PROCESSES = ("jax", "tensorflow", "torch")
L = keras.layers
pytestmark = [OF_MAPS, OF_ARRAYS]


class OnPurpose(Exception):
    """A failure that a test plans."""


class Failing(L.Layer):
    """Fails on batches of three rows."""

    error: type = OnPurpose

    def call(self, x):
        if x.shape[0] == 3:
            raise self.error("on purpose")
        return x


def make_model(error=OnPurpose, **options):
    layers = [keras.Input((16,)), L.Dense(32, name="d1"), L.Dense(64, name="d2"), Failing()]
    layers[-1].error = error
    model = keras.Sequential(layers)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=keras.optimizers.SGD(0.1, momentum=0.9), loss=loss, **options)
    return model


def scoped(*args, **kwargs):
    keras.utils.set_random_seed(1)
    with mlp_map().scope(batch_dim="batch"):
        return make_model(*args, **kwargs)


def weights(model):
    return [make_adapter().read(v) for v in model.weights]


def assert_alive(model, tmp_path):
    """The model can be read, saved, used and trained, and is in its layouts."""
    x, y = batch("sequential", 4)
    model.save(tmp_path / "model.keras")
    model.predict(x, verbose=0)
    model.evaluate(x, y, verbose=0)
    assert np.isfinite(model.fit(x, y, verbose=0).history["loss"]).all()
    assert_in_layouts(model, mlp_map())


ENTRIES = {
    "fit": lambda m, x, y: m.fit(x, y, verbose=0),
    "evaluate": lambda m, x, y: m.evaluate(x, y, verbose=0),
    "predict": lambda m, x, y: m.predict(x, verbose=0),
    "train_on_batch": lambda m, x, y: m.train_on_batch(x, y),
    "test_on_batch": lambda m, x, y: m.test_on_batch(x, y),
    "predict_on_batch": lambda m, x, y: m.predict_on_batch(x),
}


@pytest.mark.parametrize("entry", ENTRIES.values(), ids=ENTRIES.keys())
@pytest.mark.parametrize("error", [OnPurpose, KeyboardInterrupt])
def test_a_step_that_fails_leaves_a_model_that_goes_on(entry, error, tmp_path):
    """After a step that fails, of any kind and for any reason, the weights are those before it, and training works."""
    model = scoped(error)
    fit(model, rows=4)
    expected = weights(model)
    with pytest.raises(error):
        entry(model, *batch("sequential", 3))

    for before, after in zip(expected, weights(model), strict=True):
        np.testing.assert_array_equal(before, after)
    assert_alive(model, tmp_path)


@pytest.mark.parametrize("entry", ["fit", "evaluate", "predict"])
def test_data_that_fail_leave_a_model_that_goes_on(entry, tmp_path):
    """A generator of batches that raises after some of them costs no weights."""
    model = scoped()

    def batches():
        yield batch("sequential", 4)
        yield batch("sequential", 4)
        raise OnPurpose("on purpose")

    # TensorFlow reads a generator in an operation, and raises an error of its own with this one's text.
    error = Exception if keras.backend.backend() == "tensorflow" else OnPurpose
    with pytest.raises(error, match="on purpose"):
        getattr(model, entry)(batches(), verbose=0, **({"shuffle": False} if entry == "fit" else {}))

    assert_alive(model, tmp_path)


@pytest.mark.parametrize("entry", ["fit", "evaluate", "predict"])
@pytest.mark.parametrize("when", ["begin", "end"])
def test_a_callback_that_fails_leaves_a_model_that_goes_on(entry, when, tmp_path):
    """A callback that raises before the second batch, or after the first, costs no weights."""

    def fails(number, logs=None):
        if number == (1 if when == "begin" else 0):
            raise OnPurpose

    callback, kind = keras.callbacks.Callback(), {"fit": "train", "evaluate": "test"}.get(entry, entry)
    setattr(callback, f"on_{kind}_batch_{when}", fails)
    model, (x, y) = scoped(), batch("sequential", 8)
    data = (x,) if entry == "predict" else (x, y)
    with pytest.raises(OnPurpose):
        getattr(model, entry)(*data, batch_size=4, verbose=0, callbacks=[callback])

    assert_alive(model, tmp_path)


@pytest.mark.skipif(ON_TORCH, reason="Keras runs one step at a time on torch")
def test_of_several_steps_at_a_time_the_last_that_worked_counts(tmp_path):
    """If the second of two steps that run as one fails, the weights are those after the first."""
    x, y = batch("sequential", 4)
    expected = scoped()
    expected.train_on_batch(x, y)
    model = scoped(steps_per_execution=2)

    def batches():
        yield x, y
        yield batch("sequential", 3)

    with pytest.raises(OnPurpose):
        model.fit(batches(), shuffle=False, verbose=0)

    for one, two in zip(weights(expected), weights(model), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-6, atol=1e-7)
    assert_alive(model, tmp_path)


@pytest.mark.parametrize("sparse", [False] if ON_TORCH else [False, True])
def test_sparse_input_trains_like_one_device(sparse):
    """A sparse matrix gives `fit`, `evaluate` and `predict` the numbers of plain Keras, and layouts stay."""
    x, y = batch("sequential", 10)
    matrix = scipy.sparse.csr_matrix(np.where(x > 0.5, x, 0))

    def make():
        inputs = keras.Input((16,), sparse=sparse)
        outputs = L.Dense(64, name="d2")(L.Dense(32, name="d1")(inputs))
        model = keras.Model(inputs, outputs)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer="sgd", loss=loss)
        return model

    def train(model):
        options = {"batch_size": 10, "verbose": 0}
        history = model.fit(matrix, y, epochs=2, shuffle=False, **options).history
        return history | {
            "evaluate": model.evaluate(matrix, y, **options),
            "predict": model.predict(matrix, **options),
        }

    expected, actual, model = both(make, train)

    assert_close(expected, actual)
    kernel = model.get_layer("d1").kernel
    assert mlp_map()["d1.kernel"] == kernel.layout


def test_an_average_of_weights_outlives_a_failure():
    """With `use_ema` a `fit` that fails writes the averages over the weights, as Keras does, and the next one works."""
    _, _, model = both(lambda: mlp(keras.optimizers.SGD(0.05, use_ema=True)), lambda m: None)

    def fails(number, logs=None):
        raise OnPurpose

    callback = keras.callbacks.Callback()
    callback.on_train_batch_end = fails
    with pytest.raises(OnPurpose):
        fit(model, callbacks=[callback])

    assert np.isfinite(fit(model)["loss"]).all()
    assert_in_layouts(model, mlp_map())
