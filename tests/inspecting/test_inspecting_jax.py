"""`lm.inspect` on JAX: where a program's arrays are is read off them, whoever has put them there."""

import re

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax._src.sharding_impls import GSPMDSharding
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import layoutmap as lm
from layoutmap.adapters import get_adapter
from layoutmap.testing import models

MESH = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
THEIR = "their_{}".format


def put(array, *specs, mesh=MESH):
    return jax.device_put(array, NamedSharding(mesh, P(*specs)))


def by_columns(tree):
    """The tree with each array sharded along its last axis, where that divides."""
    return jax.tree.map(
        lambda x: put(x, *(None,) * (x.ndim - 1), "model") if x.ndim and x.shape[-1] % 4 == 0 else put(x),
        tree,
    )


def layouts(plan):
    return {path: str(a.layout) for path, a in plan.items()}


def problems(plan):
    return [(p.kind, p.severity, p.subject) for p in plan.problems]


@pytest.mark.parametrize("seed", [5, *(pytest.param(n, marks=pytest.mark.long) for n in range(100, 400))])
@pytest.mark.parametrize("library", ["nnx", "pytree"])
def test_arrays_that_jax_alone_has_placed_have_the_layouts_that_they_were_given(library, seed):
    """On a mesh of the program's own, with dims that this library has never heard of; drawn models and layouts."""
    case = models.draw(seed, library)
    rules = dict(case.map.rules)
    # JAX itself places arrays only where axes divide.
    plan = case.plan(lm.LayoutMap(case.map.mesh, rules, uneven="shrink", rest="replicated"))
    model = case.make_model()
    grid = np.array(jax.devices()[: plan.mesh.size]).reshape(plan.mesh.shape)
    theirs = jax.sharding.Mesh(grid, tuple(map(THEIR, plan.mesh.dim_names)))
    expected = {}
    for path, variable in get_adapter("jax").variables(model).items():
        dims = [plan[path].layout.list_mesh_dims(axis) for axis in range(plan[path].layout.rank)]
        specs = [tuple(map(THEIR, each)) or None for each in dims]
        variable.replace(put(variable.array, *specs, mesh=theirs))
        expected[path] = lm.Layout(
            specs, lm.Mesh(None, dict(zip(theirs.axis_names, plan.mesh.shape, strict=True)))
        )

    found = lm.inspect(model)

    assert set(expected) == {a.variable.path for a in found.assignments}
    assert [] == [
        (path, str(found[path].layout), str(layout))
        for path, layout in expected.items()
        if found[path].layout.sharding_specs != layout.sharding_specs
    ]
    assert {a.variable for a in plan.assignments} == {a.variable for a in found.assignments}
    assert plan.device_bytes == found.device_bytes
    assert found == lm.Plan.from_json(found.to_json())
    again = case.plan(lm.LayoutMap.from_model(model))
    assert {a.variable.path: a.layout for a in found.assignments} == {p: a.layout for p, a in again.items()}
    assert set() == {p.kind for p in again.problems} - {"global init", "no activations", "unsupported"}


def make_state():
    """A train state of flax whose parameters are in boxes no more."""
    layer = nn.Dense(16, name="up")
    params = layer.init(jax.random.key(0), jnp.ones((2, 8)))["params"]
    return TrainState.create(apply_fn=layer.apply, params={"up": params}, tx=optax.adam(1e-3))


def test_the_slots_of_a_train_state_are_those_of_its_parameters():
    """Also after a step that was compiled: `params` and `opt_state` are told apart, and a slot follows its weight."""
    state = make_state()
    state = by_columns(state.replace(step=jnp.asarray(0)))
    step = jax.jit(lambda state: state.apply_gradients(grads=state.params), donate_argnums=0)

    for plan in (lm.inspect(state), lm.inspect(step(state))):
        expected = {
            "step": "()",
            "params.up.bias": "(model,)",
            "params.up.kernel": "(unsharded, model)",
            "optimizer.0.count": "()",
            **{
                f"optimizer.params.up.{of}.0.{slot}": layout
                for slot in ("mu", "nu")
                for of, layout in (("bias", "(model,)"), ("kernel", "(unsharded, model)"))
            },
        }
        assert expected == layouts(plan)
        assert "params.up.kernel" == plan["optimizer.params.up.kernel.0.mu"].variable.parent
        assert re.search(r"optimizer\.\*\.0\.mu +2 .* as its weight", str(plan))


def test_the_state_of_an_optimizer_is_given_beside_the_parameters():
    """That of optax, and an optimizer of nnx; without it there are no slots."""
    params = by_columns({"up": {"kernel": jnp.ones((8, 16))}})
    model = nnx.Linear(8, 16, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)

    assert ["up.kernel"] == list(lm.inspect(params))
    assert "optimizer.up.kernel.0.mu" in lm.inspect(params, optax.adam(1e-3).init(params))
    found = lm.inspect(model, optimizer)
    assert {"optimizer.kernel.0.trace", "optimizer.step"} <= {*found}
    assert {"slot"} == {a.variable.kind for a in lm.inspect(optimizer).assignments}


@pytest.mark.parametrize(
    ("join", "at", "of"),
    [
        (
            lambda params, state: {"params": params, "opt": state, "step": jnp.zeros((), int)},
            "params.",
            "opt.",
        ),
        (lambda params, state: (params, state), "0.", "1."),
        (lambda params, state: {"run": [{"params": params}, {"opt": state}]}, "run.0.params.", "run.1.opt."),
    ],
    ids=["dict", "tuple", "nested"],
)
@pytest.mark.parametrize("tx", [optax.adamw(1e-3), optax.adafactor(1e-3, min_dim_size_to_factor=4)])
def test_the_state_of_an_optimizer_inside_of_a_pytree_is_slots(join, at, of, tx):
    """No gradients are counted for it, and each slot has its parameter."""
    params = {"blocks": [by_columns({"up": jnp.ones((8, 16))}) for _ in range(2)], "scale": jnp.ones(())}
    state = tx.init(params)
    apart, joined = lm.inspect(params, state), lm.inspect(join(params, state))

    kinds = {a.variable.path.removeprefix(at): a.variable.kind for a in joined.assignments}
    assert {"blocks.0.up", "blocks.1.up", "scale"} == {p for p, kind in kinds.items() if kind == "weight"}
    assert apart.memory.gradients == joined.memory.gradients
    assert apart.memory.slots == joined.memory.slots
    slots = [
        [(a.variable.parent, a.layout) for a in plan.assignments if a.variable.kind == "slot"]
        for plan in (apart, joined)
    ]
    assert slots[0] == [(parent and parent.removeprefix(at), layout) for parent, layout in slots[1]]
    assert any(path.endswith(f"{of}0.count") for path in joined)


def test_rules_read_off_a_pytree_with_the_state_of_an_optimizer_are_those_of_its_weights():
    params = {"blocks": [by_columns({"up": jnp.ones((8, 16))}) for _ in range(2)], "scale": jnp.ones(4)}
    rules = lm.LayoutMap.from_model({"params": params, "opt": optax.adamw(1e-3).init(params)})

    assert [("unsharded", "model")] == [tuple(each.sharding_specs) for each in rules.values()]


def test_slots_of_two_models_in_a_pytree_have_no_parent():
    """Parameters of equal names cannot be told apart, and parameters that an optimizer keeps are weights."""
    params = {"w": jnp.ones((8, 16))}
    state = optax.adam(1e-3).init(params)
    found = lm.inspect(
        {"a": params, "b": params, "opt": state, "kept": optax.LookaheadParams(params, params)}
    )

    kinds = {a.variable.path: (a.variable.kind, a.variable.parent) for a in found.assignments}
    assert ("slot", None) == kinds["optimizer.opt.0.mu.w"]
    assert ("weight", None) == kinds["kept.slow.w"]


def test_a_box_is_no_part_of_a_path():
    """Of linen, and of the states of nnx; a plan of the same function calls the variables the same."""

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            kernel_init = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "model"))
            return nn.Dense(16, kernel_init=kernel_init, name="up")(x)

    def make():
        return Model().init(jax.random.key(0), jnp.ones((2, 8)))

    planned = lm.plan(make, lm.LayoutMap("data=2,model=4", {r".*\.kernel": (None, "model")}), library="jax")
    linear = nnx.Linear(8, 16, rngs=nnx.Rngs(0))

    assert {"params.up.kernel", "params.up.bias"} == {*planned} == {*lm.inspect(by_columns(make()))}
    assert {"kernel", "bias"} == {*lm.inspect(linear)} == {*lm.inspect(nnx.state(linear))}
    assert {"weight", "bias"} == {*lm.inspect(eqx.nn.Linear(4, 8, key=jax.random.key(0)))}


def test_shapes_with_shardings_are_enough():
    """On a mesh of devices, and on an abstract one, which names none."""
    state = by_columns(make_state().replace(step=jnp.asarray(0)))
    abstract = AbstractMesh((256, 4), ("data", "model"))

    def on(mesh):
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, x.sharding.spec)),
            state,
        )

    assert lm.inspect(state) == lm.inspect(on(MESH))
    found = lm.inspect(on(abstract))
    assert lm.Mesh("data=256,model=4") == found.mesh
    assert layouts(lm.inspect(state)) == layouts(found)


def test_a_sharding_without_names_is_named_only_if_a_mesh_says_the_same():
    """It is looked for on the meshes of the other arrays, and else told as it is."""
    named = put(jnp.ones((8, 16)), None, ("model", "data"))
    nameless = GSPMDSharding(tuple(MESH.devices.flat), named.sharding._to_xla_hlo_sharding(2))
    array = jax.device_put(jnp.ones((8, 16)), nameless)

    assert {"a": "(unsharded, (model, data))", "b": "(model,)"} == layouts(
        lm.inspect({"a": array, "b": put(jnp.ones(8), "model")})
    )
    alone = lm.inspect({"a": array})
    assert {} == layouts(alone)
    assert [("no layout", "warning", "a")] == problems(alone)
    assert "which names no mesh dims" in alone.problems[0].what


def test_a_pending_sum_is_no_layout():
    """An array of which each device has a summand is named as that, and `fetch_layout` refuses it."""
    explicit = jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(explicit):
        left, right = (
            put(jnp.ones((8, 16)), None, "x", mesh=explicit),
            put(jnp.ones((16, 8)), "x", mesh=explicit),
        )
        dims = (((1,), (0,)), ((), ()))
        summands = jax.jit(lambda a, b: jax.lax.dot_general(a, b, dims, out_sharding=P(unreduced={"x"})))(
            left, right
        )

    plan = lm.inspect({"sum": summands, "w": left})

    assert {"w": "(unsharded, x)"} == layouts(plan)
    assert "sum: each device has a summand of it: the sum over x is pending" == plan.problems[0].what
    with pytest.raises(lm.LayoutError, match="no layout"):
        lm.dtensor.fetch_layout(summands)


def test_what_is_on_no_mesh_is_said():
    """What JAX copies to where it is used counts as replicated; what the program has put on one device does not."""
    plan = lm.inspect(
        {
            "w": put(jnp.ones(8), "model"),
            "count": jnp.zeros(()),
            "table": np.ones(4, np.float32),
            "pinned": jax.device_put(jnp.ones(4), jax.devices()[3]),
        }
    )

    assert {"count": "()", "table": "(unsharded,)", "w": "(model,)"} == layouts(plan)
    assert [("no layout", "warning", "pinned"), ("plain", "note", "table")] == [
        each for each in problems(plan) if each[0] != "unused dim"
    ]
    assert "pinned: on CPU:3 alone" == plan.problems[0].what
    assert "note: table: an array of numpy, which JAX copies to where it is used" in str(plan)


def test_lint_reports_large_arrays_that_were_created_later():
    """A cache above 1 MiB on one device, beside arrays on a mesh, is a finding. A small one is not."""
    kernel = lm.dtensor.relayout(
        np.ones((8, 16), np.float32), lm.Layout([None, "model"], lm.create_mesh("model=8"))
    )
    caches = {"small": jnp.zeros((8, 16)), "large": jnp.zeros((512, 513))}
    findings = [
        p for p in lm.inspect({"kernel": kernel, "caches": caches}).lint().problems if p.kind == "plain"
    ]
    assert ["caches.large"] == [problem.subject for problem in findings]
    assert ("size", "1.0 MiB") in findings[0].facts


def test_a_model_on_one_device_has_a_plan_of_one():
    """Whole programs without a mesh are on one device, and nothing is wrong with that."""
    plan = lm.inspect(make_state())

    assert (lm.Mesh(["CPU:0"], "device=1"), ()) == (plan.mesh, plan.problems)


def test_an_array_on_the_one_device_of_a_mesh_is_replicated():
    """What optimizers make on the only device of a mesh, outside of it, is where it belongs."""
    layout_map = lm.LayoutMap("data=1", rest="replicated")
    model = layout_map.build(lambda: nnx.Linear(8, 16, rngs=nnx.Rngs(0)), library="jax")
    model.bias.set_raw_value(jax.device_put(jnp.zeros(16), jax.devices()[0]))
    plan = lm.inspect(model)

    assert ("(unsharded,)", []) == (
        layouts(plan)["bias"],
        [each for each in problems(plan) if "note" not in each],
    )


def test_several_meshes_are_said_each_with_its_part():
    """A mesh at a fixed place of the largest counts as a part of it; another one is named with its layouts."""
    devices = np.array(jax.devices())
    part = jax.sharding.Mesh(devices.reshape(2, 4)[:, 1], ("data",))
    other = jax.sharding.Mesh(devices[:4], ("stage",))
    arrays = {"a": put(jnp.ones((8, 8)), "data", "model"), "b": put(jnp.ones(8), "data", mesh=part)}
    plan = lm.inspect({**arrays, "c": put(jnp.ones(8), "stage", mesh=other)})

    assert {"a": "(data, model)", "b": "(data,)"} == layouts(plan)
    assert [("another mesh", "warning", "c"), ("another mesh", "note", "b")] == problems(plan)
    assert {"layout": "(stage,)", "its mesh": "stage=4"}.items() <= dict(plan.problems[0].facts).items()
    assert "the plan treats this array as replicated over model" == plan.problems[1].why


def test_a_mesh_without_devices_that_was_used_first_changes_nothing():
    """Arrays are on the first equal mesh, which may be that of a map, and parts and nameless shardings are found."""
    first = lm.dtensor.relayout(
        np.ones((8, 4), np.float32), lm.Layout(["rows", "columns"], lm.Mesh(None, "rows=4,columns=2"))
    )
    grid = np.array(jax.devices()).reshape(4, 2)
    mesh, part = jax.sharding.Mesh(grid, ("rows", "columns")), jax.sharding.Mesh(grid[:, 1], ("rows",))
    named = put(jnp.ones((8, 16)), "rows", mesh=mesh)
    nameless = GSPMDSharding(tuple(grid.flat), named.sharding._to_xla_hlo_sharding(2))
    arrays = {
        "a": first,
        "b": put(jnp.ones(8), "rows", mesh=part),
        "c": jax.device_put(jnp.ones((8, 16)), nameless),
    }
    expected = {"a": "(rows, columns)", "b": "(rows,)", "c": "(rows, unsharded)"}
    assert expected == layouts(lm.inspect(arrays))


def test_a_mesh_whose_names_no_mesh_here_can_have_is_said():
    """JAX takes any text for an axis; a mesh dim is no `a|b`."""
    odd = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("a|b",))
    plan = lm.inspect({"w": put(jnp.ones(8), "a|b", mesh=odd)})

    assert [("no layout", "warning", "w")] == problems(plan)
    assert "a mesh that layoutmap cannot express" in plan.problems[0].what


def test_a_model_of_ours_has_the_plan_of_its_scope():
    """Its rules, notes and problems; an array that is elsewhere now is told."""
    layout_map = lm.LayoutMap(
        lm.create_mesh("data=2,model=4"), {r".*kernel": (None, "model"), "nothing": ("model",)}
    )
    with pytest.warns(lm.LayoutMapWarning):
        model = layout_map.build(lambda: nnx.Linear(8, 16, rngs=nnx.Rngs(0)), library="jax")
    planned = lm.plan(lambda: nnx.Linear(8, 16, rngs=nnx.Rngs(0)), layout_map, library="jax")
    found = lm.inspect(model)

    assert planned.assignments == found.assignments
    assert {*problems(planned)} <= {*problems(found)}
    model.kernel.set_raw_value(jax.device_put(model.kernel.get_raw_value(), NamedSharding(MESH, P("data"))))
    moved = lm.inspect(model)
    assert "(data, unsharded)" == str(moved["kernel"].layout)
    assert {"layout in the scope": "(unsharded, model)", "layout now": "(data, unsharded)"} == dict(
        next(p for p in moved.problems if p.kind == "moved").facts
    )


def test_a_plan_that_was_read_off_is_a_plan():
    """Text, pages, JSON, lint, diff and memory; `explain` says whether another map agrees."""
    params = by_columns({"up": {"kernel": jnp.ones((8, 16))}, "norm": {"scale": jnp.ones(6)}})
    plan = lm.inspect(params, batch_dim="data")
    rows = lm.LayoutMap("data=2,model=4", {r"up\.kernel": ("model", None), r"norm": (None,)})

    assert () == plan.problems == lm.Plan.from_json(plan.to_json()).problems
    assert "up.kernel" in plan.to_html()
    assert "up.kernel" in plan._repr_html_()
    assert () == plan.lint("data").problems
    moved = lm.inspect({**params, "up": {"kernel": put(jnp.ones((8, 16)), "data")}})
    assert "up.kernel  layout  (unsharded, model) -> (data, unsharded)" in str(plan.diff(moved))
    kernel, scale = plan.explain("up.kernel", rows), plan.explain("norm.scale", rows)
    assert re.search(r"the map says  rule 1 .*: \(model, unsharded\)\n +another layout", kernel)
    assert re.search(r"the map says  rule 2 .*: \(unsharded,\)\n +the same", scale)
    assert "it keeps its layout" in plan.explain("up.kernel")


def test_what_rules_cannot_say_is_told_when_they_are_read_off():
    """Slots that lie otherwise than their weights, and arrays without a layout; a plan from JSON has rules, too."""
    params = by_columns({"up": {"kernel": jnp.ones((8, 16))}})
    state = optax.sgd(0.1, momentum=0.9).init(params)
    elsewhere = jax.tree.map(lambda x: put(x, "data"), state)
    pinned = {**params, "pinned": jax.device_put(jnp.ones(4), jax.devices()[3])}

    plain = lm.LayoutMap.from_model(params, state)
    assert plain == lm.LayoutMap.from_model(lm.Plan.from_json(lm.inspect(params).to_json()))
    assert {r"(.*\.)?up\.kernel$": "(unsharded, model)"} == {r.pattern: str(r.layout) for r in plain.rules}
    with pytest.warns(lm.LayoutMapWarning, match="as its weight it would be in"):
        assert plain == lm.LayoutMap.from_model(params, elsewhere)
    with pytest.warns(lm.LayoutMapWarning, match="on CPU:3 alone"):
        assert plain == lm.LayoutMap.from_model(pinned)


def test_a_replica_that_has_drifted_is_named():
    """One value changed on one device, of a replicated array and of one that half of the devices share."""
    values = np.arange(32, dtype=np.float32).reshape(4, 8)

    def changed(*specs, on=None):
        sharding = NamedSharding(MESH, P(*specs))
        pieces = []
        for device, index in sharding.addressable_devices_indices_map(values.shape).items():
            piece = values[index].copy()
            piece[0, 0] += device.id == on
            pieces.append(jax.device_put(piece, device))
        return jax.make_array_from_single_device_arrays(values.shape, sharding, pieces)

    alike = {"whole": changed(), "columns": changed(None, "model"), "all": changed("data", "model", on=3)}
    assert [] == [p for p in lm.inspect(alike, across=True).problems if p.severity == "error"]

    plan = lm.inspect({**alike, "whole": changed(on=5), "columns": changed(None, "model", on=2)}, across=True)
    assert [("drifted", "error", "columns"), ("drifted", "error", "whole")] == problems(plan)[:2]
    columns, whole = (dict(p.facts) for p in plan.errors)
    assert ["model=2", "CPU:2", "CPU:6"] == list(columns.values())
    assert ["all of it", "CPU:0, CPU:1, CPU:2, CPU:3, CPU:4, CPU:6, CPU:7", "CPU:5"] == list(whole.values())
    assert "whole: its replicas have drifted apart" in str(plan)


def test_nothing_is_made_or_moved():
    """No array is made, and none is replaced."""
    state = by_columns(make_state().replace(step=jnp.asarray(0)))
    before, number = jax.tree.leaves(state), len(jax.live_arrays())

    lm.inspect(state)

    assert number == len(jax.live_arrays())
    assert all(one is other for one, other in zip(before, jax.tree.leaves(state), strict=True))


def test_what_is_no_model_is_refused():
    """And a mesh dim that there is not."""
    with pytest.raises(lm.ScopeError, match="is not a model"):
        lm.inspect(object())
    with pytest.raises(lm.ScopeError, match="batch_dim 'nowhere'"):
        lm.inspect(by_columns({"w": jnp.ones(8)}), batch_dim="nowhere")


def test_a_guard_looks_at_the_first_step_and_every_third():
    """A layout that changes is told at the next comparison, with the step and the change."""
    params = by_columns({"up": {"kernel": jnp.ones((8, 16))}})
    moved = {"up": {"kernel": put(jnp.ones((8, 16)), "data")}}
    guarded = lm.guard(params, every=3)

    for tree in (params, moved, moved):
        guarded(jax.tree.map(lambda x: x + 1, tree))
    with pytest.raises(
        lm.PlanError, match=r"at step 3\n +changes +up\.kernel  layout  \(unsharded, model\) -> \(data"
    ):
        guarded(moved)
    with pytest.raises(lm.PlanError, match="at step 0"):
        lm.guard(moved, lm.inspect(params))(moved)
    with pytest.raises(lm.ScopeError, match="every=0"):
        lm.guard(params, every=0)


def test_a_guard_takes_up_what_only_the_first_step_makes():
    """Slots that the plan does not know yet are no change, and from there on they may not move."""
    params = by_columns({"up": {"kernel": jnp.ones((8, 16))}})
    state = optax.sgd(0.1, momentum=0.9).init(params)
    guarded = lm.guard(params, lm.inspect(params), state, every=1)

    guarded()
    with pytest.raises(lm.PlanError, match=r"optimizer\.up\.kernel\.0\.trace  layout"):
        guarded(params, jax.tree.map(lambda x: put(x, "data"), state))


def test_a_guard_tells_of_replicas_that_drift():
    """Where one device has stepped on alone."""
    sharding = NamedSharding(MESH, P())
    pieces = [jax.device_put(jnp.ones(4) + (device.id == 6), device) for device in sharding.device_set]

    with pytest.raises(lm.PlanError, match="drifted apart") as caught:
        lm.guard({"w": jax.make_array_from_single_device_arrays((4,), sharding, pieces)})()
    assert ["w"] == [p.subject for p in caught.value.problems]
