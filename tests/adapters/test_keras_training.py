"""Training a Keras model in layouts: the numbers of one device, and layouts that stay."""

import gc
import weakref

import keras
import numpy as np
import pytest
from keras_models import ON_TORCH, batch, compiled
from keras_training import (
    assert_close,
    assert_in_layouts,
    both,
    fit,
    fit_and_use,
    mlp,
    mlp_map,
)
from quiet import OF_ARRAYS, OF_MAPS

import layoutmap as lm

PROCESSES = ("jax", "tensorflow", "torch")
L = keras.layers
pytestmark = [OF_MAPS, OF_ARRAYS]


@pytest.mark.every_backend
def test_fit_evaluate_and_predict_give_the_numbers_of_one_device():
    """Losses, metrics and predictions are those of plain Keras, with a last batch that does not divide."""
    expected, actual, model = both(mlp, lambda m: fit_and_use(m, epochs=2))

    assert_close(expected, actual)
    assert_in_layouts(model, mlp_map())


OPTIMIZERS = {
    "accumulation": lambda: keras.optimizers.Adam(1e-3, gradient_accumulation_steps=2),
    "LossScale": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.05)),
    "clipnorm": lambda: keras.optimizers.AdamW(1e-3, clipnorm=0.01),
    "global_clipnorm": lambda: keras.optimizers.SGD(0.1, global_clipnorm=0.1),
    "clipvalue": lambda: keras.optimizers.SGD(0.1, clipvalue=1e-3),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_what_optimizers_add_trains_like_one_device(optimizer):
    """Accumulation, loss scaling and clipping: losses are the plain ones, and slots lie where their weights lie."""
    expected, actual, model = both(lambda: mlp(optimizer()), fit)

    assert_close({"loss": expected["loss"]}, {"loss": actual["loss"]})
    assert_in_layouts(model, mlp_map())


@pytest.mark.parametrize(
    "options",
    [*([] if ON_TORCH else [{"steps_per_execution": 2}]), {"run_eagerly": True}, {"jit_compile": False}],
    ids=str,
)
def test_every_way_of_running_a_step_gives_the_same(options):
    """However Keras runs its steps, numbers and layouts are right."""
    expected, actual, model = both(lambda: mlp("sgd", **options), lambda m: fit_and_use(m, rows=6))

    assert_close(expected, actual)
    assert_in_layouts(model, mlp_map())


class Halved(L.Dense):
    """Its kernel is halved by each call in training, as spectral normalization divides it by its norm."""

    def call(self, inputs, training=False):
        if training:
            self.kernel.assign(self.kernel * 0.5)
        return super().call(inputs)


@pytest.mark.parametrize("specs", [(None, "batch"), (None, "model"), ("batch", "model")], ids=str)
def test_a_layer_that_assigns_to_its_own_weight_does_so_in_layouts(specs):
    """The weight has its new value after the call, and trains from it, also where it was gathered for the call."""

    def make_model():
        x = keras.Input((16,))
        model = keras.Model(x, L.Dense(64, name="out")(Halved(8, name="halved")(x)))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("sgd", loss)
        return model

    layout_map = lm.LayoutMap("batch=2,model=4", {r"halved\.kernel": specs}, rest="replicated")
    lm.check_parity(make_model, layout_map, batch("sequential"), batch_dim="batch", library="keras")


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


def test_single_batches_give_the_numbers_of_one_device():
    """`train_on_batch`, `test_on_batch` and `predict_on_batch`, with weights and a batch that does not divide."""
    x, y = batch("sequential", 5)

    def train(model):
        weights = {"sample_weight": np.linspace(0, 1, 5)}
        return {
            "train": [model.train_on_batch(x, y, **weights) for _ in range(2)],
            "class weight": model.train_on_batch(
                x, y, class_weight={label: 1.0 + label for label in range(64)}
            ),
            "test": model.test_on_batch(x, y, **weights),
            "predict": model.predict_on_batch(x),
        }

    expected, actual, model = both(mlp, train)

    assert_close(expected, actual)
    assert_in_layouts(model, mlp_map())


@pytest.mark.parametrize("scale", [2.0**10, 2.0**40])
def test_half_precision_with_a_scale_of_the_loss(scale):
    """Under mixed_float16 the scale is that of one device, also where gradients overflow and a step is left out."""

    def make_model():
        layers = [L.Dense(n, name=f"d{i}", dtype="mixed_float16") for i, n in ((1, 32), (2, 64))]
        model = keras.Sequential([keras.Input((16,)), *layers])
        optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=scale)
        model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    def train(model):
        loss = fit(model, rows=8)["loss"]
        return {"loss": loss, "scale": model.optimizer.dynamic_scale.numpy()}

    expected, actual, model = both(make_model, train)

    assert expected["scale"] == actual["scale"]
    assert (scale if scale < 2.0**20 else scale / 4) == actual["scale"]
    assert_close(expected, actual, tolerance=1e-2)
    assert mlp_map()["d2.kernel"] == model.layers[1].kernel.layout
