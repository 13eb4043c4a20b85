"""Attention in a counted step: with its scores in memory, or as one fused kernel (flash attention)."""

import functools

import jax
import jax.numpy as jnp
import keras
import pytest
from flax import nnx

import layoutmap as lm
from layoutmap.adapters.jax import train_with
from layoutmap.core.layout import Layout
from layoutmap.core.policy import LayoutPolicy
from layoutmap.core.variables import Assignment
from layoutmap.cost.jax.lowered import StepCostCounter
from layoutmap.cost.table import FUSED_ATTENTION, SCORED_ATTENTION

BATCH, LENGTH, WIDTH, HEADS, DEPTH = 8, 128, 64, 4, 2
MESH = lm.Mesh("data=4,model=2")
X = jax.ShapeDtypeStruct((BATCH, LENGTH, WIDTH), "float32")
SCORES = BATCH // 4 * HEADS * LENGTH * LENGTH
"""The scores of a layer on a device: the batch is sharded over data."""


class Block(nnx.Module):
    def __init__(self, rngs, implementation=None):
        self.attention = nnx.MultiHeadAttention(
            HEADS, WIDTH, rngs=rngs, decode=False, use_bias=False, attention_fn=_attend(implementation)
        )

    def __call__(self, x):
        return x + self.attention(x)


def _attend(implementation):
    def attend(query, key, value, mask=None, **_):
        return jax.nn.dot_product_attention(query, key, value, mask=mask, implementation=implementation)

    return attend if implementation else nnx.dot_product_attention


class Unrolled(nnx.Module):
    def __init__(self, rngs, implementation=None):
        self.blocks = nnx.List([Block(rngs, implementation) for _ in range(DEPTH)])

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class Scanned(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.split_rngs(splits=DEPTH)(nnx.vmap(Block, in_axes=0, out_axes=0))(rngs)

    def __call__(self, x):
        return nnx.scan(lambda block, x: block(x), in_axes=(0, nnx.Carry), out_axes=nnx.Carry)(self.blocks, x)


def keras_blocks(flash=None):
    x = given = keras.Input((LENGTH, WIDTH))
    for n in range(DEPTH):
        attend = keras.layers.MultiHeadAttention(
            HEADS, WIDTH // HEADS, use_bias=False, flash_attention=flash, name=f"attention_{n}"
        )
        x = keras.layers.Add(name=f"add_{n}")([x, attend(x, x)])
    return keras.Model(given, x)


KINDS = {
    "unrolled": (lambda: Unrolled(nnx.Rngs(0)), "jax"),
    "scanned": (lambda: Scanned(nnx.Rngs(0)), "jax"),
    "keras": (keras_blocks, "keras"),
}


def counted(make, library, **options):
    """What a step costs, and what is held at its peak."""
    layout_map = lm.LayoutMap(MESH, rest="replicated")
    step = lm.lower_step(make, layout_map, inputs=X, library=library).step
    assignments = [Assignment(v, Layout.replicated(MESH, len(v.shape))) for v in step.variables]
    return StepCostCounter(step, **options).compute_cost(
        assignments, LayoutPolicy(MESH, "data"), with_peak_tensors=True
    )


@pytest.mark.parametrize(
    ("kind", "remat"), [("unrolled", None), ("unrolled", "blocks"), ("scanned", None), ("keras", None)]
)
def test_a_fused_kernel_keeps_no_scores(kind, remat):
    """Nothing of the size of scores is held; they are computed once more for the gradient; no collective is another."""
    make, library = KINDS[kind]
    scored, fused = (counted(make, library, remat=remat, fuse_attention=each) for each in (False, True))

    assert scored.collectives == fused.collectives
    assert scored.argument_bytes == fused.argument_bytes
    product = 2 * SCORES * WIDTH // HEADS
    assert DEPTH * product == fused.flops["float32"] - scored.flops["float32"]
    per_head = [[each for each in cost.held if 2 <= [*each.shape].count(LENGTH)] for cost in (scored, fused)]
    assert [True, False] == list(map(bool, per_head))
    assert scored.traffic_bytes - fused.traffic_bytes > DEPTH * 4 * SCORES
    saved = scored.least_peak_bytes - fused.least_peak_bytes
    assert saved >= (1 if remat else DEPTH) * 4 * SCORES
    assert (SCORED_ATTENTION in scored.notes, SCORED_ATTENTION in fused.notes) == (True, False)
    assert [f"{FUSED_ATTENTION}, whatever the model calls (fuse_attention)"] == [
        note for note in fused.notes if note.startswith(FUSED_ATTENTION)
    ]


@pytest.mark.parametrize("kind", ["jax", "keras"])
def test_a_fused_kernel_that_the_model_calls_is_counted_as_one(kind):
    """Without an option, and without the GPU that it is for: `implementation="cudnn"`, or Keras's `flash_attention`."""
    make, library, calling = {
        "jax": (*KINDS["unrolled"], lambda: Unrolled(nnx.Rngs(0), "cudnn")),
        "keras": (*KINDS["keras"], functools.partial(keras_blocks, True)),
    }[kind]
    asked, called = counted(make, library, fuse_attention=True), counted(calling, library)

    assert [FUSED_ATTENTION] == [note for note in called.notes if "attention" in note]
    figures = [(cost.flops, cost.peak_bytes, cost.traffic_bytes) for cost in (asked, called)]
    assert figures[0] == figures[1]


def test_a_mask_is_held_once_by_all_layers():
    """A fused kernel takes what is added to scores: of a mask for all layers that is one array, in their type."""

    def forward(weights, x):
        mask = (x[..., :1] * jnp.swapaxes(x[..., :1], 1, 2) > 0)[:, None]
        for weight in weights.values():
            q = (x @ weight).reshape(*x.shape[:2], HEADS, -1)
            x = x + jax.nn.dot_product_attention(q, q, q, mask=mask).reshape(x.shape)
        return x

    def make():
        return train_with({f"w{n}": jnp.zeros((WIDTH, WIDTH)) for n in range(DEPTH)}, forward=forward)

    held = counted(make, "jax", fuse_attention=True).held
    biases = [each for each in held if [*each.shape].count(LENGTH) == 2]
    assert [("float32", 4 * SCORES // HEADS)] == [(each.dtype, each.num_bytes) for each in biases]


def test_without_a_call_of_attention_there_is_nothing_to_fuse():
    """The error says which calls are known, also where layers compute scores themselves, to drop some."""

    def make():
        return nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))

    with pytest.raises(lm.ScopeError, match="fuse_attention finds no call of attention"):
        lm.step_cost(make, lm.LayoutMap(MESH), inputs=X, library="jax", fuse_attention=True)
    with pytest.raises(lm.ScopeError, match="fuse_attention=True has no effect without on="):
        lm.plan(make, lm.LayoutMap(MESH), inputs=X, library="jax", fuse_attention=True)


def test_jax_is_as_before_afterwards():
    """Attention that is computed beside a counted step, and after it, is what JAX makes of it."""
    q = jnp.ones((1, 4, 1, 8))
    before = jax.nn.dot_product_attention(q, q, q)

    def make():
        attend = lambda w, x: jax.nn.dot_product_attention(x @ w["w"], x, x)  # noqa: E731
        return train_with({"w": jnp.zeros((8, 8))}, forward=attend)

    options = {
        "inputs": jax.ShapeDtypeStruct((4, 4, 1, 8), "float32"),
        "library": "jax",
        "fuse_attention": True,
    }
    lm.step_cost(make, lm.LayoutMap(MESH), **options)

    assert (before == jax.nn.dot_product_attention(q, q, q)).all()
    with pytest.raises(RuntimeError):
        jax.nn.dot_product_attention(q, q, q, implementation="cudnn")
