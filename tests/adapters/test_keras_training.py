"""Training a Keras model in layouts: the numbers of one device, and layouts that stay."""

import gc
import weakref

import keras
import numpy as np
import pytest
from keras_models import ON_JAX, ON_TORCH, assert_held, batch, compiled

import layoutmap as lm

PROCESSES = ("jax", "tensorflow", "torch")
L = keras.layers
pytestmark = [
    pytest.mark.filterwarnings("ignore::layoutmap.LayoutMapWarning"),
    # Keras 3.15's own variables know only the older form of __array__.
    pytest.mark.filterwarnings(
        "ignore:__array__ implementation doesn't accept a copy keyword:DeprecationWarning"
    ),
]
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


def test_fit_evaluate_and_predict_give_the_numbers_of_one_device():
    """Losses, metrics and predictions are those of plain Keras, with a last batch that does not divide."""
    expected, actual, model = both(mlp, lambda m: fit_and_use(m, epochs=2))

    assert_close(expected, actual)
    assert_in_layouts(model, mlp_map())


# On TensorFlow, where each takes seconds to compile, the plain ones are tested once: test_keras_parity.py.
OPTIMIZERS = {
    "accumulation": lambda: keras.optimizers.Adam(1e-3, gradient_accumulation_steps=2),
    "LossScale": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.05)),
    "clipped AdamW": lambda: keras.optimizers.AdamW(1e-3, clipnorm=1.0),
}
if ON_JAX:
    OPTIMIZERS |= {
        "SGD": lambda: keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True),
        "RMSprop": lambda: keras.optimizers.RMSprop(1e-3),
        "Adafactor": lambda: keras.optimizers.Adafactor(1e-3),
        "Lion": lambda: keras.optimizers.Lion(1e-4),
        "Muon": lambda: keras.optimizers.Muon(1e-3),
    }


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_every_optimizer_trains_like_one_device_and_its_slots_follow(optimizer):
    """Slots lie where their weights lie, before and after training, and the losses are the plain ones."""
    expected, actual, model = both(lambda: mlp(optimizer()), fit)

    assert_close({"loss": expected["loss"]}, {"loss": actual["loss"]})
    assert_in_layouts(model, mlp_map())


@pytest.mark.parametrize(
    "options",
    [{"jit_compile": False}, {"run_eagerly": True}, *([] if ON_TORCH else [{"steps_per_execution": 2}])],
    ids=str,
)
def test_every_way_of_running_a_step_gives_the_same(options):
    """However Keras runs its steps, numbers and layouts are right."""
    expected, actual, model = both(lambda: mlp("sgd", **options), lambda m: fit_and_use(m, rows=6))

    assert_close(expected, actual)
    assert_in_layouts(model, mlp_map())


def test_averaged_weights_survive_a_second_fit():
    """With `use_ema` a second `fit` works; plain Keras gives one buffer away twice and stops."""
    _, _, model = both(lambda: mlp(keras.optimizers.SGD(0.05, use_ema=True)), lambda m: None)
    first = fit(model)
    second = fit(model)

    assert second["loss"][0] < first["loss"][0]
    assert_in_layouts(model, mlp_map())


def test_mixed_precision_trains_like_one_device():
    """Under a mixed policy, weights stay float32 in their layouts and the losses are the plain ones."""

    def make_model():
        layers = [
            keras.Input((16,)),
            *(L.Dense(n, name=f"d{i}", dtype="mixed_bfloat16") for i, n in ((1, 32), (2, 64))),
        ]
        model = keras.Sequential(layers)
        model.compile(optimizer="sgd", loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    expected, actual, model = both(make_model, fit)

    assert {"float32"} == {keras.backend.standardize_dtype(v.value.dtype) for v in model.trainable_variables}
    assert_close({"loss": expected["loss"]}, {"loss": actual["loss"]}, tolerance=1e-2)


@pytest.mark.parametrize("first", ["fit", "predict", "evaluate", "train_on_batch"])
def test_weights_that_training_makes_find_their_layouts(first):
    """A model without weights that first meets data outside of the scope is as one that was built in it."""

    def make_model():
        return compiled(keras.Sequential([L.Dense(32, name="d1"), L.Dense(64, name="d2")]))

    x, y = batch("sequential")
    calls = {
        "fit": lambda m: m.fit(x, y, verbose=0).history["loss"],
        "predict": lambda m: m.predict(x, verbose=0),
        "evaluate": lambda m: m.evaluate(x, y, verbose=0),
        "train_on_batch": lambda m: m.train_on_batch(x, y),
    }
    expected, actual, model = both(make_model, calls[first])

    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)
    assert mlp_map()["d1.kernel"] == model.layers[0].kernel.layout


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


def test_callbacks_see_a_whole_model():
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


def test_dropout_masks_are_those_of_one_device():
    """Random masks in training do not depend on the mesh: a model with dropout has the plain losses."""

    def make_model():
        layers = [
            L.Dense(32, name="d1"),
            L.Dropout(0.5, seed=5),
            L.BatchNormalization(name="bn"),
            L.Dense(64, name="d2"),
        ]
        return compiled(keras.Sequential([keras.Input((16,)), *layers]))

    rules = MLP_RULES | {r"bn\..*": ("model",)}
    expected, actual, model = both(make_model, fit, lm.LayoutMap(lm.create_mesh(MESH), rules))

    assert_close(expected, actual)
    assert ("model",) == model.layers[2].moving_mean.layout.sharding_specs


def test_an_optimizer_made_elsewhere_follows_when_training_begins():
    """An optimizer that was built for the plain model is brought along by `apply`, and training goes on."""
    x, y = batch("sequential")
    keras.utils.set_random_seed(1)
    expected = mlp()
    model = mlp()
    for weight, value in zip(model.variables, expected.get_weights(), strict=True):
        weight.assign(value)
    for m in (expected, model):
        m.train_on_batch(x, y)
    mlp_map().apply(model, batch_dim="batch")

    assert_in_layouts(model, mlp_map())
    for _ in range(2):
        np.testing.assert_allclose(model.train_on_batch(x, y), expected.train_on_batch(x, y), rtol=1e-5)


def test_a_model_and_its_scope_are_freed():
    """Nothing keeps a model alive after its last reference is gone."""
    with mlp_map().scope() as scope:
        model = mlp()
    fit(model)
    gone = weakref.ref(model.layers[0].kernel), weakref.ref(scope)
    del model, scope
    keras.utils.clear_session()
    gc.collect()

    assert [None, None] == [ref() for ref in gone]


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
