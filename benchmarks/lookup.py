"""Compare the time that a layout map takes to look up all paths of a large model with simple loops.

    python benchmarks/lookup.py                              100,000 paths, 1,000 rules
    python benchmarks/lookup.py --paths 10000 --rules 200    smaller
    python benchmarks/lookup.py --kind bare                  rules with unescaped dots

The methods take turns: this library's index, the equivalent "plain loop" (an exact key, then every compiled regex in
order), and tf_keras's own LayoutMap, if tf_keras is installed. The loops are too slow for all paths, so they run on a
random sample, and their time is scaled up, as the table says. The answers of all methods are compared on the sample. A
time is the median over the rounds. It includes building the index, but not creating the map.

tf_keras passes its patterns to `re.match` as text. Python's `re` caches 512 compiled patterns. With more rules it
compiles each one again for each path, which makes that ratio large. With --rules 500 it is much smaller.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import statistics
import warnings
from collections.abc import Callable

from measure import time_call

from layoutmap import Layout, LayoutMap, Mesh

LEAVES = (
    "attn.query.kernel",
    "attn.key.kernel",
    "attn.out.kernel",
    "mlp.up.kernel",
    "mlp.up.bias",
    "norm.scale",
)
KINDS = {  # each rule is for one block
    "escaped": r".*\.block_{i}\.{leaf}",
    "bare": "model.block_{i}.{leaf}",
    "groups": r"(encoder|model)\.block_{i}\.(attn\.(query|key)|mlp\.up)\.kernel",
}


def make_rules(kind: str, count: int) -> list[str]:
    """Return patterns of one kind, and last one for all other paths."""
    patterns: dict[str, None] = {}
    for i in range(count):
        for leaf in LEAVES:
            patterns[KINDS[kind].format(i=i, leaf=leaf if kind == "bare" else re.escape(leaf))] = None
    return [*list(patterns)[: count - 1], r".*\.kernel"]


def make_paths(count: int, rules: int) -> list[str]:
    """Return paths that are spread evenly over the blocks with rules."""
    blocks = max(1, rules // len(LEAVES))
    places = [
        (i % blocks, LEAVES[i // blocks % len(LEAVES)], i // blocks // len(LEAVES)) for i in range(count)
    ]
    return [f"model.block_{block}.{leaf}.{part}" for block, leaf, part in places]


def make_methods(patterns: list[str]) -> dict[str, Callable[[], Callable[[str], object]]]:
    """Return for each method a function that makes a new function from paths to layouts."""
    mesh = Mesh([f"/job:localhost/replica:0/task:0/device:CPU:{i}" for i in range(8)], "batch=2,model=4")
    layouts = [Layout(["model", None], mesh), Layout([None, "model"], mesh)]
    rules = {pattern: layouts[i % 2] for i, pattern in enumerate(patterns)}

    def make_index():
        layout_map = LayoutMap(mesh, rules)
        return layout_map.__getitem__

    def make_loop():
        compiled = [(re.compile(pattern).match, layout) for pattern, layout in rules.items()]

        def find(path: str):
            if path in rules:
                return rules[path]
            return next((layout for match, layout in compiled if match(path)), None)

        return find

    methods: dict[str, object] = {"layoutmap": make_index, "plain loop": make_loop}
    try:
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from tensorflow.experimental import dtensor
            from tf_keras.dtensor.experimental import LayoutMap as TFKerasLayoutMap
    except ImportError:
        return methods

    def make_tf_keras_map():
        layout_map = TFKerasLayoutMap(mesh=None)
        originals = {}
        for pattern, layout in rules.items():
            layout_map[pattern] = copy = dtensor.Layout.from_string(  # pyright: ignore[reportAttributeAccessIssue]
                layout.to_string()
            )
            originals[id(copy)] = layout
        return lambda path: originals.get(id(layout_map[path]))

    return {**methods, "tf_keras": make_tf_keras_map}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0],
        epilog="example: python benchmarks/lookup.py --paths 10000 --rules 200 --kind bare",
    )
    parser.add_argument("--paths", type=int, default=100_000, help="number of paths to look up (%(default)s)")
    parser.add_argument("--rules", type=int, default=1_000, help="number of rules of the map (%(default)s)")
    parser.add_argument(
        "--kind", choices=[*KINDS, "all"], default="all", help="form of the rules (%(default)s)"
    )
    parser.add_argument("--sample", type=int, default=300, help="number of paths for the loops (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of each method (%(default)s)")
    options = parser.parse_args()

    print(f"{options.paths:,} paths, {options.rules:,} rules, median of {options.rounds} rounds")
    print(f"{'rules':<9} {'way':<12} {'seconds':>9} {'ratio':>9}")
    paths = make_paths(options.paths, options.rules)
    chance = random.Random(0)
    for kind in KINDS if options.kind == "all" else [options.kind]:
        methods = make_methods(make_rules(kind, options.rules))
        samples = {method: chance.sample(paths, min(len(paths), options.sample)) for method in methods}
        if "tf_keras" in samples:
            samples["tf_keras"] = samples["tf_keras"][: max(1, options.sample // 10)]
        samples["layoutmap"] = paths
        times: dict[str, list[float]] = {method: [] for method in methods}
        for _ in range(options.rounds):
            finders = {method: make() for method, make in methods.items()}
            for method, find in finders.items():
                sample = samples[method]
                seconds, layouts = time_call(lambda find=find, sample=sample: [find(path) for path in sample])
                times[method].append(seconds * len(paths) / len(sample))
                assert layouts == [finders["layoutmap"](path) for path in sample], (
                    f"{method} answers differently"
                )
        own = statistics.median(times["layoutmap"])
        for method, all_times in times.items():
            median = statistics.median(all_times)
            note = "" if method == "layoutmap" else f"   scaled up from {len(samples[method])} paths"
            print(f"{kind:<9} {method:<12} {median:>9.2f} {median / own:>8.1f}x{note}")


if __name__ == "__main__":
    main()
