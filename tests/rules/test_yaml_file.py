"""Rules files: what is written is read back, and what is wrong is reported by its place."""

import copy
import pickle

import pytest
from hypothesis import given

import layoutmap as lm
from layoutmap.testing import strategies

RULES_FILE = """\
version: 1
mesh:
  dims:
    batch: 2
    model: 4
rules:
  blocks\\.\\d+\\.up\\.kernel: [null, model]
  'a: "b" #c': [[batch, model], null]
  scalar: []
"""


def test_the_file_is_as_documented():
    """A map is written in one form, rules in their order, specs in one line."""
    rules = {
        r"blocks\.\d+\.up\.kernel": (None, "model"),
        'a: "b" #c': (("batch", "model"), None),
        "scalar": (),
    }
    layout_map = lm.LayoutMap(lm.Mesh(None, "batch=2,model=4"), rules)

    assert RULES_FILE == layout_map.to_yaml()
    assert layout_map == lm.LayoutMap.from_yaml(RULES_FILE)
    assert list(layout_map) == list(lm.LayoutMap.from_yaml(RULES_FILE))


@pytest.mark.parametrize("mesh", ["batch=2,model=4", "{dims: {batch: 2, model: 4}}"])
@pytest.mark.parametrize("version", ["", "version: 1\n"], ids=["no version", "version"])
def test_a_file_may_be_written_short(version, mesh):
    """The version may be left out, and the mesh may be written as everywhere else."""
    text = f"{version}mesh: {mesh}\nrules:\n  up: [null, model]\n"

    assert lm.LayoutMap("batch=2,model=4", {"up": (None, "model")}) == lm.LayoutMap.from_yaml(text)


def test_a_mesh_as_text_replaces_that_of_the_file():
    """As in `LayoutMap(\"model=2\")`."""
    text = "mesh: model=4\nrules: {up: [model]}"

    assert lm.LayoutMap("model=2", {"up": ("model",)}) == lm.LayoutMap.from_yaml(text, "model=2")


@given(strategies.layout_maps())
def test_every_map_is_read_back_as_it_was(layout_map):
    """Writing and reading a map changes neither its rules, nor their order, nor its mesh."""
    again = lm.LayoutMap.from_yaml(layout_map.to_yaml())

    assert list(layout_map.items()) == list(again.items())
    assert layout_map.mesh == again.mesh


def test_activations_are_in_the_file():
    """Activations are written after the rules."""
    layout_map = lm.LayoutMap(lm.Mesh(None, "model=2"), {"a": ("model",)}, {r"blocks\.\d+": (None, "model")})

    assert """\
version: 1
mesh:
  dims:
    model: 2
rules:
  a: [model]
activations:
  blocks\\.\\d+: [null, model]
""" == layout_map.to_yaml()
    assert layout_map == lm.LayoutMap.from_yaml(layout_map.to_yaml())


def test_what_is_said_of_the_rest_is_in_the_file():
    """It is the last line, and a map that says it is another than one that does not; a copy says it, too."""
    mesh = lm.Mesh(None, "model=2")
    layout_map = lm.LayoutMap(mesh, {"a": ("model",)}, rest="replicated")

    assert (
        "version: 1\nmesh:\n  dims:\n    model: 2\nrules:\n  a: [model]\nrest: replicated\n"
        == layout_map.to_yaml()
    )
    for twin in (
        lm.LayoutMap.from_yaml(layout_map.to_yaml()),
        copy.copy(layout_map),
        copy.deepcopy(layout_map),
        pickle.loads(pickle.dumps(layout_map)),
        eval(repr(layout_map), {"LayoutMap": lm.LayoutMap, "Mesh": lm.Mesh}),
    ):
        assert ("replicated", layout_map) == (twin.rest, twin)
        assert layout_map.match("b") == twin.match("b")
    assert layout_map != lm.LayoutMap(mesh, {"a": ("model",)})
    with pytest.raises(lm.RuleError) as refused:
        lm.LayoutMap.from_yaml("{version: 1, rest: sharded}")
    assert """\
rules file: rest='sharded' is not allowed
  why   it says whether variables without a rule are replicated on purpose or get a warning
  fix   use 'replicated' or None; for a sharded layout add a rule as the last one""" == str(refused.value)


def test_another_mesh_may_take_the_place_of_the_files():
    """One rules file serves meshes of any size."""
    mesh = lm.Mesh(None, "batch=64,model=8")

    assert mesh == lm.LayoutMap.from_yaml(RULES_FILE, mesh).mesh


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "version: 1\nrules:\n  a: [model]\n  a: [null]\n",
            """\
rules file: 'a' appears twice
  line  4
  why   a key has one value, and a pattern one rule
  fix   delete one of them""",
        ),
        (
            "version: 2\n",
            """\
rules file has the unknown version 2
  why   this layoutmap reads version 1
  fix   write version: 1, delete the line, or use the layoutmap release that wrote the file""",
        ),
        (
            "mesh: batch=2,batch=4\n",
            """\
rules file: mesh: mesh dim 'batch' of size 4 is not allowed
  mesh  batch=2, batch=4
  why   a layout could not tell the two dims of that name apart
  fix   rename one of them, to 'batch_2' for instance""",
        ),
        (
            "version: 1\nrule: {}\n",
            """\
rules file: the file has the unknown key 'rule'
  why   the keys are activations, mesh, rest, rules, uneven, version
  fix   correct the key, or delete it""",
        ),
        (
            "version: 1\nactivations: {a: model}\n",
            """\
rules file: activation rule 'a' has no list of sharding specs
  value  'model'
  why    a layout has one sharding spec for each axis
  fix    write a list, as in [null, model]""",
        ),
        (
            "version: 1\nrules: {a: model}\n",
            """\
rules file: rule 'a' has no list of sharding specs
  value  'model'
  why    a layout has one sharding spec for each axis
  fix    write a list, as in [null, model]""",
        ),
        (
            "just text",
            """\
rules file: the file is not a mapping
  value  'just text'
  fix    write it as LayoutMap.to_yaml() does: version, mesh and rules""",
        ),
    ],
    ids=["twice", "version", "mesh", "key", "activation specs", "specs", "text"],
)
def test_what_is_wrong_is_reported(text, message):
    """A rules file that cannot be read says what, where and the fix."""
    with pytest.raises(lm.RuleError) as caught:
        lm.LayoutMap.from_yaml(text, lm.Mesh(None, "model=2"))

    assert message == str(caught.value)


def test_text_that_is_no_yaml_is_refused():
    """The place of a mistake in the YAML itself is in the message."""
    with pytest.raises(lm.RuleError, match="line 1, column"):
        lm.LayoutMap.from_yaml("{version: 1")
