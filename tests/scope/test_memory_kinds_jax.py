"""Arrays in host memory stay there, and plans, differences and guards tell them from those of the devices."""

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

import layoutmap as lm

MESH = "batch=2,model=4"
KINDS = st.lists(st.sampled_from(["device", "pinned_host", "unpinned_host"]), min_size=3, max_size=3)
RULES = {"w0": (None, "model"), "w1": ("batch", None), "w2": (None, None)}
pytestmark = pytest.mark.filterwarnings("ignore::layoutmap.LayoutMapWarning")


def made(kinds, seed=0):
    """Three arrays in layouts, each in a kind of memory."""
    random, mesh = np.random.default_rng(seed), lm.create_mesh(MESH)
    arrays = {
        path: lm.dtensor.relayout(random.normal(size=(8, 8)).astype("float32"), lm.Layout(specs, mesh))
        for path, specs in RULES.items()
    }
    return {
        path: jax.device_put(array, array.sharding.with_memory_kind(kind))
        for (path, array), kind in zip(arrays.items(), kinds, strict=True)
    }


def kinds_of(tree):
    return [leaf.sharding.memory_kind for leaf in jax.tree.leaves(tree)]


def values_of(tree):
    return [np.asarray(jax.device_get(leaf)).tolist() for leaf in jax.tree.leaves(tree)]


@pytest.mark.every_case
@given(kinds=KINDS)
def test_drawn_kinds_of_memory_stay(kinds, tmp_path_factory):
    """`apply` on the same and another mesh, `relayout`, `save` and `load` keep each array's memory and values."""
    tree, folder = made(kinds), tmp_path_factory.mktemp("saved")
    lm.save(tree, folder)
    mesh = lm.create_mesh(MESH)
    results = [
        lm.LayoutMap(mesh, RULES).apply(tree),
        lm.LayoutMap(lm.create_mesh("batch=4,model=2"), RULES).apply(tree),
        {path: lm.dtensor.relayout(each, lm.Layout([None, "batch"], mesh)) for path, each in tree.items()},
        lm.load(made(kinds, seed=1), folder),
    ]
    for result in results:
        assert kinds == kinds_of(result)
        assert values_of(tree) == values_of(result)


@pytest.mark.every_case
@given(before=KINDS, after=KINDS)
def test_a_drawn_change_of_memory_is_a_difference(before, after):
    """`inspect`, its JSON, `diff` and the guard see each array that has another kind of memory, and no other."""
    one, other = lm.inspect(made(before)), lm.inspect(made(after))
    changed = [f"w{n}" for n, (a, b) in enumerate(zip(before, after, strict=True)) if a != b]
    assert changed == [change.path for change in one.diff(other) if change.what == "memory"]
    assert one.assignments == lm.Plan.from_json(one.to_json()).assignments
    guard = lm.guard(made(before), one, every=1)
    if changed:
        with pytest.raises(lm.PlanError, match="memory"):
            guard(made(after))
    else:
        guard(made(after))


@given(kinds=KINDS)
def test_host_memory_is_counted_apart(kinds):
    """The bytes of a device are those of its own memory, and the host's stand beside them."""
    plan, tree = lm.inspect(made(kinds)), made(kinds)
    shards = {path: array.addressable_shards[0].data.nbytes for path, array in tree.items()}
    on_device = [path for path, kind in zip(tree, kinds, strict=True) if kind == "device"]
    assert sum(shards[path] for path in on_device) == plan.device_bytes
    assert sum(shards.values()) == plan.device_bytes + plan.host_bytes


def test_a_module_and_the_state_of_an_optimizer_stay_in_host_memory(tmp_path):
    """So do Variables of flax.nnx, and slots that a program has moved there."""
    layout_map = lm.LayoutMap(lm.create_mesh(MESH), {".*kernel": (None, "model")})
    model = layout_map.build(lambda: nnx.Linear(8, 8, rngs=nnx.Rngs(0)), library="jax")
    optimizer = layout_map.build_optimizer(optax.adam(1e-3), model)
    for each in (model.kernel, optimizer.opt_state[0].mu["kernel"]):
        value = each.get_raw_value()
        each.set_raw_value(jax.device_put(value, value.sharding.with_memory_kind("pinned_host")))
    expected = kinds_of(nnx.state((model, optimizer)))
    assert {"device", "pinned_host"} == {*expected}
    lm.save(model, tmp_path, optimizer=optimizer)
    lm.load(model, tmp_path, optimizer=optimizer)
    layout_map.apply(model)
    assert expected == kinds_of(nnx.state((model, optimizer)))
    assert 2 == sum(bool(a.variable.memory) for a in lm.inspect(model, optimizer).assignments)
