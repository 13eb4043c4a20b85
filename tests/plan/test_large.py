"""The work of a plan grows with its variables and its rules, and not with their product: counted, not timed."""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Callable
from typing import Any

import pytest

import layoutmap as lm
from layoutmap.core.variables import VariableSpec
from layoutmap.plan import planner
from layoutmap.scope.plan import make_plan

WORDS = [
    f"{a}{b}" for a in ("enc", "dec", "emb", "att", "mix") for b in ("oder", "ention", "ling", "er", "x")
]

COMPILE = re.compile


def numbered(i: int) -> str:
    return f"blocks.{i // 2}.{('up', 'down')[i % 2]}.kernel"


def of_words(i: int) -> str:
    return ".".join([*random.Random(i).choices(WORDS, k=4), f"w{i}", "kernel"])


class Regex:
    """A compiled regex whose matches are counted as calls, also where C asks for them."""

    def __init__(self, pattern: str | re.Pattern[str]) -> None:
        self._own = COMPILE(pattern)

    def match(self, text: str) -> re.Match[str] | None:
        return self._own.match(text)

    def search(self, text: str) -> re.Match[str] | None:
        return self._own.search(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)


def calls_of(function: Callable[[], object]) -> int:
    """How many functions are called, those written in C included."""
    count = 0

    def counting(frame: object, event: str, arg: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(counting)
    try:
        function()
    finally:
        sys.setprofile(before)
    return count


@pytest.mark.parametrize("rule", [r"{}$", r".*{}", r"unused\.{}", r"(\w+\.)+x{}"])
@pytest.mark.parametrize("path", [numbered, of_words])
def test_twice_as_many_variables_and_rules_are_twice_the_work(
    path: Callable[[int], str], rule: str, monkeypatch: pytest.MonkeyPatch
):
    """Planning them, writing the page and the text calls at most 2.3 times as many functions, and not 4 times."""

    def work(count: int) -> int:
        paths = [path(i) for i in range(count)]
        variables = [VariableSpec(each, (8, 8), "float32") for each in paths]
        rules = {rule.format(each.replace(".", r"\.")): ("model", None) for each in paths[::2]}

        def all_of_it() -> None:
            plan = make_plan(variables, lm.LayoutMap("model=4", rules))
            assert plan.to_html()
            assert str(plan)
            assert lm.Plan.from_json(plan.to_json()).diff(plan) is not None

        re.purge()
        return calls_of(all_of_it)

    monkeypatch.setattr(planner, "_MOST_COMPARISONS", 50)  # the bound of what is no matter of size
    monkeypatch.setattr(re, "compile", Regex)
    work(20)  # what is imported and kept

    assert work(400) < 2.3 * work(200)
