"""What training takes in, and who looks on: data of every kind, and callbacks."""

import importlib

import keras
import numpy as np
import pytest
from keras_models import batch
from keras_training import assert_close, assert_in_layouts, both, fit, mlp, mlp_map
from quiet import OF_ARRAYS, OF_MAPS

import layoutmap as lm

PROCESSES = ("jax", "tensorflow", "torch")
L = keras.layers
pytestmark = [OF_MAPS, OF_ARRAYS, pytest.mark.one_backend]


def test_data_may_come_from_a_generator_or_a_dataset():
    """Batches of any size from Python are placed as they come."""
    x, y = batch("sequential", 14)

    class Batches(keras.utils.PyDataset):
        def __len__(self):
            return 3

        def __getitem__(self, index):
            part = slice(5 * index, 5 * index + 5)
            return x[part], y[part]

    def batches():
        yield from (Batches()[i] for i in range(3))

    def train(model):
        options = {"epochs": 1, "verbose": 0, "shuffle": False}
        first = model.fit(Batches(), **options).history["loss"]
        return {"loss": first, "next": model.fit(batches(), steps_per_epoch=3, **options).history["loss"]}

    expected, actual, _ = both(lambda: mlp("sgd"), train)

    assert_close(expected, actual)


def test_callbacks_see_a_complete_model():
    """Callbacks that read, keep and restore weights, or change the rate, work in the middle of training."""

    def train(model):
        callbacks = [
            keras.callbacks.EarlyStopping(monitor="loss", patience=5, restore_best_weights=True),
            keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5),
        ]
        return {"loss": fit(model, epochs=3, callbacks=callbacks)["loss"]}

    expected, actual, model = both(mlp, train)

    assert_close(expected, actual)
    assert_in_layouts(model, mlp_map())


def test_tensorboard_gets_the_losses(tmp_path):
    """The callback writes what plain training writes, step by step."""

    def train(model):
        board = keras.callbacks.TensorBoard(tmp_path / model.name, write_graph=False)
        return {"loss": fit(model, epochs=2, callbacks=[board])["loss"]}

    expected, actual, model = both(mlp, train)
    written = [event for path in (tmp_path / model.name).rglob("events*") for event in events_of(path)]

    assert_close(expected, actual)
    np.testing.assert_allclose(actual["loss"], [v for tag, v in written if tag == "epoch_loss"], rtol=1e-6)
    assert_in_layouts(model, mlp_map())


@pytest.mark.long
def test_tensorboard_shows_weights_or_is_refused(tmp_path):
    """Histograms and pictures of weights are those of one device; where they would fail, `fit` says so at once."""
    refused = {"tensorflow": ["histogram_freq", "write_images"], "torch": ["write_images"]}
    with mlp_map().scope(batch_dim="batch"):
        model = mlp()
    for option in ("histogram_freq", "write_images"):
        board = keras.callbacks.TensorBoard(
            tmp_path / option, histogram_freq=1, write_graph=False, write_images=option == "write_images"
        )
        if option in refused.get(keras.backend.backend(), []):
            with pytest.raises(lm.ScopeError, match=r"fit: TensorBoard with .* cannot show weights"):
                fit(model, rows=4, callbacks=[board])
            continue
        fit(model, rows=4, callbacks=[board])
        (path,) = (tmp_path / option / "train").rglob("events*")
        shown = {tag.rpartition("/")[2] for tag in tags_of(path)}
        assert ({"histogram", "image"} if option == "write_images" else {"histogram"}) <= shown


def tags_of(path):
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    return [value.tag for event in EventFileLoader(str(path)).Load() for value in event.summary.value]


@pytest.mark.long
def test_a_callback_reads_weights_and_slots():
    """What a logger reads in the middle of training, by `numpy()` and `get_weights`, are the values of one device."""

    class Reading(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.seen = [*self.model.get_weights(), *(v.numpy() for v in self.model.optimizer.variables)]

    def train(model):
        fit(model, rows=8, callbacks=[reading := Reading()])
        return {str(number): value for number, value in enumerate(reading.seen)}

    expected, actual, _ = both(mlp, train)

    assert_close(expected, actual)


def events_of(path):
    """The scalars of one of TensorBoard's files, in order."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
    from tensorboard.util.tensor_util import make_ndarray

    for event in EventFileLoader(str(path)).Load():
        for value in event.summary.value:
            yield value.tag, float(make_ndarray(value.tensor))


def test_nested_data_validation_and_frozen_layers():
    """Dicts of inputs and outputs, sample weights, a validation split and a frozen layer train like one device."""
    random = np.random.default_rng(0)
    x = {name: random.normal(size=(10, 8)).astype("float32") for name in "ab"}
    y = {"o": random.normal(size=(10, 8)).astype("float32")}

    def make_model():
        a, b = keras.Input((8,), name="a"), keras.Input((8,), name="b")
        frozen = L.Dense(8, name="frozen")
        frozen.trainable = False
        model = keras.Model({"a": a, "b": b}, {"o": L.Dense(8, name="d1")(frozen(a) + b)})
        model.compile(keras.optimizers.SGD(0.1), {"o": "mse"})
        return model

    def train(model):
        options = {
            "sample_weight": np.arange(10.0),
            "validation_split": 0.3,
            "batch_size": 4,
            "shuffle": False,
        }
        history = model.fit(x, y, epochs=1, verbose=0, **options).history
        return history | {"predict": model.predict(x, verbose=0, batch_size=4)["o"]}

    expected, actual, model = both(make_model, train)

    assert_close(expected, actual)
    assert mlp_map()["d1.kernel"] == model.get_layer("d1").kernel.layout


def test_data_may_come_from_tensorflow():
    """`tf.data` pipelines, with a last batch that does not divide, train on every backend like one device."""
    data = importlib.import_module("tensorflow").data.Dataset
    x, y = batch("sequential", 7)

    def train(model):
        batches = data.from_tensor_slices((x, y)).batch(4)
        return {
            "loss": model.fit(batches, shuffle=False, verbose=0).history["loss"],
            "predict": model.predict(x, verbose=0),
        }

    expected, actual, _ = both(lambda: mlp("sgd"), train)

    assert_close(expected, actual)


def test_a_checkpoint_of_a_callback_is_a_complete_model(tmp_path):
    """`ModelCheckpoint` keeps the best weights and whole models in the middle of training; both come back."""

    def train(model):
        name = f"{tmp_path}/{model.name}"
        callbacks = [
            keras.callbacks.ModelCheckpoint(f"{name}.keras", monitor="loss"),
            keras.callbacks.ModelCheckpoint(
                f"{name}.weights.h5", monitor="loss", save_weights_only=True, save_best_only=True
            ),
        ]
        return {"loss": fit(model, rows=4, epochs=2, callbacks=callbacks)["loss"]}

    expected, actual, model = both(mlp, train)
    with mlp_map().scope():
        loaded = keras.models.load_model(f"{tmp_path}/{model.name}.keras")
    trained = [v.numpy() for v in [*model.variables, *model.optimizer.variables]]

    assert_close(expected, actual)
    for value, variable in zip(trained, [*loaded.variables, *loaded.optimizer.variables], strict=True):
        assert np.array_equal(value, variable.numpy()), variable.path
    assert_in_layouts(loaded, mlp_map())
    model.load_weights(f"{tmp_path}/{model.name}.weights.h5")
    assert_in_layouts(model, mlp_map())
    x, y = batch("sequential")
    np.testing.assert_allclose(loaded.evaluate(x, y, verbose=0), model.evaluate(x, y, verbose=0), rtol=1e-6)


def test_training_that_was_interrupted_goes_on(tmp_path):
    """`BackupAndRestore` takes training up where an interrupt has left it, with the slots that it had."""

    class Interrupt(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 1:
                raise KeyboardInterrupt

    def train(model, *callbacks):
        backup = keras.callbacks.BackupAndRestore(tmp_path / "backup")
        return fit(model, rows=4, epochs=2, callbacks=[backup, *callbacks])["loss"]

    with mlp_map().scope(batch_dim="batch"):
        keras.utils.set_random_seed(1)
        first, second = mlp(), mlp()
    with pytest.raises(KeyboardInterrupt):
        train(first, Interrupt())
    resumed = train(second)
    keras.utils.set_random_seed(1)
    expected = fit(mlp(), rows=4, epochs=2)["loss"]

    assert_close({"loss": expected[1:]}, {"loss": resumed})
    assert_in_layouts(second, mlp_map())
