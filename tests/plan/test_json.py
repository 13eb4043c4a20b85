"""A plan as JSON is the plan: it comes back equal, its text is stable, and what is not a plan is refused by place."""

import json
from dataclasses import replace

import costs
import pytest
from hypothesis import given
from hypothesis import strategies as st

import layoutmap as lm
from layoutmap.core.variables import Assignment, Kind, VariableSpec
from layoutmap.plan.problems import Problem
from layoutmap.scope.plan import make_plan
from layoutmap.testing import strategies

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
    whole = {("", "d1.kernel"): "its initializer is orthogonal"}
    return make_plan(VARIABLES, layout_map, global_init=whole, layers=["d1", "d2"])


GOLDEN = r"""{"format": "layoutmap plan", "version": 3,
 "verdict": {"passes": true, "says": "1.1 KiB per device, before activations; 3 warnings", "num_errors": 0, "num_warnings": 3, "strict": false, "missing": "", "fits": null, "needed_bytes": 1160, "available_bytes": null, "moment": "before activations", "because": [{"what": "weights", "path": "tokens.embeddings", "shape": "bfloat16[16, 8]", "num_bytes": 256}, {"what": "gradients", "path": "tokens.embeddings", "shape": "bfloat16[16, 8]", "num_bytes": 256}, {"what": "weights", "path": "d*.kernel", "shape": "float32[8, 4]", "num_bytes": 128}, {"what": "gradients", "path": "d*.kernel", "shape": "float32[8, 4]", "num_bytes": 128}, {"what": "weights", "path": "d*.bias", "shape": "float32[32]", "num_bytes": 128}, {"what": "gradients", "path": "d*.bias", "shape": "float32[32]", "num_bytes": 128}, {"what": "optimizer slots", "path": "d*.kernel", "shape": "float32[8, 4]", "num_bytes": 128}, {"what": "state", "path": "seed", "shape": "uint32[2]", "num_bytes": 8}], "advice": [], "untried": []},
 "mesh": {"dims": {"batch": 2, "model": 4}},
 "variables": [
  {"path": "tokens.embeddings", "shape": [64, 8], "dtype": "bfloat16", "aliases": ["head.kernel"], "layout": ["model", null], "rule": [1, ".*embeddings"], "others": [[2, ".*\\.kernel", [null, ["model", "batch"]]]]},
  {"path": "d1.kernel", "shape": [8, 32], "dtype": "float32", "layout": [null, ["model", "batch"]], "rule": [2, ".*\\.kernel"], "global_init": "its initializer is orthogonal"},
  {"path": "d1.bias", "shape": [32], "dtype": "float32", "layout": [null], "rule": null, "corrected": [3, "d1\\.bias$", ["model"]]},
  {"path": "seed", "shape": [2], "dtype": "uint32", "kind": "rng", "layout": [null], "rule": null},
  {"path": "optimizer.d1.kernel.momentum", "shape": [8, 32], "dtype": "float32", "kind": "slot", "parent": "d1.kernel", "layout": [null, ["model", "batch"]]}
 ],
 "activations": [
  {"path": "d1", "rule": [1, "d1"], "layout": ["batch", null], "otherwise": "its output stays as it is"}
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
                global_init=draw(texts),
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


def variable(**changes):
    """A plan file of one variable, changed."""
    item = {
        "path": "d",
        "shape": [8, 4],
        "dtype": "int8",
        "layout": [None, None],
        "rule": [1, "d"],
        **changes,
    }
    return changed(variables=[{name: value for name, value in item.items() if value is not ...}])


def without(key):
    data = json.loads(make().to_json())
    del data[key]
    return json.dumps(data)


ONE = {"path": "d", "shape": [8], "dtype": "int8", "layout": [None]}
NOTE = {"severity": "note", "subject": "d", "what": "it is"}
STRICT = {
    "another list": ("[]", "the file is not a plan"),
    "another format": (changed(format="other"), "the file is not a plan"),
    "a later version": (
        changed(version=4),
        "version 4 is not known\n  why   this layoutmap reads versions 1 to 3",
    ),
    "an older one without a cost": (changed(version=2), "plan has no 'collectives'"),
    "an empty cost": (changed(cost={}), "plan has no 'collectives'"),
    "verdict": (changed(verdict=True), "verdict is not an object"),
    "device memory": (changed(device_memory=-1), "device_memory is no"),
    "mesh": (changed(mesh=None), "mesh is not an object"),
    "no dims": (changed(mesh={}), "mesh has no 'dims'"),
    "a dim of 0": (changed(mesh={"dims": {"x": 0}}), "mesh: "),
    "variables": (changed(variables={}), "variables is not a list"),
    "no shape": (variable(shape=...), "variables[0] has no 'shape'"),
    "an unknown dim": (variable(layout=[None, "y"]), "variables[0].layout: layout (unsharded, y)"),
    "a number for a rule": (variable(rule=1), "variables[0].rule is not a list"),
    "a text for a problem": (changed(problems=["it burns"]), "problems[0] is not an object"),
    "no variables": (without("variables"), "plan has no 'variables'"),
    "no problems": (without("problems"), "plan has no 'problems'"),
    "unknown key": (changed(variabels=[]), "plan: 'variabels' is not known"),
    "unknown key of a variable": (variable(dytpe="int8"), "variables[0]: 'dytpe' is not known"),
    "unknown key of the mesh": (changed(mesh={"dims": {}, "size": 1}), "mesh: 'size' is not known"),
    "unknown key of an activation": (
        changed(activations=[{"path": "d", "rule": None, "x": 1}]),
        "activations[0]: 'x'",
    ),
    "unknown key of a problem": (changed(problems=[{**NOTE, "x": 1}]), "problems[0]: 'x' is not known"),
    "version": (changed(version=True), "version True"),
    "version of a fraction": (changed(version=1.0), "version 1.0"),
    "fraction": (variable(shape=[512.9, 8]), "variables[0].shape[0] is not a whole number of 0 or more"),
    "size as text": (variable(shape=[8, "8"]), "variables[0].shape[1] is not a whole number of 0 or more"),
    "negative": (variable(shape=[8, -4]), "variables[0].shape[1] is not a whole number of 0 or more"),
    "bool": (variable(shape=[True, 4]), "variables[0].shape[0] is not a whole number of 0 or more"),
    "not a number": (
        variable(shape=[float("nan"), 4]),
        "variables[0].shape[0] is not a whole number of 0 or more",
    ),
    "1e400": (
        variable().replace("[8, 4]", "[8, 1e400]"),
        "variables[0].shape[1] is not a whole number of 0 or more",
    ),
    "too many elements": (
        variable(shape=[2**40, 2**40]),
        "variables[0].shape is not a shape: it has too many elements",
    ),
    "path": (variable(path=1), "variables[0].path is not text"),
    "dtype": (variable(dtype="float33"), "variables[0].dtype is not a dtype"),
    "dtype of numpy's own": (variable(dtype="a4"), "variables[0].dtype is not a dtype"),
    "kind": (variable(kind="wait"), "variables[0].kind is not known"),
    "aliases": (variable(aliases="ab"), "variables[0].aliases is not a list"),
    "parent": (variable(parent=1), "variables[0].parent is not text"),
    "axes": (variable(axes=[[0]]), "variables[0].axes does not fit the shape"),
    "use": (variable(use=["in.0"]), "variables[0].use does not fit the shape"),
    "head size": (
        variable(use=["", ""], head_size="8"),
        "variables[0].head_size is not a whole number of 0 or more",
    ),
    "head size of nothing": (variable(head_size=8), "variables[0]: 'head_size' is not known"),
    "rule": (variable(rule=["1", "d"]), "variables[0].rule[0] is not a whole number of 0 or more"),
    "other": (variable(others=[[1, "d"]]), "variables[0].others[0] is not a list of 3"),
    "uneven": (variable(uneven="grow"), "variables[0].uneven is not known"),
    "spec": (variable(layout=[None, 1]), "variables[0].layout[1] is not a list"),
    "mesh dim twice": (
        variable(layout=["model", "model"]),
        "variables[0].layout: layout (model, model): spec 'model'",
    ),
    "mesh size": (changed(mesh={"dims": {"x": 2.0}}), "mesh.dims.x is not a whole number of 0 or more"),
    "mesh name": (changed(mesh={"dims": {"x": 2}, "name": 1}), "mesh.name is not text"),
    "gathered dims": (changed(gathered_dims=[1]), "gathered_dims[0] is not text"),
    "free activations": (changed(free_activations="no"), "free_activations is not true or false"),
    "severity": (changed(problems=[{**NOTE, "severity": "bad"}]), "problems[0].severity is not known"),
    "facts": (changed(problems=[{**NOTE, "facts": [["a", 1]]}]), "problems[0].facts[0][1] is not text"),
    "variable twice": (
        changed(variables=[ONE, {**ONE, "model": "a"}, ONE]),
        "variables[2]: 'd' appears twice",
    ),
    "key twice": (
        variable().replace('"dtype"', '"path": "e", "dtype"'),
        "variables[0]: key 'path' appears twice",
    ),
    "mesh dim's key twice": (
        variable().replace('"dims": {', '"dims": {"batch": 2, '),
        "mesh.dims: key 'batch'",
    ),
    "digits": (variable().replace("[8, 4]", f"[8, {'4' * 5000}]"), "the file is not JSON"),
    "deep": (variable().replace("[8, 4]", "[" * 100_000), "the file is not the JSON of a plan"),
    "deep and whole": ("[" * 900 + "]" * 900, "the file is not a plan"),
    "no text": (None, "the file is not JSON"),
}


@pytest.mark.parametrize(("text", "what"), STRICT.values(), ids=STRICT)
def test_a_plan_is_read_strictly(text, what):
    """Nothing is guessed, counted twice or left for later: the first wrong part is reported with its place."""
    with pytest.raises(lm.PlanError) as caught:
        lm.Plan.from_json(text)

    assert str(caught.value).startswith(f"plan file: {what}")
    assert caught.value.why
    assert caught.value.fix


@pytest.mark.parametrize("dtype", ["key<fry>", "key<rbg>"])
def test_a_random_key_of_jax_comes_back(dtype):
    """Its element type has the name of its generator."""
    variables = [VariableSpec("rngs.default.key", (), dtype, Kind.RNG)]
    plan = make_plan(variables, lm.LayoutMap(MESH, {}, rest="replicated"))

    assert plan == lm.Plan.from_json(plan.to_json())


def test_half_a_surrogate_pair_in_a_path_comes_back():
    """Python's texts may hold what no encoding can write; the plan's JSON, page and fingerprint can all be made."""
    plan = make_plan([VariableSpec("a\ud800", (8,), "int8")], lm.LayoutMap(MESH, {"a": ("model",)}))

    assert plan == lm.Plan.from_json(plan.to_json().encode().decode())
    assert 16 == len(plan.fingerprint)
    assert plan.to_html().encode()


def test_one_path_in_two_layouts_has_a_fingerprint():
    """A plan made in code may hold a path twice; its fingerprint does not depend on the order."""
    spec = VariableSpec("d", (8,), "int8")
    twice = [Assignment(spec, lm.Layout([of], MESH)) for of in (None, "model", ("model", "batch"))]

    assert lm.Plan(MESH, tuple(twice)).fingerprint == lm.Plan(MESH, tuple(twice[::-1])).fingerprint


def with_cost(**changes):
    """The JSON of a plan with a cost, some of its fields changed: `machine.fast` is one of an object inside."""
    data = json.loads(costs.plan().to_json())
    for names, value in changes.items():
        *inside, last = names.split("__")
        item = data
        for name in inside:
            item = item[name]
        item[last] = value
    return json.dumps(data)


def test_a_cost_comes_back_with_its_machine():
    """As it was; and so does one of version 2, in which each plan has a cost, and which has no verdict."""
    plan = costs.plan()
    again = lm.Plan.from_json(plan.to_json())

    assert plan == again
    assert str(plan.cost) == str(again.cost)
    assert plan.to_json() == again.to_json()
    older = {name: value for name, value in json.loads(plan.to_json()).items() if name != "verdict"}
    assert plan == lm.Plan.from_json(json.dumps(older | {"version": 2}))
    assert '\n  ["all_gather", ["data"], 2, 14680064, "blocks.0.up.kernel", "forward"],\n' in plan.to_json()
    assert make().fingerprint == replace(make(), cost=plan.cost).fingerprint


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"collectives": [["gather"]]}, r"collectives\[0\] is not a list of 6"),
        ({"collectives": [["gather", [], 1, 1, "", ""]]}, r"collectives\[0\]\[0\] is not known"),
        ({"collectives": [["permute", ["row"], 1, 1, "", ""]]}, r"collectives\[0\]: 'row' is not a mesh dim"),
        ({"collectives": [["permute", [], -1, 1, "", ""]]}, r"collectives\[0\]\[2\] is not a whole number"),
        ({"cost": []}, "cost is not an object"),
        ({"cost__flops": {"float32": 1.5}}, "cost.flops.float32 is not a whole number"),
        ({"cost__peak": 1}, "cost: 'peak' is not known"),
        ({"cost__machine": {}}, "cost.machine has no 'name'"),
        ({"cost__machine__node_size": 0}, "cost.machine.node_size is not a whole number above 0"),
        ({"cost__machine__devices": 0}, "cost.machine.devices is not a whole number above 0"),
        ({"cost__machine__flops": {}}, "cost.machine.flops lists no element type"),
        ({"cost__machine__fast__bandwidth": 0}, "cost.machine.fast.bandwidth is not a number above 0"),
        ({"cost__machine__memory_bandwidth": 1e999}, "cost.machine.memory_bandwidth is not a number above 0"),
    ],
)
def test_what_is_no_cost_is_refused(changes, message):
    """With the place in the file, why, and a fix."""
    with pytest.raises(lm.PlanError, match=f"^plan file: {message}") as caught:
        lm.Plan.from_json(with_cost(**changes))
    assert caught.value.fix


OF_ITS_OWN = {  # fields of a variable whose values no other field has
    "shape": [8, 32],
    "dtype": "float32",
    "kind": "state",
    "axes": [[0], [1]],
    "trainable": False,
    "use": ["in.0", "out.0"],
    "head_size": 8,
    "layout": [None, "model"],
    "rule": [2, ".*kernel"],
    "uneven": "shrink",
}


@pytest.mark.parametrize("field", OF_ITS_OWN)
def test_a_field_does_not_take_the_value_of_another(field):
    """Each field has values of its own, and is named where it has that of another."""
    whole = {"path": "d", **OF_ITS_OWN}
    assert lm.Plan.from_json(changed(variables=[whole]))

    for other, value in whole.items():
        if other != field:
            with pytest.raises(lm.PlanError, match=rf"plan file: variables\[0\]\.{field}"):
                lm.Plan.from_json(changed(variables=[{**whole, field: value}]))
