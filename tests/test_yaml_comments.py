"""Comments of rules files: kept at their rules, whatever is done to the map, and no part of what it says."""

import copy
import pickle
import re

import pytest
from house import PACKAGE
from hypothesis import given
from hypothesis import strategies as st

import layoutmap as lm
from layoutmap.testing import strategies

MESH = lm.Mesh(None, "batch=2,model=4")
PRESETS = sorted((PACKAGE / "presets").glob("*.yaml"))
# What PyYAML lets stand in a file, in one line.
_SIGNS = st.characters(exclude_categories=["Cs", "Cc"], exclude_characters="\u2028\u2029\ufffe\uffff")
_LINES = st.text(_SIGNS, max_size=20)


def more_in(before, after):
    """The lines that a text has besides those of another, which it has in their order."""
    lines = before.splitlines()
    more = []
    for line in after.splitlines():
        if lines and line == lines[0]:
            del lines[0]
        else:
            more.append(line)
    assert not lines
    return more


BY_HAND = """\
# The model of the paper.

# Second part of the head.
version: 3 # of the form
mesh: # of the first cluster
  # sizes
  dims: {batch: 2, model: 4} # `model` must divide the heads
rules:

  # Attention: whole heads.
  query: # over the heads
    # batch
    - null
    - model # heads
  'a: "b" #c': [[batch, model], null] # both

  # Feedforward
  up: {layout: [null, model], uneven: shrink}
activations: # between blocks
  # of each block
  blocks: [batch, null] # rows
# what is uneven
uneven: replicate # and not an error
# The end.
"""


def comments_of(text):
    """What is said in a text that has no `#` but in comments and in the one key of BY_HAND."""
    text = text.replace("'a: \"b\" #c'", "")
    return re.findall(r"#.*?(?=\s*$)", text, re.MULTILINE)


def test_a_file_written_by_hand():
    """Each comment stays with its entry; one that stands between the lines of a rule stands above it."""
    assert """\
# The model of the paper.

# Second part of the head.
version: 3 # of the form
mesh: # of the first cluster
  # sizes
  dims: # `model` must divide the heads
    batch: 2
    model: 4
rules:

  # Attention: whole heads.
  # over the heads
  # batch
  query: [null, model] # heads
  'a: "b" #c': [[batch, model], null] # both

  # Feedforward
  up: {layout: [null, model], uneven: shrink}
activations: # between blocks
  # of each block
  blocks: [batch, null] # rows
# what is uneven
uneven: replicate # and not an error
# The end.
""" == lm.LayoutMap.from_yaml(BY_HAND).to_yaml()


def test_a_comment_goes_where_its_rule_goes():
    """It is gone with its rule, and stays with it while others come and go."""
    layout_map = lm.LayoutMap.from_yaml(BY_HAND)
    layout_map.add("down", ("model", None), comment="narrows,\nso over what it takes in")
    del layout_map["query"]
    layout_map.activations.clear()
    layout_map.setdefault("bias", (None,))

    assert """\
# The model of the paper.

# Second part of the head.
version: 3 # of the form
mesh: # of the first cluster
  # sizes
  dims: # `model` must divide the heads
    batch: 2
    model: 4
rules:
  'a: "b" #c': [[batch, model], null] # both

  # Feedforward
  up: {layout: [null, model], uneven: shrink}
  # narrows,
  # so over what it takes in
  down: [model, null]
  bias: [null]
# what is uneven
uneven: replicate # and not an error
# between blocks
# The end.
""" == layout_map.to_yaml()


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_the_files_of_presets(path):
    """Every comment is kept, in order, and the file that is written is read as it was."""
    text = path.read_text(encoding="utf-8")
    layout_map = lm.LayoutMap.from_yaml(text, lm.Mesh(None, "fsdp=2,model=4"))
    written = layout_map.to_yaml()

    assert comments_of(text) == comments_of(written) != []
    assert layout_map == lm.LayoutMap.from_yaml(written)
    assert written == lm.LayoutMap.from_yaml(written).to_yaml()


@given(st.data())
def test_comments_of_any_file_are_kept(data):
    """Wherever a line may be put in, and at the end of any line: no comment is lost, and none changes its place."""
    said, blank = _LINES.map(lambda line: f"#{line}".rstrip()), st.sampled_from(["", "  "])
    lines = []
    for line in BY_HAND.splitlines():
        lines += data.draw(st.lists(said | blank, max_size=2))
        free = line and "#" not in line
        lines.append(f"{line} {data.draw(said)}" if free and data.draw(st.booleans()) else line)
    text = "\n".join(lines)
    layout_map = lm.LayoutMap.from_yaml(text)
    written = layout_map.to_yaml()

    assert layout_map == lm.LayoutMap.from_yaml(BY_HAND)
    assert comments_of(text) == comments_of(written)
    assert written == lm.LayoutMap.from_yaml(written).to_yaml()


@given(strategies.layout_maps(), st.data())
def test_any_map_with_any_comments_is_read_back(drawn, data):
    """The same rules, the same text, and besides what is written without comments, those that code has given."""
    bare, layout_map = (lm.LayoutMap(drawn.mesh, activations=drawn.activations) for _ in range(2))
    said = []
    for rule in drawn.rules:
        comment = data.draw(st.lists(_LINES, max_size=3).map("\n".join))
        bare.add(rule.pattern, rule.layout, uneven=rule.uneven)
        layout_map.add(rule.pattern, rule.layout, uneven=rule.uneven, comment=comment)
        said += [f"  # {line}".rstrip() for line in comment.splitlines()]
    text = layout_map.to_yaml()
    again = lm.LayoutMap.from_yaml(text)

    assert bare == layout_map == again
    assert text == again.to_yaml()
    assert said == more_in(bare.to_yaml(), text)


def test_a_comment_says_nothing_to_the_program():
    """Maps that differ in comments only are equal, also written as code; copies, pickles and updates keep comments."""
    layout_map = lm.LayoutMap.from_yaml(BY_HAND)
    bare = lm.LayoutMap.from_yaml("\n".join(line for line in BY_HAND.splitlines() if line.strip()[:1] != "#"))
    added = lm.LayoutMap(MESH)
    added.update(layout_map)

    assert layout_map == bare
    assert layout_map == eval(repr(layout_map), {"LayoutMap": lm.LayoutMap, "Mesh": lm.Mesh})
    for twin in (copy.copy(layout_map), copy.deepcopy(layout_map), pickle.loads(pickle.dumps(layout_map))):
        assert layout_map.to_yaml() == twin.to_yaml()
        del twin["up"]
        assert "# Feedforward" in layout_map.to_yaml()
    assert "  # Feedforward\n  up:" in added.to_yaml()
    assert "  # of each block\n  blocks: [batch, null] # rows" in added.to_yaml()


def test_an_update_that_fails_leaves_no_comment():
    """All of it is added, or nothing."""
    layout_map = lm.LayoutMap(MESH, {"up": (None,)})
    with pytest.raises(lm.RuleError, match="in the map already"):
        layout_map.update(lm.LayoutMap.from_yaml(BY_HAND))

    assert lm.LayoutMap(MESH, {"up": (None,)}).to_yaml() == layout_map.to_yaml()


def test_another_mesh_keeps_what_was_said_of_the_first():
    """A comment whose entry is not written any more, such as that of a mesh dim, is at the end of the file."""
    text = "version: 1\nmesh:\n  dims:\n    # rows\n    x: 2 # nodes\nrules:\n  a: [null]\n"

    assert """\
version: 1
mesh:
  dims:
    batch: 2
    model: 4
rules:
  a: [null]
# rows
# nodes
""" == lm.LayoutMap.from_yaml(text, MESH).to_yaml()


@pytest.mark.parametrize(
    "text",
    [
        "# a\n{version: 1, # b\n rules: {x: [null], # c\n # d\n y: [model]} # e\n} # f",
        "\ufeff# a\r\nversion: 1 # b\r\n# c\r\nrules: {} # d\r\n# e\r\n# f",
        "# a\n---\n# b\nversion: 2\nrules:\n  # c\n  x: &l [null] # d\nactivations: {y: *l} # e\n...\n# f",
        "version: 1\nrules: &r # a\n  # b\n  ? x\n  # c\n  : [null] # d\nmesh: {dims: {model: 2}} # e\n# f",
        "rules:\n# a\n  x: # b\n  # c\n  - null # d\n  # e\nversion: 1 # f",
        "version: 2\nrules: &r # a\n  x: &l [null] # b\n  # c\n  y: *l # d\nactivations: *r # e\n# f",
    ],
    ids=[
        "in braces",
        "of another system",
        "with an anchor",
        "long keys",
        "in another order",
        "with aliases",
    ],
)
def test_other_ways_to_write_a_file(text):
    """Whatever YAML allows, no comment is lost."""
    written = lm.LayoutMap.from_yaml(text, MESH).to_yaml()

    assert sorted(f"# {sign}" for sign in "abcdef") == sorted(comments_of(written))
    assert "\ufeff" not in written
    assert written == lm.LayoutMap.from_yaml(written).to_yaml()


def test_entries_of_several_lines():
    """What is said at the end of an entry is said beside it, and what is said before that above it."""
    text = """\
version: 1
mesh:
  name: |-
    m
  # a
  dims: {model: 2} # b
rules:
  x: [null, # c
    model # d
  ] # e
  ? |-
    y
  # f
  : [model] # g
"""
    assert """\
version: 1
mesh:
  # a
  dims: # b
    model: 2
  name: m
rules:
  # c
  # d
  x: [null, model] # e
  # f
  y: [model] # g
""" == lm.LayoutMap.from_yaml(text).to_yaml()


def test_a_comment_that_no_file_can_hold_is_refused():
    """The rule is not added then."""
    layout_map = lm.LayoutMap(MESH)
    with pytest.raises(lm.RuleError) as caught:
        layout_map.add("up", (None, "model"), comment="bell \a")

    assert r"""rule 'up': its comment cannot be written
  comment  'bell \x07'
  why      YAML does not allow the sign '\x07'
  mend     leave that sign out""" == str(caught.value)
    assert 0 == len(layout_map)
