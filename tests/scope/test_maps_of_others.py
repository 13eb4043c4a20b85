"""Layout maps of Keras, flax and JAX, taken over and given back: compared with what those libraries do themselves."""

from __future__ import annotations

import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import keras
import keras_hub
import pytest
from flax import nnx
from flax.core import spmd
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import layoutmap as lm
from layoutmap.core.errors import MeshError, PlanError, RuleError
from layoutmap.core.variables import Kind, VariableSpec
from layoutmap.rules import zoo
from layoutmap.scope.plan import make_plan
from layoutmap.testing import models, strategies

MESH = lm.create_mesh("batch=2,model=4")
DIMS = ("batch", "model")


def device_mesh(shape=(2, 4), dims=DIMS):
    return keras.distribution.DeviceMesh(
        shape, dims, keras.distribution.list_devices()[: shape[0] * shape[1]]
    )


def keras_map(rules):
    made = keras.distribution.LayoutMap(device_mesh())
    for key, axes in rules.items():
        made[key] = axes
    return made


def axes_of(layout):
    return tuple(None if spec == "unsharded" else spec for spec in layout.sharding_specs)


KEYS = st.sampled_from(
    [
        "a/kernel",
        "a",
        ".*",
        ".*kernel",
        "a.*",
        "b_1/kernel",
        "b.*",
        "(?i)A/KERNEL",
        "a|b/kernel",
        ".*/b(_1)?/kernel",
    ]
)
AXES = st.sampled_from([("model",), (None, "model"), ("batch", "model"), (None, None), ()])
NAMES = st.sampled_from(["a/kernel", "a/b/kernel", "b/kernel", "b_1/kernel", "a/b_1/kernel", "a", "kernel"])


@given(st.dictionaries(KEYS, AXES, max_size=4), st.lists(NAMES, unique=True, min_size=1))
def test_a_map_of_keras_means_what_it_means_to_keras(rules, names):
    """For each name the layout that `keras_map[variable.path]` returns; where that raises, the plan has an error."""
    theirs = keras_map(rules)
    variables = [
        VariableSpec(f"object.{i}", (8, 8), "float32", name=f"keras:{n}") for i, n in enumerate(names)
    ]
    plan = make_plan(variables, lm.LayoutMap.from_keras(theirs))
    for assignment in plan.assignments:
        name = assignment.variable.name.removeprefix("keras:")
        wrong = [p.kind for p in plan.errors if p.subject == assignment.variable.path]
        try:
            axes = theirs[name].axes if theirs[name] else ()
        except ValueError:
            assert ["contradiction"] == wrong
        else:
            assert ((*axes, *[None] * (2 - len(axes))), []) == (axes_of(assignment.layout), wrong)


def unnamed(hidden=8):
    """Layers that were given no names: Keras numbers them by the process, and the map's keys count on it."""
    inputs = keras.Input((8,))
    outputs = keras.layers.Dense(hidden)(inputs)
    for _ in range(2):
        outputs = keras.layers.Dense(hidden)(outputs)
    return keras.Model(inputs, outputs)


def trained():
    """Such a model with the slots of an optimizer."""
    model = unnamed()
    model.compile(optimizer="adam", loss="mse")
    model.optimizer.build(model.trainable_variables)
    return model


NUMBERED = {"dense/kernel": (None, "model"), "dense_1/kernel": ("model", None), "dense_[12]/bias": ("model",)}


def placed_by_keras(theirs, make):
    """The axes of each variable where Keras itself lays them out, in a process that has made nothing before."""
    keras.backend.clear_session()
    with keras.distribution.ModelParallel(layout_map=theirs, batch_dim_name="batch").scope():
        return placed(make())


def placed(model):
    slots = model.optimizer.variables if getattr(model, "optimizer", None) else []
    return {v.path: padded(v.value.sharding.spec, len(v.shape)) for v in [*model.weights, *slots]}


def padded(spec, rank):
    return (*spec, *[None] * (rank - len(spec)))


def test_numbers_of_names_are_those_of_a_process_that_has_made_nothing_before():
    """However much was built before, so that a plan and the model built by it have the same layouts, those of Keras."""
    theirs = keras_map(NUMBERED)
    expected = placed_by_keras(theirs, unnamed)
    layout_map = lm.LayoutMap.from_keras(theirs)
    layout_map.rest = "replicated"
    unnamed(16)
    plans = [lm.plan(unnamed, layout_map) for _ in range(2)]
    built = layout_map.build(unnamed, batch_dim="batch")

    assert {
        "dense/kernel": (None, "model"),
        "dense/bias": (None,),
        "dense_1/kernel": ("model", None),
        "dense_1/bias": ("model",),
        "dense_2/kernel": (None, None),
        "dense_2/bias": ("model",),
    } == expected
    assert [expected] * 2 == [by_name(plan) for plan in plans]
    assert list(expected.values()) == list(placed(built).values())
    assert ("keras:dense_2/bias",) == plans[1]["dense_2.bias"].variable.aliases


def by_name(plan):
    named = [a for a in plan.assignments if a.variable.name]
    return {a.variable.name.removeprefix("keras:"): axes_of(a.layout) for a in named}


def test_names_in_a_model_that_exists_are_as_they_are():
    """As `apply` finds them: nobody knows which were given."""
    keras.backend.clear_session()
    unnamed()
    layout_map = lm.LayoutMap.from_keras(keras_map({"dense_4/kernel": ("model", None)}))
    layout_map.rest = "replicated"
    model = layout_map.apply(unnamed())

    assert ["dense_4/kernel"] == [v.path for v in model.weights if v.value.sharding.spec == P("model", None)]


def test_a_weight_that_is_read_before_all_are_known_has_the_layout_of_its_name():
    """Its value is made by itself then."""
    layout_map = lm.LayoutMap.from_keras(
        keras_map({"early/kernel": (None, "model"), "early/bias": ("model",)})
    )
    with layout_map.scope(batch_dim="batch"):
        layer = keras.layers.Dense(8, name="early")
        layer.build((4,))
        early = layer.kernel.value.sharding.spec

    assert (P(None, "model"), P("model")) == (early, layer.bias.value.sharding.spec)


def test_the_map_of_keras_hub_for_llama_3_shows_its_hole():
    """Its second table of tokens has no rule: 2.1 GB on each device of an 8B model; a rule by object path closes it."""
    theirs = keras_hub.models.Llama3Backbone.get_layout_map(device_mesh())
    layout_map = lm.LayoutMap.from_keras(theirs)
    plan = lm.plan(zoo.find_model("llama3_8b").make, layout_map)
    holes = {p.subject: plan[p.subject].shard_bytes for p in plan.warnings if p.kind == "no rule"}
    path = "token_embedding.reverse_embeddings"

    assert () == plan.errors
    assert 2_101_346_304 == holes.pop(path)
    assert {"scale"} == {name.rpartition(".")[2] for name in holes}  # of norms
    assert (
        "every device holds all 2,101,346,304 bytes of it" in {p.subject: p.why for p in plan.warnings}[path]
    )
    shipped = {path: theirs[a.variable.name.removeprefix("keras:")] for path, a in plan.items()}
    assert {path: layout and layout.axes for path, layout in shipped.items()} == {
        path: None if path in {*holes, "token_embedding.reverse_embeddings"} else axes_of(a.layout)
        for path, a in plan.items()
    }

    layout_map[r".*\.reverse_embeddings$"] = ("batch", "model")
    closed = make_plan([a.variable for a in plan.assignments], layout_map)
    assert path not in {p.subject for p in closed.problems}
    assert plan.device_bytes - closed.device_bytes == 2_101_346_304 * 7 // 8


def test_the_mesh_is_that_of_the_map_or_the_one_given():
    """Devices and all; without either it is refused."""
    theirs = keras_map({"a": ("model",)})
    abstract = keras.distribution.LayoutMap(None)
    abstract["a"] = ("model",)

    assert lm.Mesh([f"CPU:{i}" for i in range(8)], "batch=2,model=4") == lm.LayoutMap.from_keras(theirs).mesh
    assert lm.Mesh(None, "model=8") == lm.LayoutMap.from_keras(theirs, "model=8").mesh
    assert lm.LayoutMap("model=8", {"keras:a": ("model",)}) == lm.LayoutMap.from_keras(abstract, "model=8")
    with pytest.raises(RuleError, match="from_keras: the map has no mesh"):
        lm.LayoutMap.from_keras(abstract)
    abstract["b"] = keras.distribution.TensorLayout(("model",), device_mesh())
    abstract["c"] = keras.distribution.TensorLayout(("model",), device_mesh((4, 2)))
    with pytest.raises(RuleError, match="from_keras: the layouts of the map are on 2 meshes"):
        lm.LayoutMap.from_keras(abstract)
    with pytest.raises(RuleError, match=r"rule 'keras:a'(.|\n)*the mesh has no dim 'model'"):
        lm.LayoutMap.from_keras(theirs, "x=8")


# -- and back to Keras


def test_keras_lays_a_model_out_as_the_plan_that_it_was_given_says():
    """Each weight, and each slot of its optimizer."""
    rules = {
        r"dense\.kernel": (None, "model"),
        r"dense_1\.kernel": ("model", "batch"),
        r".*\.bias": ("model",),
    }
    plan = lm.plan(trained, lm.LayoutMap(MESH, rules))
    expected = placed_by_keras(plan.to_keras(), trained)

    slots = {
        f"adam/{a.variable.path.removeprefix('optimizer.').replace('.', '_')}": axes_of(a.layout)
        for a in plan.assignments
        if a.variable.kind is Kind.SLOT
    }
    ours = by_name(plan) | slots  # and metrics
    assert expected == {name: ours[name] for name in expected}
    assert {"loss/total", "loss/count"} == ours.keys() - expected.keys()
    assert ("model", "batch") == slots["adam/dense_1_kernel_velocity"]


@given(st.dictionaries(KEYS, AXES, max_size=4), st.lists(NAMES, unique=True, min_size=1))
def test_a_map_goes_to_keras_and_back(rules, names):
    """From Keras to a plan to Keras and back are the same layouts for the same names."""
    variables = [
        VariableSpec(f"object.{i}", (8, 8), "float32", name=f"keras:{n}") for i, n in enumerate(names)
    ]
    plan = make_plan(variables, lm.LayoutMap.from_keras(keras_map(rules)))
    if plan.errors:
        with pytest.raises(PlanError):
            plan.to_keras()
        return
    theirs = plan.to_keras()

    assert {name: axes_of(a.layout) for name, a in zip(names, plan.assignments, strict=True)} == {
        name: theirs[name].axes for name in names
    }
    again = make_plan(variables, lm.LayoutMap.from_keras(theirs))
    assert [a.layout for a in plan.assignments] == [a.layout for a in again.assignments]


def test_what_keras_cannot_express_is_refused_by_name():
    """Axes over several dims, outputs of layers, names that are not unique, plans of no Keras model, other meshes."""

    def plan(rules=None, names=("a/kernel", "b/kernel"), mesh=MESH, **more):
        variables = [
            VariableSpec(f"v.{i}", (8, 8), "float32", name=f"keras:{n}" * bool(n))
            for i, n in enumerate(names)
        ]
        return make_plan(variables, lm.LayoutMap(mesh, rules, **more), layers=["block"])

    weight = VariableSpec("v", (8, 8), "float32", name="keras:v")
    slot = VariableSpec("s", (8,), "float32", Kind.SLOT, parent="v", axes=((0,),), parent_shape=(8, 8))
    cases = {
        make_plan(
            [weight, slot], lm.LayoutMap(MESH, {"v$": ("model", None)})
        ): "the layout (model,) of an optimizer's slot",
        plan(
            {".*": (("batch", "model"), None)}
        ): "the layout ((batch, model), unsharded) cannot be expressed",
        plan(activations={"block": ("batch",)}): "the layouts of 1 outputs of layers cannot be expressed",
        plan({"v.0": ("model", None)}, ("a", "a")): "two layouts for the name a: (model, unsharded) and",
        plan(names=("",)): "a variable that has no name in Keras cannot be expressed",
        lm.Plan.from_json(plan().to_json()): "a variable that has no name in Keras cannot be expressed",
    }
    for each, what in cases.items():
        with pytest.raises(PlanError) as refused:
            each.to_keras()
        assert f"to_keras: {what}" in refused.value.what
        assert refused.value.facts["where"]
        assert refused.value.why
        assert refused.value.fix
    with pytest.raises(
        MeshError,
        match="the DeviceMesh has different dims than the plan's mesh\n  plan        batch=2, model=4\n",
    ):
        plan().to_keras(device_mesh((4, 2)))
    with pytest.raises(MeshError, match="the plan's mesh has 512 devices, but Keras has 8"):
        plan(mesh=lm.Mesh(None, "model=512")).to_keras()
    assert device_mesh().shape == plan().to_keras(device_mesh()).device_mesh.shape


# -- flax


LOGICAL = st.lists(
    st.tuples(
        st.sampled_from(["embed", "mlp", "heads", "vocab"]),
        st.sampled_from(["batch", "model", None, ("batch", "model"), ("model",)]),
    ),
    max_size=6,
)
NAMES_OF_AXES = st.lists(st.sampled_from(["embed", "mlp", "heads", "vocab", None]), max_size=4)


@given(LOGICAL, st.lists(NAMES_OF_AXES, min_size=1, max_size=4))
@pytest.mark.filterwarnings("ignore:from_logical_axes. .* names of axes have no rule")
def test_logical_rules_mean_in_linen_what_they_mean_there(rules, arrays):
    """`flax.linen.logical_to_mesh_axes` is the same, and refuses the same."""
    axes = {f"v{i}": P(*names) for i, names in enumerate(arrays)}
    shapes = {path: (8,) * len(names) for path, names in axes.items()}

    def ours():
        layout_map = lm.LayoutMap.from_logical_axes(rules, axes, MESH, shapes)
        return {path: axes_of(layout_map[path]) for path in axes}

    try:
        theirs = {path: nn.logical_to_mesh_axes(names, rules) for path, names in axes.items()}
    except ValueError:
        with pytest.raises(RuleError, match="two axes have the name"):
            ours()
    else:
        assert theirs == {path: P(*specs) for path, specs in ours().items()}


@given(LOGICAL, NAMES_OF_AXES)
def test_logical_rules_mean_in_nnx_what_they_mean_there(rules, names):
    """`flax.core.spmd.apply_rules` is the same; what JAX then refuses is refused."""
    theirs = spmd.apply_rules(P(*names), tuple(rules))
    shapes = {"v": (8,) * len(names)}

    def ours():
        return lm.LayoutMap.from_logical_axes(rules, {"v": tuple(names)}, MESH, shapes, semantics="nnx")

    used = [dim for spec in theirs if spec for dim in ([spec] if isinstance(spec, str) else spec)]
    if len(set(used)) < len(used) or not set(used) <= set(DIMS):
        with pytest.raises(RuleError, match="is not allowed"):
            ours()
    else:
        assert theirs == P(*axes_of(ours()["v"]))


def laid_out_by_linen(names, rules, mesh):
    """The specs that flax's own function gives."""
    tree = {path: P(*each) for path, each in names.items()}
    return {path: s.spec for path, s in nn.logical_to_mesh_sharding(tree, mesh, rules).items()}


@given(strategies.plans())
def test_a_plan_goes_to_logical_rules_and_back(planned):
    """With names that are made, both libraries of flax and our own map have the layouts of the plan."""
    _, _, plan = planned
    if plan.errors:
        return
    try:
        names, rules = plan.to_logical_axis_rules()
    except PlanError:
        assert any(a.variable.kind is Kind.SLOT for a in plan.assignments)
        return
    layouts = {path: plan[path].layout for path in names}

    assert {p: P(*axes_of(layout)) for p, layout in layouts.items()} == {
        path: nn.logical_to_mesh_axes(each, rules) for path, each in names.items()
    }
    assert {p: P(*axes_of(layout)) for p, layout in layouts.items()} == {
        path: spmd.apply_rules(P(*each), tuple(rules)) for path, each in names.items()
    }
    for semantics in ("linen", "nnx"):
        back = lm.LayoutMap.from_logical_axes(rules, names, plan.mesh, plan, semantics=semantics)
        assert layouts == {path: back[path] for path in layouts}


@given(LOGICAL, st.lists(NAMES_OF_AXES, min_size=1, max_size=4))
@pytest.mark.filterwarnings("ignore:from_logical_axes. .* names of axes have no rule")
def test_a_plan_goes_to_rules_for_the_names_that_a_model_has(rules, arrays):
    """What rules of linen have given is given again by the rules that are found; where none are, two differ."""
    axes = {f"v{i}": tuple(names) for i, names in enumerate(arrays)}
    variables = [VariableSpec(path, (8,) * len(names), "float32") for path, names in axes.items()]
    try:
        layout_map = lm.LayoutMap.from_logical_axes(rules, axes, MESH, {v.path: v.shape for v in variables})
    except RuleError:
        return  # a name for two axes
    plan = make_plan(variables, layout_map)
    try:
        names, found = plan.to_logical_axis_rules(axes)
    except PlanError:
        # Only where a name has several rules are there dims to fall back on; a cycle of dims needs three names.
        assert len({name for name, _ in rules}) < len(rules) or len({n for n, d in rules if d}) > 2
        return

    assert axes == names
    mesh = jax.make_mesh((2, 4), DIMS, axis_types=(jax.sharding.AxisType.Auto,) * 2)
    assert plan.to_partition_specs() == laid_out_by_linen(names, found, mesh)


@pytest.mark.parametrize("library", ["nnx", "pytree"])
@pytest.mark.parametrize("seed", range(3))
def test_plans_of_drawn_models_go_to_logical_rules(library, seed):
    """By `flax.linen.logical_to_mesh_sharding`."""
    plan = models.draw(seed, library).plan()
    names, rules = plan.to_logical_axis_rules()
    mesh = jax.make_mesh(plan.mesh.shape, plan.mesh.dim_names)

    assert {path: plan.to_partition_specs()[path] for path in names} == laid_out_by_linen(names, rules, mesh)


def test_names_that_cannot_have_the_layouts_are_refused():
    """The variable and the name that differ; an order of rules is found where axes compete for a dim."""
    shapes = {"up": (8, 8), "down": (8, 8), "norm": (8,)}
    axes = {"up": ("embed", "mlp"), "down": ("mlp", "embed"), "norm": ("embed",)}

    def plan(**specs):
        variables = [VariableSpec(path, shapes[path], "float32") for path in specs]
        return make_plan(variables, lm.LayoutMap(MESH, specs))

    assert [("mlp", "model"), ("embed", "batch")] == sorted(
        plan(up=("batch", "model"), down=("model", "batch")).to_logical_axis_rules(axes)[1], reverse=True
    )
    competing = plan(up=(None, "model"), norm=("model",)).to_logical_axis_rules(axes)
    assert [("mlp", "model"), ("embed", "model")] == competing[1]
    with pytest.raises(PlanError, match=r"norm: the layout (.|\n)* 'embed' is sharded over") as refused:
        plan(up=("batch", "model"), norm=(None,)).to_logical_axis_rules(axes)
    assert "name its axes differently" in refused.value.fix
    with pytest.raises(PlanError, match="rules apply only to an axis with a name"):
        plan(norm=("model",)).to_logical_axis_rules({})


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        init = nn.initializers.lecun_normal()
        x = nn.Dense(16, name="up", kernel_init=nn.with_logical_partitioning(init, ("embed", "mlp")))(x)
        return nn.Dense(8, name="down", kernel_init=nn.with_logical_partitioning(init, ("mlp", "embed")))(x)


RULES = [("mlp", "model"), ("embed", "batch")]


def test_a_module_of_linen_and_a_module_of_nnx_are_taken_as_flax_returns_their_axes():
    """`nn.get_partition_spec` and the shapes of the same tree; the state of nnx, too."""
    boxed = jax.eval_shape(Block().init, jax.random.key(0), jnp.ones((2, 8)))
    with jax.set_mesh(jax.make_mesh((2, 4), DIMS, axis_types=(jax.sharding.AxisType.Auto,) * 2)):
        init = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("embed", "mlp"))
        with spmd.logical_axis_rules(RULES):
            state = nnx.state(nnx.eval_shape(lambda: nnx.Linear(8, 16, kernel_init=init, rngs=nnx.Rngs(0))))
    linen = lm.LayoutMap.from_logical_axes(RULES, nn.get_partition_spec(boxed), MESH, nn.meta.unbox(boxed))
    ours = lm.LayoutMap.from_logical_axes(RULES, nnx.get_partition_spec(state), MESH, state, semantics="nnx")

    assert {
        r"params\.up\.bias$": (None,),
        r"params\.up\.kernel$": ("batch", "model"),
        r"params\.down\.bias$": (None,),
        r"params\.down\.kernel$": ("model", "batch"),
    } == {pattern: axes_of(layout) for pattern, layout in linen.items()}
    assert {"bias$": (None,), "kernel$": ("batch", "model")} == {
        p: axes_of(layout) for p, layout in ours.items()
    }
    assert {"bias": P(None), "kernel": P("batch", "model")} == nnx.to_pure_dict(
        ours.to_partition_specs(state)
    )
    tree = linen.to_partition_specs(nn.meta.unbox(boxed))
    assert tree == nn.meta.unbox(linen.to_partition_specs(boxed))
    assert P("model", "batch") == tree["params"]["down"]["kernel"]


# -- JAX


TREE = {
    "blocks": [
        {"kernel": jnp.ones((8, 8)), "bias": jnp.ones(8)},
        {"kernel": jnp.ones((8, 8)), "bias": jnp.ones(8)},
    ],
    "scale": jax.ShapeDtypeStruct((), "float32"),
    "key": jax.random.key(0),
    "activation": jax.nn.relu,
}


@given(strategies.plans())
def test_a_plan_goes_to_specs_and_back(planned):
    """From any map that fits to PartitionSpecs by path, and back to a map, are the same layouts for the same paths.

    A PartitionSpec has no memory kind, so these layouts are in device memory.
    """
    _, _, plan = planned
    if plan.errors:
        return
    back = lm.LayoutMap.from_partition_specs(plan.to_partition_specs(), plan.mesh, plan)
    in_device_memory = {path: lm.Layout(a.layout.sharding_specs, plan.mesh) for path, a in plan.items()}

    assert in_device_memory == {path: back[path] for path in plan}


@given(
    st.sampled_from([("batch", "model"), (None, ("model", "batch")), (None, None), ("model", None)]),
    st.sampled_from([None, "batch", ("batch", "model")]),
)
def test_a_map_goes_to_a_tree_and_back(kernel, bias):
    """By PartitionSpecs and by NamedShardings, with the same layouts for the same paths; other leaves have none."""
    layout_map = lm.LayoutMap(MESH, {r"blocks\.\d\.kernel": kernel, "blocks.*bias": (bias,)})
    for tree in layout_map.to_partition_specs(TREE), layout_map.to_named_shardings(TREE):
        assert tree["activation"] is None
        arrays = {name: leaf for name, leaf in TREE.items() if name != "activation"}
        back = lm.LayoutMap.from_partition_specs({name: tree[name] for name in arrays}, MESH, arrays)
        paths = [f"blocks.{i}.{name}" for i in range(2) for name in ("kernel", "bias")]

        assert {path: layout_map[path] for path in paths} == {path: back[path] for path in paths}
        assert back["scale"].sharding_specs == back["key"].sharding_specs == ()


def test_arrays_are_where_their_shardings_say():
    """`jax.device_put` takes the tree as it is."""
    layout_map = lm.LayoutMap(MESH, {r"blocks\.\d+\.kernel": (None, "model"), "blocks.*bias": ("batch",)})
    params = {"blocks": TREE["blocks"]}
    found = jax.device_put(params, layout_map.to_named_shardings(params))

    assert {(None, "model"): (8, 2), ("batch",): (4,)} == {
        tuple(leaf.sharding.spec): leaf.addressable_shards[0].data.shape for leaf in jax.tree.leaves(found)
    }


def test_the_specs_of_a_plan_are_those_of_its_variables():
    """By path, or in the place of a tree's arrays; a path that the plan does not have is named."""
    plan = lm.plan(unnamed, lm.LayoutMap(MESH, {r".*\.kernel": (None, "model"), r".*\.bias": (None,)}))
    tree = {"dense": {"kernel": jnp.ones((8, 8)), "bias": jnp.ones(8)}}

    assert {path: P(*axes_of(a.layout)) for path, a in plan.items()} == plan.to_partition_specs()
    assert {"dense": {"kernel": P(None, "model"), "bias": P(None)}} == plan.to_partition_specs(tree)
    assert plan.to_partition_specs() == {path: s.spec for path, s in plan.to_named_shardings().items()}
    with pytest.raises(KeyError, match=r"no variable 'dense\.kernal'; near misses: dense\.kernel"):
        plan.to_partition_specs({"dense": {"kernal": jnp.ones(8)}})


def test_a_layout_that_does_not_fit_has_no_spec():
    """As in a plan: the error of the planner, with the path."""
    with pytest.raises(
        PlanError, match=r"blocks\.0\.bias: a layout of rank 2 does not fit a tensor of rank 1"
    ):
        lm.LayoutMap(MESH, {".*": (None, "model")}).to_partition_specs({"blocks": [{"bias": jnp.ones(8)}]})


def refused_specs():
    mesh = jax.make_mesh((2, 4), DIMS, axis_types=(jax.sharding.AxisType.Auto,) * 2)
    other = jax.make_mesh((8,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
    return {
        "entry UNCONSTRAINED of axis 0": P(P.UNCONSTRAINED),
        "unreduced=['batch']": P(unreduced={"batch"}),
        "memory kind 'pinned_host'": NamedSharding(mesh, P(), memory_kind="pinned_host"),
        "is on another mesh": NamedSharding(other, P("model")),
        "is not a PartitionSpec": jax.sharding.SingleDeviceSharding(jax.devices()[0]),
    }


def test_what_a_layout_cannot_express_is_refused_by_name():
    """What, where, why and the fix, for each of them."""
    for what, spec in refused_specs().items():
        with pytest.raises(RuleError, match=re.escape(what)) as refused:
            lm.LayoutMap.from_partition_specs({"d": {"kernel": spec}}, MESH, {"d.kernel": (8, 8)})
        assert "d.kernel" in refused.value.what
        assert refused.value.why
        assert refused.value.fix
