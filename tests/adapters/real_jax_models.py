"""Models of flax.nnx, Equinox and haiku that were written elsewhere, tiny, with rules and a batch for each."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from layoutmap.adapters.jax import train_with

VOCABULARY, LENGTH, ROWS = 32, 8, 4


@dataclass(frozen=True)
class Real:
    """A model, and what shards and trains it.

    Attributes:
        make: Makes it, as it is trained.
        rules: On a mesh of batch=2, model=4.
        batch: Inputs and targets.
    """

    make: Callable[[], Any]
    rules: Mapping[str, tuple[Any, ...]]
    batch: Callable[[], tuple[Any, Any]]


def trained(model: Any, forward: Any, optimizer: Any = None) -> Any:
    def loss(logits: Any, targets: Any) -> Any:
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

    return train_with(model, loss=loss, optimizer=optimizer or optax.sgd(0.1, momentum=0.9), forward=forward)


def tokens(rows: int = ROWS, high: int = VOCABULARY) -> tuple[Any, Any]:
    random = np.random.default_rng(0)
    return tuple(random.integers(0, high, (rows, LENGTH), dtype="int32") for _ in range(2))


# -- tunix: Llama, Gemma, Qwen


def tunix(family: str) -> Any:
    """One family's module, without tunix itself, which imports what people train with (data sets, tokenizers)."""
    if "tunix" not in sys.modules:
        spec = importlib.util.find_spec("tunix")
        assert spec is not None, "google-tunix is not installed"
        package = types.ModuleType("tunix")
        package.__path__ = [str(Path(spec.origin or "").parent)]
        sys.modules["tunix"] = package
    return importlib.import_module(f"tunix.models.{family}.model")


SIZES: dict[str, Any] = {
    "num_layers": 2,
    "embed_dim": 16,
    "hidden_dim": 32,
    "num_heads": 4,
    "head_dim": 8,
    "num_kv_heads": 4,
}
QWEN: dict[str, Any] = SIZES | {"vocab_size": VOCABULARY, "rope_theta": 10_000, "norm_eps": 1e-6}


def decoder(name: str, family: str, **options: Any) -> Callable[[], Any]:
    def forward(model: Any, tokens: Any) -> Any:
        positions = jnp.broadcast_to(jnp.arange(LENGTH), tokens.shape)
        mask = jnp.broadcast_to(jnp.tri(LENGTH, dtype=bool), (*tokens.shape, LENGTH))
        return model(tokens, positions, None, mask)[0]

    def make() -> Any:
        module = tunix(family)
        config = module.ModelConfig(**options)
        return trained(getattr(module, name)(config, rngs=nnx.Rngs(0)), forward)

    return make


def gemma(num_kv_heads: int = 4) -> Any:
    module = tunix("gemma")
    kinds = (module.AttentionType.GLOBAL, module.AttentionType.LOCAL_SLIDING)
    return decoder(
        "Gemma",
        "gemma",
        **SIZES | {"num_kv_heads": num_kv_heads},
        num_embed=VOCABULARY,
        final_logit_softcap=30.0,
        use_post_attn_norm=True,
        use_post_ffw_norm=True,
        attention_types=kinds,
        attn_logits_soft_cap=50.0,
        sliding_window_size=4,
    )()


TABLE = {r"embedder\.input_embedding": ("model", None)}
HEAD = {r"lm_head\.w": (None, "model")}
ATTENTION = {
    r"layers\.\d+\.attn\.(q|k|v)_proj\.w": (None, "model", None),
    r"layers\.\d+\.attn\.o_proj\.w": ("model", None, None),
}
GEMMA_ATTENTION = {
    r"layers\.\d+\.attn\.qkv_einsum\.w": (None, "model", None, None),
    r"layers\.\d+\.attn\.attn_vec_einsum\.w": ("model", None, None),
}
MLP = {
    r"layers\.\d+\.mlp\.(gate|up)_proj\.kernel": ("batch", "model"),
    r"layers\.\d+\.mlp\.down_proj\.kernel": ("model", "batch"),
}
BIASES = {r"layers\.\d+\.attn\.(q|k|v)_bias": ("model",)}
EXPERTS = {r"layers\.\d+\.mlp\.(gate|up|down)_proj": ("model", None, None)}
MAMBA = {
    r".*\.embedding": ("model", None),
    r".*\.in_proj\.kernel": (None, "model"),
    r".*\.out_proj\.kernel": ("model", "batch"),
    r".*\.conv\.kernel": (None, None, "model"),
    r".*\.(A_log|D|dt_bias)": ("model",),
}
GRAPH = {r"convs\.\d+\.lin\.kernel": ("batch", "model"), r"convs\.\d+\.(att_src|att_dst)": ("model", None)}
ESM2 = {  # the first axis is that of the layers
    r"layers\.attn\.(query|key|value)_proj\.weight": (None, "model", None),
    r"layers\.attn\.output_proj\.weight": (None, None, "model"),
    r"layers\.linear1\.weight": (None, "model", "batch"),
    r"layers\.linear2\.weight": (None, "batch", "model"),
}
EQUINOX_ATTENTION = {
    r"(query|key|value)_proj\.weight": ("model", "batch"),
    r"output_proj\.weight": ("batch", "model"),
}
RESNET = {
    r"params\..*/conv_\d\.w|params\..*conv\.w": (None, None, None, "model"),
    r"params\..*batchnorm.*\.(scale|offset)": (None, None, None, "model"),
    r"params\..*logits\.w": ("batch", "model"),
}


# -- others of flax.nnx


def mamba() -> Any:
    mamba2 = importlib.import_module("mamba2_jax")
    config = mamba2.Mamba2Config(
        vocab_size=VOCABULARY, hidden_size=16, state_size=8, head_dim=8, chunk_size=4, num_hidden_layers=2
    )
    model = mamba2.Mamba2ForCausalLM(config, rngs=nnx.Rngs(0))
    return trained(model, lambda model, tokens: model(tokens)["logits"])


def graph_network() -> Any:
    models = importlib.import_module("jraphx.nn.models")
    model = models.GAT(8, 16, 2, out_features=VOCABULARY, heads=4, norm="layer_norm", rngs=nnx.Rngs(0))
    return trained(model, lambda model, nodes, edges: model(nodes, edges))


def graph() -> tuple[Any, Any]:
    random = np.random.default_rng(0)
    nodes = random.normal(size=(16, 8)).astype("float32")
    edges = random.integers(0, 16, (2, 24), dtype="int32")
    return (nodes, edges), random.integers(0, VOCABULARY, (16,), dtype="int32")


# -- Equinox and haiku


def esm2() -> Any:
    """Its layers are stacked: made, and called, by vmap and scan."""
    model = importlib.import_module("esm2quinox").ESM2(2, 16, 4, token_dropout=True, key=jax.random.key(0))
    return trained(model, lambda model, tokens: jax.vmap(lambda row: model(row).logits)(tokens))


def attention() -> Any:
    """Equinox's own."""
    model = importlib.import_module("equinox").nn.MultiheadAttention(
        4, 16, 8, 8, VOCABULARY, key=jax.random.key(0)
    )

    def forward(model: Any, x: Any) -> Any:
        return jax.vmap(lambda row: model(row, row[:, :8], row[:, 8:], mask=jnp.tri(LENGTH, dtype=bool)))(x)

    return trained(model, forward)


def resnet() -> Any:
    """Of haiku: its weights and moving statistics are dicts."""
    haiku = importlib.import_module("haiku")

    def run(images: Any, is_training: bool) -> Any:
        net = haiku.nets.ResNet((1, 1, 1, 1), VOCABULARY, bottleneck=False, channels_per_group=(8, 8, 16, 16))
        return net(images, is_training=is_training)

    net = haiku.without_apply_rng(haiku.transform_with_state(run))
    params, state = net.init(jax.random.key(0), jnp.zeros((1, 16, 16, 3)), True)

    def forward(model: Any, images: Any) -> Any:
        return net.apply(model["params"], model["state"], images, True)[0]

    # Adam makes steps of equal size of gradients that are rounding only, as those of a weight before a norm.
    return trained({"params": params, "state": state}, forward, optax.sgd(0.1))


def images() -> tuple[Any, Any]:
    random = np.random.default_rng(0)
    return random.normal(size=(ROWS, 16, 16, 3)).astype("float32"), random.integers(0, VOCABULARY, (ROWS,))


def vectors() -> tuple[Any, Any]:
    x = np.random.default_rng(0).normal(size=(ROWS, LENGTH, 16)).astype("float32")
    return x, tokens()[1]


def proteins() -> tuple[Any, Any]:
    return tokens(high=24)


NNX = {
    "Llama 3": Real(decoder("Llama3", "llama3", **QWEN), TABLE | HEAD | ATTENTION | MLP, tokens),
    "Gemma 2": Real(gemma, TABLE | GEMMA_ATTENTION | MLP, tokens),
    "Qwen 2": Real(decoder("Qwen2", "qwen2", **QWEN), TABLE | HEAD | ATTENTION | BIASES | MLP, tokens),
    "Qwen 3, experts": Real(
        decoder("Qwen3", "qwen3", **QWEN, num_experts=4, num_experts_per_tok=2),
        TABLE | HEAD | ATTENTION | EXPERTS,
        tokens,
    ),
    "Mamba 2": Real(mamba, MAMBA, tokens),
    "graph attention": Real(graph_network, GRAPH, graph),
}
PYTREES = {
    "ESM 2": Real(esm2, ESM2, proteins),
    "attention of Equinox": Real(attention, EQUINOX_ATTENTION, vectors),
    "ResNet": Real(resnet, RESNET, images),
}
MODELS = NNX | PYTREES
# Preset -> a model that it is for.
PRESETS: dict[str, Callable[[], Any]] = {
    "llama_nnx": NNX["Llama 3"].make,
    "gemma_nnx": functools.partial(gemma, 2),
    "qwen_nnx": NNX["Qwen 2"].make,
}
