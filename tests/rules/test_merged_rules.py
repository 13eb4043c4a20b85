"""Rules written of layouts: few, and each for just the variables it says."""

from hypothesis import example, given
from hypothesis import strategies as st

from layoutmap.core.paths import split_path_at_numbers
from layoutmap.rules.merged_rules import make_rules_for_path_groups
from layoutmap.rules.rule_set import RuleSet

PARTS = st.sampled_from(["up", "down", "q_proj", "k_proj", "kernel", "block", "h", "a+b", "up_2", "mlp-x"])
PATHS = st.lists(
    st.one_of(PARTS, st.integers(0, 12).map(str), st.integers(0, 3).map("layer_{}".format)),
    min_size=1,
    max_size=5,
)
NUMBERED = st.builds(
    "b.{}.{}_{}.w".format, st.integers(0, 1), st.sampled_from(["up", "down"]), st.integers(0, 1)
)
"""Paths few enough that groups have some of the numbers in two places, and not all."""
SPECS = st.sampled_from([("model",), (None,), (("data", "model"),)])


@st.composite
def layouts(draw):
    """Groups of paths, each with specs: one group of paths that differ in numbers may have several."""
    found = {}
    paths = st.one_of(st.lists(PATHS.map(".".join), min_size=1, max_size=12, unique=True), st.sets(NUMBERED))
    for path in draw(paths):
        found.setdefault((split_path_at_numbers(path), draw(SPECS)), []).append(path)
    return {tuple(paths): specs for (_, specs), paths in found.items()}


def in_turns(name):
    return tuple(f"b.{block}.{name}_{number}.w" for block, number in ((1, 0), (0, 1))), ("model",)


OTHERS = [f"b.{block}.{name}_{number}.w" for block, number in ((0, 0), (1, 1)) for name in ("up", "down")]


@example(dict(map(in_turns, ("up", "down"))), OTHERS)
@given(layouts(), st.lists(PATHS.map(".".join), max_size=4))
def test_rules_give_just_these_layouts(found, others):
    """Each path gets the specs of its group from the rules, and paths that are none of them get nothing."""
    owners = {path: path for path in others if all(path not in paths for paths in found)}
    layout_map = RuleSet("data=2,model=4", make_rules_for_path_groups(found, owners), rest="replicated")
    expected = {path: specs for paths, specs in found.items() for path in paths} | dict.fromkeys(
        owners, (None,)
    )
    got = {path: layout_map.get(path) for path in expected}
    replicated = ("unsharded",)
    assert {p: replicated if specs == (None,) else specs for p, specs in expected.items()} == {
        p: replicated if layout is None else layout.sharding_specs for p, layout in got.items()
    }


def test_what_differs_in_one_part_is_one_rule():
    """Kernels of one layout are one rule with a choice, in the words that a person would write."""
    attention = {
        (f"layer_{n}.attention.{name}_dense.kernel",): (None, "model") for n in (1,) for name in ("q", "k")
    }
    outputs = {("layer_1.attention.output_dense.kernel",): ("model", None)}
    assert {
        r".*\.(q|k)_dense\.kernel$": (None, "model"),
        r".*\.output_dense\.kernel$": ("model", None),
    } == make_rules_for_path_groups(attention | outputs)


def test_digits_in_names_are_exact_only_where_layouts_differ():
    """Further blocks have the rules, too."""
    found = {
        tuple(f"h.{n}.w{k}" for n in range(2) for k in (1, 3)): (None, "model"),
        tuple(f"h.{n}.w2" for n in range(2)): ("model", None),
    }
    assert [r"h\.\d+\.w(1|3)$", r".*\.\d+\.w2$"] == [*make_rules_for_path_groups(found)]


def test_another_path_to_a_variable_may_match():
    """A rule may match other paths to the same variable, and no paths of others."""
    found = {("head.kernel",): ("model", None), ("emb.table",): (None, "model")}
    assert list(make_rules_for_path_groups(found, {"tied.head.kernel": "head.kernel"})) == [
        r"(.*\.)?head\.kernel$",
        r"(.*\.)?emb\.table$",
    ]
    assert list(make_rules_for_path_groups(found, {"tied.head.kernel": "other"})) == [
        r"head\.kernel$",
        r"(.*\.)?emb\.table$",
    ]
