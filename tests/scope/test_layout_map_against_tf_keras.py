"""Layout map against that of tf_keras 2.21: the same answers to paths, and a dict where that one is none."""

from __future__ import annotations

import re

import pytest
import tf_keras
from hypothesis import given
from hypothesis import strategies as st
from tensorflow.experimental import dtensor

from layoutmap.core.errors import RuleError
from layoutmap.core.layout import Layout
from layoutmap.core.mesh import Mesh
from layoutmap.scope.layout_map import LayoutMap
from layoutmap.testing import strategies

MESH = Mesh([f"/job:localhost/replica:0/task:0/device:CPU:{i}" for i in range(8)], "batch=2,model=4")
ROW, COLUMN = Layout(["model", None], MESH), Layout([None, "model"], MESH)


def theirs(layout: Layout) -> dtensor.Layout:
    return dtensor.Layout.from_string(layout.to_string())


def their_map(layout_map: LayoutMap) -> tf_keras.dtensor.experimental.LayoutMap:
    """tf_keras's map of the same rules, filled through its own door."""
    made = tf_keras.dtensor.experimental.LayoutMap(mesh=theirs(COLUMN).mesh)
    for pattern, layout in layout_map.items():
        made[pattern] = theirs(layout)
    return made


def same(theirs_: dtensor.Layout | None, ours: Layout | None) -> bool:
    return (theirs_ and theirs_.to_string()) == (ours and ours.to_string())


@pytest.fixture
def pair():
    ours = LayoutMap(MESH, {"d.*": ROW, "e": COLUMN})
    return their_map(ours), ours


# -- the same


@st.composite
def maps_and_paths(draw: st.DrawFn) -> tuple[LayoutMap, list[str]]:
    rules = st.dictionaries(strategies.patterns(), strategies.layouts(MESH, tuples=False), max_size=8)
    layout_map = LayoutMap(MESH, draw(rules))
    keys = list(layout_map.keys())
    path = strategies.paths() | st.sampled_from(keys) if keys else strategies.paths()
    return layout_map, draw(st.lists(path, min_size=1, max_size=5))


@given(maps_and_paths())
def test_a_path_gets_the_layout_that_tf_keras_gives(case: tuple[LayoutMap, list[str]]):
    """Whatever the rules, `m[path]` and `m.get(path)` are tf_keras's."""
    layout_map, paths = case
    other = their_map(layout_map)

    for path in paths:
        assert same(other[path], layout_map[path]), path
        assert same(other.get(path), layout_map.get(path)), path


@given(maps_and_paths())
def test_the_rules_are_listed_as_tf_keras_lists_them(case: tuple[LayoutMap, list[str]]):
    """Length, iteration order, and `del` of a rule are tf_keras's."""
    layout_map, _ = case
    other = their_map(layout_map)

    assert len(other) == len(layout_map)
    assert list(other) == list(layout_map)
    for key in list(layout_map)[::2]:
        del other[key]
        del layout_map[key]
        assert list(other) == list(layout_map)


@pytest.mark.parametrize("kind", ["tf_keras", "layoutmap"])
def test_the_example_of_the_documentation(kind: str):
    """The map of `LayoutMap`'s documentation, as written there: dense and conv2d, kernels and biases."""
    layouts = {
        "layout_2d": COLUMN,
        "layout_1d": Layout(["model"], MESH),
        "layout_4d": Layout([None, None, None, "model"], MESH),
        "layout_1d_conv": Layout(["batch"], MESH),
    }
    if kind == "tf_keras":
        map = tf_keras.dtensor.experimental.LayoutMap(mesh=None)
        layouts = {name: theirs(layout) for name, layout in layouts.items()}
    else:
        map = LayoutMap(mesh=None)
    layout_2d, layout_1d = layouts["layout_2d"], layouts["layout_1d"]
    layout_4d, layout_1d_conv = layouts["layout_4d"], layouts["layout_1d_conv"]

    map[".*dense.*kernel"] = layout_2d
    map[".*dense.*bias"] = layout_1d
    map[".*conv2d.*kernel"] = layout_4d
    map[".*conv2d.*bias"] = layout_1d_conv

    layout_1 = map["dense_1.kernel"]
    layout_2 = map["dense_1.bias"]
    layout_3 = map["conv2d_1.kernel"]
    layout_4 = map["conv2d_1.bias"]
    layout_5 = map["my_other_layer.kernel"]

    assert layout_2d == layout_1
    assert layout_1d == layout_2
    assert layout_4d == layout_3
    assert layout_1d_conv == layout_4
    assert layout_5 is None


def test_a_key_that_is_there_is_refused_by_both(pair):
    """A second rule of one pattern is a ValueError that says so."""
    for layout_map, layout in zip(pair, (theirs(ROW), ROW), strict=True):
        with pytest.raises(ValueError, match=r"already exist in the LayoutMap|is in the map already"):
            layout_map["e"] = layout


def test_a_value_that_is_no_layout_is_refused_by_both(pair):
    """Text for a layout is a ValueError that says so."""
    for layout_map in pair:
        with pytest.raises(ValueError, match=r"should be a dtensor.Layout type|'model' is not a layout"):
            layout_map["new"] = "model"


def test_deleting_a_rule_that_is_not_there_is_a_key_error_in_both(pair):
    """`del` means the exact key in both."""
    for layout_map in pair:
        with pytest.raises(KeyError, match="d1"):
            del layout_map["d1"]


# -- different, on purpose


def test_it_is_a_dict_of_its_rules(pair):
    """In tf_keras all is `in` the map, and `get`, `setdefault` and `pop` mind no default; here they are a dict's."""
    other, ours = pair

    assert [True, True] == [key in other for key in ("nope", "d1")]
    assert [False, False, True] == [key in ours for key in ("nope", "d1", "d.*")]
    assert [None, 7, ROW] == [other.get("nope", 7), ours.get("nope", 7), ours.get("d1", 7)]
    assert other.setdefault("new", theirs(ROW)) is None
    assert ["d.*", "e"] == list(other)
    assert [ROW, COLUMN] == [ours.setdefault("new", ROW), ours.setdefault("d1", COLUMN)]
    assert ["d.*", "e", "new", "d1"] == list(ours)
    with pytest.raises(KeyError):
        other.pop("d1", 7)
    assert [COLUMN, 7, COLUMN] == [ours.pop("d1", 7), ours.pop("d2", 7), ours.pop("e", 7)]


def test_an_invalid_regex_is_refused_when_it_is_added(pair):
    """tf_keras takes it and fails at some later look-up; here the rule is refused by name."""
    other, ours = pair

    other["["] = theirs(ROW)
    with pytest.raises(re.error, match="unterminated character set"):
        other["nope"]
    with pytest.raises(RuleError, match=re.escape("rule '[' is not a regex")):
        ours["["] = ROW
    assert ours["nope"] is None


def test_a_map_is_on_one_mesh(pair):
    """tf_keras takes layouts on several meshes and fails when the model runs; here the second mesh is refused."""
    other, ours = pair
    elsewhere = Layout(["model"], Mesh(MESH.devices, "model=8"))

    other["new"] = theirs(elsewhere)
    with pytest.raises(RuleError, match="its layout is on another mesh"):
        ours["new"] = elsewhere


def test_a_tuple_of_specs_is_a_layout(pair):
    """tf_keras wants a Layout; here a tuple of specs is bound to the map's mesh."""
    other, ours = pair

    with pytest.raises(ValueError, match=r"should be a dtensor\.Layout type"):
        other["new"] = (None, "model")
    ours["new"] = (None, "model")
    assert COLUMN == ours["new"]


def test_a_layout_of_tensorflow_is_taken(pair):
    """A layout or a mesh of TensorFlow may stand where ours does."""
    _, ours = pair
    tf_layout = theirs(ROW)
    ours["new"] = tf_layout

    assert ROW == ours["new"]
    assert ROW == Layout(tf_layout.sharding_specs, tf_layout.mesh)
    assert MESH == LayoutMap(tf_layout.mesh).mesh
    with pytest.raises(RuleError, match="is not a layout"):
        ours["text"] = tf_layout.to_string()


def test_the_default_mesh_is_that_of_the_first_layout():
    """tf_keras's map without a mesh stays without, and a variable without a rule then fails; here it takes one."""
    other, ours = tf_keras.dtensor.experimental.LayoutMap(), LayoutMap()
    other["a"], ours["a"] = theirs(ROW), ROW

    assert other.get_default_mesh() is None
    assert MESH == ours.get_default_mesh()
