"""What Keras's layers do with their weights, and lint of real models: keras-hub's own map for Llama among them."""

import itertools
import re

import hub_models
import keras
import pytest
from axis_roles import assert_right, random
from cases import few

import layoutmap as lm
from layoutmap.adapters.keras.roles import find_weight_axis_roles
from layoutmap.scope.plan import make_plan

PROCESSES = ("jax",)
ROWS = 3
# T5 of keras-hub 0.32 passes masks to its attention, which takes none.
pytestmark = [
    pytest.mark.every_case,
    pytest.mark.filterwarnings("ignore:Layer '.*_attention' .* was passed an input with a mask:UserWarning"),
]


LAYERS = {
    "Dense": (lambda: keras.layers.Dense(5), (ROWS, 4)),
    "EinsumDense to heads": (
        lambda: keras.layers.EinsumDense("abc,cde->abde", (None, 2, 3), bias_axes="de"),
        (ROWS, 2, 4),
    ),
    "EinsumDense from heads": (
        lambda: keras.layers.EinsumDense("abcd,cde->abe", (None, 5), bias_axes="e"),
        (ROWS, 2, 3, 2),
    ),
    "EinsumDense, heads first": (
        lambda: keras.layers.EinsumDense("btd,ndh->btnh", (None, 2, 3), bias_axes="h"),
        (ROWS, 2, 4),
    ),
    "EinsumDense with an ellipsis": (
        lambda: keras.layers.EinsumDense("...x,xy->...y", (5,), bias_axes="y"),
        (ROWS, 2, 4),
    ),
    "Conv1D": (lambda: keras.layers.Conv1D(5, 2), (ROWS, 4, 3)),
    "Conv2D": (lambda: keras.layers.Conv2D(5, 2), (ROWS, 4, 4, 3)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_axes_do_what_their_roles_say(name):
    """Slices along an axis that is put out fill slices of the output; those along one that is summed over add up."""
    make, shape = LAYERS[name]
    layer, inputs = make(), random(shape)
    layer(inputs)
    used, variables = find_weight_axis_roles([layer], {}), {"kernel": layer.kernel, "bias": layer.bias}
    roles = {"kernel": used[id(layer._kernel)].roles, "bias": used[id(layer.bias)].roles}

    def output(**weights):
        for key, value in weights.items():
            variables[key].assign(value)
        return layer(inputs)

    assert_right(roles, {key: random(each.shape) for key, each in variables.items()}, output)
    assert "" not in roles["bias"]


def test_tables_have_rows():
    """Of a plain embedding, and both tables of a reversible one."""
    plain, both = keras.layers.Embedding(8, 4), keras.layers.ReversibleEmbedding(8, 4, tie_weights=False)
    plain.build(), both.build((2,))
    used = find_weight_axis_roles([plain, both], {})

    assert ("rows", "out.0") == used[id(plain._embeddings)].roles == used[id(both._embeddings)].roles
    assert ("in.0", "rows") == used[id(both.reverse_embeddings)].roles


def keras_hubs_own(first=None):
    """The map that keras-hub ships with Llama's backbone, and rules that come before its own."""
    devices = keras.distribution.DeviceMesh((2, 4), ("data", "model"), keras.distribution.list_devices())
    shipped = hub_models.hub.Llama3Backbone.get_layout_map(devices, data_parallel_dim_name="data")
    layout_map = lm.LayoutMap("data=2,model=4", first)
    layout_map.update(lm.LayoutMap.from_keras(shipped, layout_map.mesh))
    return layout_map


def test_the_two_faults_of_keras_hubs_map_for_llama_are_found():
    """Heads over the dim of the batch, and a table that no rule matches; with both fixed nothing is left."""

    def make():
        return hub_models.make("llama")

    shipped = lm.plan(make, keras_hubs_own()).lint()
    fixed = keras_hubs_own(
        {
            r".*\.(query|key|value)_dense\.kernel": ("data", "model", None),
            r".*\.reverse_embeddings": ("data", "model"),
        }
    )

    assert "data" == shipped.batch_dim
    assert [
        ("swapped", "llama3_backbone.transformer_layer_0.self_attention_layer.query_dense.kernel"),
        ("swapped", "llama3_backbone.transformer_layer_1.self_attention_layer.query_dense.kernel"),
        ("replicated table", "llama3_backbone.token_embedding.reverse_embeddings"),
    ] == [(p.kind, p.subject) for p in shipped.problems]
    assert "change rule 2 to ('data', 'model', None)" in shipped.problems[0].fix
    (left,) = lm.plan(make, fixed).lint().problems
    assert "shadowed rule" == left.kind  # Keras's own, for which one of the fixes stands now


# What may as well be sharded along the other axis: tables, what makes logits, and experts that are one array.
EITHER = r"embeddings|relative_attention_bias|logits|predictions|expert_feedforward"


@pytest.mark.parametrize("name", few(hub_models.FAMILIES, "llama"))
def test_a_familys_rules_are_passed_and_each_other_order_of_a_kernels_specs_is_found(name):
    """A sharded along another axis that divides is a valid layout: the plan has no problem, and lint reports it."""
    config = hub_models.TINY[name] | {"num_layers": 1}
    if name == "gemma":  # its gates are half as wide as it says, and should not be as wide as the model
        config |= {"intermediate_dim": 128}
    layout_map = hub_models.rules(name)
    both = lm.plan(lambda: hub_models.make(name, config), hub_models.rules(name, fsdp_dim="batch"))
    variables = [a.variable for a in both.assignments]
    right = make_plan(variables, layout_map)
    assert () == both.problems == both.lint().problems == right.problems == right.lint().problems

    told, missed = 0, []
    for rule in layout_map.rules:
        if re.search(EITHER, rule.pattern):
            continue
        specs = rule.layout.sharding_specs
        for other in set(itertools.permutations(specs)) - {specs}:
            changed = lm.LayoutMap(layout_map.mesh)
            for each in layout_map.rules:
                changed.add(each.pattern, other if each == rule else each.layout, uneven=each.uneven)
            plan = make_plan(variables, changed)
            if not plan.errors + plan.warnings:
                told += bool(plan.lint())
                missed += [] if plan.lint() else [(rule.pattern, other)]

    assert [] == missed
    assert told >= 3
