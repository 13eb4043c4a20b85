"""A plan as JSON is the plan: it comes back equal, its text is stable, and what is no plan is refused by place."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import layoutmap as lm
from layoutmap.plan import Problem
from layoutmap.planning import make_plan
from layoutmap.testing import strategies
from layoutmap.variables import Kind, VariableSpec

MESH = lm.Mesh(None, "batch=2,model=4")
VARIABLES = [
    VariableSpec("tokens.embeddings", (64, 8), "bfloat16", aliases=("head.kernel",)),
    VariableSpec("d1.kernel", (8, 32), "float32"),
    VariableSpec("d1.bias", (32,), "float32"),
    VariableSpec("seed", (2,), "uint32", Kind.RNG),
    VariableSpec("optimizer.d1.kernel.momentum", (8, 32), "float32", Kind.SLOT, parent="d1.kernel"),
]
RULES = {r".*embeddings": ("model", None), r".*\.kernel": (None, ("model", "batch")), "d2": ("model",)}


def make(rules=RULES, mesh=MESH):
    layout_map = lm.LayoutMap(mesh, rules, {"d1": ("batch", None)})
    whole = {"d1.kernel": "its initializer is orthogonal"}
    return make_plan(VARIABLES, layout_map, drawn_whole=whole, layers=["d1", "d2"])


GOLDEN = r"""{"format": "layoutmap plan", "version": 1,
 "mesh": {"dims": {"batch": 2, "model": 4}},
 "variables": [
  {"path": "tokens.embeddings", "shape": [64, 8], "dtype": "bfloat16", "aliases": ["head.kernel"], "layout": ["model", null], "rule": [1, ".*embeddings"], "others": [[2, ".*\\.kernel", [null, ["model", "batch"]]]]},
  {"path": "d1.kernel", "shape": [8, 32], "dtype": "float32", "layout": [null, ["model", "batch"]], "rule": [2, ".*\\.kernel"], "drawn_whole": "its initializer is orthogonal"},
  {"path": "d1.bias", "shape": [32], "dtype": "float32", "layout": [null], "rule": null},
  {"path": "seed", "shape": [2], "dtype": "uint32", "kind": "rng", "layout": [null], "rule": null},
  {"path": "optimizer.d1.kernel.momentum", "shape": [8, 32], "dtype": "float32", "kind": "slot", "parent": "d1.kernel", "layout": [null, ["model", "batch"]]}
 ],
 "activations": [
  {"path": "d1", "rule": [1, "d1"], "layout": ["batch", null], "otherwise": "what it puts out stays as it comes"}
 ],
"""  # noqa: E501


def test_the_text():
    """A variable in each line; what is as usual is left out."""
    assert GOLDEN == make().to_json().partition(' "problems"')[0]


@st.composite
def any_plans(draw):
    """Plans with all that a variable can be told of, also where no plan of ours would say it."""
    plan = draw(strategies.plans(layers=True))[2]
    texts = st.text(max_size=5)
    return replace(
        plan,
        assignments=tuple(
            replace(
                a,
                variable=replace(
                    a.variable,
                    aliases=tuple(draw(st.lists(texts, max_size=2))),
                    model=draw(st.sampled_from(["", "teacher"])),
                ),
                drawn_whole=draw(texts),
            )
            for a in plan.assignments
        ),
        problems=(*plan.problems, Problem("k", "note", *(draw(texts) for _ in range(2)), why=draw(texts))),
    )


@given(any_plans())
def test_a_plan_comes_back(plan):
    """Reading what was written gives the equal plan, which is written as it was."""
    text = plan.to_json()

    assert plan == lm.Plan.from_json(text)
    assert text == lm.Plan.from_json(text).to_json()
    assert plan.fingerprint == lm.Plan.from_json(text).fingerprint


def test_a_plan_with_everything_comes_back():
    """Aliases, slots, notes and activations, too."""
    assert make() == lm.Plan.from_json(make().to_json())


def test_the_fingerprint_is_that_of_the_places():
    """It stays where rules are written otherwise, and on other devices; it changes with any layout, or the mesh."""
    same = {"tokens": ("model", None), **RULES}
    named = lm.Mesh([f"CPU:{i}" for i in range(8)], "batch=2,model=4")

    assert "fee5266e63bf04e1" == make().fingerprint
    assert make().fingerprint == make(same).fingerprint == make(mesh=named).fingerprint
    assert make().fingerprint != make({**RULES, r".*\.bias": ("model",)}).fingerprint
    assert make().fingerprint != make(mesh=lm.Mesh(None, "batch=4,model=2")).fingerprint


def changed(**changes):
    return json.dumps({**json.loads(make().to_json()), **changes})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "plan file: it is no JSON"),
        ("[]", "plan file: it is no plan"),
        (changed(format="other"), "plan file: it is no plan"),
        (changed(version=2), "plan file: version 2\n  why   this layoutmap reads version 1"),
        (changed(mesh=None), "plan file: mesh is no object"),
        (changed(mesh={}), "plan file: mesh has no 'dims'"),
        (changed(mesh={"dims": {"x": 0}}), "plan file: mesh: "),
        (changed(variables={}), "plan file: variables is no list"),
        (changed(variables=[{"path": "d"}]), r"plan file: variables\[0\] has no 'shape'"),
        (
            changed(variables=[{"path": "d", "shape": [1], "dtype": "int8", "layout": ["y"]}]),
            r"plan file: variables\[0\]: layout \(y,\)",
        ),
        (
            changed(variables=[{"path": "d", "shape": [1], "dtype": "int8", "layout": [None], "rule": 1}]),
            r"plan file: variables\[0\] is not as plans are written",
        ),
        (
            changed(variables=[{"path": "d", "shape": ["a"], "dtype": "int8", "layout": [None]}]),
            r"plan file: variables\[0\] is not as plans are written",
        ),
        (changed(problems=["it burns"]), r"plan file: problems\[0\] is no object"),
    ],
)
def test_what_is_no_plan_is_refused(text, message):
    """With the place in the file, why, and a mend."""
    with pytest.raises(lm.PlanError, match=f"^{message}") as caught:
        lm.Plan.from_json(text)
    assert caught.value.mend


@pytest.mark.parametrize("end", range(0, 900, 45))
def test_half_a_file_is_refused(end):
    """A plan that was cut off is no plan."""
    with pytest.raises(lm.PlanError, match="it is no JSON"):
        lm.Plan.from_json(make().to_json()[:end])
