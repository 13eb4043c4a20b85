"""Look up paths with regexes of rules files, drawn to take long: `python drawn_patterns.py SEED COUNT`.

Prints each pattern before its lookup, so that the last line of a run that hangs names the pattern.
"""

from __future__ import annotations

import random
import re
import sys
import time
import warnings

PATHS = [
    "transformer.blocks.11.attention.query_dense.kernel",
    "a" * 60 + "!",
    "ab" * 30 + "!",
    "a.b_1." * 8 + "!",
    "aa." * 12 + "!",
]
ATOMS = ["a", "a", "b", ".", r"\w", r"[^.]", r"\.", "[ab]", "ab", "", r"\d"]
QUANTIFIERS = [
    "*",
    "+",
    "?",
    "*?",
    "+?",
    "*+",
    "++",
    "{8}",
    "{99}",
    "{2,}",
    "{,40}",
    "{0,9}",
    "{999}",
    "{9999}",
]
OPENINGS = ["(", "(?:", "(", "(?=", "(?!", "(?>", "(?i:", "(?P<n>"]


def draw_pattern(chance: random.Random, depth: int) -> str:
    """Return a regex of nested groups, counts, and alternatives over few characters. Some do not compile."""
    form = chance.choice(
        ["atom"] if not depth else ["atom", "row", "row", "count", "count", "group", "or", "run"]
    )
    if form == "atom":
        return chance.choice(ATOMS)
    if form == "run":
        return (draw_pattern(chance, 0) + chance.choice(QUANTIFIERS[:3])) * chance.randint(2, 8)
    inner = draw_pattern(chance, depth - 1)
    if form == "group":
        return f"{chance.choice(OPENINGS)}{inner})"
    if form == "count":
        return f"{chance.choice(OPENINGS[:3])}{inner}){chance.choice(QUANTIFIERS)}"
    other = draw_pattern(chance, depth - 1)
    return inner + "|" * (form == "or") + other


def main(seed: int, count: int) -> None:
    """Look up the paths with each pattern that a rules file may have, and print how many there are."""
    import yaml

    import layoutmap as lm

    warnings.simplefilter("ignore")  # Some drawn sets are to change their meaning in a later Python.
    chance = random.Random(seed)
    taken, slowest = 0, (0.0, "")
    for _ in range(count):
        pattern = draw_pattern(chance, chance.randint(2, 6)) + chance.choice(["", "$", "!x", "k"])
        print(pattern, flush=True)
        start = time.perf_counter()
        try:
            layout_map = lm.LayoutMap.from_yaml(
                yaml.safe_dump({"version": 1, "mesh": {"dims": {"model": 2}}, "rules": {pattern: ["model"]}})
            )
        except lm.RuleError:
            layout_map = None
        if layout_map is not None:
            taken += bool(re.search(r"[*+?|{]", pattern))
            for path in PATHS:
                layout_map.get(path)
        slowest = max(slowest, (time.perf_counter() - start, pattern))
    print(taken, *slowest)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
