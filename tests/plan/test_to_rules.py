"""The rules that are read off a plan give its layouts, and are few."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from layoutmap.core.errors import RuleError
from layoutmap.core.layout import Layout
from layoutmap.core.mesh import Mesh
from layoutmap.core.variables import Assignment, Kind, VariableSpec
from layoutmap.plan.planner import make_plan_table
from layoutmap.plan.table import PlanTable
from layoutmap.plan.to_rules import derive_rules

MESH = Mesh("data=2,model=4")
PARTS = st.sampled_from(
    ["h", "0", "1", "12", "up", "up_proj", "gate_proj", "a+b", "kernel", "kernel_scale", "bias"]
)
SPECS = st.tuples(st.sampled_from([None, "data"]), st.sampled_from([None, "model"]))


def plan_of(found, **rest):
    """A plan of variables in layouts, by path."""
    return PlanTable(
        MESH,
        tuple(
            Assignment(
                VariableSpec(path, (8,) * len(specs), "float32", **rest.get(path, {})), Layout(specs, MESH)
            )
            for path, specs in found.items()
        ),
    )


def layouts(table):
    return {a.variable.path: a.layout for a in table.assignments}


@given(st.dictionaries(st.lists(PARTS, min_size=1, max_size=5).map(".".join), SPECS, min_size=1, max_size=30))
@example({"h": (None, "model"), "h.h": (None, "model")})  # the rule of the first is for both
def test_a_plan_with_them_has_the_layouts_that_were_found(found):
    """Whatever paths share, each variable gets its own layout; what is replicated needs no rule."""
    plan = plan_of(found)
    rules = derive_rules(plan)

    assert layouts(plan) == layouts(make_plan_table([a.variable for a in plan.assignments], rules))
    assert len(rules) <= sum(specs != (None, None) for specs in found.values())
    assert () == make_plan_table([a.variable for a in plan.assignments], rules).problems


def test_blocks_and_layers_that_are_alike_share_a_rule():
    """Two rules for two layouts of a hundred variables."""
    found = {}
    for block in range(20):
        found |= {f"h.{block}.attn.{name}.kernel": (None, "model") for name in ("query", "key", "value")}
        found |= {f"h.{block}.attn.out.kernel": ("model", None), f"h.{block}.norm.scale": (None,)}

    assert {
        r".*\.(query|key|value)\.kernel$": (None, "model"),
        r".*\.out\.kernel$": ("model", None),
    } == {
        rule.pattern: tuple(s if s != "unsharded" else None for s in rule.layout.sharding_specs)
        for rule in derive_rules(plan_of(found)).rules
    }


def test_what_is_derived_has_a_rule_only_if_it_does_not_follow():
    """A factor that lies as its parent's axis needs none; one that was put elsewhere is named."""
    parent, follows = (None, "model"), {"parent": "up.kernel", "axes": ((), (1,)), "parent_shape": (8, 8)}
    plan = plan_of({"up.kernel": parent, "up.lora_b": (None, "model")}, **{"up.lora_b": follows})
    moved = plan_of({"up.kernel": parent, "up.lora_b": ("data", None)}, **{"up.lora_b": follows})

    assert 1 == len(derive_rules(plan))
    assert 2 == len(derive_rules(moved))
    assert layouts(moved) == layouts(
        make_plan_table([a.variable for a in moved.assignments], derive_rules(moved))
    )


def test_slots_and_aliases_need_no_rule():
    """A slot follows its weight, and a rule for another path to a variable is one for it."""
    slot = {"kind": Kind.SLOT, "parent": "up.kernel"}
    plan = plan_of(
        {
            "up.kernel": (None, "model"),
            "optimizer.up.kernel.mu": (None, "model"),
            "down.kernel": (None, None),
        },
        **{"optimizer.up.kernel.mu": slot, "up.kernel": {"aliases": ("head.kernel", "tail.down.kernel")}},
    )
    rules = derive_rules(plan)

    assert 1 == len(rules)
    assert layouts(plan) == layouts(make_plan_table([a.variable for a in plan.assignments], rules))


def test_no_rule_is_left_that_decides_nothing():
    """A rule for some layers may match another path to a variable, which then needs no rule of its own."""
    plan = plan_of(
        {"l0.kernel": (None, "model"), "l1.kernel": (None, "model"), "l2.layer.kernel": (None, "model")},
        **{"l2.layer.kernel": {"aliases": ("l2.kernel",)}},
    )
    rules = derive_rules(plan)
    planned = make_plan_table([a.variable for a in plan.assignments], rules)

    assert layouts(plan) == layouts(planned)
    assert () == planned.problems
    assert 1 == len(rules)


def test_a_layout_that_no_rule_gives_is_refused_by_name():
    """A packed weight lies as a rule for the weight before says, and its own axes cannot be chosen."""
    packed = {"parent": "up.kernel", "axes": ((), (1,)), "parent_shape": (8, 8)}

    with pytest.raises(RuleError, match=r"up\.kernel: no rules give it its layout"):
        derive_rules(plan_of({"up.kernel": ("data", None)}, **{"up.kernel": packed}))
