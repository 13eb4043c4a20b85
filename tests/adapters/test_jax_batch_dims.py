"""Batches over several mesh dims in steps, plans, and searches on JAX."""

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import PartitionSpec

import layoutmap as lm
from layoutmap.adapters.jax import train_with

MESH, DIMS = "replica=2,fsdp=2,model=2", ("replica", "fsdp")
X = np.random.default_rng(0).normal(size=(8, 16)).astype("float32")
Y = np.random.default_rng(1).normal(size=(8, 4)).astype("float32")


class Net(nnx.Module):
    def __init__(self, rngs):
        self.up, self.down = nnx.Linear(16, 32, rngs=rngs), nnx.Linear(32, 4, rngs=rngs)

    def __call__(self, x):
        return self.down(jax.nn.relu(self.up(x)))


def make():
    return train_with(
        Net(nnx.Rngs(0)), loss=lambda y, target: ((y - target) ** 2).mean(), optimizer=optax.sgd(0.1)
    )


def make_map():
    layout_map = lm.LayoutMap(lm.create_mesh(MESH))
    layout_map.update({r".*up\.kernel": ("fsdp", "model"), r".*down\.kernel": ("model", "fsdp")})
    layout_map.activations["up"] = (DIMS, "model")
    return layout_map


def test_a_step_shards_rows_over_both_dims():
    assert lm.check_parity(make, make_map(), (X, Y), batch_dim=DIMS)

    anchor = lm.dtensor.relayout(
        np.zeros(8, np.float32), lm.Layout(["model"], lm.create_mesh(MESH)), engine="jax"
    )

    @lm.jit_step(batch_dim=DIMS)
    def pass_on(anchor, x):
        return anchor, x

    _, x = pass_on(anchor, X)
    assert PartitionSpec(DIMS) == PartitionSpec(*x.sharding.spec[:1])
    assert (X[:6] == np.asarray(pass_on(anchor, X[:6])[1])).all()


def test_the_cost_counts_a_batch_over_both_dims(tmp_path):
    plan = lm.plan(make, make_map(), on="h100:8", inputs=(X, Y), batch_dim=DIMS)
    assert "batches are sharded over replica and fsdp" in plan.cost.step.notes
    both = [c for c in plan.cost.step.collectives if {*DIMS} <= {*c.dims}]
    assert both, "gradients of replicated weights are summed over both dims"
    again = lm.Plan.from_json(plan.to_json())
    assert DIMS == again.cost.batch_dim
    assert "replica and fsdp" in str(plan.lint())


def test_a_search_keeps_weights_on_one_dim_and_rows_on_both():
    found = lm.search(make, mesh=lm.create_mesh(MESH), on="h100:8", inputs=(X, Y), batch_dim=DIMS, tries=8)
    assert DIMS == found.batch_dim
    specs = [spec for layout in found.layout_map.values() for spec in layout.sharding_specs]
    assert not [spec for spec in specs if "replica" in (spec if isinstance(spec, tuple) else (spec,))]
