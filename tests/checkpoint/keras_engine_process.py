"""One backend of Keras that loads, saves and trains a model; run by test_keras_engines.py.

Arguments: the backend, the mesh, the directory, the step to load (or `new`), and the step to save. Prints the losses of
some steps after that.
"""

import json
import os
import sys

BACKEND, DIMS, DIRECTORY, LOADED, SAVED = sys.argv[1:]
os.environ |= {"KERAS_BACKEND": BACKEND, "TF_CPP_MIN_LOG_LEVEL": "3"}
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import keras  # noqa: E402
import numpy as np  # noqa: E402

import layoutmap as lm  # noqa: E402

L = keras.layers


class Block(L.Layer):
    """Attention and a dense layer, around each of which a residual leads."""

    def __init__(self):
        super().__init__()
        self.norm = L.LayerNormalization()
        self.attention = L.MultiHeadAttention(8, 2)
        self.up, self.down = L.Dense(32, activation="gelu"), L.Dense(16)

    def call(self, x):
        y = self.norm(x)
        x = x + self.attention(y, y)
        return x + self.down(self.up(x))


class Decoder(keras.Model):
    """A table of tokens, which also makes the logits, and two blocks; its layers have no names."""

    def __init__(self):
        super().__init__()
        self.tokens = L.ReversibleEmbedding(64, 16)
        self.blocks = [Block(), Block()]
        self.noise = L.Dropout(0.0, seed=11)
        options = {"dtype": "bfloat16", "initializer": "normal", "trainable": False, "name": "low"}
        self.low = self.add_weight(shape=(16,), **options)

    def call(self, x):
        x = self.tokens(x)
        for block in self.blocks:
            x = block(x)
        return self.tokens(self.noise(x) + keras.ops.cast(self.low, x.dtype), reverse=True)


def make_model():
    model = Decoder()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), loss)
    return model


RULES = {
    r"tokens\.embeddings": ("model", None),
    r".*\.(query|key|value)_dense\.kernel": (None, "model", None),
    r".*\.up\.kernel": (None, "model"),
    r".*\.down\.kernel": ("model", None),
    r"low": ("model",),
}

if BACKEND == "tensorflow":
    import tensorflow as tf

    tf.experimental.dtensor.initialize_accelerator_system("CPU", num_logical_cpu_devices=8)
keras.utils.set_random_seed(1)
layout_map = lm.LayoutMap(lm.create_mesh(DIMS), RULES)
options = {"batch_dim": "batch", "inputs": keras.Input((8,), dtype="int32")}
random = np.random.default_rng(0)
x, y = random.integers(0, 64, (8, 8), "int32"), random.integers(0, 64, (8, 8), "int32")
if LOADED == "new":
    model = layout_map.build(make_model, **options)
    model.train_on_batch(x, y)
else:
    model = lm.load(make_model, DIRECTORY, step=int(LOADED), layout_map=layout_map, **options)
lm.save(model, DIRECTORY, step=int(SAVED))
print(json.dumps([float(np.asarray(model.train_on_batch(x, y))) for _ in range(2)]))
