"""Rules that begin with `keras:` are for what Keras calls a variable, and mean what they mean to Keras."""

from __future__ import annotations

import re

import pytest

import layoutmap as lm
from layoutmap.core.errors import RuleError
from layoutmap.core.variables import Kind, VariableSpec
from layoutmap.scope.plan import make_plan

MESH = lm.Mesh(None, "batch=2,model=4")
ROWS, COLUMNS = ("model", None), (None, "model")


def variable(path, name, shape=(8, 16), **rest):
    return VariableSpec(path, shape, "float32", name=f"keras:{name}", **rest)


UP, DOWN = variable("mlp.up.kernel", "mlp/dense/kernel"), variable("mlp.down.kernel", "mlp/dense_1/kernel")


def planned(rules, *variables):
    return make_plan(variables or (UP, DOWN), lm.LayoutMap(MESH, rules))


def specs(plan):
    return {path: assignment.layout.sharding_specs for path, assignment in plan.items()}


def test_a_rule_is_for_one_sort_of_paths():
    """Those over Keras's names see no object path, and others see no name."""
    layout_map = lm.LayoutMap(MESH, {"keras:.*dense.*": ROWS, ".*dense.*": COLUMNS, ".*": (None, None)})

    assert [1] == [rule.number for rule in layout_map.matching_rules("keras:mlp/dense/kernel")]
    assert [2, 3] == [rule.number for rule in layout_map.matching_rules("mlp.dense.kernel")]
    assert layout_map["keras:mlp/up/kernel"] is None


@pytest.mark.parametrize(
    "pattern",
    [
        "mlp/dense",
        "mlp/dense|x",
        "x|mlp/dense/kernel",
        "mlp/dense/kernel$",
        "(?i)MLP/.*KERNEL",
        "(?x) mlp/dense/kernel  # the first",
        "(?xi)(?s) MLP/dense/. ernel",
        r"(mlp)/dense/kerne(l)(?<=\2)",
        "mlp/dense/kernel\n",
    ],
)
def test_all_of_the_name_must_match(pattern):
    """As `re.fullmatch` has it, whatever the regex is made of."""
    found = lm.LayoutMap(MESH, {f"keras:{pattern}": ROWS})["keras:mlp/dense/kernel"]

    assert bool(re.fullmatch(pattern, "mlp/dense/kernel")) == (found is not None)


def test_an_exact_name_comes_first_and_then_the_order():
    """Among Keras's rules the name itself wins; among both sorts of rules the first one."""
    assert {"mlp.up.kernel": ("unsharded", "model"), "mlp.down.kernel": ("model", "unsharded")} == specs(
        planned({"keras:.*kernel": ROWS, "keras:mlp/dense/kernel": COLUMNS})
    )
    both = {r".*\.up\.kernel": COLUMNS, "keras:.*kernel": ROWS, r".*\.down\.kernel": COLUMNS}
    plan = planned(both)
    assert {"mlp.up.kernel": ("unsharded", "model"), "mlp.down.kernel": ("model", "unsharded")} == specs(plan)
    assert ["shadowed rule"] == [problem.kind for problem in plan.problems]


def test_two_regexes_that_match_one_name_are_an_error():
    """It says which, and what to type; a rule that is the path itself settles it."""
    rules = {"keras:.*kernel": ROWS, "keras:mlp.*": COLUMNS}
    (problem,) = planned(rules, UP).errors

    assert """\
mlp.up.kernel: 2 of Keras's rules match its name
  rule 1  keras:.*kernel  (model, unsharded)
  rule 2  keras:mlp.*     (unsharded, model)
  why                     Keras refuses a name that several keys of a layout map match
  fix                     make one of them more specific, or add a rule that is the path itself: \
layout_map['mlp.up.kernel']""" == str(problem)
    assert () == planned(rules | {"mlp.up.kernel": ROWS}, UP).errors


def test_axes_that_are_left_out_are_unsharded():
    """Keras passes them to JAX as they are; in a rule over object paths it is an error."""
    plan = planned({"keras:.*kernel": ("model",)}, UP)

    assert ({"mlp.up.kernel": ("model", "unsharded")}, ()) == (specs(plan), plan.problems)
    assert ["rank"] == [p.kind for p in planned({".*": ("model",)}, UP).errors]


def test_the_plan_shows_the_name_and_finds_the_variable_by_it():
    """It is an alias where a rule asks for it, and nothing otherwise."""
    plan = planned({"keras:.*kernel": ROWS})

    assert UP.path == plan["keras:mlp/dense/kernel"].variable.path
    assert "also called  keras:mlp/dense/kernel" in plan.explain("mlp.up.kernel")
    assert lm.Plan.from_json(plan.to_json()) == plan
    assert () == planned({".*kernel": ROWS})["mlp.up.kernel"].variable.aliases
    assert planned({"keras:.*kernel": ROWS}, *(a.variable for a in plan.assignments)) == plan


def test_a_rule_without_a_name_says_which_come_near():
    """And those without a rule say which rules do."""
    plan = planned({"keras:mlp/dens/kernel": ROWS}, UP)

    assert [
        ("unused rule", (("near misses", "keras:mlp/dense/kernel"),)),
        ("no rule", (("shape", "(8, 16)"), ("near misses", "keras:mlp/dens/kernel"))),
    ] == [(p.kind, p.facts) for p in plan.problems]
    assert "a keras: rule matches whole names, and none of Keras's 1 name" == plan.problems[0].why


def test_the_plan_says_which_rules_are_for_outputs_to_keras():
    """It looks outputs of layers up in the same map, by names that end in output."""
    plan = planned({"keras:.*dense.*": ROWS})

    assert [("layer output", "note", (("outputs", "keras:mlp/dense/output, keras:mlp/dense_1/output"),))] == [
        (p.kind, p.severity, p.facts) for p in plan.problems
    ]


def test_a_derived_variable_follows_where_the_rule_is_its_parents():
    """A rule over names that matches both is the parent's."""
    scale = variable(
        "mlp.up.kernel_scale",
        "mlp/dense/kernel_scale",
        (16,),
        parent="mlp.up.kernel",
        parent_shape=(8, 16),
        axes=((1,),),
    )

    assert ("model",) == specs(planned({"keras:mlp/dense/.*": COLUMNS}, UP, scale))["mlp.up.kernel_scale"]
    assert ("unsharded",) == specs(
        planned({"keras:mlp/dense/kernel": COLUMNS, "keras:.*scale": (None,)}, UP, scale)
    )["mlp.up.kernel_scale"]


def test_states_have_rules_and_slots_follow():
    """Names of slots are looked up by nobody."""
    slot = variable("optimizer.mlp.up.kernel.m", "adam/m", kind=Kind.SLOT, parent="mlp.up.kernel")

    assert ("model", "unsharded") == specs(planned({"keras:mlp.*": ROWS}, UP, slot))[slot.path]


def test_they_are_written_to_a_rules_file():
    """And read from it, and copied."""
    layout_map = lm.LayoutMap(MESH, {"keras:.*/kernel": ROWS, r".*\.up": COLUMNS})

    assert lm.LayoutMap.from_yaml(layout_map.to_yaml()) == layout_map
    assert lm.LayoutMap(MESH, layout_map) == layout_map


def test_a_key_that_is_no_regex_is_refused_with_what_to_write():
    """As for any other rule."""
    with pytest.raises(RuleError, match=r"rule 'keras:\*kernel' is not a regex") as refused:
        lm.LayoutMap(MESH, {"keras:*kernel": ROWS})
    assert "in a regex, .* matches anything: '.*kernel'" == refused.value.fix


@pytest.mark.parametrize("given", [{}, None, "a map", lm.LayoutMap(MESH)])
def test_what_is_no_map_of_keras_is_refused(given):
    """By what it is."""
    with pytest.raises(RuleError, match=r"from_keras: .* is not a Keras layout map") as refused:
        lm.LayoutMap.from_keras(given)
    assert "Llama3Backbone.get_layout_map(device_mesh)" in refused.value.fix
