"""Where an axis does not divide, what is taken is what was asked for, as far as it divides."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

import layoutmap as lm
from layoutmap.core.uneven import apply_uneven_policy, derive_layout_from_parent
from layoutmap.core.variables import VariableSpec
from layoutmap.scope.plan import make_plan
from layoutmap.testing import strategies


@st.composite
def asked(draw):
    layout = draw(strategies.layouts())
    return layout, tuple(draw(st.integers(0, 24)) for _ in range(layout.rank))


@given(asked())
def test_what_is_taken_fits_and_is_part_of_what_was_asked(drawn):
    """Axes that divide stay as they were; of the others, "shrink" takes the most shards there are, "replicate" none."""
    layout, shape = drawn
    uneven = layout.find_uneven_axes(shape)
    shrunk, whole = (apply_uneven_policy(layout, shape, how) for how in ("shrink", "replicate"))

    assert layout == apply_uneven_policy(layout, shape, "error")
    assert ((), ()) == (shrunk.find_uneven_axes(shape), whole.find_uneven_axes(shape))
    for axis, size in enumerate(shape):
        dims = layout.list_mesh_dims(axis)
        taken = shrunk.list_mesh_dims(axis)
        if axis not in uneven:
            assert dims == taken == whole.list_mesh_dims(axis)
            continue
        subsets = itertools.chain.from_iterable(itertools.combinations(dims, n) for n in range(len(dims) + 1))
        counts = [math.prod(layout.mesh.dim_size(d) for d in subset) for subset in subsets]
        assert max(n for n in counts if size % n == 0) == shrunk.num_shards(axis)
        assert tuple(d for d in dims if d in taken) == taken
        assert () == whole.list_mesh_dims(axis)


def test_a_layout_of_another_rank_stays():
    """Its error is about the rank."""
    layout = lm.Layout(["model"], lm.Mesh(None, "model=4"))

    assert layout == apply_uneven_policy(layout, (3, 3), "shrink")


def test_an_axis_made_of_several_follows_the_first():
    """Heads and features that were made one axis are sharded along the heads."""
    kernel = lm.Layout([None, "model", "batch"], lm.Mesh(None, "batch=2,model=4"))

    assert ("unsharded", "model") == derive_layout_from_parent(kernel, ((0,), (1, 2))).sharding_specs
    assert ("batch", "model", "unsharded") == derive_layout_from_parent(
        kernel, ((2,), (1,), ())
    ).sharding_specs


@pytest.mark.parametrize(
    "make",
    [
        lambda: lm.LayoutMap(lm.Mesh(None, "model=4"), uneven="grow"),
        lambda: lm.LayoutMap(lm.Mesh(None, "model=4")).add("d1", ("model",), uneven="grow"),
        lambda: lm.LayoutMap.from_yaml("{version: 1, uneven: grow}"),
        lambda: lm.LayoutMap.from_yaml("{version: 1, rules: {d1: {layout: [model], uneven: grow}}}"),
    ],
)
def test_another_policy_is_refused(make):
    """With those that there are."""
    with pytest.raises(lm.RuleError, match="uneven='grow'") as caught:
        make()

    assert caught.value.fix.startswith(
        "use one of 'error', 'replicate', 'shrink', 'pad', or ('pad', 'shrink')"
    )


@pytest.mark.parametrize(
    "setting", [(), ("pad",), ("shrink", "pad"), ("pad", "pad"), ("pad", "shrink", "error"), None]
)
def test_policies_that_cannot_follow_one_another_are_refused(setting):
    """Only padding can be impossible for a variable, so one other policy follows it, and none follows another."""
    with pytest.raises(lm.RuleError, match="uneven="):
        lm.LayoutMap(lm.Mesh(None, "model=4"), uneven=setting)


@pytest.mark.parametrize("setting", ["pad", ("pad", "shrink"), ("pad", "replicate"), ("pad", "error")])
def test_settings_survive_files(setting):
    """A map and a rule have their setting in YAML and in the JSON of a plan."""
    variables = [VariableSpec("d1", (13, 8), "float32"), VariableSpec("d2", (7,), "float32")]
    layout_map = lm.LayoutMap(lm.Mesh(None, "model=4"), {"d1": ("model", None)}, uneven=setting)
    layout_map.add("d2", ("model",), uneven="shrink")
    read = lm.LayoutMap.from_yaml(layout_map.to_yaml())
    plan = make_plan(variables, layout_map)

    assert (setting, setting, "shrink") == (
        read.uneven,
        read.match("d1").rule.uneven,
        read.match("d2").rule.uneven,
    )
    assert plan == lm.Plan.from_json(plan.to_json())
    assert [True, False] == [a.is_padded for a in plan.assignments]


def test_padding_is_counted_and_shown():
    """Each device stores the largest shard, and a note names the sizes and the bytes."""
    layout_map = lm.LayoutMap(lm.Mesh(None, "model=4"), {".*": ("model", None)}, uneven="pad")
    plan = make_plan([VariableSpec("up", (13, 256), "float32")], layout_map)

    assert ((4, 256), 4096, 768) == (plan["up"].shard_shape, plan.device_bytes, plan["up"].padding_bytes)
    assert "note: up: axis 0 is padded from 13 to 16, 768 B per device" in str(plan)
    assert not plan.errors


def test_the_error_offers_padding_first():
    """The fix has the bytes that padding costs, and names what cannot be padded where a rule asks for it."""
    up, mesh = VariableSpec("up", (13, 256), "float32"), lm.Mesh(None, "model=4")
    fix = 'set uneven="pad", which costs 768 B per device, or uneven="shrink"'
    refused = make_plan(
        [up],
        lm.LayoutMap(mesh, {"up": ("model", None)}, uneven="pad"),
        explain_why_padding_is_impossible=lambda variable, layout: "it is glued",
    )

    assert [fix] == [p.fix for p in make_plan([up], lm.LayoutMap(mesh, {"up": ("model", None)})).errors]
    assert ["13 is not a multiple of 4, and it is glued"] == [p.why for p in refused.errors]
    assert not refused["up"].fits


def test_the_next_policy_is_for_variables_that_cannot_be_padded():
    """Others are padded, and the note says why one is not."""
    variables = [VariableSpec(path, (13, 8), "float32") for path in ("up", "glued")]
    layout_map = lm.LayoutMap(lm.Mesh(None, "model=4"), {".*": ("model", None)}, uneven=("pad", "shrink"))
    plan = make_plan(
        variables,
        layout_map,
        explain_why_padding_is_impossible=lambda variable, layout: (
            "it is glued" if variable.path == "glued" else ""
        ),
    )

    assert ["(model, unsharded)", "(unsharded, unsharded)"] == [str(a.layout) for a in plan.assignments]
    assert [True, False] == [a.is_padded for a in plan.assignments]
    assert ['13 is not a multiple of 4, and rule 1 has uneven=("pad", "shrink"), and it is glued'] == [
        p.why for p in plan.problems if p.subject == "glued" and p.kind == "uneven"
    ]


def test_derived_variables_are_padded_with_their_parent():
    """A slot of equal shape, one that was reduced over an axis, and the factor of a kernel."""
    up = VariableSpec("up", (13, 8), "float32")
    slots = [
        VariableSpec("slots.mu", (13, 8), "float32", "slot", parent="up"),
        VariableSpec("slots.row", (13,), "float32", "slot", parent="up", parent_shape=(13, 8), axes=((0,),)),
        VariableSpec("slots.col", (8,), "float32", "slot", parent="up", parent_shape=(13, 8), axes=((1,),)),
    ]
    layout_map = lm.LayoutMap(lm.Mesh(None, "model=4"), {"up": ("model", None)}, uneven="pad")
    plan = make_plan([up, *slots], layout_map)

    assert [True, True, True, False] == [a.is_padded for a in plan.assignments]
    assert ["(model, unsharded)", "(model,)", "(unsharded,)"] == [str(a.layout) for a in plan.assignments[1:]]


def test_a_rule_that_cannot_be_added_is_not():
    """A policy that is none leaves the map as it was."""
    layout_map = lm.LayoutMap(lm.Mesh(None, "model=4"))
    with pytest.raises(lm.RuleError):
        layout_map.add("d1", ("model",), uneven="grow")

    assert 0 == len(layout_map)
