"""The JSON Schema of rules files says what `from_yaml` says: an editor lets no mistake pass, and makes none up."""

import json

import pytest
import yaml
from frameworks import PACKAGE
from hypothesis import example, given
from hypothesis import strategies as st
from jsonschema import Draft7Validator

import layoutmap as lm
from layoutmap.rules import yaml_file
from layoutmap.testing import strategies

SCHEMA = json.loads(yaml_file.read_rules_file_schema())
PRESETS = sorted((PACKAGE / "rules" / "presets").glob("*.yaml"))
_KEYS = [
    "version",
    "mesh",
    "rules",
    "activations",
    "uneven",
    "rest",
    "dims",
    "name",
    "devices",
    "layout",
    "d1",
    "batch",
]
_SCALARS = st.sampled_from(
    [
        None,
        True,
        False,
        0,
        1,
        2,
        3,
        4,
        -1,
        1.5,
        "",
        "batch",
        "batch=2, model=4",
        "batch=x",
        "shrink",
        "error",
        "replicated",
    ]
)
_VALUES = st.recursive(
    _SCALARS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(_KEYS), inner, max_size=2),
    max_leaves=4,
)


def is_valid(data):
    return Draft7Validator(SCHEMA).is_valid(data)


def places_in(value, place=()):
    """Every place in a value, as the keys that lead to it."""
    yield place
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in items:
        yield from places_in(each, (*place, key))


@st.composite
def nearly_rules_files(draw):
    """What `to_yaml` writes, with something replaced, taken out or put in."""
    data = yaml.safe_load(draw(strategies.layout_maps(max_rules=3)).to_yaml())
    for _ in range(draw(st.integers(1, 2))):
        *way, last = draw(st.sampled_from([p for p in places_in(data) if p]))
        holder = data
        for key in way:
            holder = holder[key]
        what = draw(st.sampled_from(["replace", "take out", "put in"]))
        if what == "replace":
            holder[last] = draw(_VALUES)
        elif what == "take out":
            del holder[last]
        elif isinstance(holder, dict):
            holder[draw(st.sampled_from(_KEYS))] = draw(_VALUES)
        if data in ({}, []):
            break
    return data


def test_the_schema_is_one():
    """It is valid by JSON Schema's own."""
    Draft7Validator.check_schema(SCHEMA)


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_the_files_of_presets(path):
    """All of them pass."""
    assert is_valid(yaml.safe_load(path.read_text(encoding="utf-8")))


@given(strategies.layout_maps())
def test_what_is_written_passes(layout_map):
    """A file of any map passes."""
    assert is_valid(yaml.safe_load(layout_map.to_yaml()))


@given(nearly_rules_files())
@example(
    {"version": 1, "mesh": {"name": True, "dims": {"batch": 2}}, "rules": {}}
)  # text in this library's YAML
def test_the_schema_says_what_from_yaml_says(data):
    """What `from_yaml` refuses for its form fails, and what it reads passes."""
    text = yaml.safe_dump(data, sort_keys=False)
    try:
        yaml_file.parse_rules_file(text)
    except lm.RuleError:
        assert not is_valid(data)
        return
    try:
        lm.LayoutMap.from_yaml(text)
    except (lm.RuleError, lm.MeshError):
        return  # it means nothing: a dim that the mesh has not, a mesh of no devices
    assert is_valid(data)
