"""A layout map answers as the plain loop over its rules does, is a dict of them, and refuses what cannot be."""

from __future__ import annotations

import copy
import pickle
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from layoutmap.core.errors import RuleError
from layoutmap.core.layout import Layout
from layoutmap.core.match import Match
from layoutmap.core.mesh import Mesh
from layoutmap.rules.near_misses import find_nearest_candidates
from layoutmap.scope.layout_map import LayoutMap
from layoutmap.testing import strategies

MESH = Mesh(None, "batch=2,model=4")
ROW, COLUMN, WHOLE = (Layout(specs, MESH) for specs in (["model", None], [None, "model"], [None, None]))


def plain_loop(layout_map: LayoutMap, path: str) -> list[str]:
    """What looking up a path means: an exact key first, then the rules that match, in order."""
    exact = [path] if path in layout_map else []
    return exact + [p for p in layout_map.keys() if p != path and re.match(p, path)]  # noqa: SIM118


@st.composite
def maps_and_paths(draw: st.DrawFn) -> tuple[LayoutMap, str]:
    layout_map = draw(strategies.layout_maps(MESH))
    keys = list(layout_map.keys())
    return layout_map, draw(strategies.paths() | st.sampled_from(keys) if keys else strategies.paths())


@given(maps_and_paths())
def test_a_path_gets_what_the_plain_loop_gives(given_: tuple[LayoutMap, str]):
    """`m[path]`, `m.get` and `m.match` agree with a loop over the rules: exact key first, then first match."""
    layout_map, path = given_
    expected = plain_loop(layout_map, path)
    layout = layout_map.get(expected[0]) if expected else None

    match = layout_map.match(path)

    assert expected == [rule.pattern for rule in layout_map.matching_rules(path)]
    assert layout is layout_map[path] is layout_map.get(path) is match.layout
    assert (layout if expected else 7) == layout_map.get(path, 7)
    assert expected == [r.pattern for r in ((match.rule,) if match.rule else ()) + match.others]
    assert [r.number for r in layout_map.rules] == list(range(1, len(layout_map) + 1))


def test_a_key_that_does_not_match_itself_is_found_exactly():
    """`a[0]` as a regex means `a0`; as a path it is still an exact key."""
    layout_map = LayoutMap(MESH, {"a[0]": ROW})

    assert ROW == layout_map["a[0]"]
    assert ROW == layout_map["a0"]
    assert """\
a[0]: rule 1  a[0] -> (model, unsharded)
  change it  change rule 1: a rule that equals the path wins over all others""" == str(
        layout_map.match("a[0]")
    )


def test_a_tuple_of_specs_is_bound_to_the_mesh_of_the_map():
    """A tuple or list of specs stands for the layout on the map's mesh."""
    layout_map = LayoutMap(MESH, {"a": (None, "model"), "b": ["batch", ("model",)], "c": ()})

    assert [COLUMN, Layout(["batch", "model"], MESH), Layout([], MESH)] == list(layout_map.values())


def test_the_first_layout_gives_a_map_its_mesh():
    """A map without a mesh takes that of its first rule, and binds later tuples to it."""
    layout_map = LayoutMap()
    assert layout_map.get_default_mesh() is None

    layout_map["a"] = COLUMN
    layout_map["b"] = ("model",)

    assert MESH == layout_map.get_default_mesh() == layout_map.mesh
    assert Layout(["model"], MESH) == layout_map["b"]


# -- explaining


def test_a_match_explains_itself():
    """What won, its number, and what lost, as text."""
    layout_map = LayoutMap(MESH, {r".*\.kernel": COLUMN, "d1.*": ROW})

    assert """\
d1.kernel: rule 1  .*\\.kernel -> (unsharded, model)
  also matches  rule 2  d1.*: would give (model, unsharded)
  change it     change rule 1, or add a rule before it: the first rule that matches wins""" == str(
        layout_map.match("d1.kernel")
    )


def test_a_typo_is_answered_with_near_misses():
    """A path that no rule matches names the rules that come close, and no others."""
    layout_map = LayoutMap(
        MESH, {r".*\.query\.kernal$": ROW, r".*\.query\.bias": ROW, r".*\.embeddings": WHOLE}
    )

    match = layout_map.match("blocks.0.attn.query.kernel")

    assert Match("blocks.0.attn.query.kernel", None, (), match.near_misses) == match
    assert match.layout is None
    assert """\
blocks.0.attn.query.kernel: no rule matches, so it is replicated
  near miss  .*\\.query\\.kernal$""" == str(match)


def test_nearest_knows_nothing_like_it():
    """Where nothing comes close, nothing is suggested."""
    assert [] == find_nearest_candidates("blocks.0.attn.query.kernel", [r".*\.gamma", ""])
    assert [] == find_nearest_candidates("", ["kernel"])


@given(st.one_of(strategies.paths(), st.text(max_size=8)), st.lists(strategies.patterns(), max_size=5))
def test_nearest_takes_whatever_text(text: str, candidates: list[str]):
    """Suggestions are among the candidates, each once, at most three."""
    found = find_nearest_candidates(text, candidates)

    assert len(set(found)) == len(found) <= 3
    assert set(found) <= set(candidates)


# -- the dict of rules


class DictOfRules(RuleBasedStateMachine):
    """A layout map does to its rules what a dict does."""

    def __init__(self):
        super().__init__()
        self.layout_map = LayoutMap(MESH)
        self.dict: dict[str, Layout] = {}

    keys = st.sampled_from(["a", "b.*", "c", r"d\d", "(e)", "aa"])
    layouts = st.sampled_from([ROW, COLUMN, WHOLE])

    @rule(key=keys, layout=layouts)
    def add(self, key: str, layout: Layout):
        if key in self.dict:
            with pytest.raises(RuleError):
                self.layout_map[key] = layout
        else:
            self.layout_map[key] = layout
            self.dict[key] = layout

    @rule(key=keys)
    def delete(self, key: str):
        if key in self.dict:
            del self.layout_map[key]
            del self.dict[key]
        else:
            with pytest.raises(KeyError, match=re.escape(repr(key))):
                del self.layout_map[key]

    @rule(key=keys, default=st.none() | st.just(7))
    def pop(self, key: str, default: object):
        assert self.dict.pop(key, default) == self.layout_map.pop(key, default)

    @rule(key=keys)
    def pop_without_default(self, key: str):
        if key not in self.dict:
            with pytest.raises(KeyError, match=re.escape(repr(key))):
                self.layout_map.pop(key)

    @rule(key=keys, layout=layouts)
    def setdefault(self, key: str, layout: Layout):
        assert self.dict.setdefault(key, layout) == self.layout_map.setdefault(key, layout)

    @precondition(lambda self: self.dict)
    @rule()
    def popitem(self):
        assert self.dict.popitem() == self.layout_map.popitem()

    @rule(new=st.dictionaries(keys, layouts, max_size=3))
    def update(self, new: dict[str, Layout]):
        if new.keys() & self.dict.keys():
            with pytest.raises(RuleError):
                self.layout_map.update(new)
        else:
            self.layout_map.update(new)
            self.dict.update(new)

    @rule()
    def clear(self):
        self.layout_map.clear()
        self.dict.clear()

    @invariant()
    def same(self):
        assert list(self.dict) == list(self.layout_map) == list(self.layout_map.keys())
        assert list(reversed(self.dict)) == list(reversed(self.layout_map))
        assert list(self.dict.items()) == list(self.layout_map.items())
        assert list(self.dict.values()) == list(self.layout_map.values())
        assert len(self.dict) == len(self.layout_map)
        assert bool(self.dict) == bool(self.layout_map)
        assert self.dict == self.layout_map
        for key in ("a", "b.*", "bb", "d1", r"d\d", 7):
            assert (key in self.dict) == (key in self.layout_map)
        for path in ("a", "bb", "d1", "e", "aa", "nope"):
            expected = plain_loop(self.layout_map, path)
            assert (self.dict[expected[0]] if expected else None) == self.layout_map[path]
            assert len(expected) == len(self.layout_map.matching_rules(path))


TestDictOfRules = DictOfRules.TestCase


def test_an_empty_map_has_nothing_to_pop():
    """`popitem` on an empty map is a `KeyError`, as on a dict."""
    with pytest.raises(KeyError, match="layout map is empty"):
        LayoutMap().popitem()


def test_maps_are_equal_by_rules_order_and_mesh():
    """Two maps are equal if they lay out alike: order counts, since the first match wins; a plain dict has no order."""
    layout_map = LayoutMap(MESH, {"a": ROW, "a.*": COLUMN})

    assert layout_map == LayoutMap(None, {"a": ROW, "a.*": COLUMN})
    assert layout_map != LayoutMap(MESH, {"a.*": COLUMN, "a": ROW})
    assert layout_map == {"a.*": COLUMN, "a": ROW}
    assert LayoutMap(MESH) != LayoutMap()
    assert layout_map != "a"
    with pytest.raises(TypeError, match="unhashable"):
        hash(layout_map)


@pytest.mark.parametrize(
    "twin",
    [
        copy.copy,
        copy.deepcopy,
        lambda m: pickle.loads(pickle.dumps(m)),
        lambda m: eval(repr(m), {"LayoutMap": LayoutMap, "Mesh": Mesh}),
    ],
    ids=["copy", "deepcopy", "pickle", "repr"],
)
@given(layout_map=strategies.layout_maps())
def test_a_copy_is_equal_and_its_own(twin, layout_map: LayoutMap):
    """A copy, a pickle or the evaluated repr is an equal map, and a change of it leaves the first as it was."""
    layout_map.match("a")  # makes the index, which must not travel

    again = twin(layout_map)

    assert layout_map == again
    assert layout_map.mesh == again.mesh
    again["one more rule"] = ()
    again.activations["one more rule"] = ()
    assert "one more rule" not in layout_map
    assert "one more rule" not in layout_map.activations
    assert layout_map["one more rule"] is None or len(layout_map)


def test_the_repr_and_the_table_of_a_map():
    """The repr is code, one rule a line; the text is a table with the rules' numbers."""
    layout_map = LayoutMap(MESH, {r".*\.kernel": COLUMN, "bias": ("model",)})

    assert """\
LayoutMap(Mesh(None, [('batch', 2), ('model', 4)]), {
    '.*\\\\.kernel': ('unsharded', 'model'),
    'bias': ('model',),
})""" == repr(layout_map)
    assert """\
LayoutMap on batch=2, model=4, 2 rules
   1  .*\\.kernel  (unsharded, model)
   2  bias        (model,)""" == str(layout_map)
    assert "LayoutMap(None, {})" == repr(LayoutMap())
    assert "LayoutMap on no mesh yet, 0 rules" == str(LayoutMap())


# -- activations


@given(strategies.layout_maps(MESH), strategies.paths())
def test_activations_are_looked_up_as_variables_are(layout_map: LayoutMap, path: str):
    """A layer's path meets the rules of `activations` as a variable's path meets those of the map."""
    layout_map = LayoutMap(MESH, {p: layout.replace_memory(None) for p, layout in layout_map.items()})
    twin = LayoutMap(MESH, activations=dict(layout_map.items()))

    assert layout_map[path] == twin.activations[path]
    assert [(r.number, r.pattern, r.layout) for r in layout_map.matching_rules(path)] == [
        (r.number, r.pattern, r.layout) for r in twin.activations.matching_rules(path)
    ]
    assert 0 == len(twin)
    assert twin[path] is None


def test_rules_and_activations_share_one_mesh():
    """Whichever comes first brings the mesh, and tuples of the other are bound to it."""
    first, second = LayoutMap(), LayoutMap()
    first.activations["a"] = ROW
    second["a"] = ROW
    first["b"] = (None, "model")
    second.activations["b"] = (None, "model")

    assert MESH == first.mesh == first.activations.mesh
    assert COLUMN == first["b"] == second.activations["b"]


def test_activations_are_part_of_the_map():
    """They count in ==, in the repr and in the tables, and are a dict apart from the rules."""
    layout_map = LayoutMap(MESH, {"a": ROW}, {r"blocks\.\d+": ("batch", None)})

    assert layout_map != LayoutMap(MESH, {"a": ROW})
    assert layout_map != {"a": ROW}
    assert layout_map == LayoutMap(MESH, {"a": ROW}, {r"blocks\.\d+": ["batch", None]})
    assert layout_map == eval(repr(layout_map), {"LayoutMap": LayoutMap, "Mesh": Mesh})
    assert [r"blocks\.\d+"] == list(layout_map.activations)
    assert """\
LayoutMap(Mesh(None, [('batch', 2), ('model', 4)]), {
    'a': ('model', 'unsharded'),
}, activations={
    'blocks\\\\.\\\\d+': ('batch', 'unsharded'),
})""" == repr(layout_map)
    assert """\
LayoutMap on batch=2, model=4, 1 rule
   1  a  (model, unsharded)
Activations on batch=2, model=4, 1 rule
   1  blocks\\.\\d+  (batch, unsharded)""" == str(layout_map)
    assert r"blocks\.\d+" in layout_map._repr_html_()
    assert "blocks.x: no rule matches, so its output stays as it is" == str(
        LayoutMap(MESH).activations.match("blocks.x")
    )


def test_a_copy_has_activations_of_its_own_on_its_own_mesh():
    """A copied map without a mesh stays without one when the first gets one."""
    layout_map = LayoutMap()
    again = copy.copy(layout_map)
    again.activations["a"] = ROW

    assert again["b"] is None
    assert MESH == again.mesh
    assert layout_map.mesh is None
    assert 0 == len(layout_map.activations)


def test_updating_from_a_map_takes_all_of_it_or_nothing():
    """Rules and activations come along together; if one cannot be added, neither rule, activation nor mesh is."""
    more = LayoutMap(MESH, {"b": ROW}, {"layer": COLUMN})
    layout_map = LayoutMap()
    layout_map.update(more)
    assert layout_map == more

    other = LayoutMap(None, {}, {})
    other.update({"a": ROW})
    other.activations["layer"] = ROW
    with pytest.raises(RuleError, match="activation rule 'layer' is in the map already"):
        other.update(more)

    assert ["a"] == list(other)
    assert ROW == other.activations["layer"]


# -- what is refused

BAD_RULES = {
    "a key that is there": (
        lambda m: m.__setitem__("there", ROW),
        """\
rule 'there' is in the map already
  old   (unsharded, model)
  new   (model, unsharded)
  why   one pattern has one layout
  fix   delete it first, del layout_map['there'], or change one of the patterns""",
    ),
    "an invalid regex": (
        lambda m: m.__setitem__(r".*\.(query|key\.kernel", ROW),
        """\
rule '.*\\\\.(query|key\\\\.kernel' is not a regex
  why   missing ), unterminated subpattern, at character 4
  fix   complete the regex, or escape the character if it is meant literally: '.*\\\\.\\\\(query|key\\\\.kernel'""",
    ),
    "a glob": (
        lambda m: m.__setitem__("*.kernel", ROW),
        """\
rule '*.kernel' is not a regex
  why   nothing to repeat, at character 0
  fix   in a regex, .* matches anything: '.*\\\\.kernel'""",
    ),
    "a repetition beyond all bounds": (
        lambda m: m.__setitem__("a{99999999999}", ROW),
        """\
rule 'a{99999999999}' is not a regex
  why   the repetition number is too large
  fix   fix the regex; re.escape(path) escapes all special characters of a path""",
    ),
    "a compiled regex": (
        lambda m: m.__setitem__(re.compile("a"), ROW),
        """\
rule re.compile('a') is not text
  why   a rule is a regex over variable paths
  fix   write it as in layout_map[r".*\\.kernel"]""",
    ),
    "text for a layout": (
        lambda m: m.__setitem__("new", "model"),
        """\
rule 'new': 'model' is not a layout
  why   it is of type str
  fix   for a tensor of one axis write ('model',), of two (None, 'model')""",
    ),
    "no layout": (
        lambda m: m.setdefault("new"),
        """\
rule 'new': None is not a layout
  why   it is None
  fix   use a Layout, or a tuple of sharding specs such as (None, "model")""",
    ),
    "an unknown dim": (
        lambda m: m.__setitem__("new", (None, "modle")),
        """\
rule 'new': layout (unsharded, modle): spec 'modle' of axis 1 is not allowed
  mesh  batch=2, model=4
  why   the mesh has no dim 'modle'
  fix   use one of 'batch', 'model', 'unsharded'""",
    ),
    "another mesh": (
        lambda m: m.__setitem__("new", Layout(["model"], Mesh(None, "model=8"))),
        """\
rule 'new': its layout is on another mesh
  map's     batch=2, model=4
  layout's  model=8
  why       all variables of a model share one mesh
  fix       use the map's mesh, or create another map""",
    ),
    "an activation that is there": (
        lambda m: m.activations.__setitem__("layer", ROW),
        """\
activation rule 'layer' is in the map already
  old   (model, unsharded)
  new   (model, unsharded)
  why   one pattern has one layout
  fix   delete it first, del layout_map.activations['layer'], or change one of the patterns""",
    ),
    "an activation by module": (
        lambda m: m.activations.__setitem__(7, ROW),
        """\
activation rule 7 is not text
  why   a rule is a regex over layers' paths
  fix   write it as in layout_map.activations[r"blocks\\.\\d+"]""",
    ),
    "one bad rule of many": (
        lambda m: m.update({"fine": ROW, "new": 7}),
        """\
rule 'new': 7 is not a layout
  why   it is of type int
  fix   use a Layout, or a tuple of sharding specs such as (None, "model")""",
    ),
}


@pytest.mark.parametrize("mistake", BAD_RULES)
def test_a_rule_that_cannot_be_is_refused_and_nothing_changes(mistake: str):
    """Every mistake has its whole message and names the rule; the map answers as before."""
    act, message = BAD_RULES[mistake]
    layout_map = LayoutMap(MESH, {"there": COLUMN}, {"layer": ROW})
    before = repr(layout_map)

    with pytest.raises(RuleError) as raised:
        act(layout_map)

    assert message == str(raised.value)
    assert before == repr(layout_map)
    assert COLUMN == layout_map["there"]
    assert layout_map["new"] is layout_map["fine"] is None


def test_specs_for_a_map_without_a_mesh_are_refused_and_it_takes_no_mesh():
    """A tuple cannot be bound, and a map that refused a rule has no more of a mesh than before."""
    layout_map = LayoutMap()

    with pytest.raises(RuleError) as raised:
        layout_map["new"] = (None, "model")
    with pytest.raises(RuleError):
        layout_map.update({"fine": ROW, "(": ROW})

    assert """\
rule 'new': sharding specs (None, 'model') have no mesh
  why   sharding specs need the layout map's mesh, and this map has none
  fix   create the map with a mesh, LayoutMap(mesh), or pass a Layout""" == str(raised.value)
    assert layout_map.mesh is None
    assert 0 == len(layout_map)


@pytest.mark.parametrize(
    ("ours", "theirs", "said"),
    [
        (Mesh(None, "x=2"), Mesh(None, "x=4"), ("x=2", "x=4")),
        (Mesh(None, "x=2", "a"), Mesh(None, "x=2"), ("named 'a'", "named ''")),
        (Mesh(None, "x=2"), Mesh(["CPU:0", "CPU:1"], "x=2"), ("abstract", "on CPU devices")),
        (
            Mesh([f"CPU:{i}" for i in range(1024)], "x=1024"),
            Mesh([f"CPU:{i}" for i in (*range(1023), 5000)], "x=1024"),
            ("'CPU:1023' at position 1023", "'CPU:5000' at position 1023"),
        ),
    ],
)
def test_two_meshes_in_one_map_are_distinguished(ours: Mesh, theirs: Mesh, said: tuple[str, str]):
    """The error shows where the meshes differ, and nothing of where they agree."""
    layout_map = LayoutMap(ours)

    with pytest.raises(RuleError, match="another mesh") as raised:
        layout_map["a"] = Layout([], theirs)

    assert {"map's": said[0], "layout's": said[1]} == raised.value.facts
