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
from layoutmap.plan import planner, rule_problems
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

    def __init__(self, pattern: str | re.Pattern[str], flags: int = 0) -> None:
        self._own = COMPILE(pattern, flags)

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
    """Adding rules, planning, the page and the text: each calls at most 2.3 times as many functions, and not 4."""

    def work(count: int) -> dict[str, int]:
        paths = [path(i) for i in range(count)]
        variables = [VariableSpec(each, (8, 8), "float32") for each in paths]
        rules = {rule.format(each.replace(".", r"\.")): ("model", None) for each in paths[::2]}
        re.purge()
        layout_map = lm.LayoutMap("model=4")
        counts = {"rules": calls_of(lambda: layout_map.update(rules))}
        plan = make_plan(variables, layout_map)
        counts["plan"] = calls_of(lambda: make_plan(variables, layout_map))
        counts["page"] = calls_of(plan.to_html)
        counts["text"] = calls_of(lambda: str(plan))
        return counts

    monkeypatch.setattr(planner, "MAX_COMPARISONS", 50)
    monkeypatch.setattr(rule_problems, "MAX_COMPARISONS", 50)  # the bound of what is no matter of size
    work(20)  # what is imported and kept
    monkeypatch.setattr(re, "compile", Regex)
    once, twice = work(200), work(400)

    assert {} == {name: (once[name], twice[name]) for name in once if twice[name] > 2.3 * once[name]}


def keras_model(count: int) -> Any:
    import keras

    layers = [keras.layers.Dense(8, name=f"up_{i}") for i in range(count // 2)]
    for layer in layers:
        layer.build((None, 8))
    return keras.Sequential(layers)


def nnx_model(count: int) -> Any:
    from flax import nnx

    class Net(nnx.Module):
        def __init__(self) -> None:
            rngs = nnx.Rngs(0)
            self.blocks = nnx.List([nnx.Linear(8, 8, rngs=rngs) for _ in range(count // 2)])

    return Net()


@pytest.mark.parametrize(("make", "library"), [(keras_model, "keras"), (nnx_model, "jax")])
def test_a_model_of_twice_as_many_variables_is_twice_the_work(make: Callable[[int], Any], library: str):
    """Planning a model of Keras or flax.nnx calls at most 2.3 times as many functions for twice the variables."""
    layout_map = lm.LayoutMap("model=4", {".*kernel": (None, "model")}, rest="replicated")

    def work(count: int) -> int:
        return calls_of(lambda: lm.plan(lambda: make(count), layout_map, library=library))

    work(20)  # what is imported and kept
    once, twice = work(100), work(200)

    assert {} == ({} if twice <= 2.3 * once else {library: (once, twice)})
