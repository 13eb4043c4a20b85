"""Optimizers of flax.nnx: their state is laid out as the variables of the module that it is for."""

import jax
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
        self.blocks = nnx.List([Block(rngs) for _ in range(2)])
        self.head = nnx.Linear(8, 4, rngs=rngs)
        self.tied = self.head

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


RULES = {r".*up\.kernel": (None, "model"), r".*up\.bias": ("model",), r".*down\.kernel": ("model", "batch")}


def net(mesh=None):
    """The module, its variables in layouts if there is a mesh."""
    model = Net(nnx.Rngs(0))
    if mesh is not None:
        layout_map = lm.LayoutMap(mesh, RULES)
        for path, variable in nnx.to_flat_state(nnx.state(model)):
            value = variable.get_raw_value()
            layout = layout_map.get(".".join(map(str, path))) or lm.Layout.replicated(mesh, value.ndim)
            variable.set_raw_value(lm.dtensor.relayout(value, layout))
            nnx.update(model, nnx.from_flat_state([(path, variable)]))
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
