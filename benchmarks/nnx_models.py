"""A Llama of any size in flax.nnx, for benchmarks."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx


@dataclass(frozen=True)
class Llama:
    """Sizes of a Llama."""

    vocabulary: int = 32000
    width: int = 512
    blocks: int = 4
    heads: int = 8
    key_heads: int = 4
    hidden: int = 1376
    dtype: str = "float32"


SIZES = {
    "llama3_8b": Llama(128256, 4096, 32, 32, 8, 14336, "bfloat16"),
    "llama3_70b": Llama(128256, 8192, 80, 64, 8, 28672, "bfloat16"),
}
RULES = {
    r"embed\.embedding|head\.kernel": (None, "model"),
    r".*\.(query|key|value)\.kernel": (None, "model", None),
    r".*\.out\.kernel": ("model", None, None),
    r".*\.(gate|up)\.kernel": (None, "model"),
    r".*\.down\.kernel": ("model", None),
}


class Attention(nnx.Module):
    def __init__(self, size: Llama, rngs: nnx.Rngs):
        head = size.width // size.heads
        kwargs = {"use_bias": False, "param_dtype": jnp.dtype(size.dtype), "rngs": rngs}
        self.query = nnx.LinearGeneral(size.width, (size.heads, head), **kwargs)
        self.key = nnx.LinearGeneral(size.width, (size.key_heads, head), **kwargs)
        self.value = nnx.LinearGeneral(size.width, (size.key_heads, head), **kwargs)
        self.out = nnx.LinearGeneral((size.heads, head), size.width, axis=(-2, -1), **kwargs)

    def __call__(self, x):
        x = jax.nn.dot_product_attention(self.query(x), self.key(x), self.value(x), is_causal=True)
        return self.out(x)


class Block(nnx.Module):
    def __init__(self, size: Llama, rngs: nnx.Rngs):
        kwargs = {"param_dtype": jnp.dtype(size.dtype), "rngs": rngs}
        self.attention_norm = nnx.RMSNorm(size.width, **kwargs)
        self.attention = Attention(size, rngs)
        self.norm = nnx.RMSNorm(size.width, **kwargs)
        self.gate = nnx.Linear(size.width, size.hidden, use_bias=False, **kwargs)
        self.up = nnx.Linear(size.width, size.hidden, use_bias=False, **kwargs)
        self.down = nnx.Linear(size.hidden, size.width, use_bias=False, **kwargs)

    def __call__(self, x):
        x = x + self.attention(self.attention_norm(x))
        y = self.norm(x)
        return x + self.down(nnx.silu(self.gate(y)) * self.up(y))


class LlamaModel(nnx.Module):
    def __init__(self, size: Llama, rngs: nnx.Rngs):
        kwargs = {"param_dtype": jnp.dtype(size.dtype), "rngs": rngs}
        self.embed = nnx.Embed(size.vocabulary, size.width, **kwargs)
        self.blocks = nnx.List([Block(size, rngs) for _ in range(size.blocks)])
        self.norm = nnx.RMSNorm(size.width, **kwargs)
        self.head = nnx.Linear(size.width, size.vocabulary, use_bias=False, **kwargs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))
