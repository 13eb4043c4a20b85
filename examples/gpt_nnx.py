"""The GPT of one_rules_file.py in flax.nnx, without any knowledge of meshes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from one_rules_file import BLOCKS, HEADS, LENGTH, VOCABULARY, WIDTH


class Attention(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.query, self.key, self.value = (nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(3))
        self.out = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        shape = (*x.shape[:-1], HEADS, WIDTH // HEADS)
        query, key, value = (layer(x).reshape(shape) for layer in (self.query, self.key, self.value))
        return self.out(jax.nn.dot_product_attention(query, key, value, is_causal=True).reshape(x.shape))


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.norm1, self.norm2 = nnx.LayerNorm(WIDTH, rngs=rngs), nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attention = Attention(rngs)
        self.up, self.down = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs), nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class GPT(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.tokens = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.places = nnx.Embed(LENGTH, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(BLOCKS)])
        self.norm, self.head = nnx.LayerNorm(WIDTH, rngs=rngs), nnx.Linear(WIDTH, VOCABULARY, rngs=rngs)

    def __call__(self, text):
        x = self.tokens(text) + self.places(jnp.arange(LENGTH))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def make_gpt() -> GPT:
    return GPT(nnx.Rngs(0))


@nnx.jit
def train_step(model: GPT, optimizer: nnx.Optimizer, rows: jax.Array) -> jax.Array:
    def compute_loss(model: GPT) -> jax.Array:
        logits = model(rows[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, rows[:, 1:]).mean()

    loss, gradients = nnx.value_and_grad(compute_loss)(model)
    optimizer.update(model, gradients)
    return loss


def train(model: GPT, batches: np.ndarray) -> list[float]:
    """Train on the batches, and return the loss of each."""
    optimizer = nnx.Optimizer(model, optax.adamw(3e-3), wrt=nnx.Param)
    return [float(train_step(model, optimizer, rows)) for rows in batches]
