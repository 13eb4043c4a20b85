"""Measure the CPU seconds of plans, pages, and rules files with very many variables and rules.

    python benchmarks/large_plan.py                                     50,000 variables, 20,000 rules, pure plans
    python benchmarks/large_plan.py --models --variables 12000          models of Keras and flax.nnx

The variable names are random: repeated blocks, words, deep and flat names. So are the rules: with and without a literal
prefix, one for each variable, some that match nothing, some with repeated groups. The table has the median and the
worst of `--cases` cases, and the worst with half as many variables and rules. A ratio of 2 means linear time.
"""

from __future__ import annotations

import gc
import os
import random
import re
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from measure import make_parser, time_call

import layoutmap as lm
from layoutmap.core.variables import VariableSpec
from layoutmap.scope.plan import make_plan

LAYERS = ("query", "out", "up", "down")
MESH = "batch=2,model=4"


def draw_paths(chance: random.Random, count: int) -> list[str]:
    """Return paths of one random form."""
    words = [
        "".join(chance.choices("abcdefghijklmnopqrstuvwxyz_", k=chance.randint(3, 12))) for _ in range(997)
    ]
    depth = chance.randint(1, 8)
    forms: list[Callable[[int], str]] = [
        lambda i: f"blocks.{i // 4}.{LAYERS[i % 4]}.kernel",
        lambda i: f"stage_{i % 7}.group_{i % 101}.block_{i}.mlp.up.kernel",
        lambda i: f"w{i}",
        lambda i: ".".join([*chance.choices(words, k=depth), f"{chance.choice(words)}{i}", "kernel"]),
    ]
    form = chance.choice(forms)
    return [form(i) for i in range(count)]


def draw_rules(chance: random.Random, paths: list[str], count: int) -> dict[str, Any]:
    """Return rules of one random form for these paths: most match one path, and some match all or none."""
    forms: list[Callable[[str, int], str]] = [
        lambda path, i: f"{re.escape(path)}$",
        lambda path, i: f".*{re.escape(path[len(path) // 3 :])}",
        lambda path, i: rf"(\w+\.)+{re.escape(path.rpartition('.')[2])}{i}",
        lambda path, i: f"[a-z]+_{i}\\..*",
        lambda path, i: f"unused{i}\\.{re.escape(path)}",
    ]
    form = chance.choice(forms)
    rules = [form(paths[i * len(paths) // count], i) for i in range(count)]
    return dict.fromkeys(rules, ("model", None)) | {".*[02468]\\..*": (None, "model")}


def measure_case(seed: int, num_variables: int, num_rules: int) -> dict[str, float]:
    """Return the CPU seconds of each operation for random paths and rules."""
    chance = random.Random(seed)
    paths = draw_paths(chance, num_variables)
    variables = [VariableSpec(path, (64, 64), "float32") for path in paths]
    times: dict[str, float] = {}
    few = {r".*\.(query|up)\.kernel": (None, "model"), r".*\.(out|down)\.kernel": ("model", None)}
    measure = partial(time_call, clock=time.process_time)
    times["plan, two rules"], plan = measure(lambda: make_plan(variables, lm.LayoutMap(MESH, few)))
    times["its page"], _ = measure(plan.to_html)
    rules = draw_rules(chance, paths, num_rules)
    times["rules"], layout_map = measure(lambda: lm.LayoutMap(MESH, rules))
    times["plan with them"], _ = measure(lambda: make_plan(variables, layout_map))
    text = layout_map.to_yaml()
    times["rules file"], _ = measure(lambda: lm.LayoutMap.from_yaml(text))
    return times


def compare_models(count: int) -> None:
    """Compare the plan of a model of each library with the library's own time to make it without values."""
    os.environ["KERAS_BACKEND"] = "jax"
    import keras
    from flax import nnx

    # `keras.Sequential` compares each new layer's name with all others, which takes quadratic time, so use attributes.
    class KerasNet(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = [keras.layers.Dense(8) for _ in range(count // 2)]

        def build(self, shape: tuple[int | None, ...]) -> None:
            for layer in self.blocks:
                layer.build(shape)

    def make_keras_model() -> Any:
        model = KerasNet()
        model.build((None, 8))
        return model

    class Net(nnx.Module):
        def __init__(self) -> None:
            rngs = nnx.Rngs(0)
            self.blocks = nnx.List([nnx.Linear(8, 8, rngs=rngs) for _ in range(count // 2)])

    def make_abstract_model() -> Any:
        with keras.StatelessScope(initialize_variables=False):
            return make_keras_model()

    flax_seconds: list[float] = []

    def make_net() -> Any:
        took, model = time_call(Net, time.process_time)
        flax_seconds.append(took)
        return model

    layout_map = lm.LayoutMap(MESH, {".*kernel": (None, "model")}, rest="replicated")
    # lm.plan calls make_net under an abstract trace, so time flax's own part there.
    for name, make, library in (("Keras", make_keras_model, "keras"), ("flax.nnx", make_net, "jax")):
        alone = time_call(make_abstract_model, time.process_time)[0] if library == "keras" else 0.0
        gc.collect()
        total, plan = time_call(
            lambda make=make, library=library: lm.plan(make, layout_map, library=library), time.process_time
        )
        alone = alone or flax_seconds[0]
        print(f"{name:<10} {len(plan):>7,} variables  plan {total:6.1f} s  the library alone {alone:6.1f} s")
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.0f}")


if __name__ == "__main__":
    parser = make_parser(__doc__)
    parser.add_argument("--variables", type=int, default=50_000)
    parser.add_argument("--rules", type=int, default=20_000)
    parser.add_argument("--cases", type=int, default=8)
    parser.add_argument("--models", action="store_true")
    options = parser.parse_args()
    if options.models:
        compare_models(options.variables)
        raise SystemExit
    full = [measure_case(seed, options.variables, options.rules) for seed in range(options.cases)]
    half = [measure_case(seed, options.variables // 2, options.rules // 2) for seed in range(options.cases)]
    print(f"{options.variables:,} variables, {options.rules:,} rules, {options.cases} cases, CPU seconds")
    print(f"{'':<20} {'median':>8} {'worst':>8} {'half as many, worst':>20}")
    for name in full[0]:
        times = [case[name] for case in full]
        print(
            f"{name:<20} {statistics.median(times):>8.1f} {max(times):>8.1f} {max(case[name] for case in half):>20.1f}"
        )
