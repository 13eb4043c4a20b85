"""The YAML of rules files: text, decimal integers, and null are read, and all else is text or refused with its line."""

import subprocess
import sys

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

import layoutmap as lm
from layoutmap.core.strict_yaml import read_yaml
from layoutmap.testing import strategies

HEAD = "version: 1\nmesh: {dims: {batch: 2, model: 4}}\n"

# Ten lists, each of ten times the one before: ten thousand million values in 344 bytes.
BOMB = "\n".join(
    ["a0: &a0 [x,x,x,x,x,x,x,x,x]", *(f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 10))]
)


def read(text):
    return lm.LayoutMap.from_yaml(HEAD + text)


def test_an_alias_repeats_a_layout():
    """What an anchor names can be named again, a single value or a whole part."""
    aliases = read("rules: {a: &columns [null, model], b: *columns, c: {layout: *columns, uneven: shrink}}")
    written_out = read(
        "rules: {a: [null, model], b: [null, model], c: {layout: [null, model], uneven: shrink}}"
    )

    assert written_out == aliases


REFUSED = {
    "python tag": (
        "version: !!python/object/apply:os.getcwd []",
        1,
        "the tag tag:yaml.org,2002:python/object/apply:os",
    ),
    "own tag": ("version: 1\nrules: !rules {a: [x]}", 2, "the tag !rules is not supported"),
    "binary": (
        "version: 1\nrules: {? !!binary eA== : [x]}",
        2,
        "the tag tag:yaml.org,2002:binary is not supported",
    ),
    "set": ("version: 1\nrules: !!set {a}", 2, "the tag tag:yaml.org,2002:set is not supported"),
    "merge": ("version: 1\nrules:\n  a: &a [x]\n  <<: *a", 4, "the merge key << is not supported"),
    "key twice": ("version: 1\nrules:\n  a: [x]\n  'a': [y]", 4, "'a' appears twice"),
    "null twice": ("version: 1\nrules:\n  ~: [x]\n  null: [y]", 4, "None appears twice"),
    "deep": ("version: 1\nrules: {a: " + "[" * 900, 2, "it has more than 10 nested levels"),
    "bomb": (BOMB, 5, "its aliases repeat more than 100000 values"),
    "one long list": (
        "a: &a [" + "x," * 999 + "]\nb: [" + "*a," * 999 + "]",
        1,
        "its aliases repeat more than",
    ),
}


@pytest.mark.parametrize(("text", "line", "what"), REFUSED.values(), ids=REFUSED)
def test_what_surprises_is_refused(text, line, what):
    """With its line, why, and what to write instead, on both parsers."""
    for error in both(text, pytest.MonkeyPatch.context):
        assert error.what.startswith(f"rules file: {what}")
        assert line == error.facts["line"]
        assert error.why
        assert error.fix


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("rules: {a: &a [*a]}", "found unconstructable recursive node"),
        ("rules: {a: *b}", "found undefined alias"),
        ("rules: {[a]: [x]}", "found unhashable key"),
        ("---\nversion: 1", "but found another document"),
        (r'rules: {"up\.kernel": [x]}', "found unknown escape character"),
    ],
)
def test_the_parser_names_the_line_of_wrong_yaml(text, why):
    """An error of PyYAML is a `RuleError` with its line, on both parsers."""
    for error in both("version: 1\n" + text, pytest.MonkeyPatch.context):
        assert "rules file cannot be read" == error.what
        assert why in error.why
        assert "line 2" in error.why
        assert error.fix


@pytest.mark.parametrize(
    "text", ["010", "1:20", "1_0", "0x10", "1" * 5000, "1.0", ".nan", "on", "2026-11-22"]
)
def test_no_text_is_another_number(text):
    """What YAML 1.1 reads as something else than its decimal digits is text, and no size of a mesh dim."""
    with pytest.raises(lm.RuleError, match="the size of mesh dim 'x' is not an integer"):
        lm.LayoutMap.from_yaml(f"version: 1\nmesh: {{dims: {{x: {text}}}}}")

    assert {"x": text} == read_yaml(f"x: {text}")


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("mesh: {dims: {x: [2]}}", "rules file: the size of mesh dim 'x' is not an integer"),
        ("mesh: {dims: {1: 2}}", "rules file: mesh dims has a key 1 that is not text"),
        ("mesh: {dims: {x: 2}, devices: [1]}", "rules file: mesh devices is not a list of texts"),
        ("mesh: {dims: {x: 2}, name: 1}", "rules file: mesh name is not text"),
        ("rules: {12: [x]}", "rules file: rules has a key 12 that is not text"),
        ("rules: {a: [x, 1]}", "rules file: rule 'a': the sharding spec of axis 1 cannot be read"),
        ("rules: {a: [[[x]]]}", "rules file: rule 'a': the sharding spec of axis 0 cannot be read"),
        ("uneven: [a, [b, [c, [d, [e]]]]]", "rules file: uneven=['a', ['b', ['c', [...]]]] is not allowed"),
    ],
)
def test_a_wrong_type_is_reported_with_its_place(text, what):
    """No value of another type gets as far as the mesh or a rule."""
    with pytest.raises(lm.RuleError) as caught:
        lm.LayoutMap.from_yaml("version: 1\n" + text)

    assert what == caught.value.what


def test_text_is_asked_for():
    """A path or an open file is refused with what to pass."""
    with pytest.raises(lm.RuleError, match=r"read_text\(\)"):
        lm.LayoutMap.from_yaml(b"version: 1")


def test_names_of_numpys_own_text_type_are_written():
    """A mesh whose dim is named by an element of a numpy array is read back equal."""
    layout_map = lm.LayoutMap(lm.Mesh(None, {np.array(["model"])[0]: 4}), {"a": ("model",)})

    assert layout_map == lm.LayoutMap.from_yaml(layout_map.to_yaml())


def both(text, monkeypatch_context):
    """What libyaml's parser makes of a text, and what PyYAML's own does; an error as it is."""
    for has_libyaml in (True, False):
        with monkeypatch_context() as patch:
            if not has_libyaml:
                patch.delattr(yaml, "CBaseLoader")
            try:
                yield read_yaml(text)
            except lm.RuleError as error:
                yield error


@pytest.mark.skipif(not yaml.__with_libyaml__, reason="there is only one parser")
@given(strategies.layout_maps() | st.dictionaries(st.text(max_size=6), st.text(max_size=6), max_size=3))
def test_both_parsers_read_what_is_written(value):
    """A file that `to_yaml` or PyYAML writes says the same with and without libyaml."""
    text = yaml.safe_dump(value) if isinstance(value, dict) else value.to_yaml()
    fast, slow = both(text, pytest.MonkeyPatch.context)

    assert fast == slow or type(fast) is type(slow) is lm.RuleError


def test_a_small_file_that_would_be_large_is_refused_within_bounds():
    """Wherever nested aliases stand, reading them needs less than 512 MiB and ends."""
    places = (
        "rules: {a: %s}",
        "mesh: %s",
        "version: %s",
        "uneven: %s",
        "%s: 1",
        "mesh: {dims: {x: %s}}",
        "%s",
    )
    code = f"""
import resource
import layoutmap as lm
resource.setrlimit(resource.RLIMIT_AS, (512 << 20, 512 << 20))
bomb = "&a [x,x,x,x,x,x,x,x,x]"
for name in "bcdefghij":
    bomb = "&%s [%s,%s]" % (name, bomb, ",".join(["*" + chr(ord(name) - 1)] * 8))
for place in {places!r}:
    try:
        lm.LayoutMap.from_yaml("version: 1\\n" + place % bomb)
    except lm.RuleError:
        print("refused")
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=False
    )

    assert ("refused\n" * len(places), "") == (done.stdout, done.stderr)
