"""Optimizers of flax.nnx: their state is laid out as the variables of the module that it is for."""

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import layoutmap as lm

MESH = "batch=2,model=4"


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.up = nnx.Linear(8, 64, rngs=rngs)
        self.down = nnx.Linear(64, 8, rngs=rngs)
        self.drop = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        return x + self.drop(self.down(nnx.relu(self.up(self.norm(x)))))


class Net(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.List([Block(rngs)])
        self.head = nnx.Linear(8, 4, rngs=rngs)
        self.tied = self.head

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


# Biases have no rule: the compiler would shard them as it shards their kernels.
RULES = {r".*up\.kernel": (None, "model"), r".*down\.kernel": ("model", "batch")}


def net(mesh=None):
    """The module, its variables in layouts if there is a mesh."""
    model = Net(nnx.Rngs(0))
    if mesh is not None:
        layout_map = lm.LayoutMap(mesh, RULES)
        for path, variable in nnx.to_flat_state(nnx.state(model)):  # these are the module's own Variables
            value = variable.get_raw_value()
            layout = layout_map.get(".".join(map(str, path))) or lm.Layout.replicated(mesh, value.ndim)
            variable.set_raw_value(lm.dtensor.relayout(value, layout))
    return model


def layouts_of(module):
    return {
        ".".join(map(str, path)): str(lm.dtensor.fetch_layout(variable.get_raw_value()))
        for path, variable in nnx.to_flat_state(nnx.state(module))
    }


@pytest.mark.parametrize("existing", [False, True])
def test_the_state_of_an_optimizer_is_laid_out(existing):
    """`build_optimizer` of a module gives an `nnx.Optimizer`, and one that exists is laid out in place."""
    mesh = lm.create_mesh(MESH)
    model, tx = net(mesh), optax.adamw(1e-2)
    if existing:
        given = nnx.Optimizer(net(), tx, wrt=nnx.Param)
        optimizer = lm.LayoutMap(mesh).apply_optimizer(given, model)
        assert optimizer is given
    else:
        optimizer = lm.LayoutMap(mesh).build_optimizer(tx, model)
        assert optimizer.tx is tx
    plain = nnx.Optimizer(net(), tx, wrt=nnx.Param)
    assert jax.tree.structure(nnx.state(plain)) == jax.tree.structure(nnx.state(optimizer))
    weights, slots = layouts_of(model), layouts_of(optimizer)
    expected = {
        f"opt_state.0.{kind}.{path}": layout
        for kind in ("mu", "nu")
        for path, layout in weights.items()
        if path.endswith(("kernel", "bias", "scale"))
    }
    assert {"step": "()", "opt_state.0.count": "()", **expected} == slots


def values_of(module):
    return [variable.get_raw_value() for _, variable in nnx.to_flat_state(nnx.state(module))]


def step(model, optimizer, x, y):
    def loss_of(model):
        return optax.softmax_cross_entropy_with_integer_labels(model(x), y).mean()

    loss, gradients = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, gradients)
    return {"loss": loss}


def batch(seed=0, rows=8):
    random = np.random.default_rng(seed)
    return random.normal(size=(rows, 8)).astype("float32"), random.integers(0, 4, rows)


def all_layouts(*modules):
    return [layouts_of(module) for module in modules]


def test_a_step_changes_modules_in_place_and_moves_nothing():
    """Modules and optimizers are changed in place, to the numbers of one device, each Variable where it was."""
    mesh, tx = lm.create_mesh(MESH), optax.sgd(1e-1, momentum=0.9)
    plain = net()
    plain_optimizer = nnx.Optimizer(plain, tx, wrt=nnx.Param)
    drifting = net(mesh)
    drifting_optimizer = lm.LayoutMap(mesh).build_optimizer(tx, drifting)
    model = net(mesh)
    optimizer = lm.LayoutMap(mesh).build_optimizer(tx, model)
    traces = []

    def counted(*arguments):
        traces.append(len(arguments))
        return step(*arguments)

    compiled = lm.jit_step(counted, donate_argnums=(0, 1), batch_dim="batch")
    before, expected_step = all_layouts(model, optimizer), nnx.jit(step)
    kernel = model.tied.kernel
    for number in range(3):
        expected = expected_step(plain, plain_optimizer, *batch(number))
        actual = compiled(model, optimizer, *batch(number))
        np.testing.assert_allclose(expected["loss"], actual["loss"], rtol=1e-5)
    assert before == all_layouts(model, optimizer)
    assert [4] == traces
    assert kernel is model.head.kernel
    for one, other in zip(
        jax.tree.leaves(nnx.state((plain, plain_optimizer), nnx.Not(nnx.RngKey))),
        jax.tree.leaves(nnx.state((model, optimizer), nnx.Not(nnx.RngKey))),
        strict=True,
    ):
        np.testing.assert_allclose(one, other, rtol=2e-4, atol=1e-5)
    x, y = (lm.dtensor.relayout(a, lm.Layout(["batch", None][: a.ndim], mesh)) for a in batch())
    expected_step(drifting, drifting_optimizer, x, y)
    assert before != all_layouts(drifting, drifting_optimizer)


def test_a_change_between_steps_is_seen():
    """What is changed between two calls, a mode or a value or a layer, counts for the next one."""
    mesh = lm.create_mesh(MESH)
    model, x = net(mesh), batch()[0]
    predict = lm.jit_step(lambda model, x: model(x), batch_dim="batch")
    plain = net()
    counts = [m.blocks[0].drop.rngs.count for m in (model, plain)]
    for change in (
        lambda m: None,
        lambda m: m.eval(),
        lambda m: m.head.bias.set_value(m.head.bias.get_value() + 1),
        lambda m: m.train(),
        lambda m: setattr(m, "head", nnx.Linear(8, 4, rngs=nnx.Rngs(7))),
        lambda m: m.blocks.pop(),
    ):
        change(model)
        change(plain)
        np.testing.assert_allclose(plain(x), predict(model, x), rtol=1e-5, atol=1e-5)
    assert [3, 3] == [int(count.get_value()) for count in counts]


def test_weights_that_do_not_change_are_not_returned():
    """A step that only reads a module leaves its Variables the arrays that they had."""
    mesh = lm.create_mesh(MESH)
    model = net(mesh)
    model.eval()
    mean = model.blocks[0].norm.mean
    mean.set_raw_value(np.asarray(mean.get_raw_value()))  # off the mesh: it is placed there, once
    lm.jit_step(lambda model, x: model(x))(model, batch()[0])
    assert "(unsharded,)" == layouts_of(model)["blocks.0.norm.mean"]
    before = values_of(model)
    lm.jit_step(lambda model, x: model(x))(model, batch()[0])
    assert [True] * len(before) == [a is b for a, b in zip(before, values_of(model), strict=True)]


def test_a_model_that_a_step_has_seen_is_not_kept():
    """A module that nobody holds is gone, though a step was called with it."""
    model = net(lm.create_mesh(MESH))
    kernel = weakref.ref(model.head.kernel.get_raw_value())
    predict = lm.jit_step(lambda model, x: model(x))
    predict(model, batch()[0])
    del model
    gc.collect()
    assert kernel() is None


def test_what_a_step_may_not_do_with_a_module():
    """A step that changes a module's structure or returns it, and a module inside another argument, are refused."""
    mesh = lm.create_mesh(MESH)
    model, told = net(mesh), []

    def grows(model):
        model.extra = nnx.Param(jnp.ones(3))

    def sets(model):
        model.blocks[0].drop.rate = 0.9

    for function, argument in (
        (grows, model),
        (sets, model),
        (lambda model: model, model),
        (lambda models: None, [model]),
    ):
        with pytest.raises(lm.ScopeError) as error:
            lm.jit_step(function)(argument)
        assert error.value.why
        assert error.value.fix
        told.append((error.value.what, error.value.facts))
    assert [
        ("the step changes the structure of one of its arguments", {"added": "extra", "removed": ""}),
        ("the step changes the structure of one of its arguments", {}),
        ("<lambda>: the step returns a Net", {"where": ""}),
        ("<lambda>: args[0][0] is an nnx object inside another argument", {"type": "Net"}),
    ] == told
    assert not hasattr(model, "extra")
