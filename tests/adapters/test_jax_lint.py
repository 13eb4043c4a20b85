"""What modules of flax.nnx do with their weights, by computing with slices of these."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from axis_roles import assert_right, only, random
from flax import nnx

import layoutmap as lm
from layoutmap.adapters.jax.roles import find_weight_axis_roles

RNGS = nnx.Rngs(0)
MODULES = {
    "Linear": (lambda: nnx.Linear(4, 5, rngs=RNGS), (3, 4)),
    "LinearGeneral to heads": (lambda: nnx.LinearGeneral(4, (2, 3), rngs=RNGS), (3, 4)),
    "LinearGeneral from heads": (
        lambda: nnx.LinearGeneral((2, 3), 5, axis=(-2, -1), rngs=RNGS),
        (4, 2, 3),
    ),
    "LinearGeneral of a batch": (
        lambda: nnx.LinearGeneral(4, 5, batch_axis={0: 2}, rngs=RNGS),
        (2, 3, 4),
    ),
    "Einsum": (lambda: nnx.Einsum("abc,cde->abde", (4, 2, 3), (2, 3), rngs=RNGS), (3, 2, 4)),
    "Einsum, heads first": (lambda: nnx.Einsum("btd,ndh->btnh", (2, 4, 3), (2, 3), rngs=RNGS), (3, 2, 4)),
    "Einsum with an ellipsis": (lambda: nnx.Einsum("...x,xy->...y", (4, 5), (5,), rngs=RNGS), (3, 2, 4)),
    "Conv": (lambda: nnx.Conv(3, 5, (2, 2), rngs=RNGS), (3, 4, 4, 3)),
    "LoRA": (lambda: nnx.LoRA(4, 2, 5, b_initializer=nnx.initializers.normal(), rngs=RNGS), (3, 4)),
}


@pytest.mark.parametrize("name", MODULES)
def test_axes_do_what_their_roles_say(name):
    """Slices along an axis that is put out fill slices of the output; those along one that is summed over add up."""
    make, shape = MODULES[name]
    module, inputs = make(), random(shape)
    used = {keys[0]: use.roles for keys, use in find_weight_axis_roles([*nnx.iter_modules(module)]).items()}
    assert {key for key in ("kernel", "bias", "lora_a", "lora_b") if getattr(module, key, None)} == set(used)

    def output(**weights):
        for key, value in weights.items():
            getattr(module, key)[...] = jnp.asarray(value)
        return module(inputs)

    assert_right(used, {key: random(getattr(module, key).shape) for key in used}, output)


NORMS = {
    "BatchNorm": lambda: nnx.BatchNorm(4, use_running_average=False, rngs=RNGS),
    "LayerNorm": lambda: nnx.LayerNorm(4, rngs=RNGS),
    "RMSNorm": lambda: nnx.RMSNorm(4, rngs=RNGS),
    "GroupNorm": lambda: nnx.GroupNorm(4, 2, rngs=RNGS),
}


@pytest.mark.parametrize("name", NORMS)
def test_weights_of_norms_are_along_the_output(name):
    """A slice of the scale fills a slice of the last axis."""
    module = NORMS[name]()
    assert {("out.0",)} == {use.roles for use in find_weight_axis_roles([*nnx.iter_modules(module)]).values()}
    for i in range(4):
        module.scale[...] = jnp.asarray(only(np.ones(4, "float32"), 0, i))
        assert {i} == set(np.nonzero(np.asarray(module(random((3, 4)))))[1])


def test_rows_of_a_table_are_looked_up():
    """A row of an embedding is what its number gives; its columns are those of the output."""
    table = nnx.Embed(4, 3, rngs=RNGS)

    assert {("embedding",): ("rows", "out.0")} == {
        k: use.roles for k, use in find_weight_axis_roles([*nnx.iter_modules(table)]).items()
    }
    assert np.array_equal(table.embedding[...], table(jnp.arange(4)))


class Heads(nnx.Module):
    """Attention with its heads side by side in one axis."""

    def __init__(self, rngs):
        self.head_dim = 4
        self.query, self.key, self.value, self.out = (nnx.Linear(16, 16, rngs=rngs) for _ in range(4))


class Block(nnx.Module):
    def __init__(self, rngs):
        self.attention = Heads(rngs)
        self.flax = nnx.MultiHeadAttention(4, 16, decode=False, rngs=rngs)
        self.table = nnx.Embed(8, 16, rngs=rngs)
        self.shared = self.table


def test_the_size_of_a_head_is_known_where_heads_share_an_axis():
    """That of flax's own attention is an axis of the kernel."""
    found = find_weight_axis_roles([*nnx.iter_modules(Block(nnx.Rngs(0)))])

    assert 4 == found["attention", "query", "kernel"].head_size
    assert found["flax", "query", "kernel"].head_size is None
    assert ("in.0", "out.0", "out.1") == found["flax", "query", "kernel"].roles
    assert ("in.0", "in.1", "out.0") == found["flax", "out", "kernel"].roles


class Reversed(nnx.Module):
    """Two layers with own names, of which the second is made first. A norm and a dropout keep states."""

    def __init__(self, reads_values=False):
        rngs = nnx.Rngs(0)
        self.later, self.first = nnx.Linear(256, 64, rngs=rngs), nnx.Linear(64, 256, rngs=rngs)
        self.norm = nnx.BatchNorm(64, use_bias=False, use_scale=False, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.reads_values = reads_values

    def __call__(self, x):
        hidden = nnx.relu(self.first(inputs=self.norm(x)))
        if self.reads_values and hidden.sum() > 0:
            hidden = -hidden
        return x + self.drop(self.later(hidden))


def test_calls_show_which_kernel_takes_the_outputs_of_another():
    """They decide, and not the order in which the layers were made. Code that reads values leaves it unknown."""
    x = jax.ShapeDtypeStruct((8, 64), "float32")
    for inputs, reads_values, axes in ((x, False, (0, 1)), ({"x": x}, False, (0, 1)), (x, True, (1, 0))):

        def make(reads_values=reads_values):
            return Reversed(reads_values)

        warns = pytest.warns(lm.LayoutMapWarning, match="TracerBoolConversionError")
        with warns if reads_values else contextlib.nullcontext():
            rules = lm.suggest(make, "batch=2,model=4", inputs=inputs, library="jax")
        plan = lm.plan(make, rules, inputs=inputs, library="jax")
        layouts = [plan[f"{name}.kernel"].layout for name in ("later", "first")]

        assert axes == tuple(layout.sharding_specs.index("model") for layout in layouts)
        assert 2 * reads_values == sum("order" in rule.reason for rule in rules.rules)
        assert [] == [*plan.lint()]
        assert ["unknown order"] * reads_values == [p.kind for p in plan.problems]
        assert reads_values == ("failed: TracerBoolConversionError: " in plan.lint().summary)


def test_a_plan_of_nnx_is_linted():
    """Heads that devices divide, and a table that is replicated, are found."""
    layout_map = lm.LayoutMap(lm.Mesh(None, "model=8"))
    layout_map[r"attention\.(query|key|value)\.kernel"] = (None, "model")
    layout_map[r"attention\.out\.kernel"] = ("model", None)
    layout_map.rest = "replicated"
    plan = lm.plan(lambda: Block(nnx.Rngs(0)), layout_map, library="jax")

    assert {f"attention.{name}.kernel" for name in ("query", "key", "value", "out")} == {
        p.subject for p in plan.lint().problems if p.kind == "heads"
    }


@pytest.mark.parametrize("number", [4, 7])
def test_a_block_that_was_left_out_is_found_in_arrays_that_others_have_laid_out(number):
    """Of blocks under tensor parallelism and FSDP: exactly one finding, none if all are laid out alike."""
    mesh = jax.make_mesh((2, 4), ("rows", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

    def lay_out(odd):
        def place(i, shape, *specs):
            specs = [None if i == odd and spec == "model" else spec for spec in specs]
            return jax.device_put(jnp.ones(shape), jax.NamedSharding(mesh, jax.P(*specs)))

        return [
            {
                "up": {"kernel": place(i, (8, 16), "rows", "model"), "bias": place(i, (16,), "model")},
                "down": {"kernel": place(i, (16, 8), "model", "rows"), "bias": place(i, (8,), "rows")},
            }
            for i in range(number)
        ]

    def found(tree):
        return [(p.kind, p.subject) for p in lm.inspect({"blocks": tree}).lint().problems]

    assert [] == found(lay_out(None))
    for odd in range(number):
        assert [("odd one out", f"blocks.{odd}")] == found(lay_out(odd))
