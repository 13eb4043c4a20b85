"""A known family gets the layouts of its preset, and any other model those of the roles of its layers."""

from __future__ import annotations

import re
from functools import partial

import hub_models
import keras
import pytest
from cases import few

import layoutmap as lm
from layoutmap.core.variables import Kind

PROCESSES = ("jax",)
# keras-hub 0.32 has T5 pass masks to its attention, which takes none.
pytestmark = pytest.mark.filterwarnings(
    "ignore:Layer '.*_attention' .* was passed an input with a mask:UserWarning"
)
MESH = "batch=2,model=4"


@pytest.mark.parametrize("name", few(hub_models.FAMILIES, "llama"))
def test_a_known_family_gets_the_layouts_of_its_preset(name: str):
    """Rules of the preset that match nothing are left out."""
    suggested = lm.suggest(lambda: hub_models.make(name), MESH)
    plans = [lm.plan(lambda: hub_models.make(name), each) for each in (hub_models.rules(name), suggested)]
    expected, actual = [{a.variable.path: a.layout for a in plan.assignments} for plan in plans]

    assert expected == actual
    assert () == (*plans[1].problems, *plans[1].lint())
    assert all(rule.reason.endswith(f"(preset {name})") for rule in suggested.rules)
    later = [re.findall(r"before (.*), as the first", rule.reason) for rule in suggested.rules]
    assert {pattern for found in later for each in found for pattern in each.split(" and ")} <= {*suggested}


def test_a_preset_whose_heads_do_not_divide_leaves_them_replicated():
    """The rule shrinks, and its reason states the number of heads."""
    suggested = lm.suggest(lambda: hub_models.make("gpt2"), "batch=1,model=8")
    plan = lm.plan(lambda: hub_models.make("gpt2"), suggested)
    queries = [rule for rule in suggested.rules if "query" in rule.pattern]

    assert () == plan.errors
    assert ["replicated: model=8 does not divide axis 1 of 4 (preset gpt2)"] == [
        rule.reason for rule in queries if rule.layout.rank == 3
    ]
    assert {"shrink"} == {rule.uneven for rule in queries}


def make_attention(width: int = 1024):
    inputs = keras.Input((8, width))
    attention = keras.layers.MultiHeadAttention(8, width // 8, name="attention")
    return keras.Model(inputs, attention(inputs, inputs))


def test_biases_of_heads_are_sharded_as_their_kernels_are():
    """The biases of queries, keys, and values have an axis of heads and few bytes."""
    suggested = lm.suggest(make_attention, MESH)
    plan = lm.plan(make_attention, suggested)
    specs = {path: plan[path].layout.sharding_specs for path in plan if path.endswith("bias")}

    assert {
        **{f"attention.{name}_dense.bias": ("model", "unsharded") for name in ("query", "key", "value")},
        "attention.output_dense.bias": ("unsharded",),
    } == specs
    assert () == (*plan.problems, *plan.lint())


def make_lazily():
    return keras.Sequential([keras.layers.Dense(64), keras.layers.Dense(8)])


def test_a_model_without_weights_needs_inputs():
    """Without them nothing is suggested for some layers, so no map is returned."""
    with pytest.raises(lm.PlanError, match=r"suggest: Sequential: 3 layers have no weights yet"):
        lm.suggest(make_lazily, MESH)
    assert 3 == len(lm.suggest(make_lazily, MESH, inputs=keras.KerasTensor((8, 16))))


class Scale(keras.layers.Layer):
    """A layer that creates its weight at once, as rotary embeddings of keras-hub do."""

    def __init__(self):
        super().__init__()
        self.factor = self.add_weight(shape=(64,))

    def build(self, shape):
        super().build(shape)

    def call(self, inputs):
        return inputs * self.factor


class UnusedScale(keras.layers.Layer):
    def __init__(self):
        super().__init__()
        self.dense, self.scale = keras.layers.Dense(64), Scale()

    def build(self, shape):
        self.dense.build(shape)

    def call(self, inputs):
        return self.dense(inputs)


def test_a_layer_with_weights_need_not_be_called():
    """A layer that has its weights lacks none, though no call reaches it."""
    suggested = lm.suggest(lambda: keras.Sequential([keras.Input((64,)), UnusedScale()]), MESH)
    assert len(suggested)


class Heads(keras.layers.Layer):
    """Attention with one head and own names. The output layer is made first."""

    def __init__(self):
        super().__init__(name="heads")
        self.join, self.ask, self.hint, self.val = (keras.layers.Dense(64) for _ in range(4))

    def call(self, x):
        query, key, value = self.ask(x), self.hint(x), self.val(x)
        weights = keras.ops.softmax(keras.ops.einsum("bqd,bkd->bqk", query, key))
        return self.join(keras.ops.einsum("bqk,bkd->bqd", weights, value))


def test_calls_show_which_kernel_takes_the_outputs_of_others():
    """Three kernels read one tensor, so the one called after them takes their outputs. Its plan as a file, too."""
    inputs = keras.Input((8, 64))
    kernels = {name: f"heads.{name}.kernel" for name in ("ask", "hint", "val", "join")}
    plans = [lm.plan(Heads, lm.suggest(Heads, MESH, inputs=inputs), inputs=inputs)]
    plans.append(
        lm.plan(Heads, lm.LayoutMap(MESH, {".*kernel": (None, "model")}, rest="replicated"), inputs=inputs)
    )
    plans.append(lm.Plan.from_json(plans[1].to_json()))

    assert ("model", "unsharded") == plans[0][kernels["join"]].layout.sharding_specs
    assert {("unsharded", "model")} == {
        plans[0][kernels[name]].layout.sharding_specs for name in ("ask", "hint", "val")
    }
    assert [[], [kernels["join"]], [kernels["join"]]] == [[p.subject for p in plan.lint()] for plan in plans]


class Reversed(keras.layers.Layer):
    """Two layers with own names, of which the second is made first."""

    def __init__(self):
        super().__init__(name="reversed")
        self.later, self.first = keras.layers.Dense(64), keras.layers.Dense(256)

    def call(self, x):
        return self.later(self.first(x))


class Built(Reversed):
    """The same, which builds its layers before it calls them."""

    def build(self, shape):
        self.first.build(shape)
        self.later.build((None, 256))


@pytest.mark.parametrize("make_layer", [Reversed, Built])
def test_calls_show_which_of_two_kernels_is_the_first(make_layer):
    """They decide, and not the order in which the layers were made."""
    inputs = keras.Input((64,))
    rules = lm.suggest(make_layer, MESH, inputs=inputs)
    plan = lm.plan(make_layer, rules, inputs=inputs)

    assert [("unsharded", "model"), ("model", "unsharded")] == [
        plan[f"reversed.{name}.kernel"].layout.sharding_specs for name in ("first", "later")
    ]
    assert [] == [*plan.lint(), *(rule for rule in rules.rules if "order" in rule.reason)]


def make_frozen_model(is_frozen: bool):
    inputs = keras.Input((64,))
    up, down = keras.layers.Dense(256, name="up"), keras.layers.Dense(64, name="down")
    outputs = keras.layers.BatchNormalization(name="norm")(down(up(inputs)))
    inner = keras.Model(inputs, outputs, name="inner")
    if is_frozen:
        up.enable_lora(4)
        inner.trainable = False
    return keras.Sequential([keras.Input((64,)), inner, keras.layers.Dense(8, name="head")])


def test_frozen_weights_have_the_roles_of_trained_ones():
    """They are weights without gradients, and no moving statistics. LoRA freezes a kernel, too."""
    suggested = [lm.suggest(partial(make_frozen_model, is_frozen), MESH) for is_frozen in (False, True)]
    rules = [{rule.pattern: (rule.layout, rule.reason) for rule in each.rules} for each in suggested]
    plan = lm.plan(lambda: make_frozen_model(True), suggested[1])

    assert rules[0] == rules[1]
    assert [True, False] == [
        plan[f"inner.{name}"].variable.kind is Kind.WEIGHT for name in ("norm.gamma", "norm.moving_mean")
    ]
    assert {"head.kernel", "head.bias"} == {
        a.variable.path for a in plan.assignments if a.variable.is_trained
    }
