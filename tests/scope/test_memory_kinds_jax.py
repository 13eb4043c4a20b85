"""Arrays in host memory stay there, and plans, differences and guards tell them from those of the devices."""

from types import SimpleNamespace

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


def make_map(memory, axis_types="auto"):
    """Rules that give every kernel a layout in a kind of memory."""
    layout_map = lm.LayoutMap(lm.create_mesh(MESH, axis_types=axis_types), rest="replicated")
    layout_map.add(".*kernel", (None, "model") if axis_types == "auto" else ("batch", None), memory=memory)
    return layout_map


class Net(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.up, self.down = nnx.Linear(8, 16, rngs=rngs), nnx.Linear(16, 8, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.relu(self.up(x)))


def train(tx, memory, slots=None, axis_types="auto", steps=3):
    """Losses and state after some steps, and the state before them."""
    layout_map = make_map(memory, axis_types)
    model = layout_map.build(Net, library="jax")
    optimizer = layout_map.build_optimizer(tx, model, memory=slots)

    @lm.jit_step(donate_argnums=(0, 1), batch_dim="batch" if axis_types == "auto" else None)
    def step(model, optimizer, x):
        loss, gradients = nnx.value_and_grad(lambda net: (net(x) ** 2).mean())(model)
        optimizer.update(model, gradients)
        return loss

    before = nnx.state((model, optimizer))
    kinds = kinds_of(before)
    rng = np.random.default_rng(0)
    losses = [float(step(model, optimizer, rng.normal(size=(8, 8)).astype("float32"))) for _ in range(steps)]
    after = nnx.state((model, optimizer))
    assert kinds == kinds_of(after)
    assert 1 == step.num_programs == step._programs.by_signature.popitem()[1].compiled._cache_size()
    return kinds, losses, values_of(after)


@pytest.mark.parametrize("axis_types", ["auto", "explicit"])
@pytest.mark.parametrize("tx", [optax.sgd(0.1, momentum=0.9), optax.adamw(0.01)], ids=["sgd", "adamw"])
def test_steps_with_host_memory_have_the_bits_of_device_memory(tx, axis_types):
    """A step computes on devices, and returns each weight and slot to its memory, with one compilation."""
    _, losses, values = train(tx, None, axis_types=axis_types)
    for memory, slots in (("pinned_host", None), ("unpinned_host", None), (None, "pinned_host")):
        kinds, *rest = train(tx, memory, slots, axis_types)
        assert (memory or slots) in kinds
        assert [losses, values] == rest


def test_a_step_takes_donated_host_memory():
    """The results reuse it, also in a step of plain arrays."""
    tree = make_map("pinned_host").apply({"kernel": np.ones((8, 8), np.float32)})
    step = lm.jit_step(
        lambda tree, x: jax.tree.map(lambda w: w - 0.1 * x.T @ (x @ w), tree), donate_argnums=0
    )
    new = step(tree, np.ones((4, 8), np.float32))
    assert tree["kernel"].is_deleted()
    assert ["pinned_host"] == kinds_of(new)


def test_rules_in_host_memory_are_planned_built_and_saved(tmp_path):
    """A plan, and one that is read from a file, count them apart; the model as built is as planned."""
    layout_map = make_map("pinned_host")
    plan = lm.plan(Net, layout_map, library="jax")
    assert (2 * 8 * 16 * 4 // 4, (16 + 8) * 4) == (plan.host_bytes, plan.device_bytes)
    assert (plan.host_bytes, plan.device_bytes) == (
        plan.memory.host,
        plan.memory.total - plan.memory.gradients,
    )
    assert plan == lm.Plan.from_json(plan.to_json())
    assert layout_map == lm.LayoutMap.from_yaml(layout_map.to_yaml())
    model = layout_map.build(Net, library="jax")
    assert not plan.diff(lm.inspect(model))
    lm.save(model, tmp_path)
    assert kinds_of(nnx.state(model)) == kinds_of(
        nnx.state(lm.load(Net, tmp_path, layout_map=layout_map, library="jax"))
    )
    back = make_map("device")
    assert [("memory", "pinned_host", "device")] * 2 == [
        (each.what, each.before, each.after) for each in plan.diff(lm.plan(Net, back, library="jax"))
    ]
    assert {"device"} == {*kinds_of(nnx.state(back.apply(model)))}


def test_slots_are_in_the_memory_of_their_weights_or_in_one_of_their_own():
    """Counts stay on devices. A wrong word is an error with the right ones."""
    params = make_map("pinned_host").apply({"kernel": np.ones((8, 8), np.float32)})
    layout_map = make_map(None)
    for memory, expected in ((None, "pinned_host"), ("device", "device"), ("unpinned_host", "unpinned_host")):
        plan = layout_map.plan_optimizer(optax.adam(0.1), params, memory=memory)
        state = layout_map.build_optimizer(optax.adam(0.1), params, memory=memory)
        assert ["device", expected, expected] == kinds_of(state)
        assert expected == (plan["optimizer.kernel.0.mu"].layout.host_memory or "device")
        moved = layout_map.apply_optimizer(
            optax.adam(0.1).init({"kernel": np.ones((8, 8), np.float32)}), params, memory=memory
        )
        assert kinds_of(state) == kinds_of(moved)
    with pytest.raises(lm.LayoutError, match=r'memory=\'host\'(?s:.*)"pinned_host" or "unpinned_host"'):
        layout_map.build_optimizer(optax.adam(0.1), params, memory="host")


def test_a_memory_that_the_devices_do_not_have_is_refused(monkeypatch):
    """GPUs have no unpinned host memory. The error lists the kinds of memory that there are."""
    device = SimpleNamespace(
        platform="gpu", addressable_memories=lambda: [SimpleNamespace(kind="pinned_host")]
    )
    monkeypatch.setattr(jax, "local_devices", lambda **_: [device])
    layout = lm.Layout(["model"], lm.create_mesh("model=2,other=4"), memory="unpinned_host")
    with pytest.raises(lm.EngineError, match=r'have no unpinned_host memory(?s:.*)use memory="pinned_host"'):
        lm.dtensor.relayout(np.ones(8, np.float32), layout)


def test_relayout_moves_arrays_between_memories():
    """`memory="device"` and the layout of an array on devices move it out of the host, also while JAX traces."""
    mesh = lm.create_mesh(MESH)
    host, device = (lm.Layout(["batch", None], mesh, memory=memory) for memory in ("pinned_host", "device"))
    array = lm.dtensor.relayout(np.ones((8, 8), np.float32), host)
    on_device = lm.dtensor.relayout(array, device)
    for moved, expected in (
        (lm.dtensor.relayout(array, lm.Layout([None, "model"], mesh)), "pinned_host"),
        (lm.dtensor.relayout_like(array, on_device), "device"),
        (lm.dtensor.relayout_like(on_device, array), "pinned_host"),
        (jax.jit(lambda x: lm.dtensor.relayout(x, device) + 1)(array), "device"),
        (jax.jit(lambda x: lm.dtensor.relayout(x + 1, host))(on_device), "pinned_host"),
    ):
        assert expected == moved.sharding.memory_kind
