"""Keras models on torch with axes that do not divide train, save and load as on one device, with uneven="pad"."""

import keras
import numpy as np
import pytest
from quiet import OF_ARRAYS

import layoutmap as lm

PROCESSES = ("torch",)
# Heads that do not divide are gathered, with a warning.
pytestmark = [OF_ARRAYS, pytest.mark.filterwarnings("ignore:.*computed on gathered tensors")]
RULES = {
    "table.embeddings": ("model", None),
    "heads.(query|key|value)_dense.kernel": (None, "model", None),
    "heads.output_dense.kernel": ("model", None, None),
    "norm.*": ("model",),
    "up.kernel": ("batch", "model"),
    "up.bias": ("model",),
    "out.kernel": ("model", "batch"),
    "out.bias": ("batch",),
}
TOKENS = np.random.default_rng(0).integers(0, 57, (16, 6))
OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "adamw": lambda: keras.optimizers.AdamW(1e-2, epsilon=1e-3, global_clipnorm=0.5),
    "adafactor": lambda: keras.optimizers.Adafactor(1e-2),
}


def make_model():
    """Five heads on four devices, and axes of 57, 13 and 20."""
    keras.utils.set_random_seed(0)
    tokens = keras.Input((6,), dtype="int32")
    x = keras.layers.Embedding(57, 20, name="table")(tokens)
    x = x + keras.layers.MultiHeadAttention(5, 4, use_bias=False, name="heads")(x, x)
    x = keras.layers.LayerNormalization(name="norm")(x)
    x = keras.layers.Dense(13, activation="gelu", name="up")(x)
    return keras.Model(tokens, keras.layers.Dense(57, name="out")(x))


def build(mesh="batch=2,model=4"):
    return lm.LayoutMap(mesh, RULES, uneven="pad", rest="replicated").build(make_model, batch_dim="batch")


def read(model):
    return [np.asarray(weight) for weight in model.weights]


def train(model, optimizer):
    """The losses, the weights, an evaluation and predictions of a trained model."""
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=OPTIMIZERS[optimizer](), loss=loss)
    targets = np.roll(TOKENS, 1, 1)
    losses = model.fit(TOKENS, targets, batch_size=8, epochs=2, shuffle=False, verbose=0).history["loss"]
    return [
        losses,
        model.evaluate(TOKENS, targets, verbose=0),
        model.predict(TOKENS, verbose=0),
        *read(model),
    ]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_training(optimizer):
    """Initial values have the bits of one device; fit, evaluate and predict agree with it."""
    plain, model = make_model(), build()

    assert 0 < len([w for w in model.weights if w.layout.find_uneven_axes(w.shape)])
    for expected, actual in zip(read(plain), read(model), strict=True):
        np.testing.assert_array_equal(actual, expected)
    for expected, actual in zip(train(plain, optimizer), train(model, optimizer), strict=True):
        np.testing.assert_allclose(actual, expected, atol=2e-5)


def test_files(tmp_path):
    """Keras's own files and those of this library load with equal bits where the axes divide and where not."""
    model = build()
    train(model, "adamw")
    model.save_weights(tmp_path / "own.weights.h5")
    lm.save(model, tmp_path / "saved")

    for mesh in ("batch=2,model=4", "batch=8,model=1", "batch=4,model=2"):
        for load in (
            lambda again: again.load_weights(tmp_path / "own.weights.h5"),
            lambda again: lm.load(again, tmp_path / "saved", extra="ignore"),
        ):
            again = build(mesh)
            load(again)
            for expected, actual in zip(read(model), read(again), strict=True):
                np.testing.assert_array_equal(actual, expected)
