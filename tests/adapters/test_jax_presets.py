"""Presets for models of flax.nnx: tiny ones, written with the layers of flax and with usual names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from cases import few
from flax import nnx

import layoutmap as lm

MESH = lm.Mesh(None, "batch=2,model=4")
VOCABULARY, LENGTH, WIDTH, HEADS, KEY_HEADS, HEAD = 64, 8, 16, 8, 4, 2
WAYS: dict[str, dict[str, Any]] = {"model": {}, "both": {"fsdp_dim": "batch"}}


class RotaryAttention(nnx.Module):
    """Heads share keys and values, and positions rotate queries and keys."""

    def __init__(self, rngs: nnx.Rngs):
        self.query = nnx.LinearGeneral(WIDTH, (HEADS, HEAD), use_bias=False, rngs=rngs)
        self.key = nnx.LinearGeneral(WIDTH, (KEY_HEADS, HEAD), use_bias=False, rngs=rngs)
        self.value = nnx.LinearGeneral(WIDTH, (KEY_HEADS, HEAD), use_bias=False, rngs=rngs)
        self.out = nnx.LinearGeneral((HEADS, HEAD), WIDTH, axis=(-2, -1), use_bias=False, rngs=rngs)

    def __call__(self, x):
        query, key = rotated(self.query(x)), rotated(self.key(x))
        return self.out(jax.nn.dot_product_attention(query, key, self.value(x), is_causal=True))


def rotated(x: jax.Array) -> jax.Array:
    angles = jnp.arange(LENGTH)[:, None, None] * 0.1 ** jnp.arange(HEAD // 2)
    first, second = jnp.split(x, 2, axis=-1)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


class Gated(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.gate = nnx.Linear(WIDTH, 4 * WIDTH, use_bias=False, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.silu(self.gate(x)) * self.up(x))


class LlamaBlock(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.attention_norm, self.mlp_norm = nnx.RMSNorm(WIDTH, rngs=rngs), nnx.RMSNorm(WIDTH, rngs=rngs)
        self.attention, self.mlp = RotaryAttention(rngs), Gated(rngs)

    def __call__(self, x):
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Llama(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.token_embedding = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.layers = nnx.List([LlamaBlock(rngs)])
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.lm_head = nnx.Linear(WIDTH, VOCABULARY, use_bias=False, rngs=rngs)

    def __call__(self, tokens):
        x = self.token_embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


class GPT2Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.ln_1, self.ln_2 = nnx.LayerNorm(WIDTH, rngs=rngs), nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attn = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs)
        self.fc1, self.fc2 = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs), nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        x = x + self.attn(self.ln_1(x), mask=jnp.tril(jnp.ones((LENGTH, LENGTH))))
        return x + self.fc2(nnx.gelu(self.fc1(self.ln_2(x))))


class GPT2(nnx.Module):
    """With one table for what goes in and what comes out."""

    def __init__(self, rngs: nnx.Rngs):
        self.wte, self.wpe = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs), nnx.Embed(LENGTH, WIDTH, rngs=rngs)
        self.blocks = nnx.List([GPT2Block(rngs)])
        self.ln_f = nnx.LayerNorm(WIDTH, rngs=rngs)

    def __call__(self, tokens):
        x = self.wte(tokens) + self.wpe(jnp.arange(LENGTH))
        for block in self.blocks:
            x = block(x)
        return self.wte.attend(self.ln_f(x))


MODELS: dict[str, Callable[[nnx.Rngs], Any]] = {"llama_nnx": Llama, "gpt2_nnx": GPT2}


def preset(name: str, way: str) -> lm.LayoutMap:
    return lm.LayoutMap.preset(name, MESH, **WAYS[way])


@pytest.mark.parametrize("name", few(MODELS, *MODELS))
@pytest.mark.parametrize("way", few(WAYS, "model"))
def test_no_weight_is_without_a_rule(name: str, way: str):
    """Nor a rule without a weight, and lint finds nothing."""
    plan = lm.plan(lambda: MODELS[name](nnx.Rngs(0)), preset(name, way), library="jax", strict=True)

    assert [] == [*plan.lint(batch_dim="batch")]


def test_the_names_of_tunix_have_rules():
    """The paths and shapes of tunix's Llama 3, as a pytree, which has no layers for rules of activations."""
    heads, keys = {"w": jnp.zeros((WIDTH, HEADS, HEAD))}, {"w": jnp.zeros((WIDTH, KEY_HEADS, HEAD))}
    out, norm = {"w": jnp.zeros((HEADS, HEAD, WIDTH))}, {"w": jnp.zeros(WIDTH)}
    wide, narrow = {"kernel": jnp.zeros((WIDTH, 2 * WIDTH))}, {"kernel": jnp.zeros((2 * WIDTH, WIDTH))}

    def make() -> Any:
        layer = {
            "input_layernorm": norm,
            "attn": {"q_proj": heads, "k_proj": keys, "v_proj": keys, "o_proj": out},
            "mlp": {"gate_proj": wide, "up_proj": wide, "down_proj": narrow},
            "post_attention_layernorm": norm,
        }
        model = {
            "embedder": {"input_embedding": jnp.zeros((VOCABULARY, WIDTH))},
            "layers": [layer, layer],
            "final_norm": norm,
            "lm_head": {"w": jnp.zeros((WIDTH, VOCABULARY))},
        }
        return jax.tree.map(jnp.copy, model)

    plan = lm.plan(make, preset("llama_nnx", "model"), library="jax", strict=True)

    assert [] == [*plan.lint(batch_dim="batch")]
