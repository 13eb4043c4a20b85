"""Keras models for benchmarks, with rules for this library and for Keras's ModelParallel."""

from __future__ import annotations

import json

import keras


class Block(keras.layers.Layer):
    """A decoder block: attention, then a feed-forward part."""

    def __init__(self, width: int, ffn: int, heads: int, name: str):
        super().__init__(name=name)
        self.heads = heads
        self.norm1 = keras.layers.LayerNormalization(name="norm1")
        self.query = keras.layers.Dense(width, use_bias=False, name="query")
        self.key = keras.layers.Dense(width, use_bias=False, name="key")
        self.value = keras.layers.Dense(width, use_bias=False, name="value")
        self.out = keras.layers.Dense(width, use_bias=False, name="out")
        self.norm2 = keras.layers.LayerNormalization(name="norm2")
        self.up = keras.layers.Dense(ffn, use_bias=False, activation="gelu", name="up")
        self.down = keras.layers.Dense(width, use_bias=False, name="down")

    def call(self, x):
        y = self.norm1(x)
        shape = (-1, keras.ops.shape(x)[1], self.heads, x.shape[-1] // self.heads)
        q, k, v = (keras.ops.reshape(part(y), shape) for part in (self.query, self.key, self.value))
        y = keras.ops.dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(keras.ops.reshape(y, (-1, *x.shape[1:])))
        return x + self.down(self.up(self.norm2(x)))


class Decoder(keras.Model):
    """A decoder over tokens."""

    def __init__(self, vocabulary: int, width: int, ffn: int, heads: int, blocks: int):
        super().__init__(name="decoder")
        self.tokens = keras.layers.Embedding(vocabulary, width, name="tokens")
        self.blocks = [Block(width, ffn, heads, name=f"block_{i}") for i in range(blocks)]
        self.norm = keras.layers.LayerNormalization(name="norm")
        self.head = keras.layers.Dense(vocabulary, use_bias=False, name="head")

    def call(self, x):
        x = self.tokens(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


MODELS = {
    # 216 M parameters. Only the embedding and the head are large enough for Keras to create them sharded.
    "decoder": {"vocabulary": 32_000, "width": 1024, "ffn": 4096, "heads": 16, "blocks": 12},
    # 316 M parameters. All kernels are large enough: 4 bytes x elements x 8 devices >= 250 MiB.
    "wide": {"vocabulary": 2880, "width": 2880, "ffn": 2880, "heads": 16, "blocks": 6},
    "micro": {"vocabulary": 256, "width": 64, "ffn": 256, "heads": 4, "blocks": 2},
    "tiny": {"vocabulary": 1024, "width": 256, "ffn": 1024, "heads": 8, "blocks": 4},
    # Small models, whose steps show the overhead of each operation.
    **{
        f"blocks-{n}": {"vocabulary": 256, "width": 64, "ffn": 256, "heads": 4, "blocks": n}
        for n in (1, 2, 4)
    },
}

# From paths of this library to sharding specs. Keras's own paths join the same words by slashes.
RULES = {
    r"tokens\.embeddings": ("model", "batch"),
    r"blocks\.\d+\.(query|key|value|up)\.kernel": ("batch", "model"),
    r"blocks\.\d+\.(out|down)\.kernel": ("model", "batch"),
    r"head\.kernel": ("batch", "model"),
}
MLP_RULES = {r"up\.kernel": ("batch", "model"), r"down\.kernel": ("model", "batch")}
KERAS_RULES = {
    r".*tokens/embeddings": ("model", "batch"),
    r".*(query|key|value|up)/kernel": ("batch", "model"),
    r".*(out|down)/kernel": ("model", "batch"),
    r".*head/kernel": ("batch", "model"),
}


def make_model(name: str) -> keras.Model:
    """Return one of the models, or a decoder with the sizes of a JSON text. The first call creates its weights.

    `mlp` has two dense layers, and its inputs are floats.
    """
    if name == "mlp":
        return keras.Sequential(
            [keras.layers.Dense(256, activation="relu", name="up"), keras.layers.Dense(64, name="down")]
        )
    return Decoder(**(MODELS.get(name) or json.loads(name)))
