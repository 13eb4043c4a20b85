"""`plan(on=...)`: the cost of a step in a plan, and what is said of a machine or a batch that cannot be."""

import random
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import keras
import numpy as np
import optax
import pytest
from flax import nnx

import layoutmap as lm
from layoutmap.adapters.jax import train_with
from layoutmap.core.errors import LayoutMapError, LayoutMapWarning
from layoutmap.cost.jax.memory import estimate_memory_upper_bound
from layoutmap.cost.machines import machine_named
from layoutmap.cost.model_steps import load_step_cost_counter

RULES = {"up.kernel": ("data", "model"), "down.kernel": ("model", "data")}
INPUTS = keras.Input(batch_shape=(512, 256))


def make():
    layers = [
        keras.layers.Dense(1024, use_bias=False, name="up"),
        keras.layers.Dense(256, use_bias=False, name="down"),
    ]
    return keras.Sequential([keras.Input((256,)), *layers])


def layout_map(rules=RULES, mesh="data=8,model=8"):
    return lm.LayoutMap(mesh, rules)


def plan_of(rules=RULES, inputs=INPUTS, verify=False, **options):
    return lm.plan(make, layout_map(rules), inputs=inputs, library="keras", verify=verify, **options)


def test_a_plan_has_the_cost_of_a_step():
    """What `step_cost` counts, with the slots of the optimizer, on the machine, over the dim that is named as usual."""
    counted = {"inputs": INPUTS, "optimizer": "adamw", "remat": "up$"}
    plan = plan_of(on="h100:64", **counted)
    alone = lm.step_cost(make, layout_map(), batch_dim="data", library="keras", **counted)

    cost = plan.cost
    assert (alone.collectives, alone.flops, alone.argument_bytes, alone.peak_bytes) == (
        cost.step.collectives,
        cost.step.flops,
        cost.step.argument_bytes,
        cost.step.peak_bytes,
    )
    assert {"float32"} == set(cost.step.flops)
    assert ("h100:64", "data") == (str(cost.machine), cost.batch_dim)
    assert cost.line.endswith("per device at the peak (an estimate by XLA's partitioner)")
    assert ("batches are sharded over data", *alone.notes) == cost.step.notes
    assert alone.notes[-1].endswith("(remat='up$')")
    assert {"optimizer.up.kernel.momentum", "optimizer.up.kernel.velocity"} <= set(plan)
    assert f"Cost: {cost.line}" in str(plan)
    assert cost.to_html() in plan._repr_html_()
    assert plan == lm.Plan.from_json(plan.to_json())
    assert "all-gather of 128.0 KiB over data" in plan.explain("up.kernel")


def test_a_step_that_needs_more_than_jax_takes_of_a_gpu_says_so():
    """Three quarters of the memory, by default; nothing is said of a TPU, nor of a memory that was given."""
    options = {"inputs": keras.Input(batch_shape=(2**27, 256)), "advise": False}
    notes = plan_of(on="h100:64", **options).cost.assumptions

    assert 1 == sum("XLA_PYTHON_CLIENT_MEM_FRACTION=0.77" in each for each in notes)
    for others in ({"on": "h200:64"}, {"on": "v5p:64"}, {"on": "h100:64", "device_memory": 79 * 2**30}):
        assert "MEM_FRACTION" not in str(plan_of(**options, **others).cost.assumptions)


@pytest.mark.parametrize("blocks", [1, 2, 5])
def test_what_is_held_at_the_peak_is_all_of_it(blocks):
    """Beside what the step is given; also where equal blocks are counted once. The verdict names the largest."""

    def deep():
        inner = [keras.layers.Dense(256, use_bias=False, name=f"block_{n}") for n in range(blocks)]
        return keras.Sequential([keras.Input((256,)), *inner])

    plan = lm.plan(deep, layout_map({}), inputs=INPUTS, library="keras", on="h100:64", verify=False)
    step = plan.cost.step

    held = sum(each.num_bytes for each in step.held)
    assert step.least_peak_bytes - step.argument_bytes == estimate_memory_upper_bound(held, step.collectives)
    assert {"activations", "gradients"} <= {each.kind for each in step.held}
    assert plan.verdict.needed_bytes >= sum(cause.num_bytes for cause in plan.verdict.because)


class Module(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(256, 1024, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(1024, 256, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.relu(self.up(x)))


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"optimizer": "adamx"}, "optimizer='adamx' is not an optimizer"),
        ({"inputs": jax.ShapeDtypeStruct((0, 256), "float32")}, "Module: the batch has no rows"),
    ],
)
def test_what_no_step_can_be_made_of_is_refused(options, what):
    """By name, wherever a step is counted."""
    given = {"inputs": jax.ShapeDtypeStruct((64, 256), "float32"), "library": "jax"} | options
    for count in (lm.plan, lm.step_cost, lm.lower_step):
        more = {"on": "h100"} if count is lm.plan else {}
        with pytest.raises(lm.ScopeError) as raised:
            count(lambda: Module(nnx.Rngs(0)), layout_map({}), **given, **more)
        assert what == raised.value.what


def test_weights_sharded_as_the_batch_want_a_rule_for_activations():
    """The compiler could gather the batch for such a weight: the plan of a cost says so, and is still with a rule."""
    fsdp = layout_map({"up.kernel": ("data", None), "down.kernel": (None, "data")})
    options = {"inputs": INPUTS, "library": "keras", "on": "h100"}

    def told(rules):
        return [p for p in lm.plan(make, rules, **options).problems if p.kind == "no activations"]

    (problem,) = told(fsdp)
    assert "up.kernel: sharded over data, as the batch is, and no rule is for activations" == problem.what
    assert (("layout", "(data, unsharded)"), ("such weights", "2")) == problem.facts
    assert [] == told(layout_map({"up.kernel": (None, "model")}))
    fsdp.activations["up|down"] = ("data", None)
    assert [] == told(fsdp)


def test_slots_that_a_model_does_not_carry_are_in_the_cost():
    """Of a module of flax.nnx and an optimizer of optax: two of the layout of each weight."""

    def arguments(optimizer):
        plan = lm.plan(
            lambda: Module(nnx.Rngs(0)),
            layout_map(),
            inputs=INPUTS,
            on="h100",
            optimizer=optimizer,
            library="jax",
        )
        return plan.cost.step.argument_bytes

    count = 4
    assert 2 * 2 * 4 * 256 * 1024 // 64 + count == arguments(optax.adam(1e-3)) - arguments(None)


def test_the_optimizer_that_is_given_takes_the_place_of_the_models():
    """Its slots are planned, and the loss that the model was compiled with stays; a misspelt one is an error."""

    def make():
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16, name="d")])
        model.compile("adam", "mean_squared_error")
        return model

    layout_map = lm.LayoutMap("data=2,model=2", rest="replicated")
    options = {"inputs": keras.Input(batch_shape=(4, 8)), "on": "h100", "batch_dim": "data"}
    own, given = (lm.plan(make, layout_map, **options, optimizer=each) for each in (None, "sgd"))

    slots = {
        f"optimizer.d.{weight}.{slot}" for weight in ("kernel", "bias") for slot in ("momentum", "velocity")
    }
    assert slots == {*own} - {*given}
    assert not any("no loss" in note for note in given.cost.step.notes)
    with pytest.raises(lm.ScopeError, match="optimizer='adamww'"):
        lm.plan(make, layout_map, **options, optimizer="adamww")


@pytest.mark.long  # XLA compiles in a process of its own; test_step_compiled.py compares all figures
def test_a_cost_that_is_verified_has_the_figures_of_xla_beside_its_own():
    """Of the step in the plan: the same bytes of arguments, and both are printed."""
    plan = plan_of({"up.kernel": (None, "model"), "down.kernel": ("model", None)}, on="h100", verify="cpu")

    assert plan.cost.step.argument_bytes == plan.cost.verified.argument_bytes
    assert "XLA for cpu" in str(plan.cost)
    assert plan.cost.line.endswith("(an estimate by XLA's partitioner, beside what XLA compiles for cpu)")


def test_a_machine_without_a_number_has_the_mesh_and_a_machine_may_be_given():
    """Another dim of the batch is another step."""
    plan = plan_of({}, on="v5p", batch_dim="model")
    given = plan_of({}, on=machine_named("v5p:64"), batch_dim="model")

    assert 64 == plan.cost.machine.num_devices
    assert plan.cost == given.cost
    assert {("model",)} == {c.dims for c in plan.cost.step.collectives}


@pytest.mark.parametrize(
    ("options", "what", "fix"),
    [
        (
            {"on": "h100:32"},
            "the machine has 32 devices, but the mesh has 64",
            "use h100:64, or a mesh of 32 devices",
        ),
        ({"on": "h100:128"}, "the machine has 128 devices, but the mesh has 64", "use h100:64"),
        ({"on": "h10"}, "there is no device 'h10'", "did you mean 'h100'?"),
        ({"on": 64}, "on=64 does not name a machine", 'write it as in on="h100:64"'),
        ({"on": "h100", "inputs": None}, "plan: on='h100' needs inputs", "pass inputs="),
        (
            {"on": "h100", "batch_dim": "rows"},
            "batch_dim 'rows' is not a dim of the mesh",
            "use one of 'data', 'model'",
        ),
        ({"batch_dim": "data"}, "batch_dim='data' has no effect without on=", "leave batch_dim out"),
        ({"verify": True}, "verify=True has no effect without on=", "leave verify out"),
        ({"remat": "up"}, "remat='up' has no effect without on=", "leave remat out"),
        ({"on": "h100", "remat": "("}, "remat='(' is not a regex for layers", "write remat='blocks'"),
    ],
)
def test_what_cannot_be_counted_is_refused_before_a_model_is_made(options, what, fix):
    """With what, why and the fix."""

    def never():
        raise AssertionError("the function was called")

    with pytest.raises(LayoutMapError) as caught:
        lm.plan(never, layout_map(), **{"inputs": INPUTS, "library": "keras", **options})
    assert what in caught.value.what
    assert caught.value.fix.startswith(fix)
    assert caught.value.why


def test_a_plan_with_errors_has_no_cost():
    """They come first, all of them."""
    plan = plan_of({"up.kernel": ("data", "model", None)}, on="h100")

    assert plan.errors
    assert plan.cost is None


def test_a_step_on_tensorflow_is_refused_with_advice():
    """The same rules can be planned on JAX."""
    with pytest.raises(LayoutMapError) as caught:
        load_step_cost_counter("tensorflow")
    assert "the cost of a step cannot be computed on tensorflow" == caught.value.what
    assert "plan the same rules with the model on JAX" in caught.value.fix


def test_planning_a_cost_changes_no_number_that_is_drawn_next():
    """As a plan without one."""

    def drawn(**options):
        random.seed(7)
        plan_of(inputs=SimpleNamespace(shape=(512, 256), dtype="float32"), **options)
        return random.random()

    assert drawn() == drawn(on="h100")


def test_a_compiler_that_is_installed_and_fails_leaves_an_estimate(monkeypatch, tmp_path):
    """Nobody has asked for it, so that it is a warning; `verify=False` does not try it."""
    rules = {"up.kernel": (None, "model"), "down.kernel": ("model", None)}
    for name in ("jax_plugins", "jax_cuda12_plugin"):  # there are some, and no plugin is in them
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.warns(LayoutMapWarning, match=r"(?s)compiler for .h100. failed.*estimate.*verify=False"):
        plan = plan_of(rules, on="h100", verify=None)
    assert "an estimate by XLA's partitioner" == plan.cost.known_by
    assert plan.cost == plan_of(rules, on="h100").cost


def test_a_padded_axis_costs_the_collectives_of_an_even_one():
    """A padded vocabulary is counted sharded: kinds, dims, and causes of its collectives are those of an even one."""

    def count(rows, uneven):
        def make():
            params = {"table": jnp.zeros((rows, 64)), "head": jnp.zeros((64, rows), jnp.bfloat16)}
            return train_with(
                params,
                forward=lambda p, x: p["table"][x] @ p["head"],
                loss=lambda o, t: optax.softmax_cross_entropy_with_integer_labels(o, t).mean(),
                optimizer=optax.adamw(1e-3),
            )

        rules = {"table": ("model", None), "head": (None, "model")}
        layout_map = lm.LayoutMap("batch=2,model=4", rules, uneven=uneven)
        given = (np.zeros((8, 16), "int32"),) * 2
        cost = lm.plan(make, layout_map, inputs=given, library="jax", on="h100:8", batch_dim="batch").cost
        return [(each.kind, each.dims, each.calls, each.cause) for each in cost.step.collectives]

    assert count(520, "error") == count(517, "pad")
