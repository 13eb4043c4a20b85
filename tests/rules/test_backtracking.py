"""Regexes that take exponential time to fail are found, and usual rules are not taken for such."""

from __future__ import annotations

import re
import subprocess
import sys
import time
import warnings

import pytest

import layoutmap as lm
from layoutmap.rules import presets
from layoutmap.rules.backtracking import doubling_text

DOUBLING = {
    "(a+)+$": "a",
    "(a*)*b": "a",
    "(a?b?)*$": "ba",
    "(a|ab|b)*$": "aba",
    r"(.+\.)+kernel": ".a",
    r"([a-z]+_?)*\.kernel": "a",
    r"([\w.]+)*k": "a",
    r"(\s*\w+)*k": "a",
    "(x+x+)+y": "xx",
    "((a+)+b)*": "a",
    "(a{1,2}){3,}x": "aa",
    "(a{0,100})*b": "a",
    "(?i)((a|AB|b)*)$": "aba",
}
FINE = [
    "(a+)+",  # nothing after it can fail
    r"(\w+\.)+kernel",
    r"(?:[^.]*\.)*kernel$",
    r"(encoder|decoder)\.\d+\.(query|key)$",
    r"((layer_\d+|block_\d+)\.)*kernel",
    r"(\d{1,3}\.){3}x",
    r"(\w{32})*x",
    r"(\s+\w+)*k",
    "(ab*)*c",
    "(a++)+b",
    "(?>a+)+b",
    r".*a.*b.*c",
]


@pytest.mark.parametrize("pattern", DOUBLING)
def test_a_text_that_doubles_the_ways_is_found(pattern: str):
    """A regex with two ways through one loop gives the text that has them."""
    assert DOUBLING[pattern] == doubling_text(re.compile(pattern))


def test_each_repeat_of_that_text_doubles_the_time():
    """What is found is true: a path with forty repeats of the text does not come to an end."""
    ask = "import re, sys; print('begun', flush=True); re.match(sys.argv[1], sys.argv[2])"
    asked = {pattern: text * 40 + "!\n!" for pattern, text in DOUBLING.items() if pattern != "(a|ab|b)*$"}
    asked["(a|b)*$"] = "ab" * 40 + "!\n!"  # one that comes to an end, beside them
    processes = {
        pattern: subprocess.Popen([sys.executable, "-c", ask, pattern, text], stdout=subprocess.PIPE)
        for pattern, text in asked.items()
    }
    try:
        for process in processes.values():
            assert process.stdout is not None
            process.stdout.readline()
        processes["(a|b)*$"].wait(60)
        time.sleep(0.5)
        assert ["(a|b)*$"] == [p for p, process in processes.items() if process.poll() is not None]
    finally:
        for process in processes.values():
            process.kill()
            process.communicate()


@pytest.mark.parametrize("pattern", FINE)
def test_other_regexes_are_not_warned_of(pattern: str):
    """A regex with one way through each loop, or with an end that cannot fail, is taken in silence."""
    assert doubling_text(re.compile(pattern)) is None


def test_no_preset_is_warned_of():
    """The rules of all presets are fine."""
    mesh = lm.Mesh(None, "data=2,model=4")
    maps = [lm.LayoutMap.preset(name, mesh, fsdp_dim="data") for name in presets.names()]

    assert [] == [p for m in maps for p in (*m, *m.activations) if doubling_text(re.compile(p))]


def test_a_rule_that_can_take_for_ever_is_warned_of_when_it_is_added():
    """The warning names the rule, shows the text, and says how to write it."""
    layout_map = lm.LayoutMap(lm.Mesh(None, "model=4"))

    with pytest.warns(lm.LayoutMapWarning) as told:
        layout_map["(a+)+$"] = (None, "model")

    assert [__file__] == [w.filename for w in told]
    assert """\
rule '(a+)+$' can take forever on a path that it does not match
  for example  a path with 'a' many times in a row
  why          its nested repeats can split that text in exponentially many ways
  fix          write it so that a text matches in one way, as in [^.]+ for a part of a path""" == str(
        told[0].message
    )
    assert ["(a+)+$"] == list(layout_map)


def test_a_warning_that_is_an_error_leaves_the_map_as_it_was():
    """Where warnings are errors, the rule is not added."""
    layout_map = lm.LayoutMap(lm.Mesh(None, "model=4"))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(lm.LayoutMapWarning):
            layout_map["(a+)+$"] = (None, "model")

    assert [] == list(layout_map)
