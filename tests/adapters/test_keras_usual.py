"""What people do with Keras, thing by thing: in layouts it gives the numbers of one device, on each backend.

The table in docs/what-works.md has a row for each case, by its name. What a backend refuses is in REFUSED, with the
message and the reason, and the test shows that it is refused.
"""

import contextlib
import csv
import itertools

import keras
import numpy as np
import pytest
from keras_training import assert_close
from quiet import OF_ARRAYS, OF_MAPS

import layoutmap as lm

PROCESSES = ("jax", "tensorflow", "torch")
L = keras.layers
pytestmark = [OF_MAPS, OF_ARRAYS, pytest.mark.one_backend]
THINGS = {}
STATEFUL = "state: a stateful `LSTM` over several calls, and `reset_state`"
# Name, backend -> pattern of the message, the reason in words.
REFUSED = {
    (STATEFUL, "torch"): ("modified by an inplace operation", "plain Keras does not train it on PyTorch"),
}
RANDOM = np.random.default_rng(0)
X, Y = (RANDOM.normal(size=(10, 8)).astype("float32") for _ in "xy")
CLASSES = RANDOM.integers(0, 8, size=10).astype("int32")
SERIES = RANDOM.normal(size=(8, 3, 8)).astype("float32")


def thing(name):
    """Register what is done, by the name that it has in the table; it returns numbers to compare."""

    def register(function):
        THINGS[name] = function
        return function

    return register


def scope():
    rules = {r"(.*\.)?d\d+\.kernel$": (None, "model")}
    the_map = lm.LayoutMap(lm.create_mesh("batch=2,model=4"), rules, rest="replicated")
    return the_map.scope(batch_dim="batch")


def small(*more, optimizer="sgd", loss="mse", **options):
    """Two dense layers, and what else is wanted between them."""
    layers = [keras.Input((8,)), L.Dense(16, "relu", name="d1"), *more, L.Dense(8, name="d2")]
    return ready(keras.Sequential(layers), optimizer, loss, **options)


def ready(model, optimizer="sgd", loss="mse", **options):
    model.compile(optimizer, loss, **options)
    return model


def trained(model, x=X, y=Y, **options):
    """What `fit` reports in two epochs, with a last batch that does not divide, and the weights."""
    options = {"batch_size": 4, "epochs": 2, "verbose": 0, "shuffle": False} | options
    return model.fit(x, y, **options).history | weights(model)


def weights(model):
    return {f"weight {number}": value for number, value in enumerate(model.get_weights())}


@thing("losses: another one after a second `compile`")
def another_loss(folder):
    model = small()
    yield
    first = trained(model)
    ready(model, loss="mae")
    return [*first.values(), *trained(model).values(), model.evaluate(X, Y, verbose=0)]


@thing("callbacks: `ReduceLROnPlateau`, `CSVLogger`, `LambdaCallback`")
def callbacks_that_log(folder):
    seen, callbacks = [], keras.callbacks
    board = [
        callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=0, min_delta=10.0),
        callbacks.CSVLogger(folder / "log.csv"),
        callbacks.LambdaCallback(on_train_batch_end=lambda number, logs: seen.append(logs["loss"])),
    ]
    model = small()
    yield
    result = trained(model, callbacks=board)
    rows = csv.DictReader((folder / "log.csv").read_text().splitlines())
    return result | {"seen": seen, "logged": [float(row["loss"]) for row in rows]}


@thing("callbacks: `EarlyStopping` that stops, and restores the best weights")
def a_callback_that_stops(folder):
    stop = keras.callbacks.EarlyStopping("val_loss", patience=0, restore_best_weights=True)
    model = small(optimizer=keras.optimizers.SGD(2.0))
    yield
    return trained(model, validation_split=0.3, epochs=4, callbacks=[stop])


@thing("callbacks: `TerminateOnNaN`")
def a_callback_that_ends_on_nan(folder):
    model = small()
    yield
    history = model.fit(X * np.nan, Y, verbose=0, epochs=3, callbacks=[keras.callbacks.TerminateOnNaN()])
    return {"epochs": len(history.epoch)}


@thing("callbacks: `SwapEMAWeights`")
def a_callback_that_swaps(folder):
    model = small(optimizer=keras.optimizers.SGD(0.1, use_ema=True))
    yield
    return trained(
        model, validation_data=(X, Y), callbacks=[keras.callbacks.SwapEMAWeights(swap_on_epoch=True)]
    )


@thing("callbacks: one of your own that reads and assigns weights, and stops")
def a_callback_of_ones_own(folder):
    class Own(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            kernel = self.model.layers[0].kernel
            kernel.assign(np.clip(kernel.numpy(), -0.2, 0.2))
            self.model.stop_training = batch == 1

    model = small()
    yield
    return trained(model, callbacks=[Own()])


@thing("data: `class_weight`")
def weights_of_classes(folder):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model = small(loss=loss)
    yield
    return trained(model, y=CLASSES, class_weight={each: 1.0 + each for each in range(8)})


@thing("data: `sample_weight`, `validation_data`, `weighted_metrics`")
def weights_of_samples(folder):
    given = np.arange(10.0)
    model = small(weighted_metrics=["mae"])
    yield
    return trained(model, sample_weight=given, validation_data=(X, Y, given))


@thing("data: `shuffle=True`, `initial_epoch`, `validation_freq`")
def shuffled_data(folder):
    model = small()
    yield
    return trained(model, shuffle=True, initial_epoch=1, epochs=4, validation_freq=2, validation_split=0.2)


@thing("data: numbers in float64 and int64, `steps_per_epoch` of an endless generator")
def data_without_end(folder):
    def batches():
        while True:
            yield X[:4].astype("float64"), np.round(Y[:4]).astype("int64")

    model = small()
    yield
    return model.fit(batches(), steps_per_epoch=2, epochs=2, verbose=0, shuffle=False).history | weights(
        model
    )


@thing("data: `Normalization.adapt`, `Rescaling`, masked series")
def prepared_data(folder):
    normal = L.Normalization()
    inputs = keras.Input((3, 8))
    x = L.Masking()(L.Rescaling(0.5)(normal(inputs)))
    model = ready(keras.Model(inputs, L.Dense(8, name="d1")(L.GlobalAveragePooling1D()(x))))
    yield
    normal.adapt(SERIES)
    padded = SERIES.copy()
    padded[::2, 2] = 0
    return trained(model, x=padded, y=Y[:8])


@thing("data: several inputs and outputs by name; `loss_weights`")
def data_by_name(folder):
    a, b = keras.Input((8,), name="a"), keras.Input((8,), name="b")
    x = L.Dense(16, name="d1")(L.Concatenate()([a, b]))
    model = keras.Model({"a": a, "b": b}, {"c": L.Dense(8, name="d2")(x), "d": L.Dense(8, name="d3")(x)})
    options = {"loss_weights": {"c": 1.0, "d": 0.5}, "metrics": {"c": ["mae"]}}
    model.compile("sgd", {"c": "mse", "d": "mae"}, **options)
    yield
    return trained(model, x={"a": X[:8], "b": Y[:8]}, y={"c": Y[:8], "d": X[:8]})


@thing("losses: twelve of Keras's, in a model of twelve outputs")
def losses_of_keras(folder):
    given = {
        "mse": (None, Y),
        "mae": (None, Y),
        "mape": (None, Y + 3),
        "huber": (None, Y),
        "log_cosh": (None, Y),
        "cosine_similarity": (None, Y),
        "poisson": ("softplus", Y**2),
        "kl_divergence": ("softmax", np.full_like(Y, 1 / 8)),
        "binary_crossentropy": ("sigmoid", (Y > 0).astype("float32")),
        "categorical_crossentropy": ("softmax", np.eye(8, dtype="float32")[CLASSES]),
        "sparse_categorical_crossentropy": ("softmax", CLASSES),
        "hinge": ("tanh", np.sign(Y)),
    }
    inputs = keras.Input((8,))
    outputs = {
        name: L.Dense(8, activation, name=f"d{number}")(inputs)
        for number, (name, (activation, _)) in enumerate(given.items())
    }
    model = keras.Model(inputs, outputs)
    model.compile("sgd", {name: name for name in given})
    yield
    return trained(model, x=X[:8], y={name: truth[:8] for name, (_, truth) in given.items()})


@thing("losses: `label_smoothing`, `BinaryFocalCrossentropy`, `Dice`, `Tversky`")
def losses_with_options(folder):
    truth = np.eye(8, dtype="float32")[CLASSES]
    losses = {
        "a": keras.losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.1),
        "b": keras.losses.BinaryFocalCrossentropy(from_logits=True),
        "c": keras.losses.Dice(),
        "d": keras.losses.Tversky(),
    }
    inputs = keras.Input((8,))
    outputs = {
        name: L.Dense(8, "sigmoid" if name in "cd" else None, name=f"d{number}")(inputs)
        for number, name in enumerate(losses)
    }
    model = keras.Model(inputs, outputs)
    model.compile("sgd", losses)
    yield
    return trained(model, x=X[:8], y=dict.fromkeys(losses, truth[:8]))


@thing("losses: `CTC` of series")
def loss_of_series(folder):
    model = ready(keras.Sequential([keras.Input((3, 8)), L.Dense(8, name="d1")]), "sgd", keras.losses.CTC())
    yield
    return trained(model, x=SERIES, y=np.clip(CLASSES[:8, None], 1, 7))


@thing("losses: a function and a class of your own, reduced by a sum")
def losses_of_ones_own(folder):
    class Own(keras.losses.Loss):
        def call(self, y_true, y_pred):
            return keras.ops.mean(keras.ops.abs(y_true - y_pred) ** 3, axis=-1)

    def own(y_true, y_pred):
        return keras.ops.max(keras.ops.square(y_true - y_pred), axis=-1)

    model = small(loss=Own(reduction="sum"), optimizer=keras.optimizers.SGD(1e-3))
    yield
    return [*trained(model).values(), *trained(ready(model, loss=own)).values()]


@thing("losses: `add_loss` in a layer, regularizers of weights and of activities")
def losses_of_layers(folder):
    class Sparse(L.Layer):
        def call(self, x):
            self.add_loss(0.01 * keras.ops.mean(keras.ops.abs(x)))
            return x

    dense = L.Dense(16, name="d3", kernel_regularizer="l2", bias_regularizer="l1", activity_regularizer="l2")
    model = small(dense, Sparse())
    yield
    return trained(model)


@thing("losses: `compute_loss` of your own")
def a_loss_in_the_model(folder):
    class Own(keras.Sequential):
        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            return keras.ops.mean(keras.ops.square(y - y_pred)) + 0.1 * keras.ops.mean(keras.ops.abs(y_pred))

    model = Own([keras.Input((8,)), L.Dense(16, name="d1"), L.Dense(8, name="d2")])
    yield
    return trained(ready(model, loss=None))


@thing("metrics: `AUC`, `Precision`, `Recall`, `F1Score`, `R2Score`, top-k")
def metrics_of_keras(folder):
    inputs, metrics = keras.Input((8,)), keras.metrics
    outputs = {
        "a": L.Dense(8, "sigmoid", name="d1")(inputs),
        "b": L.Dense(8, "softmax", name="d2")(inputs),
        "c": L.Dense(8, name="d3")(inputs),
    }
    model = keras.Model(inputs, outputs)
    model.compile(
        "sgd",
        {"a": "binary_crossentropy", "b": "categorical_crossentropy", "c": "mse"},
        metrics={
            "a": [
                metrics.AUC(num_thresholds=20, name="auc"),
                metrics.Precision(name="p"),
                metrics.Recall(name="r"),
            ],
            "b": [metrics.F1Score("macro"), metrics.TopKCategoricalAccuracy(3), "accuracy"],
            "c": [metrics.R2Score(), "mean_absolute_percentage_error"],
        },
    )
    truth = np.eye(8, dtype="float32")[CLASSES]
    yield
    return trained(model, x=X[:8], y={"a": (Y > 0).astype("float32")[:8], "b": truth[:8], "c": Y[:8]})


@thing("metrics: of your own, a function and one with a state")
def metrics_of_ones_own(folder):
    class Largest(keras.metrics.Metric):
        def __init__(self):
            super().__init__(name="largest")
            self.largest = self.add_weight(name="largest", initializer="zeros")

        def update_state(self, y_true, y_pred, sample_weight=None):
            self.largest.assign(keras.ops.maximum(self.largest, keras.ops.max(keras.ops.abs(y_pred))))

        def result(self):
            return keras.ops.convert_to_tensor(self.largest)

    def own(y_true, y_pred):
        return keras.ops.mean(keras.ops.abs(y_true - y_pred), axis=-1)

    model = small(metrics=[own, Largest()])
    yield
    return trained(model)


@thing("state: moving statistics of `BatchNormalization`, in training and frozen")
def moving_statistics(folder):
    model = small(norm := L.BatchNormalization(momentum=0.5))
    yield
    first = trained(model)
    norm.trainable = False
    model.compile("sgd", "mse")
    return [*first.values(), *trained(model).values()]


@thing(STATEFUL)
def states_of_a_recurrent_layer(folder):
    layers = [
        keras.Input(batch_shape=(4, 3, 8)),
        recurrent := L.LSTM(8, stateful=True),
        L.Dense(8, name="d1"),
    ]
    model = ready(keras.Sequential(layers))
    yield
    first = trained(model, x=SERIES, y=Y[:8])
    after = model.predict(SERIES[:4], verbose=0)
    recurrent.reset_state()
    return first | {"after": after, "reset": model.predict(SERIES[:4], verbose=0)}


@thing("state: a counter and an average of your own, updated in `call`")
def states_of_ones_own(folder):
    class Counting(L.Layer):
        def build(self, shape):
            self.calls = self.add_weight(initializer="zeros", trainable=False, dtype="int32", name="calls")
            self.mean = self.add_weight(shape=shape[1:], initializer="zeros", trainable=False, name="mean")

        def call(self, x, training=False):
            if training:
                self.calls.assign_add(1)
                self.mean.assign(0.9 * self.mean + 0.1 * keras.ops.mean(x, axis=0))
            return x - self.mean

    model = small(Counting())
    yield
    return trained(model)


@thing("state: seeds of `Dropout` and `GaussianNoise` move on, and both are off in `predict`")
def states_of_seeds(folder):
    model = small(L.Dropout(0.5, seed=1), L.GaussianNoise(0.1, seed=2))
    yield
    model.fit(X, Y, batch_size=4, verbose=0)
    seeds = [v.numpy() for v in model.non_trainable_variables]
    model.set_weights([np.full_like(v, 0.1) if v.dtype.kind == "f" else v for v in model.get_weights()])
    return {"seeds": seeds, "predict": model.predict(X, verbose=0)}


@thing("state: `SpectralNormalization`, constraints of kernels")
def constrained_weights(folder):
    constrained = L.Dense(16, name="d3", kernel_constraint="max_norm", bias_constraint="non_neg")
    model = small(L.SpectralNormalization(L.Dense(16, name="d4")), constrained)
    yield
    return trained(model)


@thing("optimizers: a schedule of the rate, `weight_decay` with exclusions")
def a_schedule(folder):
    rate = keras.optimizers.schedules.CosineDecay(0.1, 4, warmup_target=0.2, warmup_steps=2)
    optimizer = keras.optimizers.AdamW(rate, epsilon=0.1, weight_decay=0.1)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    model = small(optimizer=optimizer)
    yield
    return trained(model)


@thing("optimizers: a rate that is assigned, a second `compile` with another optimizer")
def another_optimizer(folder):
    model = small(optimizer=keras.optimizers.Adam(0.1, epsilon=0.1))
    yield
    first = trained(model)
    model.optimizer.learning_rate = 0.01
    second = trained(model)
    ready(model, keras.optimizers.RMSprop(0.01, epsilon=0.1))
    return [*first.values(), *second.values(), *trained(model).values()]


@thing("optimizers: one of your own")
def an_optimizer_of_ones_own(folder):
    class Own(keras.optimizers.Optimizer):
        def build(self, variables):
            super().build(variables)
            self.moves = self.add_optimizer_variables(variables, "move")

        def update_step(self, gradient, variable, learning_rate):
            move = self.moves[self._get_variable_index(variable)]
            self.assign(move, 0.9 * move + gradient)
            self.assign_sub(variable, move * keras.ops.cast(learning_rate, move.dtype))

    model = small(optimizer=Own(0.05))
    yield
    return trained(model)


@thing("optimizers: `loss_scale_factor`, `global_clipnorm` and `use_ema` at once")
def options_of_optimizers(folder):
    options = {
        "loss_scale_factor": 8.0,
        "global_clipnorm": 0.5,
        "use_ema": True,
        "ema_overwrite_frequency": 2,
    }
    model = small(optimizer=keras.optimizers.SGD(0.1, **options))
    yield
    return trained(model)


@thing("surgery: freeze a layer, compile and train; thaw it, and train on")
def frozen_layers(folder):
    model = small()
    yield
    model.layers[0].trainable = False
    first = trained(ready(model))
    model.layers[0].trainable = True
    return [*first.values(), *trained(ready(model)).values()]


@thing("surgery: a new head on the layers of a trained model")
def a_new_head(folder):
    model = small()
    yield
    first = trained(model)
    yield
    headed = ready(keras.Model(model.inputs, L.Dense(8, name="d9")(model.layers[0].output)))
    yield
    return [*first.values(), *trained(headed).values()]


@thing("surgery: outputs of inner layers, a model of part of the layers")
def inner_outputs(folder):
    model = small()
    yield
    first = trained(model)
    yield
    inner = keras.Model(model.inputs, [model.layers[0].output, *model.outputs])
    yield
    return [*first.values(), *inner.predict(X, verbose=0)]


@thing("surgery: `pop` and `add` of a `Sequential`")
def a_changed_sequence(folder):
    model = small()
    yield
    first = trained(model)
    yield
    model.pop()
    model.add(L.Dense(8, name="d8"))
    yield
    return [*first.values(), *trained(ready(model)).values()]


@thing("surgery: a model in a model, a layer that is called twice, tied embeddings")
def shared_layers(folder):
    tokens = keras.Input((3,), dtype="int32")
    embedding, twice = L.ReversibleEmbedding(8, 16), L.Dense(16, "tanh", name="d1")
    x = twice(twice(embedding(tokens)))
    inner = keras.Sequential([keras.Input((3, 16)), L.Dense(16, name="d2")], name="inner")
    model = keras.Model(tokens, embedding(inner(x), reverse=True))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    numbers = np.arange(24).reshape(8, 3) % 8
    yield
    return trained(ready(model, loss=loss), x=numbers, y=numbers)


@thing("surgery: weights of one model set in another, layer by layer")
def weights_of_another(folder):
    source, model = small(), small()
    yield
    first = trained(source)
    for given, layer in zip(source.layers, model.layers, strict=True):
        layer.set_weights(given.get_weights())
    return [*first.values(), *trained(model).values()]


@thing("surgery: `summary`, `count_params`, `get_config`, `to_json`")
def descriptions_of_a_model(folder):
    model, lines = small(), []
    model.summary(print_fn=lines.append)
    again = keras.models.model_from_json(model.to_json())
    same = keras.Sequential.from_config(model.get_config())
    counts = [each.count_params() for each in (model, again, same)]
    yield
    return {"lines": len("\n".join(map(str, lines)).splitlines()), "counts": counts}


@thing("saving: `.keras` with a layer of your own, its optimizer, and training on")
def a_saved_model(folder):
    @keras.saving.register_keras_serializable("usual", "Own")
    class Own(L.Dense):
        pass

    model = small(Own(16, name="d3"), optimizer=keras.optimizers.Adam(0.01, epsilon=0.1))
    yield
    first = trained(model)
    model.save(folder / "model.keras")
    yield
    loaded = keras.models.load_model(folder / "model.keras")
    yield
    return [*first.values(), *trained(loaded).values(), int(loaded.optimizer.iterations.numpy())]


@thing("saving: weights of a plain model into layouts, and back")
def saved_weights(folder):
    model = small()
    yield
    first = trained(model)
    model.save_weights(folder / "a.weights.h5")
    plain = small()
    plain.load_weights(folder / "a.weights.h5")
    return [*first.values(), *plain.get_weights(), *trained(plain).values()]


@thing("saving: in the middle of training; what is loaded goes on as what never stopped")
def an_interrupted_training(folder):
    model = small(optimizer=keras.optimizers.Adam(0.01, epsilon=0.1))
    yield
    trained(model)
    model.save(folder / "model.keras")
    yield
    loaded = keras.models.load_model(folder / "model.keras")
    yield
    on, again = trained(model), trained(loaded)
    assert_close(on, again, 1e-6)
    return again


def run(name, opened, folder):
    """What a thing gives, in a scope and outside of it in turns."""
    keras.utils.set_random_seed(1)
    folder.mkdir()
    steps, scopes = THINGS[name](folder), itertools.cycle((opened, contextlib.nullcontext))
    while True:
        with next(scopes)():
            try:
                next(steps)
            except StopIteration as done:
                return done.value


@pytest.mark.parametrize("name", THINGS)
def test_what_people_do_gives_the_numbers_of_one_device(name, tmp_path):
    """What is reported and returned, and what is left in the weights, agrees to 1e-5."""
    pattern, reason = REFUSED.get((name, keras.backend.backend()), ("", ""))
    if reason:
        with pytest.raises(Exception, match=pattern):
            run(name, scope, tmp_path / "laid out")
        pytest.skip(f"no: {reason}")
    expected = run(name, contextlib.nullcontext, tmp_path / "plain")
    actual = run(name, scope, tmp_path / "laid out")

    assert_close(numbered(expected), numbered(actual))


def numbered(results):
    return {"/".join(map(str, path)): value for path, value in keras.tree.flatten_with_path(results)}
