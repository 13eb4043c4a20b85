"""Keras layers on TensorFlow called with plain tensors and with tensors on the mesh: the numbers are the same."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf
from quiet import OF_ARRAYS, OF_MAPS

import layoutmap as lm

PROCESSES = ("tensorflow",)
L = keras.layers
dtensor = tf.experimental.dtensor
pytestmark = [OF_MAPS, OF_ARRAYS, pytest.mark.filterwarnings("ignore::layoutmap.LayoutMapWarning")]
MESH = lm.create_mesh("batch=2,model=4")
RULES = {
    r"(dense|features|conv).*\.bias": ("model",),
    r"(dense|features).*\.kernel": (None, "model"),
    r"attend\.(query|key|value).*\.kernel": (None, None, "model"),
    r".*embeddings": ("model", None),
}
SERIES, IMAGE, WORDS = (6, 8), (8, 8, 4), (6,)


class Attending(keras.Model):
    """Self-attention on features."""

    def __init__(self, layer, causal=False):
        super().__init__()
        self.attend, self.causal = layer, causal
        self.features = L.Dense(8)

    def call(self, x, training=None):
        takes_list = isinstance(self.attend, L.Attention)
        x = self.features(x)
        options = {"use_causal_mask": self.causal, "training": training}
        return self.attend([x, x], **options) if takes_list else self.attend(x, x, **options)


class WithConstants(keras.Model):
    """Constants of each kind that a layer may hold or make when it is called."""

    def __init__(self):
        super().__init__()
        self.features, self.scale = L.Dense(8), tf.constant(np.arange(8), "float32")

    def call(self, x, training=None):
        angles = keras.ops.outer(keras.ops.arange(6, dtype="float32"), np.arange(8, dtype="float32"))
        band = keras.ops.tril(keras.ops.ones((6, 8)))
        return self.features(x) * self.scale + keras.ops.sin(angles) + band + np.ones((6, 8), "float32")


def after_dense(make):
    return SERIES, lambda: keras.Sequential([keras.Input(SERIES), L.Dense(8), make()])


def of(shape, *makes, dtype="float32"):
    return shape, lambda: keras.Sequential([keras.Input(shape, dtype=dtype), *(make() for make in makes)])


def attending(make, causal=False):
    return SERIES, lambda: Attending(make(), causal)


LAYERS = {
    "Dense": after_dense(lambda: L.Dense(8, activation="relu")),
    "Dropout": after_dense(lambda: L.Dropout(0.5)),
    "SpatialDropout1D": after_dense(lambda: L.SpatialDropout1D(0.5)),
    "GaussianNoise": after_dense(lambda: L.GaussianNoise(0.5)),
    "GaussianDropout": after_dense(lambda: L.GaussianDropout(0.5)),
    "AlphaDropout": after_dense(lambda: L.AlphaDropout(0.5)),
    "Softmax": after_dense(L.Softmax),
    "PReLU": after_dense(L.PReLU),
    "LayerNormalization": after_dense(L.LayerNormalization),
    "BatchNormalization": after_dense(L.BatchNormalization),
    "GroupNormalization": after_dense(lambda: L.GroupNormalization(2)),
    "UnitNormalization": after_dense(L.UnitNormalization),
    "Normalization": after_dense(lambda: L.Normalization(mean=1.0, variance=4.0)),
    "Reshape": after_dense(lambda: L.Reshape((12, 4))),
    "Flatten": after_dense(L.Flatten),
    "Permute": after_dense(lambda: L.Permute((2, 1))),
    "TimeDistributed": after_dense(lambda: L.TimeDistributed(L.Dense(4))),
    "EinsumDense": after_dense(lambda: L.EinsumDense("abc,cd->abd", (6, 8), bias_axes="d")),
    "regularizers": after_dense(
        lambda: L.Dense(8, kernel_regularizer=keras.regularizers.OrthogonalRegularizer())
    ),
    "SpectralNormalization": after_dense(lambda: L.SpectralNormalization(L.Dense(8))),
    "LSTM": of(SERIES, lambda: L.LSTM(8, return_sequences=True)),
    "LSTM with dropout": of(SERIES, lambda: L.LSTM(8, dropout=0.5, recurrent_dropout=0.5)),
    "GRU": of(SERIES, lambda: L.GRU(8)),
    "SimpleRNN": of(SERIES, lambda: L.SimpleRNN(8)),
    "Bidirectional": of(SERIES, lambda: L.Bidirectional(L.GRU(8))),
    "ConvLSTM1D": of((3, 6, 4), lambda: L.ConvLSTM1D(4, 3)),
    "Masking": of(SERIES, L.Masking, lambda: L.GRU(8)),
    "Embedding": of(WORDS, lambda: L.Embedding(16, 8), dtype="int32"),
    "Embedding with a mask": of(
        WORDS, lambda: L.Embedding(16, 8, mask_zero=True), lambda: L.LSTM(8), dtype="int32"
    ),
    "Attention": attending(lambda: L.Attention(dropout=0.5)),
    "causal Attention": attending(lambda: L.Attention(dropout=0.5), causal=True),
    "AdditiveAttention": attending(lambda: L.AdditiveAttention(dropout=0.5), causal=True),
    "MultiHeadAttention": attending(lambda: L.MultiHeadAttention(4, 8, dropout=0.5)),
    "causal MultiHeadAttention": attending(lambda: L.MultiHeadAttention(4, 8), causal=True),
    "GroupQueryAttention": attending(lambda: L.GroupQueryAttention(8, 4, 2, dropout=0.5), causal=True),
    "Conv1D": of(SERIES, lambda: L.Conv1D(8, 3)),
    "Conv2D": of(IMAGE, lambda: L.Conv2D(8, 3), L.MaxPooling2D),
    "Conv2DTranspose": of(IMAGE, lambda: L.Conv2DTranspose(8, 3), L.GlobalAveragePooling2D),
    "DepthwiseConv2D": of(IMAGE, lambda: L.DepthwiseConv2D(3), lambda: L.AveragePooling2D(2)),
    "SeparableConv2D": of(IMAGE, lambda: L.UpSampling2D(2), lambda: L.SeparableConv2D(8, 3)),
    "padding": of(IMAGE, lambda: L.ZeroPadding2D(1), lambda: L.Cropping2D(2), lambda: L.Conv2D(8, 3)),
    "a layer with constants": (SERIES, WithConstants),
}
KINDS = ("plain", "replicated", "sharded")


def make_pair(name):
    """The same model twice, one of them in a scope, and rows for them."""
    shape, make = LAYERS[name]
    random = np.random.default_rng(0)
    rows = random.integers(0, 16, (4, *shape)) if shape == WORDS else random.normal(size=(4, *shape))
    rows = rows.astype("int32" if shape == WORDS else "float32")
    pair = []
    for scope in (
        contextlib.nullcontext(),
        lm.LayoutMap(MESH, RULES, uneven="replicate").scope(batch_dim="batch"),
    ):
        keras.utils.set_random_seed(1)
        with scope:
            pair.append(make())
        pair[-1](rows)
    return *pair, rows


def place(rows, kind):
    if kind == "plain":
        return tf.constant(rows)
    layout = lm.Layout.replicated(MESH, rank=rows.ndim)
    return lm.dtensor.copy_to_mesh(
        tf.constant(rows),
        layout if kind == "replicated" else lm.Layout.batch_sharded(MESH, "batch", rows.ndim),
    )


def differentiate(model, rows):
    with tf.GradientTape() as tape:
        result = model(rows, training=True)
        loss = tf.reduce_sum(result**2)
    return result, *tape.gradient(loss, [variable.value for variable in model.trainable_variables])


def assert_same(expected, actual):
    for a, b in zip(tf.nest.flatten(expected), tf.nest.flatten(actual), strict=True):
        a, b = (tf.convert_to_tensor(each) for each in (a, b))
        on_mesh = dtensor.is_dtensor(b)
        value = lm.dtensor.relayout(b, lm.Layout.replicated(MESH, b.ndim)) if on_mesh else b
        np.testing.assert_allclose(value.numpy(), a.numpy(), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", LAYERS)
def test_an_eager_call_gives_the_numbers_of_one_device(name):
    """Plain inputs give a plain result and inputs on the mesh one on the mesh, with the same numbers."""
    expected, actual, rows = make_pair(name)

    for kind in KINDS:
        result = actual(place(rows, kind), training=True)
        assert (kind != "plain") == dtensor.is_dtensor(result)
        assert_same(expected(rows, training=True), result)


@pytest.mark.parametrize("name", LAYERS)
def test_eager_gradients_on_the_mesh_are_those_of_one_device(name):
    """A `GradientTape` inside of `run_on` takes inputs of each kind."""
    expected, actual, rows = make_pair(name)

    for kind in KINDS:
        with lm.dtensor.run_on(MESH):
            found = differentiate(actual, place(rows, kind))
        assert_same(differentiate(expected, tf.constant(rows)), found)


@pytest.mark.parametrize("name", LAYERS)
def test_a_compiled_function_gives_the_numbers_of_one_device(name):
    """A `tf.function` takes inputs on the mesh anywhere, and plain ones inside of `run_on`."""
    expected, actual, rows = make_pair(name)
    function = tf.function(lambda rows: actual(rows, training=True))

    for kind in KINDS:
        with lm.dtensor.run_on(MESH) if kind == "plain" else contextlib.nullcontext():
            assert_same(expected(rows, training=True), function(place(rows, kind)))


@pytest.mark.parametrize("name", LAYERS)
def test_predict_takes_inputs_on_the_mesh(name):
    """`predict` returns one device's rows for inputs of each kind."""
    expected, actual, rows = make_pair(name)

    for kind in KINDS:
        assert_same(expected(rows), actual.predict(place(rows, kind), verbose=0))


def test_the_loops_of_keras_take_tensors_on_the_mesh():
    """`fit`, `evaluate` and the methods for one batch take sharded tensors, also as data for validation."""
    expected, actual, rows = make_pair("Dense")
    targets = place(rows, "sharded")
    found = []
    for model, data in ((expected, rows), (actual, targets)):
        model.compile("sgd", "mse")
        losses = model.fit(data, data, validation_data=(data, data), verbose=0).history
        found.append([losses, model.evaluate(data, data, verbose=0), model.train_on_batch(data, data)])
    assert_same(*found)
