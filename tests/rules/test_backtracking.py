"""Regexes that take exponential time to fail are refused, and usual rules are not taken for such."""

from __future__ import annotations

import contextlib
import random
import re
import subprocess
import sys
import time

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
    "(?>(a+)+b)": "a",  # nothing in it is tried again, once it has matched
    "(?=(a+)+b)a": "a",
    "((a+)+c)++": "a",
    "((?>a|b)*)*c": "a",
    "(a+){20}b": "a",
    f"{'x' * 300}(a+)+b": "a",
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
    "(?>(a+)+)b",
    "((?>(a+)+)b)*c",
    r"(?>[\w.]+\.)*kernel",
    "(a*(?>b+c))*d",
    r"(?:\w++\.?)*k",
    "^(?!.*norm).*kernel$",
    r".*a.*b.*c",
]


@pytest.mark.parametrize("pattern", DOUBLING)
def test_a_text_that_doubles_the_ways_is_found(pattern: str):
    """A regex with two ways through one loop gives the text that has them."""
    assert DOUBLING[pattern] == doubling_text(re.compile(pattern))


def test_each_repeat_of_that_text_doubles_the_time():
    """What is found is true: a path with forty repeats of the text does not come to an end."""
    ask = "import re, sys; print('begun', flush=True); re.match(sys.argv[1], sys.argv[2])"
    asked = {
        pattern: "x" * pattern.count("x" * 300) * 300 + text * 40 + "!\n!"
        for pattern, text in DOUBLING.items()
        if pattern != "(a|ab|b)*$"
    }
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
def test_other_regexes_are_fine(pattern: str):
    """A regex with one way through each loop, or with an end that cannot fail, is taken in silence."""
    assert doubling_text(re.compile(pattern)) is None


def test_no_preset_is_refused():
    """The rules of all presets are fine."""
    mesh = lm.Mesh(None, "data=2,model=4")
    maps = [lm.LayoutMap.preset(name, mesh, fsdp_dim="data") for name in presets.names()]

    assert [] == [p for m in maps for p in (*m, *m.activations) if doubling_text(re.compile(p))]


def drawn_endless(chance: random.Random) -> str:
    """A regex with two ways through a loop: repeats in repeats, alternatives that match the same, optional marks."""
    one, other = chance.sample(["a", r"\w", "[^.]", "[a-z]", r"\d", "layer", r"block_\d"], 2)
    body = chance.choice(
        [
            f"{chance.choice(['(', '(?:'])}{one}+)",
            f"(?:{one}|{one}{one})",
            rf"(?:{one}+{chance.choice(['_', '-', '!'])}?)",
            f"(?:{one}{one}|{other}|{one})",
            f"(?:(?:{one}*{other})?{one}+)",
        ]
        if len(one) < 5 and one != "a"
        else [f"(?:{one})(?:{one})*", f"(?:{one}{one}|{other}|{one})", f"(?:(?:{one})+)"]
    )
    loop = f"({body})" + chance.choice(["+", "*", "{2,}", "{1,40}", "+?", "*?"])
    for _ in range(chance.randrange(3)):
        loop = chance.choice([f"(?:{loop})", f"({loop}|head)", rf"(?:tail\.)?{loop}"])
    return (
        chance.choice(["", ".*", "blocks", "x" * 100])
        + loop
        + chance.choice(["k", "!", "$", "(?:kernel|bias)"])
    )


@pytest.mark.parametrize("seed", range(20))
def test_a_drawn_regex_that_never_ends_is_refused(seed: int):
    """No regex that repeats what can be matched in two ways gets into a map."""
    chance = random.Random(seed)
    taken = list[str]()
    for pattern in {drawn_endless(chance) for _ in range(10)}:
        with contextlib.suppress(lm.RuleError):
            lm.LayoutMap("model=4")[pattern] = ("model",)
            taken.append(pattern)

    assert [] == taken


def drawn_usual(chance: random.Random) -> str:
    """A regex over paths as people write them: literal parts, numbers, alternatives, any parts, optional ones."""
    words = ["blocks", "layers", "attention", "query_dense", "mlp", "up", "kernel", "bias", "norm", "encoder"]
    several = "|".join(chance.sample(words, 3))
    parts = [
        *words,
        rf"{chance.choice(words)}_\d+",
        chance.choice([r"\d+", r"[^.]+", r"\w+", r"[0-9]{1,3}", r"[a-z_]+\d*"]),
        f"({several})",
        f"(?:{several})_\\d+",
        rf"(?:{several})?",
        rf"(?!{chance.choice(words)})\w+",
    ]
    joined = r"\.".join(chance.choice(parts) for _ in range(chance.randint(1, 6)))
    before = chance.choice(
        [
            "",
            ".*",
            r"(?:.*\.)?",
            r"(\w+\.)*",
            r"(?:[^.]+\.)+",
            r"^",
            "(?i)",
            rf"(?:({several})\.)*",
            r"(?:\w++\.)*",
        ]
    )
    return before + joined + chance.choice(["", "$", ".*", r"(?:\.\d+)*$", "(_a|_b)?"])


@pytest.mark.parametrize("seed", range(10))
def test_no_usual_regex_is_refused(seed: int):
    """All of a thousand drawn patterns as people write them are taken."""
    chance = random.Random(seed)
    patterns = {drawn_usual(chance): ("model",) for _ in range(100)}

    assert list(patterns) == list(lm.LayoutMap("model=4", patterns))


def test_a_rule_that_could_take_for_ever_is_refused():
    """The error shows the text, says how to write the rule, and leaves the map as it was."""
    layout_map = lm.LayoutMap(lm.Mesh(None, "model=4"))

    with pytest.raises(lm.RuleError) as refused:
        layout_map["(a+)+b"] = (None, "model")

    assert """\
rule '(a+)+b' could take forever on a path that it does not match
  for example  a path with 'a' many times in a row
  why          its repeats can split that text in more than one way, and each repetition doubles the ways to try
  fix          write it so that there is one way to match, as in [^.]+ for a part of a path
               or with a possessive repeat, which never backtracks: '(a+)++b'""" == str(refused.value)
    assert [] == list(layout_map)
    layout_map["(a+)++b"] = (None, "model")
