"""The difference of two plans is empty where nothing moved, and names everything that did."""

import json
import textwrap
from dataclasses import replace

import costs
import pytest
from cases import examples
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import layoutmap as lm
from layoutmap.core.layout import MEMORY_KINDS
from layoutmap.core.match import Match, Rule
from layoutmap.core.variables import Assignment, Kind, VariableSpec
from layoutmap.plan.completeness import has_weights
from layoutmap.scope.plan import make_plan
from layoutmap.testing import strategies

MESH = lm.Mesh(None, "batch=2,model=4")


def text(message):
    return textwrap.dedent(message).strip()


def model(blocks=2, dtype="float32", width=32):
    weights = [VariableSpec(f"blocks.{i}.up.kernel", (8, width), dtype) for i in range(blocks)]
    return [VariableSpec("tokens", (64, 8), "float32"), *weights]


def plan_of(variables, rules, mesh=MESH, activations=None):
    return make_plan(variables, lm.LayoutMap(mesh, rules, activations), layers=["blocks.0", "blocks.1"])


@given(strategies.plans(layers=True))
def test_nothing_moves_between_equal_plans(drawn):
    """A plan and itself, or itself read from a file, do not differ."""
    _, _, plan = drawn

    assert not plan.diff(plan)
    assert not plan.diff(lm.Plan.from_json(plan.to_json()))
    assert str(plan.diff(plan)).startswith("no change")
    assert (str(plan.diff(plan)) == "no change") == has_weights(plan)


@st.composite
def pairs(draw):
    """A plan and another: of its own, or the first one after some changes."""
    before = draw(strategies.plans(layers=True))[2]
    if draw(st.booleans()):
        return before, draw(strategies.plans(layers=True))[2]
    after = before
    for _ in range(draw(st.integers(0, 3))):
        after = draw(st.sampled_from(list(CHANGES.values())))(after, draw) or after
    return before, after


# -- one change each: the plan with it, or `None` where it cannot be made


def of_variable(change):
    """A change of one variable, drawn."""

    def made(plan, draw):
        if not len(plan):
            return None
        n = draw(st.integers(0, len(plan) - 1))
        old = plan.assignments[n]
        new = change(old, plan, draw)
        return replace(plan, assignments=(*plan.assignments[:n], *new, *plan.assignments[n + 1 :]))

    return made


def spec(**changes):
    """Another value of a variable's fields, which are other ones than it had."""

    def change(old, plan, draw):
        new = {
            name: draw(values.filter(lambda v, name=name: v != getattr(old.variable, name)))
            for name, values in changes.items()
        }
        if "shape" in new:  # what is said of each axis is of the old shape
            new |= {"axes": None, "parent_shape": None, "use": None}
        return [replace(old, variable=replace(old.variable, **new))]

    return of_variable(change)


def relaid(old, plan, draw):
    """The variable in another layout."""
    layouts = strategies.layouts(plan.mesh, max_rank=3).map(lambda new: new.replace_memory(old.layout.memory))
    return [replace(old, layout=draw(layouts.filter(lambda layout: layout != old.layout)))]


def added(plan, draw):
    variable = VariableSpec(f"added.{len(plan)}", (4,), "int8")
    where = draw(st.integers(0, len(plan)))
    new = Assignment(variable, draw(strategies.layouts(plan.mesh)))
    return replace(plan, assignments=(*plan.assignments[:where], new, *plan.assignments[where:]))


def on_another_mesh(plan, draw):
    """All layouts on a mesh of other sizes."""
    data = json.loads(plan.to_json())
    sizes = data["mesh"]["dims"]
    data["mesh"] = {"dims": {**sizes, draw(st.sampled_from(list(sizes))): draw(st.integers(9, 12))}}
    return lm.Plan.from_json(json.dumps(data))


def of_output(plan, draw):
    """Another layout of a layer's output, or of one more layer."""
    first, *rest = plan.activations or [Match("added", None)]
    layouts = strategies.layouts(plan.mesh).filter(lambda layout: layout != first.layout)
    return replace(plan, activations=(replace(first, rule=Rule(1, "added", draw(layouts))), *rest))


def moved(old, plan, draw):
    """The variable in another memory."""
    layouts = st.sampled_from(MEMORY_KINDS).map(old.layout.replace_memory)
    return [replace(old, layout=draw(layouts.filter(lambda layout: layout != old.layout)))]


CHANGES = {
    "layout": of_variable(relaid),
    "memory": of_variable(moved),
    "shape": spec(shape=st.lists(st.integers(0, 12), max_size=3).map(tuple)),
    "dtype": spec(dtype=st.sampled_from(["float32", "bfloat16", "int8"])),
    "kind": spec(kind=st.sampled_from(Kind)),
    "removed": of_variable(lambda old, plan, draw: []),
    "added": added,
    "mesh": on_another_mesh,
    "output": of_output,
}


@pytest.mark.parametrize("what", CHANGES)
@settings(max_examples=examples(40))  # of each of these changes
@given(st.data())
def test_one_change_is_reported_by_its_path(what, data):
    """Whatever is changed in a plan: that is reported, with how it was and is, and nothing else."""
    before = data.draw(strategies.plans(layers=True))[2]
    after = CHANGES[what](before, data.draw)
    assume(after is not None)
    diff = before.diff(after)

    (change,) = diff
    assert what == change.what
    if what == "mesh":
        assert ("", str(before.mesh), str(after.mesh)) == (change.path, change.before, change.after)
        return
    kept, now = (p.activations if what == "output" else p.assignments for p in (before, after))
    gone, new = [a for a in kept if a not in now], [a for a in now if a not in kept]
    assert {change.path} == {a.path if what == "output" else a.variable.path for a in (*gone, *new)}
    for told, there in ((change.before, gone), (change.after, new)):
        assert [told] == ([how(what, a) for a in there] or [""])


def how(what, assignment):
    """A variable, or a layer's output, as a change of it tells it."""
    if what in ("layout", "output"):
        return str(assignment.layout)
    if what == "memory":
        return assignment.layout.host_memory or "device"
    v = assignment.variable
    if what in ("added", "removed"):
        return f"{v.dtype}{list(v.shape)} {assignment.layout}"
    return str(getattr(v, what))


@given(pairs())
def test_a_difference_is_the_same_both_ways(drawn):
    """The way back tells the same of the same things, before and after in each other's place."""
    before, after = drawn
    other_way = {"added": "removed", "removed": "added"}

    assert {(c.path, other_way.get(c.what, c.what), c.after, c.before) for c in before.diff(after)} == {
        (c.path, c.what, c.before, c.after) for c in after.diff(before)
    }
    assert len(before.diff(after)) == len(after.diff(before))


@given(pairs())
def test_plans_differ_where_their_fingerprints_do(drawn):
    """No difference means one fingerprint, and one fingerprint no difference, but for what a variable is for."""
    before, after = drawn

    assert (before.fingerprint == after.fingerprint) == ({c.what for c in before.diff(after)} <= {"kind"})


@given(pairs())
def test_a_difference_of_plans_is_that_of_their_files(drawn):
    """Read from JSON, two plans differ as they did, in the same words."""
    before, after = drawn
    read = lm.Plan.from_json(before.to_json()), lm.Plan.from_json(after.to_json())

    assert before.diff(after) == read[0].diff(read[1])
    assert str(before.diff(after)) == str(before.diff(read[1])) == str(read[0].diff(after))


@given(pairs())
def test_no_change_is_lost_where_repeated_blocks_are_one(drawn):
    """The rows of the text stand for as many changes as there are."""
    diff = drawn[0].diff(drawn[1])

    assert len(diff) == sum(count for count, _ in diff.grouped_changes)
    assert bool(diff) == bool(diff.changes)


def test_in_a_notebook():
    """A table of the same rows; names of variables are no markup."""
    html = plan_of([], {}).diff(plan_of([VariableSpec("a<b", (4,), "int8")], {}))._repr_html_()

    assert "a&lt;b</td>" in html
    assert "a<b" not in html
    assert "1 change; per device 0 B -&gt; 4 B" in html


def test_another_rule_with_the_same_layout_is_no_change():
    """What counts is where a variable is placed, and not who said so."""
    one = plan_of(model(), {".*": (None, "model")})
    two = plan_of(model(), {".*kernel": (None, "model"), "tokens": (None, "model")})

    assert not one.diff(two)
    assert one != two


def test_models_are_distinguished():
    """Where a scope has built several, each change names its model; where there is one, it needs no name."""
    before, after = (
        plan_of([VariableSpec("k", (8,), "float32", model=m) for m in models], {})
        for models in (("teacher", "student"), ("teacher",))
    )

    assert ["student: k"] == [change.path for change in before.diff(after)]
    assert ["k"] == [change.path for change in after.diff(plan_of([], {}))]


def test_slots_that_change_as_their_weights_do_are_one_row():
    """Of each kind of slot one, and its own row for a slot that changes otherwise."""

    def trained(width, moments="float32"):
        slots = [
            VariableSpec(f"optimizer.{v.path}.{name}", v.shape, dtype, Kind.SLOT, parent=v.path)
            for v in model(width=width)
            for name, dtype in (("m", "float32"), ("v", moments))
        ]
        return plan_of([*model(width=width), *slots], {".*": (None, "model")})

    assert text("""
        blocks.{0..1}.up.kernel              shape  (8, 32) -> (8, 64)
        optimizer.tokens.v                   dtype  float32 -> bfloat16
        optimizer.*.m                        shape  as its weight: (8, 32) -> (8, 64)
        optimizer.*.v                        shape  as its weight: (8, 32) -> (8, 64)
        optimizer.blocks.{0..1}.up.kernel.v  dtype  float32 -> bfloat16

        9 changes; per device 3.0 KiB -> 3.8 KiB
        """) == str(trained(32).diff(trained(64, "bfloat16")))


def test_a_row_of_slots_has_an_arrow():
    """It shows the change of the first, and how many others there are."""
    slots = [
        VariableSpec(f"optimizer.{v.path}.m", v.shape, "float32", Kind.SLOT, parent=v.path) for v in model()
    ]
    before = plan_of([*model(), *slots], {"tokens": ("model", None), r".*up\.kernel": (None, "model")})
    after = plan_of([*model(), *slots], {r".*up\.kernel": ("model", None)})
    changed = "(model, unsharded) -> (unsharded, unsharded)"

    assert text(f"""
        tokens                   layout  {changed}
        blocks.{{0..1}}.up.kernel  layout  (unsharded, model) -> (model, unsharded)
        optimizer.*.m            layout  as its weight: {changed}, and 1 other

        6 changes; per device 2.0 KiB -> 5.0 KiB
        """) == str(before.diff(after))


def test_what_a_rule_does_to_a_step_is_shown():
    """The time, what travels and what waits, where it differs; it counts as no change of its own."""
    before = costs.plan()
    rest = [c for c in costs.collectives() if c.dims == ("model",)]
    after = costs.plan(
        {r".*up\.kernel": (None, "model"), "tokens": ("model", None)}, rest, peak_bytes=40 * 2**30
    )

    assert text("""
        blocks.{0..1}.up.kernel  layout  (data, model) -> (unsharded, model)

        of a step                                       before     after
        -----------------------------------  -----------------  --------
        sent                                           3.6 GiB   3.5 GiB
        all-gather of weights over data      49.0 MiB, 1.03 ms         -
        reduce-scatter of weights over data   24.5 MiB, 514 us         -
        memory at the peak                            30.0 GiB  40.0 GiB

        2 changes; per device 128.8 MiB -> 153.2 MiB
        """) == str(before.diff(after))
    assert "all-gather of weights over data" in before.diff(after)._repr_html_()
    slower = before.diff(costs.plan(on="a100:64"))
    assert ("machine", "h100:64", "a100:64") == slower.costs[0]
    assert ("time of a step", "18.0 ms", "38.2 ms") == slower.costs[1]
    assert not slower
    assert [] == before.diff(replace(before, cost=None)).costs
