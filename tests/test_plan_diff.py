"""The difference of two plans is empty where nothing moved, and names everything that did."""

import textwrap

from hypothesis import given

import layoutmap as lm
from layoutmap.planning import make_plan
from layoutmap.testing import strategies
from layoutmap.variables import Kind, VariableSpec

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
    assert "no change" == str(plan.diff(plan))


@given(strategies.plans(layers=True), strategies.plans(layers=True))
def test_plans_differ_where_their_fingerprints_do(one, other):
    """No difference means one fingerprint; and what is added one way is removed the other."""
    before, after = one[2], other[2]
    there, back = before.diff(after), after.diff(before)

    assert bool(there) == bool(back)
    if not there:
        assert before.fingerprint == after.fingerprint
    assert {c.path for c in there if c.what == "added"} == {c.path for c in back if c.what == "removed"}
    assert len(there) == len(back)
    assert len(there) == sum(count for count, _ in there.grouped)


def test_the_text():
    """A line for each change, those of repeated blocks in one, and what it does to a device."""
    before = plan_of(model(), {r".*kernel": (None, "model"), "tokens": ("model", None)})
    after = plan_of(
        [*model(blocks=3, dtype="bfloat16"), VariableSpec("seed", (2,), "uint32", Kind.RNG)][1:],
        {r"blocks\.\d\.": ("model", None)},
        activations={r"blocks\.\d": ("batch", None)},
    )

    assert text("""
        tokens                   removed  float32[64, 8] (model, unsharded)
        blocks.{0..1}.up.kernel  dtype    float32 -> bfloat16
        blocks.{0..1}.up.kernel  layout   (unsharded, model) -> (model, unsharded)
        blocks.2.up.kernel       added    bfloat16[8, 32] (model, unsharded)
        seed                     added    uint32[2] (unsharded,)
        blocks.{0..1}            output   (batch, unsharded)

        9 changes; per device 1.0 KiB -> 392 B
        """) == str(before.diff(after))
    assert "<PlanDiff: 9 changes; per device 1.0 KiB -> 392 B>" == repr(before.diff(after))


def test_in_a_notebook():
    """A table of the same rows; names of variables are no markup."""
    html = plan_of([], {}).diff(plan_of([VariableSpec("a<b", (4,), "int8")], {}))._repr_html_()

    assert "a&lt;b</td>" in html
    assert "a<b" not in html
    assert "1 change; per device 0 B -&gt; 4 B" in html


def test_another_mesh_is_one_change():
    """That every layout is on another mesh is told once."""
    rules = {".*": (None, "model")}
    diff = plan_of(model(), rules).diff(plan_of(model(), rules, lm.Mesh(None, "batch=4,model=2")))

    assert text("""
        the mesh  mesh  batch=2, model=4 -> batch=4, model=2

        1 change; per device 1.0 KiB -> 2.0 KiB
        """) == str(diff)


def test_another_rule_with_the_same_layout_is_no_change():
    """What counts is where a variable lies, and not who said so."""
    one = plan_of(model(), {".*": (None, "model")})
    two = plan_of(model(), {".*kernel": (None, "model"), "tokens": (None, "model")})

    assert not one.diff(two)
    assert one != two
