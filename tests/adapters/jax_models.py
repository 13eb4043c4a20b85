"""Small models of flax.nnx and as pytrees, the rules that shard them, and a batch for each."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from layoutmap.adapters.jax import train_with

WIDTH = 16


def squares(outputs: Any, targets: Any) -> Any:
    return ((outputs - targets) ** 2).mean()


def trained(model: Any, **options: Any) -> Any:
    return train_with(model, loss=squares, optimizer=optax.sgd(0.1, momentum=0.9), **options)


class Attention(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.attention = nnx.MultiHeadAttention(8, WIDTH, decode=False, rngs=rngs)
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)

    def __call__(self, x):
        return x + self.attention(self.norm(x))


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, use_bias=False, rngs=rngs)  # the norm takes a bias out
        self.batch_norm = nnx.BatchNorm(4 * WIDTH, rngs=rngs)
        self.drop = nnx.Dropout(0.25, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        return x + self.down(self.drop(nnx.relu(self.batch_norm(self.up(x)))))


class Scale(nnx.Variable):
    """A type of variable of one's own."""


class Language(nnx.Module):
    """Blocks in a list, a shared table, states of all kinds, and an array that is in no variable."""

    def __init__(self, rngs: nnx.Rngs):
        self.table = nnx.Embed(32, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Attention(rngs), Block(rngs), Block(rngs)])
        self.head = self.table
        self.scale = Scale(jnp.full((WIDTH,), 0.5))
        self.position = jax.random.normal(rngs.params(), (8, WIDTH)) * 0.02

    def __call__(self, tokens):
        x = self.table(tokens) + self.position[: tokens.shape[-1]]
        for block in self.blocks:
            x = block(x)
        return self.head.attend(x * self.scale[...])


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Layer:
    weight: jax.Array
    bias: jax.Array


class Pair(NamedTuple):
    first: Layer
    second: Layer


def make_dict() -> Any:
    keys = jax.random.split(jax.random.key(0), 3)
    sizes = [(WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH), (WIDTH, WIDTH)]
    first, second, third = (
        Layer(jax.random.normal(key, size) / np.sqrt(size[0]), jnp.zeros(size[1]))
        for key, size in zip(keys, sizes, strict=True)
    )
    return {
        "pair": Pair(first, second),
        "rest": [third, {"name": "last", "scale": np.ones(WIDTH, "float32")}],
    }


def call_dict(tree: Any, x: Any) -> Any:
    for layer in (*tree["pair"], tree["rest"][0]):
        x = jax.nn.gelu(x @ layer.weight + layer.bias)
    return x * tree["rest"][1]["scale"]


class Equinox(eqx.Module):
    mlp: eqx.nn.MLP
    norm: eqx.nn.LayerNorm

    def __init__(self, key: Any):
        self.mlp = eqx.nn.MLP(WIDTH, WIDTH, 4 * WIDTH, 2, key=key)
        self.norm = eqx.nn.LayerNorm(WIDTH)

    def __call__(self, x):
        return jax.vmap(lambda row: self.norm(self.mlp(row)))(x)


class Feedforward(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.blocks = nnx.Sequential(Block(rngs), Block(rngs))

    def __call__(self, x):
        return self.blocks(x)


NNX = {
    "language": lambda: trained(Language(nnx.Rngs(0))),
    "feedforward": lambda: trained(Feedforward(nnx.Rngs(params=1, dropout=2))),
}
PYTREES = {
    "dict": lambda: trained(make_dict(), forward=call_dict),
    "equinox": lambda: trained(Equinox(jax.random.key(3))),
}
MODELS = NNX | PYTREES
RULES = {
    "language": {
        r"(table|head)\.embedding": ("model", None),
        r".*\.(query|key|value)\.kernel": (None, "model", None),
        r".*\.out\.kernel": ("model", None, None),
        r".*\.up\.kernel": (None, "model"),
        r".*\.batch_norm\..*": ("model",),
        r".*\.down\.kernel": ("model", "batch"),
        r"position": (None, "model"),
    },
    "feedforward": {
        r".*\.up\.kernel": (None, "model"),
        r".*\.batch_norm\..*": ("model",),
        r".*\.down\.kernel": ("model", None),
    },
    "dict": {
        r"pair\.first\.weight": (None, "model"),
        r"pair\.first\.bias": ("model",),
        r"pair\.second\.weight": ("model", None),
        r"rest\.0\.weight": ("batch", "model"),
        r"rest\.1\.scale": ("model",),
    },
    "equinox": {
        r"mlp\.layers\.0\.weight": ("model", None),
        r"mlp\.layers\.1\.weight": (None, "model"),
        r"mlp\.layers\.2\.weight": ("batch", "model"),
    },
}


def batch(name: str) -> tuple[Any, Any]:
    random = np.random.default_rng(0)
    if name == "language":
        return random.integers(0, 32, (8, 8)), random.normal(size=(8, 8, 32)).astype("float32")
    return tuple(random.normal(size=(8, WIDTH)).astype("float32") for _ in range(2))
