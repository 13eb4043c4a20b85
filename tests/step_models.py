"""Small models of flax.nnx and Keras with equal blocks, whose training steps tests count and compile."""

from collections import Counter

import jax
import keras
from flax import nnx

import layoutmap as lm

MESH = lm.Mesh(None, "data=4,model=2")
ROWS, WIDTH, INNER, DEPTH = 32, 64, 128, 4
BATCH = jax.ShapeDtypeStruct((ROWS, WIDTH), "float32")
MEGATRON = {r".*up\.kernel": (None, "model"), r".*down\.kernel": ("model", None)}
NAMES = [f"block_{number}" for number in range(DEPTH)]


class Block(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(WIDTH, INNER, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(INNER, WIDTH, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.relu(self.up(x)))


class Unrolled(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.List([Block(rngs) for _ in range(DEPTH)])

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class Recomputing(Block):
    @nnx.remat
    def __call__(self, x):
        return super().__call__(x)


class UnrolledRecomputing(Unrolled):
    def __init__(self, rngs):
        self.blocks = nnx.List([Recomputing(rngs) for _ in range(DEPTH)])


class Scanned(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.split_rngs(splits=DEPTH)(nnx.vmap(Block, in_axes=0, out_axes=0))(rngs)

    def __call__(self, x):
        return nnx.scan(lambda block, x: block(x), in_axes=(0, nnx.Carry), out_axes=nnx.Carry)(self.blocks, x)


@keras.saving.register_keras_serializable("step_cost")
class KerasBlock(keras.layers.Layer):
    def build(self, shape):
        self.up = keras.layers.Dense(INNER, activation="relu", use_bias=False)
        self.down = keras.layers.Dense(WIDTH, use_bias=False)
        self.up.build((None, WIDTH))
        self.down.build((None, INNER))

    def call(self, x):
        return x + self.down(self.up(x))


def keras_blocks():
    return keras.Sequential([keras.Input((WIDTH,)), *(KerasBlock(name=name) for name in NAMES)])


def keras_blocks_recomputing():
    with keras.RematScope("list_of_layers", layer_names=NAMES):
        return keras_blocks()


def lowered(kind, rules=None, optimizer=None, inputs=BATCH, **options):
    make, library = (kind, "keras") if "keras" in kind.__name__ else (lambda: kind(nnx.Rngs(0)), "jax")
    layout_map = lm.LayoutMap(MESH, rules or {})
    return lm.lower_step(
        make, layout_map, inputs=inputs, batch_dim="data", optimizer=optimizer, library=library, **options
    )


def collectives(cost):
    """All that are of more than a number, by kind, dims and size."""
    found = Counter()
    for each in cost.collectives:
        if each.tensor_bytes > 8:
            found[each.kind, each.dims, each.tensor_bytes] += each.calls
    return dict(found)
