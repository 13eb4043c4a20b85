"""A plan is a mapping from path to assignment."""

from __future__ import annotations

import copy
import pickle

import pytest

import layoutmap as lm
from layoutmap.core.variables import VariableSpec
from layoutmap.scope.plan import make_plan

MAP = lm.LayoutMap(lm.Mesh(None, "model=4"))


def test_a_plan_is_a_mapping_in_all_its_methods():
    """`in`, `[]`, `get`, `keys`, `items` and `len` speak of the variables' paths."""
    plan = make_plan(
        [VariableSpec("d1.kernel", (4,), "float32"), VariableSpec("d1.bias", (4,), "float32")], MAP
    )
    kernel, bias = plan.assignments

    assert {"d1.kernel": kernel, "d1.bias": bias} == dict(plan)
    assert ["d1.kernel", "d1.bias"] == list(plan)
    assert ("d1.kernel" in plan, "d1" in plan, len(plan)) == (True, False, 2)
    assert (bias, None) == (plan.get("d1.bias"), plan.get("d1"))
    with pytest.raises(KeyError, match=r"near misses: d1\.kernel"):
        plan["d1.kernal"]


def test_a_variable_is_found_under_each_of_its_paths():
    """An alias is found as the path is, and is no key of its own; a variable's own path is before an alias."""
    tied = VariableSpec("head.kernel", (4,), "float32", aliases=("embed.kernel", "d1"))
    plan = make_plan([tied, VariableSpec("d1", (8,), "float32")], MAP)

    assert plan["head.kernel"] is plan["embed.kernel"]
    assert "embed.kernel" in plan
    assert ["head.kernel", "d1"] == list(plan)
    assert (8,) == plan["d1"].variable.shape


def test_variables_of_one_path_are_distinguished_by_their_model():
    """Each has a key of its own, and their path alone says which there are."""
    variables = [
        VariableSpec("k", (n,), "float32", model=model) for n, model in ((4, "teacher"), (8, "student"))
    ]
    plan = make_plan([*variables, VariableSpec("b", (2,), "float32", model="student")], MAP)

    assert ["teacher: k", "student: k", "b"] == list(plan)
    assert (8,) == plan["student: k"].variable.shape
    assert "k" in plan
    with pytest.raises(lm.PlanError) as told:
        plan.get("k")
    assert """\
k: 2 variables of the plan have this path
  variables  teacher: k, student: k
  why        the plan has several models
  fix        include the model: plan['teacher: k']""" == str(told.value)


def test_keys_are_unique_even_where_models_are_not():
    """As many keys as variables, whatever the variables are called."""
    assignment = make_plan([VariableSpec("k", (4,), "float32", model="m")], MAP).assignments[0]
    plan = lm.Plan(MAP.mesh, (assignment,) * 3)

    assert ["m: k", "m: k (2)", "m: k (3)"] == list(plan)


def test_a_plan_is_a_value_whatever_was_asked_of_it():
    """A copy or a pickle is equal, and so is the hash."""
    plan = make_plan([VariableSpec("k", (4,), "float32")], MAP)
    assert "k" in plan
    twins = [copy.copy(plan), copy.deepcopy(plan), pickle.loads(pickle.dumps(plan))]

    assert [plan] * 3 == twins
    assert {hash(plan)} == {hash(twin) for twin in twins}
    assert all("k" in twin for twin in twins)


def test_a_thousand_lookups_of_a_large_plan_are_quick():
    """A path is found by an index: 20,000 variables are each looked up once."""
    plan = make_plan([VariableSpec(f"k{i}", (4,), "float32") for i in range(20_000)], MAP)

    assert list(plan.assignments) == [plan[path] for path in plan]
