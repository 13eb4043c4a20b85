"""The GPT of one_rules_file.py in Keras 3, without any knowledge of meshes."""

from __future__ import annotations

import keras
import numpy as np
from keras import layers
from one_rules_file import BLOCKS, HEADS, LENGTH, VOCABULARY, WIDTH


class Attention(layers.Layer):
    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = (layers.Dense(WIDTH) for _ in range(3))
        self.out = layers.Dense(WIDTH)

    def call(self, x):
        query, key, value = (
            keras.ops.reshape(layer(x), (-1, LENGTH, HEADS, WIDTH // HEADS))
            for layer in (self.query, self.key, self.value)
        )
        x = keras.ops.dot_product_attention(query, key, value, is_causal=True)
        return self.out(keras.ops.reshape(x, (-1, LENGTH, WIDTH)))


class Block(layers.Layer):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = layers.LayerNormalization(), layers.LayerNormalization()
        self.attention = Attention()
        self.up, self.down = layers.Dense(4 * WIDTH, activation="gelu"), layers.Dense(WIDTH)

    def call(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.down(self.up(self.norm2(x)))


class GPT(keras.Model):
    def __init__(self):
        super().__init__()
        self.tokens, self.places = layers.Embedding(VOCABULARY, WIDTH), layers.Embedding(LENGTH, WIDTH)
        self.blocks = [Block() for _ in range(BLOCKS)]
        self.norm, self.head = layers.LayerNormalization(), layers.Dense(VOCABULARY)

    def call(self, text):
        x = self.tokens(text) + self.places(keras.ops.arange(LENGTH))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def make_gpt() -> GPT:
    keras.utils.set_random_seed(0)
    model = GPT()
    model(keras.Input((LENGTH,), dtype="int32"))
    return model


def train(model: GPT, batches: np.ndarray) -> list[float]:
    """Train on the batches, and return the loss of each."""
    model.compile(
        optimizer=keras.optimizers.AdamW(3e-3),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    losses: list[float] = []
    for rows in batches:
        model.reset_metrics()  # without this, Keras returns the mean over all batches
        losses.append(float(model.train_on_batch(rows[:, :-1], rows[:, 1:])))
    return losses
