"""The memory of a training step, from shapes: what is held, in which order, and XLA's own peak."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import optax
import pytest
from cases import compiled_for_gpus
from flax import nnx
from step_models import (
    DEPTH,
    INNER,
    MEGATRON,
    MESH,
    ROWS,
    WIDTH,
    Block,
    Scanned,
    Unrolled,
    UnrolledRecomputing,
    keras_blocks,
    keras_blocks_recomputing,
    lowered,
)

import layoutmap as lm
from layoutmap.core.variables import get_itemsize
from layoutmap.cost.jax.counting import count_flops
from layoutmap.cost.jax.memory import estimate_memory_upper_bound
from layoutmap.cost.jax.partitioned import parse_partitioned_step


def test_what_gradients_are_made_of_is_held_until_the_backward_pass_is_through():
    """With memory to spare a step holds what each product was given and its output's gradient, else the former only."""
    rows, width, depth = 2048, 32, 5

    class Chain(nnx.Module):
        def __init__(self, rngs):
            layers = [nnx.Linear(width, width, use_bias=False, rngs=rngs) for _ in range(depth)]
            self.layers = nnx.List(layers)

        def __call__(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    inputs = jax.ShapeDtypeStruct((rows, width), "float32")
    cost = lowered(Chain, optimizer=optax.sgd(1e-3), inputs=inputs).count(lm.LayoutMap(MESH))
    activation, gradient, loss = rows // 4 * width * 4, width * width * 4, 4
    # What the first layer is given is an argument. When memory is short, two gradients are alive at a time.
    plenty, short = (depth - 1 + depth) * activation + gradient + loss, (depth - 1 + 2) * activation + loss
    found = [peak - cost.argument_bytes for peak in (cost.peak_bytes, cost.least_peak_bytes)]
    assert [estimate_memory_upper_bound(each, cost.collectives) for each in (plenty, short)] == found


def test_an_embedding_leaves_the_order_of_gradients_as_it_is():
    """JAX puts a barrier before its gradient's index; only one before activations says that these are recomputed."""

    class Embedded(Unrolled):
        def __init__(self, rngs):
            super().__init__(rngs)
            self.table = nnx.Embed(8, WIDTH, rngs=rngs)

        def __call__(self, ids):
            return super().__call__(self.table(ids))

    rows = 64 * ROWS
    inputs = jax.ShapeDtypeStruct((rows, WIDTH), "float32"), jax.ShapeDtypeStruct((rows,), "int32")
    plain, embedded = (
        lowered(kind, inputs=each, optimizer=optax.sgd(1e-3)).count(lm.LayoutMap(MESH))
        for kind, each in zip((Unrolled, Embedded), inputs, strict=True)
    )
    saved = [each.peak_bytes - each.least_peak_bytes for each in (plain, embedded)]
    assert min(saved) > 0
    assert saved == pytest.approx([saved[0]] * 2, rel=0.01)


@pytest.mark.parametrize("dear", [jnp.tanh, jax.scipy.special.erfc])
def test_results_of_dear_functions_are_held(dear):
    """XLA keeps them for the backward pass; erfc is many operations. Those of cheap ones are computed again."""

    def peak(function):
        class Chain(nnx.Module):
            def __init__(self, rngs):
                self.layers = nnx.List(
                    [nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs) for _ in range(4)]
                )

            def __call__(self, x):
                for layer in self.layers:
                    x = layer(x)
                    x = x * function(x)
                return x

        inputs = jax.ShapeDtypeStruct((64 * ROWS, WIDTH), "float32")
        return lowered(Chain, inputs=inputs).count(lm.LayoutMap(MESH)).least_peak_bytes

    activation = 64 * ROWS // 4 * WIDTH * 4
    assert peak(dear) >= peak(lambda x: 2 * x + 1) + 3 * activation


def test_operands_of_odd_sizes_are_held_padded():
    """XLA for GPUs multiplies bfloat16 on copies that are padded to multiples of 8; float32 as it is."""

    def beside_arguments(dtype, width):
        def make(rngs):
            options = {"use_bias": False, "rngs": rngs, "dtype": dtype, "param_dtype": dtype}
            return nnx.Sequential(*(nnx.Linear(width, width, **options) for _ in range(3)))

        inputs = jax.ShapeDtypeStruct((64 * ROWS, width), dtype)
        cost = lowered(make, inputs=inputs, optimizer=optax.sgd(1e-3)).count(lm.LayoutMap(MESH))
        return (cost.peak_bytes - estimate_memory_upper_bound(0, cost.collectives)) - cost.argument_bytes

    odd, even = beside_arguments("bfloat16", 63), beside_arguments("bfloat16", 64)
    assert odd > 1.5 * even
    assert beside_arguments("float32", 63) < beside_arguments("float32", 64)


def test_what_a_scan_stacks_has_memory_of_its_own():
    """Each array that a loop fills, though all begin as the same zeros; its weights are held as they are given."""

    class Stack(nnx.Module):
        def __init__(self, rngs):
            self.blocks = nnx.split_rngs(splits=DEPTH)(nnx.vmap(Layers, in_axes=0, out_axes=0))(rngs)

        def __call__(self, x):
            axes = {"in_axes": (0, nnx.Carry), "out_axes": nnx.Carry}
            return nnx.scan(lambda block, x: block(x), **axes)(self.blocks, x)

    class Layers(nnx.Module):
        def __init__(self, rngs):
            self.first, self.last = (nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs) for _ in range(2))

        def __call__(self, x):
            return self.last(self.first(x))

    rows = 64 * ROWS
    inputs = jax.ShapeDtypeStruct((rows, WIDTH), "float32")
    cost = lowered(Stack, inputs=inputs, optimizer=optax.sgd(1e-3)).count(lm.LayoutMap(MESH))
    activation, weights = rows // 4 * WIDTH * 4, 2 * DEPTH * WIDTH * WIDTH * 4
    held = (cost.peak_bytes - estimate_memory_upper_bound(0, cost.collectives) - cost.argument_bytes) / 1.1
    # Of each block what its two products are given; the gradients of all, and a few activations at a time.
    assert 2 * DEPTH * activation + weights <= held <= (2 * DEPTH + 4) * activation + 2 * weights


@pytest.mark.parametrize(
    ("plain", "own", "remat"),
    [
        (Unrolled, UnrolledRecomputing, "blocks"),
        pytest.param(keras_blocks, keras_blocks_recomputing, r"block_\d$", marks=pytest.mark.long),
    ],
)
def test_recomputed_activations_cost_what_the_librarys_own_way_costs(plain, own, remat):
    """With remat, blocks keep their inputs and compute the first product again: as `nnx.remat` and `RematScope` do."""
    rows = jax.ShapeDtypeStruct((64 * ROWS, WIDTH), "float32")
    layout_map = lm.LayoutMap(MESH, MEGATRON)
    kept, recomputed, same = (
        lowered(kind, MEGATRON, inputs=rows, remat=each).count(layout_map)
        for kind, each in ((plain, None), (plain, remat), (own, None))
    )
    notes = ("activations inside of layers are recomputed in ",)
    assert replace(recomputed, notes=()) == replace(same, notes=())
    assert notes == tuple(note[: len(notes[0])] for note in set(recomputed.notes) - set(same.notes))
    product = 2 * 64 * ROWS // 4 * WIDTH * INNER // 2
    assert DEPTH * product == recomputed.flops["float32"] - kept.flops["float32"]
    # A block keeps its inner activation before and after relu, whose sum is larger than an input's.
    inner, outer = (64 * ROWS // 4 * width * 4 for width in (INNER // 2, WIDTH))
    saved = kept.least_peak_bytes - recomputed.least_peak_bytes
    assert (DEPTH - 1) * inner // 2 <= saved <= 2 * DEPTH * max(inner, outer)


def test_argument_bytes_are_the_shards():
    """A step is given the shards of weights, slots and the batch: the bytes of the plan."""
    step = lowered(Block, optimizer=optax.adam(1e-3))
    layout_map = lm.LayoutMap(MESH, MEGATRON)
    shards = step.plan(layout_map).device_bytes + ROWS // 4 * WIDTH * get_itemsize("float32")
    assert shards == step.count(layout_map).argument_bytes


@pytest.mark.parametrize("target", [compiled_for_gpus("h100")])
@pytest.mark.parametrize("kind", [Unrolled, Scanned])
def test_an_estimate_of_a_peak_is_no_less_than_what_xla_compiles(kind, target):
    """It is an upper bound, and FLOPs are those of the products that XLA has libraries compute."""
    inputs = jax.ShapeDtypeStruct((64 * ROWS, WIDTH), "float32")
    step = lowered(kind, optimizer=optax.adam(1e-3), inputs=inputs)
    counted = step.count(lm.LayoutMap(MESH))
    made = step.compile(lm.LayoutMap(MESH), target=target)
    assert 0.95 <= counted.peak_bytes / made.peak_bytes
    assert counted.flops == count_flops(parse_partitioned_step(made.text, MESH))
