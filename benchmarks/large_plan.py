"""CPU seconds for very many variables and rules: a plan, its page, a large rules file, rules added one by one.

python benchmarks/large_plan.py [--variables 100000]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import layoutmap as lm
from layoutmap.core.variables import VariableSpec
from layoutmap.scope.plan import make_plan

LAYERS = ("query", "out", "up", "down")
RULES = {r".*\.(query|up)\.kernel": (None, "model"), r".*\.(out|down)\.kernel": ("model", None)}


def timed(what: str, function: Callable[[], Any]) -> Any:
    start = time.process_time()
    result = function()
    print(f"{what:<40} {time.process_time() - start:6.1f} s")
    return result


def add_one_by_one(count: int) -> None:
    layout_map = lm.LayoutMap("model=4")
    for i in range(count):
        if layout_map.get(f"blocks.{i}.kernel") is None:
            layout_map[rf"blocks\.{i}\.kernel$"] = ("model",)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--variables", type=int, default=100_000)
    blocks = range(parser.parse_args().variables // len(LAYERS))
    variables = [
        VariableSpec(f"blocks.{i}.{n}.kernel", (1024, 1024), "float32") for i in blocks for n in LAYERS
    ]
    plan = timed(
        f"plan of {len(variables):,} variables",
        lambda: make_plan(variables, lm.LayoutMap("batch=8,model=8", RULES)),
    )
    timed("its page", plan.to_html)
    entries = "".join(f"  blocks\\.{i}\\.attention\\.query\\.kernel$: [null, model]\n" for i in range(17_500))
    text = f"version: 1\nmesh: {{dims: {{batch: 2, model: 4}}}}\nrules:\n{entries}"
    timed(f"rules file of {len(text):,} bytes", lambda: lm.LayoutMap.from_yaml(text))
    timed("1,000 rules, each looked up, then added", lambda: add_one_by_one(1_000))
