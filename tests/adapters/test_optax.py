"""Optimizers of optax: every leaf of their state is laid out as the parameter that it is for."""

import jax
import jax.numpy as jnp
import keras
import numpy as np
import optax
import pytest
from cases import few
from optax_optimizers import MESH, OPTIMIZERS, SPECS, USUAL, bits, laid_out, misplaced, plain_params

import layoutmap as lm


@pytest.fixture(scope="module")
def layout_map():
    return lm.LayoutMap(lm.create_mesh(MESH))


@pytest.fixture(scope="module")
def params(layout_map):
    return laid_out(plain_params(), layout_map.mesh)


@pytest.mark.parametrize("name", few(OPTIMIZERS, *USUAL))
def test_no_leaf_is_misplaced_and_no_value_differs(layout_map, params, name):
    """Each axis of each leaf is sharded as the parameter's axis that it is made of, with the bits of `tx.init`."""
    tx = OPTIMIZERS[name]()
    plain = plain_params()
    state = layout_map.build_optimizer(tx, params)
    expected = tx.init(plain)
    assert (jax.tree.structure(expected), list(map(bits, jax.tree.leaves(expected)))) == (
        jax.tree.structure(state),
        list(map(bits, jax.tree.leaves(state))),
    )
    assert [] == misplaced(state)
    assert [] == misplaced(layout_map.apply_optimizer(expected, params))


def test_plain_jit_loses_what_is_kept(params):
    """`jax.jit(tx.init)` of laid out parameters, which one would write instead, misplaces leaves."""
    assert len(misplaced(jax.jit(optax.adamw(1e-2).init)(params))) > 0


def test_equal_axes_of_adafactor(layout_map):
    """Of a square weight rows follow the first axis and columns the second, though both have one shape."""
    kernel = lm.dtensor.relayout(jnp.ones((32, 32)), lm.Layout(["batch", "model"], layout_map.mesh))
    state = layout_map.build_optimizer(optax.adafactor(min_dim_size_to_factor=8), {"kernel": kernel})
    specs = [lm.dtensor.fetch_layout(of["kernel"]).sharding_specs for of in (state[0].v_row, state[0].v_col)]
    assert [("batch",), ("model",)] == specs


def shampoo():
    """An optimizer that keeps a square matrix for each axis of each parameter."""

    def init(params):
        return {"preconditioners": jax.tree.map(lambda p: [jnp.eye(n) for n in p.shape], params)}

    return optax.GradientTransformation(init, lambda updates, state, params=None: (updates, state))


def test_a_preconditioner_is_sharded_along_one_axis(layout_map, params):
    """A square matrix for an axis of a parameter is sharded as that axis, once."""
    state = layout_map.build_optimizer(shampoo(), params)
    found = {leaf.shape[0]: lm.dtensor.fetch_layout(leaf).sharding_specs for leaf in jax.tree.leaves(state)}
    expected = {n: (lm.UNSHARDED, SPECS.get(n, lm.UNSHARDED)) for n in (40, 16, 8, 64, 12, 56, 24)}
    assert expected == found


def test_slots_are_in_the_plan(layout_map, params):
    """The plan has each parameter, and each leaf of the state with its parameter and its layout."""
    plan = layout_map.plan_optimizer(optax.adam(1e-2), params)
    slots = [a for a in plan.assignments if a.variable.kind == "slot"]
    assert {
        "optimizer.0.count": (None, "()"),
        **{
            f"optimizer.{path}.0.{kind}": (path, str(plan[path].layout))
            for kind in ("mu", "nu")
            for path in plan
            if plan[path].variable.kind == "weight"
        },
    } == {a.variable.path: (a.variable.parent, str(a.layout)) for a in slots}
    assert ("optimizer.*.0.mu", 7) == next(
        (row.split()[0], int(row.split()[1])) for row in str(plan).splitlines() if "0.mu" in row
    )


def test_a_plan_by_rules_alone():
    """Of parameters without a layout the plan follows the rules, on a mesh of devices that do not exist."""
    layout_map = lm.LayoutMap("batch=64,model=32", {r"kernel": ("batch", "model")})
    params = {"kernel": jax.ShapeDtypeStruct((4096, 8192), jnp.bfloat16)}
    plan = layout_map.plan_optimizer(optax.adamw(1e-2), params)
    assert "(batch, model)" == str(plan["optimizer.kernel.0.mu"].layout)
    assert 2 * 2 * 4096 * 8192 // 2048 + 4 == plan.memory.slots


def test_zero_shards_slots_over_the_batch(layout_map, params):
    """With `zero_dim` a slot is sharded over it along the first axis that divides, after its parameter's own dims."""
    tx = optax.adafactor(1e-2, min_dim_size_to_factor=40)
    state = layout_map.build_optimizer(tx, params, zero_dim="batch")
    specs = jax.tree.map(lambda leaf: lm.dtensor.fetch_layout(leaf).sharding_specs, state[0])
    both = ("model", "batch")
    assert {
        "embed": {"table": both},
        "blocks": [{"kernel": ("batch", "model"), "bias": (both,)}] * 2,
        "head": {"kernel": ("model", "batch")},
        "scale": ("batch",),
    } == specs.v
    assert list(map(bits, jax.tree.leaves(tx.init(plain_params())))) == list(
        map(bits, jax.tree.leaves(state))
    )


def test_zero_is_named_in_the_plan(layout_map, params):
    """The plan says how many slots are sharded further, and names those that cannot be."""
    (note,) = [
        p
        for p in layout_map.plan_optimizer(optax.adam(1e-2), params, zero_dim="batch").problems
        if p.kind == "zero"
    ]
    assert ("note", "14 of 14 slots are sharded over batch (ZeRO-1)") == (note.severity, note.what)
    odd = {"odd": lm.dtensor.relayout(np.ones((3, 5), np.float32), lm.Layout([None, None], layout_map.mesh))}
    plan = layout_map.plan_optimizer(optax.adam(1e-2), odd, zero_dim="batch")
    assert "optimizer.odd.0.mu, optimizer.odd.0.nu" == dict(plan.problems[0].facts)["as their weights"]


def test_a_leaf_of_no_parameter_is_listed(layout_map, params):
    """A large leaf without a parameter's path is replicated with a warning, and an error if that is asked for."""
    tx = optax.flatten(optax.adam(1e-2))
    with pytest.warns(
        lm.LayoutMapWarning, match=r"optimizer\.0\.mu: none of its axes is an axis of a weight"
    ):
        state = layout_map.build_optimizer(tx, params)
    assert lm.dtensor.fetch_layout(state[0].mu).is_fully_replicated()
    with pytest.raises(lm.PlanError, match="pass zero_dim= to shard it, too"):
        layout_map.build_optimizer(tx, params, strict=True)


def test_what_is_refused(layout_map, params):
    """Parameters without a layout or on two meshes, a dim that is none and what is no optimizer are named."""
    tx = optax.adam(1e-2)
    other = lm.create_mesh("data=8")
    two = params | {"scale": lm.dtensor.relayout(np.ones(24, np.float32), lm.Layout(["data"], other))}
    told = []
    for arguments, options in (
        ((tx, plain_params()), {}),
        ((tx, two), {}),
        ((tx, params), {"zero_dim": "data"}),
        ((tx.init, params), {}),
        ((keras.optimizers.Adam(), params), {"zero_dim": "batch"}),
        ((tx, {"activation": jax.nn.relu}), {}),
        ((optax.GradientTransformation(lambda p: float(p["scale"][0]), tx.update), params), {}),
    ):
        with pytest.raises(lm.LayoutMapError) as error:
            layout_map.build_optimizer(*arguments, **options)
        told.append((type(error.value).__name__, error.value.what, bool(error.value.why and error.value.fix)))
    with pytest.raises(lm.MeshError) as error:
        lm.LayoutMap(other).build_optimizer(tx, params)
    told.append((type(error.value).__name__, error.value.what, True))
    assert [
        ("LayoutError", "params.blocks.0.bias has no layout", True),
        ("MeshError", "params.blocks.0.bias and params.scale are on different meshes", True),
        ("ScopeError", "zero_dim 'data' is not a dim of the mesh", True),
        *[("ScopeError", "tx= is not an optimizer", True)] * 2,
        ("LayoutError", "activation: this parameter is not an array", True),
        ("ScopeError", "the optimizer's init cannot be traced", True),
        ("MeshError", "the layout map and params.blocks.0.bias are on different meshes", True),
    ] == told
