"""`lm.inspect` of Keras models that Keras's own distributions have laid out, on JAX."""

import functools

import keras
import keras_hub
import numpy as np
import pytest
from cases import few

import layoutmap as lm

PROCESSES = ("jax",)


@pytest.fixture
def distribution():
    """Sets a distribution of Keras, for one test."""
    before = keras.distribution.distribution()
    yield keras.distribution.set_distribution
    keras.distribution.set_distribution(before)


def make():
    model = keras.Sequential(
        [
            keras.Input((8,)),
            keras.layers.Dense(16, name="up"),
            keras.layers.BatchNormalization(name="norm"),
            keras.layers.Dense(4, name="down"),
        ],
        name="model",
    )
    model.compile("adam", "mse")
    return model


def layouts(plan):
    return {path: str(a.layout) for path, a in plan.items() if a.variable.kind != "metric"}


def test_layouts_of_model_parallel_are_read(distribution):
    """Weights, moving averages and slots, after a step of `fit`; the rules that are read off build the same here."""
    mesh = keras.distribution.DeviceMesh((2, 4), ("data", "model"), keras.distribution.list_devices())
    theirs = keras.distribution.LayoutMap(mesh)
    theirs[".*up/kernel"], theirs[".*up/bias"], theirs[".*down/kernel"] = (
        (None, "model"),
        ("model",),
        ("model", None),
    )
    distribution(keras.distribution.ModelParallel(layout_map=theirs, batch_dim_name="data"))
    model = make()
    model.fit(np.ones((8, 8)), np.ones((8, 4)), verbose=0)
    plan = lm.inspect(model, batch_dim="data")
    expected = {
        "up.kernel": "(unsharded, model)",
        "up.bias": "(model,)",
        "down.kernel": "(model, unsharded)",
        "down.bias": "(unsharded,)",
        **{f"norm.{name}": "(unsharded,)" for name in ("gamma", "beta", "moving_mean", "moving_variance")},
    }

    assert "data=2, model=4" == str(plan.mesh)
    assert expected == {
        path: each for path, each in layouts(plan).items() if not path.startswith("optimizer.")
    }
    assert {path: each for path, each in expected.items() if "moving" not in path} == {
        a.variable.parent: str(a.layout) for a in plan.assignments if a.variable.path.endswith(".momentum")
    }
    assert () == plan.errors
    assert [] == [p for p in lm.inspect(model, across=True).problems if p.kind == "drifted"]
    layout_map = lm.LayoutMap.from_model(model)
    distribution(None)
    built = layout_map.build(make, library="keras")
    assert expected == {
        path: layout for path, layout in layouts(lm.inspect(built)).items() if path in expected
    }


def test_data_parallel_replicates_all_over_the_batch(distribution):
    """Each device holds all of each variable, and the plan says that a dim shards no weight."""
    distribution(keras.distribution.DataParallel(devices=keras.distribution.list_devices()))
    plan = lm.inspect(make())

    assert ["batch=8"] == [str(plan.mesh)]
    assert {True} == {a.layout.is_fully_replicated() for a in plan.assignments}
    assert ["unused dim"] == [p.kind for p in plan.problems]
    assert plan.global_bytes == plan.device_bytes


def test_a_plain_model_is_on_one_device():
    """Its paths are those of a model that is built here."""
    plan = lm.inspect(make())
    planned = lm.plan(make, lm.LayoutMap("data=2", rest="replicated"), library="keras")

    assert "device=1" == str(plan.mesh)
    assert {path for path in planned if not path.startswith("optimizer.")} <= {*plan}
    assert () == plan.problems


def test_a_guard_is_a_callback_of_fit(distribution):
    """A run that stays as it was goes on; one that another plan was agreed on for ends at its first batch."""
    distribution(keras.distribution.DataParallel(devices=keras.distribution.list_devices()))
    model, x, y = make(), np.ones((16, 8)), np.ones((16, 4))
    guarded = lm.guard(model, every=1)
    model.fit(x, y, batch_size=8, epochs=2, verbose=0, callbacks=[guarded.callback()])

    assert {"batch=8"} == {str(guarded.plan.mesh)}
    planned = lm.plan(make, lm.LayoutMap("batch=8", rest="replicated"), library="keras")
    model.fit(x, y, batch_size=8, verbose=0, callbacks=[lm.guard(model, planned).callback()])
    other = lm.plan(
        make, lm.LayoutMap("batch=8", {"up.kernel": (None, "batch")}, rest="replicated"), library="keras"
    )
    with pytest.raises(
        lm.PlanError, match=r"up\.kernel +layout +\(unsharded, batch\) -> \(unsharded, unsharded\)"
    ):
        model.fit(x, y, batch_size=8, verbose=0, callbacks=[lm.guard(model, other).callback()])


def test_a_mesh_dim_of_one_device_is_as_planned_after_a_step():
    """It parts nothing, and XLA leaves it out of the layouts of a step's results: the weights have not moved."""
    mesh = lm.create_mesh("data=1,model=8")
    rules = {r"up\.kernel": (None, "model"), r"(up|down)\.bias": ("data",)}
    model = lm.LayoutMap(mesh, rules, rest="replicated").build(make)
    planned = layouts(lm.inspect(model))
    model.fit(np.ones((8, 8)), np.ones((8, 4)), verbose=0)
    found = lm.inspect(model)

    assert planned == {path: layouts(found)[path] for path in planned}
    assert [] == [problem for problem in found.problems if problem.kind == "moved"]


def test_a_plan_from_before_the_first_step_is_one_to_guard_by(distribution):
    """The optimizer makes its slots in the first step, which is no change; the guard knows them from there on."""
    distribution(keras.distribution.DataParallel(devices=keras.distribution.list_devices()))
    model = make()
    guarded = lm.guard(model, lm.inspect(model), every=1)
    model.fit(np.ones((16, 8)), np.ones((16, 4)), batch_size=8, verbose=0, callbacks=[guarded.callback()])

    assert "optimizer.up.kernel.momentum" in guarded.plan


SIZES = {"vocabulary_size": 64, "num_layers": 2, "num_query_heads": 4, "num_key_value_heads": 4}
SIZES |= {"hidden_dim": 32, "intermediate_dim": 64}
SHIPPED = {
    "LlamaBackbone": SIZES,
    "Llama3Backbone": SIZES,
    "Qwen2Backbone": SIZES,
    "GemmaBackbone": SIZES | {"head_dim": 8},
}


@pytest.mark.filterwarnings("ignore::layoutmap.LayoutMapWarning")  # keras-hub shards tables along both axes
@pytest.mark.parametrize("family", few(SHIPPED, "LlamaBackbone"))
def test_rules_are_read_off_the_maps_that_keras_hub_ships(family, distribution):
    """A backbone that `get_layout_map` has laid out: the rules that are read off it plan and build the same."""
    kind = getattr(keras_hub.models, family)
    make_backbone = functools.partial(kind, **SHIPPED[family], name="backbone")
    mesh = keras.distribution.DeviceMesh((2, 4), ("batch", "model"), keras.distribution.list_devices())
    theirs = kind.get_layout_map(mesh)
    distribution(keras.distribution.ModelParallel(layout_map=theirs, batch_dim_name="batch"))
    plan = lm.inspect(make_backbone())
    layout_map = lm.LayoutMap.from_model(make_backbone())
    distribution(None)
    built = layout_map.build(make_backbone, batch_dim="batch")

    assert any(a.layout.num_shards(0) > 1 for a in plan.values() if a.layout.rank)
    assert not lm.plan(make_backbone, layout_map).diff(plan)
    assert layouts(plan) == layouts(lm.inspect(built))
