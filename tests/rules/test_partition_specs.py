"""PartitionSpecs and the rules that give them: the same layouts for the same arrays, and nothing dropped."""

from __future__ import annotations

import functools
import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

import layoutmap as lm
from layoutmap.core.errors import LayoutMapWarning, MeshError, RuleError
from layoutmap.core.variables import VariableSpec
from layoutmap.rules.partition_specs import make_path_rules
from layoutmap.scope.plan import make_plan

MESH = lm.Mesh(None, "fsdp=2,tensor=4")
PARTS = st.sampled_from(["h", "wq", "kernel", "kernel_scale", "0", "1", "12", "a+b", "(c"])
PATHS = st.lists(PARTS, min_size=1, max_size=4).map(".".join)
SPECS = st.sampled_from(
    [(), (None,), ("fsdp",), (None, "tensor"), (("fsdp", "tensor"), None), ("tensor", "fsdp")]
)


def as_specs(layout):
    return tuple(None if spec == "unsharded" else spec for spec in layout.sharding_specs)


def padded(specs, rank):
    return (*specs, *[None] * (rank - len(specs)))


@given(st.dictionaries(PATHS, SPECS, max_size=12))
def test_rules_of_specs_give_these_specs(specs):
    """To each path its own, whichever others there are; blocks that differ in numbers only share a rule."""
    layout_map = lm.LayoutMap(MESH, make_path_rules(specs))

    assert specs == {path: as_specs(layout_map[path]) for path in specs}
    assert all(not layout_map.match(path).others for path in specs)
    assert len(layout_map) <= len(specs)


@pytest.mark.parametrize("start", ["h.{}.", "h_{}.", "{}.", "stage_1.block{}.mlp_0."])
def test_blocks_share_a_rule_beside_digits_in_names(start):
    """The digits of w1 and w3 tell layouts apart, those of blocks do not, and further blocks have the rules, too."""
    column, row = (None, "tensor"), ("tensor", None)
    by_name = {"w1": column, "w2": row, "w3": column}
    specs = {start.format(n) + name: by_name[name] for n in range(40) for name in by_name}
    before = re.escape(start.format(9)).replace("9", r"\d+")

    assert {rf"{before}w(1|3)$": column, rf"{before}w2$": row} == make_path_rules(specs)


def test_a_block_with_other_specs_has_its_own_rule():
    """The other blocks share one as long as a rules file may list their numbers."""
    specs = {f"h.{n}.w": ("tensor" if n == 2 else "fsdp",) for n in range(5)}
    assert {r"h\.(0|1|3|4)\.w$": ("fsdp",), r"h\.2\.w$": ("tensor",)} == make_path_rules(specs)
    specs |= {f"h.{n}.w": ("fsdp",) for n in range(5, 60)}
    assert {re.escape(path) + "$": value for path, value in specs.items()} == make_path_rules(specs)


@given(st.dictionaries(PATHS, st.tuples(SPECS, st.integers(2, 4)), max_size=8))
def test_specs_round_trip(given_specs):
    """From specs to a map and back are the same specs, with an entry for each axis."""
    shapes = {path: (8,) * rank for path, (_, rank) in given_specs.items()}
    layout_map = lm.LayoutMap.from_partition_specs({p: s for p, (s, _) in given_specs.items()}, MESH, shapes)
    back = {path: as_specs(layout_map[path]) for path in shapes}

    assert {path: padded(specs, rank) for path, (specs, rank) in given_specs.items()} == back
    assert lm.LayoutMap.from_partition_specs(back, MESH, shapes) == layout_map


REGEXES = st.sampled_from(
    [".*", "wq", "h/0", "^h", "kernel$", "h/[0-9]+/wq", "a.b|kernel", "(?i)WQ", r"\(c", "q/k"]
)


@given(
    st.lists(st.tuples(REGEXES, SPECS), max_size=5),
    st.dictionaries(PATHS, st.sampled_from([(), (1,), (1, 1, 1), (8, 8), (8, 8, 8)]), max_size=8),
)
@pytest.mark.filterwarnings("ignore:from_partition_rules. .* rules? without effect")
def test_rules_of_easylm_mean_what_they_mean_there(rules, shapes):
    """The first that `re.search` finds in the path with slashes; one element is replicated; none is an error."""

    def expected(path, shape):
        if math.prod(shape) == 1:
            return padded((), len(shape))
        return next((padded(s, len(shape)) for r, s in rules if re.search(r, path.replace(".", "/"))), None)

    wanted = {path: expected(path, shape) for path, shape in shapes.items()}
    if None in wanted.values():
        with pytest.raises(RuleError, match=r"\d arrays have no rule") as refused:
            lm.LayoutMap.from_partition_rules(rules, MESH, shapes)
        assert [p for p, specs in wanted.items() if specs is None] == refused.value.facts["arrays"].split(
            ", "
        )
    else:
        layout_map = lm.LayoutMap.from_partition_rules(rules, MESH, shapes)
        assert wanted == {path: as_specs(layout_map[path]) for path in shapes}


def test_rules_that_decide_nothing_are_named():
    """Those that match nothing, and those that come too late."""
    rules = [("wq", ("fsdp",)), ("wk", ("fsdp",)), ("h/0/wq", ("tensor",))]

    with pytest.warns(LayoutMapWarning, match=r"2 rules without effect\n  rules  2  wk, 3  h/0/wq\n"):
        lm.LayoutMap.from_partition_rules(rules, MESH, {"h.0.wq": (8, 8)})


def test_shapes_are_taken_from_a_plan_or_from_nested_dicts_and_lists():
    """All say the same arrays by the same paths."""
    rules = [("wq", (None, "tensor")), ("", ())]
    flat = {"h.0.wq.kernel": (8, 8), "h.1.wq.kernel": (8, 8), "norm": (8,)}
    nested = {"h": [{"wq": {"kernel": (8, 8)}}, {"wq": {"kernel": [8, 8]}}], "norm": (8,)}
    plan = make_plan([VariableSpec(p, s, "float32") for p, s in flat.items()], lm.LayoutMap(MESH))
    maps = [lm.LayoutMap.from_partition_rules(rules, MESH, given) for given in (flat, nested, plan)]

    assert [{r"h\.\d+\.wq\.kernel$": (None, "tensor"), "norm$": (None,)}] * 3 == [
        {pattern: as_specs(layout) for pattern, layout in each.items()} for each in maps
    ]


def test_an_array_without_a_spec_has_no_rule():
    """A plan then says so."""
    layout_map = lm.LayoutMap.from_partition_specs({"a": None}, MESH, {"a": (8, 8), "b": (8,)})

    assert ((None, None), None) == (as_specs(layout_map["a"]), layout_map["b"])


SHAPES = {"d.kernel": (8, 8), "d.bias": (8,)}
REFUSED = {
    "a list": ([("d", ())], "is not a dict", "pass a dict by path"),
    "another array": ({"d.kernal": ()}, "d.kernal is not one of the arrays", "did you mean d.kernel?"),
    "a text": (
        {"d.kernel": "tensor"},
        "'tensor' is not a PartitionSpec",
        'write PartitionSpec(None, "model")',
    ),
    "a number": ({"d.kernel": 3}, "3 is not a PartitionSpec", "or a tuple"),
    "an entry": ({"d.kernel": (3,)}, "entry 3 of axis 0 is not supported in a layout", "write None"),
    "too many": (
        {"d.bias": ("fsdp", None)},
        "the spec has 2 entries, but the array has 1 axes",
        "remove entries",
    ),
    "a dim": ({"d.bias": ("model",)}, "spec 'model' of axis 0 is not allowed", "use one of 'fsdp', 'tensor'"),
    "a dim twice": ({"d.kernel": ("fsdp", "fsdp")}, "spec 'fsdp' of axis 1 is not allowed", "leave axis 1"),
}


BAD_RULES = {
    "a dict": ({"wq": ()}, "are not rules", "write a list of pairs"),
    "no pair": (["wq"], "rule 1 cannot be read: 'wq'", "write it as in"),
    "three": ([("wq", (), ())], "rule 1 cannot be read: ('wq', (), ())", "write it as in"),
    "no regex": ([("*wq", ())], "from_partition_rules: rule 1 '*wq' is not a regex", "'.*wq'"),
    "too long": (
        [(".*", (None, None, "fsdp"))],
        "rule 1 '.*', which matches d.kernel: the spec has 3 entries, but the array has 2 axes",
        "remove entries",
    ),
}


def test_what_has_no_shape_or_no_mesh_is_refused():
    """By what it is."""
    with pytest.raises(RuleError, match=r"from_partition_rules: d has no shape"):
        lm.LayoutMap.from_partition_rules([("", ())], MESH, {"d": "float32"})
    with pytest.raises(MeshError, match="the mesh is missing"):
        lm.LayoutMap.from_partition_rules([("", ())], None, SHAPES)


LOGICAL = {"up.kernel": ("embed", "mlp"), "up.bias": ("mlp",)}
LOGICAL_SHAPES = {"up.kernel": (8, 8), "up.bias": (8,)}


def logical(rules, axes=LOGICAL, semantics="linen"):
    found = lm.LayoutMap.from_logical_axes(rules, axes, MESH, LOGICAL_SHAPES, semantics=semantics)
    return {path: as_specs(found[path]) for path in axes}


def test_the_two_semantics_of_logical_rules():
    """With two rules for a name, linen takes the first that is free and nnx the last."""
    rules = [("mlp", "fsdp"), ("embed", "fsdp"), ("embed", "tensor"), ("mlp", None)]

    assert {"up.kernel": ("tensor", "fsdp"), "up.bias": ("fsdp",)} == logical(rules)
    assert {"up.kernel": ("tensor", None), "up.bias": (None,)} == logical(rules, semantics="nnx")


def test_a_name_without_a_rule_is_warned_of_in_linen_and_a_mesh_dim_in_nnx():
    """Which the mesh must have then."""
    with pytest.warns(
        LayoutMapWarning, match=r"1 names of axes have no rule\n  names  mlp\n(.|\n)*\('mlp', None\)"
    ):
        assert {"up.kernel": ("fsdp", None), "up.bias": (None,)} == logical([("embed", "fsdp")])
    with pytest.raises(RuleError, match="the mesh has no dim 'mlp'"):
        logical([("embed", "fsdp")], semantics="nnx")
    assert {"up.bias": ("tensor",)} == logical([], {"up.bias": ("tensor",)}, "nnx")


BAD_LOGICAL = {
    "semantics": ([], LOGICAL, "flax", "semantics='flax'", "use 'linen'"),
    "dims": ([("mlp", 3)], LOGICAL, "linen", "rule 'mlp': entry 3 of axis 0", "write None"),
    "twice": (
        [],
        {"up.kernel": ("mlp", "mlp")},
        "linen",
        "up.kernel: two axes have the name 'mlp'",
        "different",
    ),
    "rank": (
        [("mlp", None)],
        {"up.bias": ("mlp", None)},
        "linen",
        "up.bias: the spec has 2 entries",
        "remove entries",
    ),
    "path": ([], {"up.bia": ("mlp",)}, "nnx", "up.bia is not one of the arrays", "did you mean up.bias?"),
    "both": ([("mlp", "fsdp"), ("embed", "fsdp")], LOGICAL, "nnx", "spec 'fsdp' of axis 1", "leave axis 1"),
}
WRONG = {
    f"{kind}: {name}": (functools.partial(act, *arguments), what, fix)
    for kind, act, cases in (
        ("specs", lambda specs: lm.LayoutMap.from_partition_specs(specs, MESH, SHAPES), REFUSED),
        ("rules", lambda rules: lm.LayoutMap.from_partition_rules(rules, MESH, SHAPES), BAD_RULES),
        ("logical", logical, BAD_LOGICAL),
    )
    for name, (*arguments, what, fix) in cases.items()
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_refused_with_its_place_and_a_fix(name):
    """What, where, why and the fix."""
    act, what, fix = WRONG[name]
    with pytest.raises(RuleError) as refused:
        act()

    assert what in refused.value.what
    assert refused.value.why
    assert fix in refused.value.fix
