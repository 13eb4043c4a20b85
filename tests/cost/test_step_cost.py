"""What a training step costs, from shapes: the collectives that theory says, for models of all kinds."""

import types
from collections import Counter

import jax
import jax.numpy as jnp
import keras
import optax
import pytest
from flax import nnx
from step_models import (
    BATCH,
    DEPTH,
    INNER,
    MEGATRON,
    MESH,
    NAMES,
    ROWS,
    WIDTH,
    Block,
    KerasBlock,
    Scanned,
    Unrolled,
    collectives,
    keras_blocks,
    lowered,
)

import layoutmap as lm
from layoutmap.adapters.jax import train_with
from layoutmap.cost.equal_blocks import make_comparable_attributes

KERNEL = WIDTH * INNER * 4


@pytest.fixture(scope="module")
def block():
    return lowered(Block, optimizer=optax.sgd(1e-3))


def test_data_parallel_sums_each_gradient_over_the_data(block):
    """Where weights are replicated and the batch is sharded, a step sums each weight's gradient, and nothing else."""
    cost = block.count(lm.LayoutMap(MESH))
    assert collectives(cost) == {("all_reduce", ("data",), KERNEL): 2}
    assert {each.cause for each in cost.collectives if each.tensor_bytes > 8} == {"up.kernel", "down.kernel"}


def test_megatrons_layouts_sum_an_activation_once_a_direction(block):
    """Megatron's split sums one activation forward over `model`, and gradients of halves of weights over `data`."""
    cost = block.count(lm.LayoutMap(MESH, MEGATRON))
    activation = ROWS // 4 * WIDTH * 4
    # What the block is given is the batch, which has no gradient: backward nothing is summed over `model`.
    assert collectives(cost) == {
        ("all_reduce", ("model",), activation): 1,
        ("all_reduce", ("data",), KERNEL // 2): 2,
    }
    assert {(e.cause, e.phase) for e in cost.collectives if e.dims == ("model",)} == {("down", "forward")}


def test_fully_sharded_weights_are_gathered_and_their_gradients_scattered():
    """Weights that are sharded over the batch's dim are gathered, and their gradients reduce-scattered."""
    layout_map = lm.LayoutMap(MESH, {".*": ("data", None)})
    layout_map.activations[".*"] = ("data", None)
    rows = 64 * ROWS  # with few rows the partitioner gathers these
    step = lowered(Block, optimizer=optax.sgd(1e-3), inputs=jax.ShapeDtypeStruct((rows, WIDTH), "float32"))
    cost = step.count(layout_map)
    kinds = {(each.kind, each.cause) for each in cost.collectives if each.tensor_bytes == KERNEL}
    kernels = ("up.kernel", "down.kernel")
    assert {(kind, path) for kind in ("all_gather", "reduce_scatter") for path in kernels} == kinds


def test_a_reduction_sends_what_a_ring_sends(block):
    """Each device sends twice the tensor less its own part for an all-reduce on a ring."""
    cost = block.count(lm.LayoutMap(MESH))
    assert 2 * 2 * KERNEL * 3 // 4 == sum(
        each.count_sent_bytes(MESH) for each in cost.collectives if each.tensor_bytes > 8
    )


def test_products_are_counted_on_one_device(block):
    """Of three products for each weight but the first one's input gradient, a device computes its share of rows."""
    cost = block.count(lm.LayoutMap(MESH))
    assert {"float32": 5 * 2 * ROWS // 4 * WIDTH * INNER} == dict(cost.flops)


def test_each_gradient_that_is_summed_is_named_for_its_weight():
    """Those of biases, too: a layer is no cause, since no activation is summed."""

    def make():
        return keras.Sequential(
            [keras.Input((WIDTH,)), keras.layers.Dense(8, name="up"), keras.layers.Dense(4)]
        )

    step = lm.lower_step(
        make, lm.LayoutMap(MESH), inputs=BATCH, batch_dim="data", optimizer="adam", library="keras"
    )

    causes = {each.cause for each in step.count(lm.LayoutMap(MESH)).collectives if each.phase == "backward"}
    assert {"up.kernel", "up.bias", "dense.kernel", "dense.bias"} == causes


@pytest.mark.parametrize("rules", [{}, MEGATRON], ids=["data", "megatron"])
def test_a_scan_costs_what_its_blocks_cost(rules):
    """A scanned stack costs what the unrolled one does, and the gradient of the first block's input."""
    over_layers = {path: (None, *specs) for path, specs in rules.items()}
    unrolled = lowered(Unrolled, rules).count(lm.LayoutMap(MESH, rules))
    scanned = lowered(Scanned, over_layers).count(lm.LayoutMap(MESH, over_layers))
    first = 2 * ROWS // 4 * WIDTH * INNER // (2 if rules else 1)
    assert dict(scanned.flops) == {"float32": unrolled.flops["float32"] + first}
    extra = {("all_reduce", ("model",), ROWS // 4 * WIDTH * 4): 1} if rules else {}
    assert Counter(collectives(scanned)) == Counter(collectives(unrolled)) + Counter(extra)


def test_equal_blocks_cost_what_each_of_them_costs():
    """Of a stack of equal blocks two and three are traced, and the figures are those of all of them."""
    step = lowered(keras_blocks, MEGATRON, "adam", keras.Input(batch_shape=(ROWS, WIDTH)))
    tied = step.count(lm.LayoutMap(MESH, MEGATRON))
    assert [[f"block_{number}" for number in range(DEPTH)]] == list(step.step.blocks)
    # A rule for one block alone, on the same mesh: its weights stay as they are, and all blocks are traced.
    apart = {r"block_0\..*kernel": (None, None)} | MEGATRON
    mixed = step.count(lm.LayoutMap(MESH, apart))
    inner = lm.LayoutMap(MESH, MEGATRON)
    inner.activations[r"block_3\.up"] = ("data", None)  # inside of one block
    constrained = step.count(inner)
    step.step.blocks[:] = []
    untied = step.count(lm.LayoutMap(MESH, MEGATRON))
    assert (collectives(tied), tied.flops, tied.traffic_bytes, tied.peak_bytes) == (
        collectives(untied),
        untied.flops,
        untied.traffic_bytes,
        untied.peak_bytes,
    )
    assert (mixed, constrained) == (step.count(lm.LayoutMap(MESH, apart)), step.count(inner))


class Normed(nnx.Module):
    def __init__(self, rngs, activation=nnx.gelu):
        self.norm, self.block, self.drop = (
            nnx.LayerNorm(WIDTH, rngs=rngs),
            Block(rngs),
            nnx.Dropout(0.1, rngs=rngs),
        )
        self.activation = activation

    def __call__(self, x):
        return x + self.drop(self.activation(self.block(self.norm(x))))


class Stack(nnx.Module):
    def __init__(self, rngs, activations=(nnx.gelu,) * 4):
        self.blocks = nnx.List([Normed(rngs, activation) for activation in activations])

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def test_equal_modules_cost_what_each_of_them_costs():
    """Of a list of equal modules two and three are traced, and the figures are those of all of them."""
    rules = {rf".*{path}": specs for path, specs in MEGATRON.items()}
    step = lowered(Stack, rules, optax.adam(1e-3))
    found = []
    for blocks in ([[f"blocks.{number}" for number in range(4)]], []):
        assert blocks == list(step.step.blocks)
        cost = step.count(lm.LayoutMap(MESH, rules))
        found.append((collectives(cost), cost.flops, cost.traffic_bytes, cost.least_peak_bytes))
        step.step.blocks[:] = []
    tied, untied = found
    assert tied == untied


class Sequences(nnx.Module):
    """Blocks that do not all see the same: every way in which one call may differ from another."""

    def __init__(self, rngs, way):
        self.way, self.blocks = way, nnx.List([Wide(rngs) for _ in range(DEPTH)])

    def __call__(self, x):
        regular = 0.0
        for number, block in enumerate(self.blocks):
            if self.way == "funnel" and number == 2:
                x = x[:, ::2]
            if self.way == "growing" and number % 2:
                x = jnp.concatenate([x, x], axis=1)
            keywords = {"wide": number % 3 == 2} if self.way == "keyword" else {}
            x = block(x, x[:, :number]) if self.way == "second" else block(x, **keywords)
            if self.way == "twice" and number % 2:
                x = block(x)
            if self.way == "parent":
                regular += jnp.sum(block.up.kernel[...] @ block.down.kernel[...])
        return x + regular


class Wide(Block):
    def __call__(self, x, more=None, *, wide=False):
        x = super().__call__(super().__call__(x) if wide else x)
        return x if more is None else x + jnp.sum(self.down(self.up(more)))


@pytest.mark.parametrize("way", ["funnel", "growing", "keyword", "second", "twice", "parent"])
def test_equal_blocks_that_are_called_in_another_way_cost_something_else(way):
    """Blocks with other inputs or keywords, called more often, or whose weights their parent reads, are traced."""

    def make():
        return Sequences(nnx.Rngs(0), way)

    inputs = jax.ShapeDtypeStruct((ROWS, 8, WIDTH), "float32")
    options = {"inputs": inputs, "batch_dim": "data", "optimizer": optax.adam(1e-3), "library": "jax"}
    step = lm.lower_step(make, lm.LayoutMap(MESH), **options)
    found = []
    assert [f"blocks.{number}" for number in range(DEPTH)] in step.step.blocks
    for rules in ({}, {rf".*{path}": specs for path, specs in MEGATRON.items()}):
        layout_map = lm.LayoutMap(MESH, rules)
        found.append(lm.lower_step(make, layout_map, **options).count(layout_map))
    step.step.blocks[:] = []  # all of them are traced
    for cost, rules in zip(
        found, ({}, {rf".*{path}": specs for path, specs in MEGATRON.items()}), strict=True
    ):
        full = step.count(lm.LayoutMap(MESH, rules))
        assert (collectives(full), full.flops, full.peak_bytes) == (
            collectives(cost),
            cost.flops,
            cost.peak_bytes,
        )


def test_keras_blocks_whose_weights_the_model_reads_are_traced():
    """As a model of Keras does that adds a term for the weights of its layers to what it returns."""

    class Regular(keras.Model):
        def __init__(self):
            super().__init__()
            self.blocks = [KerasBlock(name=name) for name in NAMES]

        def call(self, x):
            for block in self.blocks:
                x = block(x)
            return x + sum(keras.ops.sum(block.up.kernel @ block.down.kernel) for block in self.blocks)

    options = {"inputs": keras.Input(batch_shape=(ROWS, WIDTH)), "batch_dim": "data", "optimizer": "adam"}
    step = lm.lower_step(Regular, lm.LayoutMap(MESH), library="keras", **options)
    assert len(step.step.blocks[0]) == DEPTH
    found = step.count(lm.LayoutMap(MESH))
    step.step.blocks[:] = []
    assert step.count(lm.LayoutMap(MESH)) == found


def test_keras_layers_that_take_turns_are_counted():
    """Layers of one class and of one size are no blocks that follow each other; each is traced, as XLA has it."""

    def make():
        shapes = [(8, "up"), (4, "down")] * DEPTH
        layers = [keras.layers.Dense(units, name=f"{name}{n}") for n, (units, name) in enumerate(shapes)]
        return keras.Sequential([keras.Input((4,)), *layers])

    rules = {r"up\d+\.kernel": (None, "model"), r"down\d+\.kernel": ("model", None)}
    options = {"inputs": keras.Input(batch_shape=(ROWS, 4)), "batch_dim": "data", "library": "keras"}
    step = lm.lower_step(make, lm.LayoutMap(MESH), **options)
    sums = [
        c
        for c in step.count(lm.LayoutMap(MESH, rules)).collectives
        if c.dims == ("model",) and "down" in c.cause
    ]
    assert sum(c.calls for c in sums if c.kind == "all_reduce" and c.phase == "forward") == DEPTH


def test_a_mesh_may_have_more_devices_than_a_process_of_xla_for_cpus():
    """That has 2,048 at most; of 4,096 each activation is summed over all of its dim, once a direction."""
    mesh = lm.Mesh(None, {"data": ROWS, "model": INNER})
    found = lowered(Unrolled, MEGATRON).count(lm.LayoutMap(mesh, MEGATRON))
    sums = [c for c in found.collectives if c.dims == ("model",) and c.tensor_bytes == WIDTH * 4]
    assert (2 * DEPTH - 1, {0}) == (sum(c.calls for c in sums), {c.group for c in sums})


@pytest.mark.parametrize("form", [list, dict])
def test_each_output_of_a_keras_model_has_the_targets_of_its_own_loss(form):
    """Losses in a list, or by the names of outputs: classes for a sparse one, values of the output's shape else."""

    def make():
        x = keras.Input((4,))
        outputs = [keras.layers.Dense(8, name="values")(x), keras.layers.Dense(3, name="classes")(x)]
        losses = {"values": "mse", "classes": keras.losses.SparseCategoricalCrossentropy(from_logits=True)}
        model = keras.Model(x, outputs)
        model.compile("adam", loss=losses if form is dict else [*losses.values()])
        return model

    options = {"inputs": keras.Input(batch_shape=(ROWS, 4)), "batch_dim": "data", "library": "keras"}
    step = lm.lower_step(make, lm.LayoutMap(MESH), **options)
    assert {(ROWS, 8): "float32", (ROWS,): "int32"} == {
        each.shape: each.dtype for each in step.step.batch[1:]
    }
    assert step.count(lm.LayoutMap(MESH)).sent_bytes > 0


def test_modules_that_compute_something_else_are_not_equal():
    """A function that modules are made with is one of their settings."""

    def mixed(rngs):
        return Stack(rngs, (nnx.gelu, nnx.relu) * 2)

    def of_lambdas(rngs):
        return Stack(rngs, [lambda x, slope=slope: x * slope, lambda x: -x] * 2)

    def of_one_lambda(rngs):
        return Stack(rngs, [lambda x, slope=slope: x * slope for slope in (2.0, 3.0)] * 2)

    def of_one_lambda_by_name(rngs):
        return Stack(rngs, [lambda x, *, slope=slope: x * slope for slope in (2.0, 3.0)] * 2)

    def of_functions(rngs):
        def applied(function):
            return lambda x: function(x)

        return Stack(rngs, [applied(function) for function in (nnx.gelu, nnx.relu)] * 2)

    slope = 2.0
    for make in (mixed, of_lambdas, of_one_lambda, of_one_lambda_by_name, of_functions):
        assert [] == [stack for stack in lowered(make).step.blocks if "blocks.0" in stack]


def test_functions_of_any_kind_are_settings():
    """A function may refer to itself, or to a name that has no value yet."""

    def of(*functions):
        return [make_comparable_attributes(types.SimpleNamespace(call=function)) for function in functions]

    def refers(is_complete):
        def function():
            return function, value

        if is_complete:
            value = 1
        return function

    empty, same, complete = of(refers(False), refers(False), refers(True))
    assert (True, False) == (empty == same, empty == complete)


def test_a_sum_of_scattered_sums_is_scattered_once():
    """Where two layers read the same sharded input, its gradient is reduce-scattered once, as the sum of both."""

    class Pair(nnx.Module):
        def __init__(self, rngs):
            self.first, self.left, self.right = (
                nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs) for _ in range(3)
            )

        def __call__(self, x):
            x = self.first(x)
            return nnx.relu(self.left(x)) + self.right(x)

    rules = lm.LayoutMap(MESH, {"(left|right).kernel": (None, "model")})
    rules.activations["first"] = ("data", "model")
    cost = lowered(Pair, inputs=jax.ShapeDtypeStruct((64 * ROWS, WIDTH), "float32")).count(rules)
    scattered = [each for each in cost.collectives if each.kind == "reduce_scatter"]
    assert [(1, 64 * ROWS // 4 * WIDTH * 4)] == [(each.calls, each.tensor_bytes) for each in scattered]


@pytest.mark.parametrize("kind", [Unrolled, keras_blocks])
def test_a_weight_that_is_gathered_again_to_recompute_is_named(kind):
    """The barrier before recomputed operations passes each value on as itself: each gather is for its own weight."""
    rules = lm.LayoutMap(MESH, {r".*up\.kernel": ("data", "model"), r".*down\.kernel": ("model", "data")})
    rows = jax.ShapeDtypeStruct((64 * ROWS, WIDTH), "float32")
    cost = lowered(kind, inputs=rows, remat="blocks").count(rules)
    gathers = [each for each in cost.collectives if each.kind == "all_gather"]
    found = {(each.phase, each.cause.rpartition("*.")[-1]) for each in gathers}
    wanted = {(phase, f"{name}.kernel") for phase in ("forward", "backward") for name in ("up", "down")}
    assert wanted == found


def test_recomputed_blocks_change_the_state_that_they_change():
    """The keys of dropout inside of recomputed blocks are what they are without, and blocks stay tied."""

    @keras.saving.register_keras_serializable("step_cost")
    class Dropping(KerasBlock):
        def build(self, shape):
            super().build(shape)
            self.drop = keras.layers.Dropout(0.5)

        def call(self, x, training=None):
            return self.drop(super().call(x), training=training)

    def keras_dropping():
        return keras.Sequential([keras.Input((WIDTH,)), *(Dropping(name=name) for name in NAMES)])

    costs = [
        lowered(keras_dropping, MEGATRON, remat=each).count(lm.LayoutMap(MESH)) for each in (None, "blocks")
    ]
    assert costs[0].argument_bytes == costs[1].argument_bytes
    assert costs[0].flops["float32"] < costs[1].flops["float32"]


def test_layers_to_recompute_that_there_are_not():
    """A pattern that matches no layer, one that is not a regex, and a pytree, which has no layers: each says so."""

    def pytree():
        weights = {"up": jnp.zeros((WIDTH, INNER))}
        return train_with(weights, forward=lambda w, x: x @ w["up"], optimizer=optax.sgd(1e-3))

    def error(make, remat):
        with pytest.raises(lm.ScopeError) as raised:
            lm.step_cost(make, lm.LayoutMap(MESH), inputs=(BATCH,), library="jax", remat=remat)
        return raised.value.what

    assert "Block: remat does not match any layer of the model" == error(lambda: Block(nnx.Rngs(0)), "blocks")
    assert "dict: remat does not match any layer of the model" == error(pytree, "blocks")
    assert "remat='(' is not a regex for layers" == error(pytree, "(")


def test_a_batch_dim_that_the_mesh_does_not_have_is_refused(block):
    """Batches would be counted as replicated, without a word; before a model is made where the map is known."""

    def never():
        raise AssertionError("the function was called")

    layout_map, options = lm.LayoutMap(MESH), {"inputs": (BATCH,), "library": "jax", "batch_dim": "rows"}
    for count in (
        lambda: lm.step_cost(never, layout_map, **options),
        lambda: lm.lower_step(never, layout_map, **options),
        lambda: block.count(layout_map, batch_dim="rows"),
        lambda: block.compile(layout_map, batch_dim="rows"),
        lambda: block.verify(layout_map, batch_dim="rows"),
    ):
        with pytest.raises(lm.ScopeError) as raised:
            count()
        assert "batch_dim 'rows' is not a dim of the mesh" == raised.value.what
        assert "use one of 'data', 'model', or leave it out" == raised.value.fix


def test_a_rule_for_activations_counts_as_in_the_step():
    """A layer's output is constrained in the counted step as in the real one, forward and backward."""
    step = lowered(Block)
    plain, rules = lm.LayoutMap(MESH, MEGATRON), lm.LayoutMap(MESH, MEGATRON)
    rules.activations["up"] = ("data", None)  # against the layout of the weight: gathered
    added = Counter(collectives(step.count(rules))) - Counter(collectives(step.count(plain)))
    assert ("all_gather", ("model",), ROWS // 4 * INNER * 4) in added


def test_a_branch_costs_what_is_in_it():
    """The collectives and products of both branches of a condition are counted, as XLA sends them."""

    class Branching(Block):
        def __call__(self, x):
            return jax.lax.cond(x.sum() > 0, lambda: super(Branching, self).__call__(x), lambda: -x)

    step, layout_map = lowered(Branching), lm.LayoutMap(MESH, MEGATRON)
    cost = step.count(layout_map)
    assert cost.flops["float32"] > 0
    assert sum(step.compile(layout_map).sent_by_kind.values()) == cost.sent_bytes


def test_an_array_in_a_list_outside_of_variables_is_refused_by_name():
    """Flax takes its shape for a constant, so the step would not be that of the model."""

    class Table(nnx.Module):
        def __init__(self, rngs):
            self.up = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
            self.kept = nnx.data(jnp.arange(WIDTH))
            self.order = nnx.data([jnp.arange(WIDTH)])

        def __call__(self, x):
            return self.up(x)[:, self.order[0]] + self.kept

    layout_map = lm.LayoutMap("batch=2,model=4", {r"up\.kernel": (None, "model")})
    with pytest.raises(
        lm.ScopeError,
        match=r"^the cost of the step cannot be computed: order\.0 would be a constant in the step",
    ):
        lm.step_cost(
            lambda: Table(nnx.Rngs(0)), layout_map, inputs=jax.ShapeDtypeStruct((8, WIDTH), "float32")
        )


def test_random_keys_and_states_are_arguments():
    """Keys of dropout and moving statistics are given to the step as they are to XLA's."""

    class Random(nnx.Module):
        def __init__(self, rngs):
            self.up, self.drop = nnx.Linear(WIDTH, INNER, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)
            self.norm = nnx.BatchNorm(INNER, rngs=rngs)

        def __call__(self, x):
            return self.norm(self.drop(self.up(x)))

    cost = lowered(Random).count(lm.LayoutMap(MESH))
    kernel, bias, norm, key_and_count = WIDTH * INNER * 4, INNER * 4, 4 * INNER * 4, 8 + 4
    assert kernel + bias + norm + key_and_count + ROWS // 4 * WIDTH * 4 == cost.argument_bytes


def test_a_pytree_is_counted():
    """A pytree is called by the function that `train_with` was given, with its loss and its optimizer."""

    def make():
        weights = {"up": jnp.zeros((WIDTH, INNER)), "down": jnp.zeros((INNER, WIDTH))}
        return train_with(
            weights,
            forward=lambda w, x: nnx.relu(x @ w["up"]) @ w["down"],
            loss=lambda y, target: ((y - target) ** 2).mean(),
            optimizer=optax.sgd(1e-3),
        )

    cost = lm.step_cost(make, lm.LayoutMap(MESH), inputs=(BATCH, BATCH), batch_dim="data", library="jax")
    assert {("all_reduce", ("data",), KERNEL): 2} == collectives(cost)


def test_one_array_is_no_batch_for_a_loss_with_targets():
    """It has been taken for two rows, inputs and targets: a step with one vector, which cost next to nothing."""

    def make():
        return train_with(
            {"a": jnp.ones((64, 64))},
            forward=lambda weights, x: x @ weights["a"],
            loss=lambda y, target: ((y - target) ** 2).mean(),
            optimizer=optax.sgd(0.1),
        )

    x, plain = jnp.ones((128, 64)), lm.LayoutMap(MESH, rest="replicated")

    with pytest.raises(lm.ScopeError, match="no targets for the loss") as refused:
        lm.lower_step(make, plain, inputs=x, library="jax")
    assert "pass (inputs, targets)" in str(refused.value)
    with pytest.raises(lm.ScopeError, match="no targets for the loss"):
        lm.check_parity(make, plain, x, library="jax")
    step = lm.lower_step(make, plain, inputs=(x, x), library="jax")
    # The output, and the weight's gradient
    assert 2 * 2 * 128 * 64 * 64 == sum(step.count(plain).flops.values())


def test_a_model_that_cannot_be_traced_says_so():
    """A model whose call fails for the given inputs is a `ScopeError` that names them and what the library said."""
    wide = jax.ShapeDtypeStruct((ROWS, WIDTH + 1), "float32")
    with pytest.raises(lm.ScopeError) as raised:
        lowered(Block, inputs=wide).count(lm.LayoutMap(MESH))
    text = str(raised.value)
    assert text.startswith("Block: the training step fails when it is traced")
    assert f"float32[{ROWS}, {WIDTH + 1}]" in text


def test_inputs_without_a_shape_are_refused():
    """What stands for a batch has a shape and an element type, or is refused by what it is."""
    with pytest.raises(lm.ScopeError, match="is not an array"):
        lowered(Block, inputs=(ROWS, WIDTH))


def test_inputs_of_another_rank_are_refused():
    """A Keras model that cannot be called with the given inputs is a `ScopeError` with their shapes."""
    with pytest.raises(lm.ScopeError, match="cannot be called with inputs of these shapes") as raised:
        lowered(keras_blocks, inputs=keras.Input(batch_shape=(ROWS, 3, WIDTH + 1)))
    assert f"float32[{ROWS}, 3, {WIDTH + 1}]" in str(raised.value)
