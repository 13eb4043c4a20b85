"""A rule of a file cannot keep a lookup busy, and usual rules are not taken for such."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import layoutmap as lm
from layoutmap.rules import presets
from layoutmap.rules.patterns import explain_why_pattern_is_slow

DOUBLING = [
    "(a+)+$",
    "(a*)*b",
    "(a?b?)*$",
    "(a|ab|b)*$",
    r"(.+\.)+kernel",
    r"([a-z]+_?)*\.kernel",
    r"([\w.]+)*k",
    r"(\s*\w+)*k",
    "(x+x+)+y",
    "((a+)+b)*",
    "(a{1,2}){3,}x",
    "(a{0,100})*b",
    "(?i)((a|AB|b)*)$",
    "(?>(a+)+b)",
    "(?=(a+)+b)a",
    "((a+)+c)++",
    "((?>a|b)*)*c",
    "(a+){20}b",
    f"{'x' * 300}(a+)+b",
]
SLOW = [
    *DOUBLING,
    "((((a{99}){99}){99}){99}){99}",  # 29 characters, nearly 10,000 million repeats
    "((((){999}){999}){999}){999}",
    "(){99999999}x",
    r"\w*" * 7 + "!",
    r"keras:\w*\w*\w*\w*\w*\w*\w*",
    "a?" * 28 + "b",
    "(?x)( a + ) +b",
    "(?x: (a+ # (\n)+ )",
    "x" * 1001,
]
FINE = [
    r"(\w+\.)+kernel",
    r"(?:[^.]*\.)*kernel$",
    r"(encoder|decoder)\.\d+\.(query|key)$",
    "(a++)+b",
    r"(\w++_)*kernel",
    "^(?!.*norm).*kernel$",
    r".*a.*b.*c",
    r".*block_\d+.*(attn|mlp).*(q|k)_proj.*kernel$",
    "|".join(rf".*{name}.*\.(kernel|bias)" for name in ("query", "key", "value", "up", "gate", "down")),
]


def write_rules(patterns: list[str], part: str = "rules") -> str:
    rules = {pattern: ["model"] for pattern in patterns}
    return yaml.safe_dump({"version": 1, "mesh": {"dims": {"model": 4}}, part: rules}, sort_keys=False)


@pytest.mark.parametrize("part", ["rules", "activations"])
@pytest.mark.parametrize("pattern", SLOW)
def test_a_slow_pattern_of_a_file_is_refused(pattern: str, part: str):
    """A regex whose ways to match multiply is refused for variables and for outputs of layers."""
    with pytest.raises(lm.RuleError, match="could take too long") as refused:
        lm.LayoutMap.from_yaml(write_rules([pattern], part))

    assert refused.value.why
    assert refused.value.fix


@pytest.mark.parametrize("pattern", SLOW[:-1])
def test_rules_in_python_code_have_no_limit(pattern: str):
    """A layout map takes any regex from the program that makes it."""
    assert [pattern] == list(lm.LayoutMap("model=4", {pattern: ("model",)}))


def test_usual_patterns_are_taken():
    """A file may have regexes as people write them, and those of all presets."""
    mesh = lm.Mesh(None, "data=2,model=4")
    maps = [lm.LayoutMap.preset(name, mesh, fsdp_dim="data") for name in presets.list_presets()]

    assert FINE == list(lm.LayoutMap.from_yaml(write_rules(FINE)))
    assert [] == [p for m in maps for p in (*m, *m.activations) if explain_why_pattern_is_slow(p)]


def test_the_message_says_what_to_write():
    """The error names the rule, the limit, and a form that one can type."""
    with pytest.raises(lm.RuleError) as refused:
        lm.LayoutMap.from_yaml(write_rules(["(a+)+b"]))

    assert r"""
rules file: rule '(a+)+b' could take too long on a path without a match
  why   a repeated group holds a repeat or an alternative
  fix   write [^.]+ for a part of a path and (\w+\.)* for several, or make a repeat possessive, as in \w++""" == (
        f"\n{refused.value}"
    )


@pytest.mark.parametrize(
    ("seed", "count"), [(0, 300), *(pytest.param(seed, 5000, marks=pytest.mark.long) for seed in range(1, 4))]
)
def test_no_drawn_pattern_of_a_file_hangs_a_lookup(seed: int, count: int):
    """A process that reads drawn patterns and looks five paths up with each one ends."""
    program = Path(__file__).with_name("drawn_patterns.py")
    done = subprocess.run(
        [sys.executable, str(program), str(seed), str(count)],
        stdout=subprocess.PIPE,
        text=True,
        timeout=240 if count < 1000 else 600,
        check=True,
    )
    taken = int(done.stdout.splitlines()[-1].split()[0])

    assert taken > count // 10


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
    """No regex that repeats what can be matched in two ways may be in a file."""
    chance = random.Random(seed)

    assert [] == [p for p in (drawn_endless(chance) for _ in range(10)) if not explain_why_pattern_is_slow(p)]


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
            r"(?:\w++\.)*",
        ]
    )
    return before + joined + chance.choice(["", "$", ".*", r"(?:\.\d+)*$", "(_a|_b)?"])


@pytest.mark.parametrize("seed", range(10))
def test_no_usual_regex_is_refused(seed: int):
    """All of a thousand drawn patterns as people write them are taken."""
    chance = random.Random(seed)

    assert [] == [p for p in (drawn_usual(chance) for _ in range(100)) if explain_why_pattern_is_slow(p)]
