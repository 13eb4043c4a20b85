"""How long a layout map takes to look up every path of a large model.

    python benchmarks/lookup.py                              100,000 paths, 1,000 rules
    python benchmarks/lookup.py --paths 10000 --rules 200    smaller
    python benchmarks/lookup.py --kind bare                  rules whose dots are not escaped

Three ways, taken in turns: this library's index; the plain loop that it stands for (an exact key, then every compiled
regex in order); and tf_keras's own LayoutMap, if tf_keras is installed. The loops are too slow for all paths: they are
timed on a random sample, and the time is scaled up, as the table says. The answers of all ways are compared on the
sample. A time is the median over the rounds; it includes making the index, and not making the map.

tf_keras hands its patterns to `re.match` as text. Python's `re` keeps 512 compiled ones, and with more rules than that
it compiles each anew for each path: hence the size of that ratio. With --rules 500 it is of another order.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import statistics
import time
import warnings

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
    """So many patterns of one kind, the last for whatever the others leave."""
    made: dict[str, None] = {}
    for i in range(count):
        for leaf in LEAVES:
            made[KINDS[kind].format(i=i, leaf=leaf if kind == "bare" else re.escape(leaf))] = None
    return [*list(made)[: count - 1], r".*\.kernel"]


def make_paths(count: int, rules: int) -> list[str]:
    """So many paths, spread evenly over the blocks that have rules of their own."""
    blocks = max(1, rules // len(LEAVES))
    places = [
        (i % blocks, LEAVES[i // blocks % len(LEAVES)], i // blocks // len(LEAVES)) for i in range(count)
    ]
    return [f"model.block_{block}.{leaf}.{part}" for block, leaf, part in places]


def seconds(ask, paths: list[str]) -> tuple[float, list[str | None]]:
    started = time.perf_counter()
    answers = [ask(path) for path in paths]
    return time.perf_counter() - started, answers


def make_ways(patterns: list[str]) -> dict[str, object]:
    """For each way a function that makes a fresh `path -> layout`, nothing looked up yet."""
    mesh = Mesh([f"/job:localhost/replica:0/task:0/device:CPU:{i}" for i in range(8)], "batch=2,model=4")
    layouts = [Layout(["model", None], mesh), Layout([None, "model"], mesh)]
    rules = {pattern: layouts[i % 2] for i, pattern in enumerate(patterns)}

    def index():
        layout_map = LayoutMap(mesh, rules)
        return layout_map.__getitem__

    def loop():
        compiled = [(re.compile(pattern).match, layout) for pattern, layout in rules.items()]

        def ask(path: str):
            if path in rules:
                return rules[path]
            return next((layout for match, layout in compiled if match(path)), None)

        return ask

    ways: dict[str, object] = {"layoutmap": index, "plain loop": loop}
    try:
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from tensorflow.experimental import dtensor
            from tf_keras.dtensor.experimental import LayoutMap as TheirMap
    except ImportError:
        return ways

    def theirs():
        layout_map = TheirMap(mesh=None)
        back = {}
        for pattern, layout in rules.items():
            layout_map[pattern] = made = dtensor.Layout.from_string(layout.to_string())
            back[id(made)] = layout
        return lambda path: back.get(id(layout_map[path]))

    return {**ways, "tf_keras": theirs}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0],
        epilog="example: python benchmarks/lookup.py --paths 10000 --rules 200 --kind bare",
    )
    parser.add_argument("--paths", type=int, default=100_000, help="how many paths to look up (%(default)s)")
    parser.add_argument("--rules", type=int, default=1_000, help="how many rules the map has (%(default)s)")
    parser.add_argument(
        "--kind", choices=[*KINDS, "all"], default="all", help="what the rules look like (%(default)s)"
    )
    parser.add_argument(
        "--sample", type=int, default=300, help="paths on which the loops are timed (%(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=3, help="the median of so many is shown (%(default)s)")
    options = parser.parse_args()

    print(f"{options.paths:,} paths, {options.rules:,} rules, median of {options.rounds} rounds")
    print(f"{'rules':<9} {'way':<12} {'seconds':>9} {'ratio':>9}")
    paths = make_paths(options.paths, options.rules)
    chance = random.Random(0)
    for kind in KINDS if options.kind == "all" else [options.kind]:
        ways = make_ways(make_rules(kind, options.rules))
        samples = {way: chance.sample(paths, min(len(paths), options.sample)) for way in ways}
        if "tf_keras" in samples:
            samples["tf_keras"] = samples["tf_keras"][: max(1, options.sample // 10)]
        samples["layoutmap"] = paths
        times: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(options.rounds):
            asked = {way: make() for way, make in ways.items()}
            for way, ask in asked.items():
                took, answers = seconds(ask, samples[way])
                times[way].append(took * len(paths) / len(samples[way]))
                assert answers == [asked["layoutmap"](path) for path in samples[way]], (
                    f"{way} answers differently"
                )
        ours = statistics.median(times["layoutmap"])
        for way, all_times in times.items():
            median = statistics.median(all_times)
            note = "" if way == "layoutmap" else f"   scaled up from {len(samples[way])} paths"
            print(f"{kind:<9} {way:<12} {median:>9.2f} {median / ours:>8.1f}x{note}")


if __name__ == "__main__":
    main()
