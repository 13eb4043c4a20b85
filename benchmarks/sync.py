"""Compare a sync of all weights between two meshes with `jax.device_put` on JAX and with gathered weights on torch.

    python benchmarks/sync.py                          10 pairs of 64 MiB on each engine: some minutes
    python benchmarks/sync.py --only jax --pairs 20 --mib 256

Each pair has 24 float32 arrays of drawn sizes in drawn layouts on a drawn mesh of 8 devices (JAX) or 4 processes
(torch). The sampler's arrays have other layouts on another mesh, and half of the pairs are cast to bfloat16. The
methods take turns, and each has run once before. "x" is the seconds of `lm.plan_sync` divided by those of the faster
other method. "cpu x" divides the seconds of all threads instead, which other programs change less. "sent" is the
bytes that devices send each other: those of the sync are counted in the tests, those of `jit` in the compiled
program, and those of gathered weights are (devices - 1) times all weights. `jit` is one program with `out_shardings`.
JAX chooses how `device_put` moves arrays, so its bytes are not counted. "blocks" is a sync that sends each block
by a permute, as between different devices, in place of all-gathers and all-to-alls. It does not count for "x".
"""

from __future__ import annotations

import json
import math
import os
import re
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

from measure import describe_ratios, make_parser, run_process_group, run_rounds, time_call

NUM_ARRAYS, NUM_RANKS = 24, 4
COLLECTIVE = re.compile(r" = (.*?) (all-gather|all-to-all|collective-permute|all-reduce)\((.*)")
"""A collective in the text of a compiled program: its results, its name, its arguments."""
ARRAY = re.compile(r"([a-z]+\d*)\[([\d,]*)\]")


def draw_pair(seed: int, mib: float, meshes: list[str]) -> tuple[list[tuple[int, int]], list[Any], bool]:
    """Draw shapes, two layouts for each, and whether values are cast."""
    import layoutmap as lm
    from layoutmap.testing.models.choices import Choices
    from layoutmap.testing.models.maps import draw_sharding_specs

    choices = Choices.from_seed(seed)
    chosen = choices.sample(meshes, 2)
    rows = [8 * choices.pick(*range(8, 129)) for _ in range(NUM_ARRAYS)]
    width = max(8, int(mib * 2**20 / 4 / sum(rows)) // 8 * 8)
    layouts = []
    for text in chosen:
        mesh = lm.Mesh(None, text)
        drawn = [
            lm.Layout(draw_sharding_specs(choices, mesh, (size, width), "error"), mesh) for size in rows[:6]
        ]
        layouts.append(drawn * (NUM_ARRAYS // 6))
    shapes = [(size, width) for size in rows[:6]] * (NUM_ARRAYS // 6)
    return shapes, layouts, bool(seed % 2)


def measure_jax(seed: int, mib: float, rounds: int) -> dict[str, Any]:
    """Return the seconds and the bytes of each method for one pair."""
    import jax
    import jax.numpy as jnp

    import layoutmap as lm
    from layoutmap.engines import get_engine
    from layoutmap.engines.jax import moving

    engine = get_engine("jax")
    shapes, layouts, is_cast = draw_pair(seed, mib, ["x=2,y=4", "x=4,y=2", "x=8", "x=2,y=2,z=2"])
    dtype = jnp.bfloat16 if is_cast else jnp.float32
    trainer, sampler = {}, {}
    for n, shape in enumerate(shapes):
        values = jax.random.normal(jax.random.key(n), shape)
        trainer[f"w{n}"] = engine.relayout(values, layouts[0][n])
        sampler[f"w{n}"] = engine.relayout(jnp.zeros(shape, dtype), layouts[1][n])
    shardings = jax.tree.map(lambda array: array.sharding, sampler)
    sync, blocks = lm.plan_sync(trainer, sampler), lm.plan_sync(trainer, sampler)
    with patch.object(moving, "find_collective_steps", return_value=None):
        jax.block_until_ready(blocks())  # the first call compiles
    cast = jax.jit(lambda tree: jax.tree.map(lambda x: x.astype(dtype), tree))
    moved = jax.jit(lambda tree: jax.tree.map(lambda x: x.astype(dtype), tree), out_shardings=shardings)
    text = moved.lower(trainer).compile().as_text() or ""
    methods: dict[str, Callable[[], Any]] = {
        "sync": sync,
        "device_put": lambda: jax.device_put(cast(trainer), shardings),
        "jit": lambda: moved(trainer),
        "blocks": blocks,
    }
    for method in methods.values():
        jax.block_until_ready(method())
    cpu: dict[str, list[float]] = {name: [] for name in methods}

    def run(name: str) -> float:
        begin = time.process_time()
        seconds, _ = time_call(lambda: jax.block_until_ready(methods[name]()))
        cpu[name].append(time.process_time() - begin)
        return seconds

    seconds = run_rounds(methods, rounds, run, f"pair {seed} ")
    sent = {"sync": sync.plan.num_bytes, "jit": count_sent_bytes(text, 8)}
    medians = [{name: statistics.median(each) for name, each in found.items()} for found in (seconds, cpu)]
    return {"seconds": medians[0], "cpu": medians[1], "sent": sent}


def count_sent_bytes(text: str, num_devices: int) -> int:
    """Count the bytes that all devices send each other in a compiled program, without copies on one device."""
    total = 0
    for results, name, arguments in COLLECTIVE.findall(text):
        size = sum(
            int(re.sub(r"\D", "", dtype) or 8) // 8 * math.prod(int(n) for n in shape.split(",") if n)
            for dtype, shape in ARRAY.findall(results)
        )
        if name == "collective-permute":
            pairs = re.search(r"source_target_pairs=(\{\{.*?\}\})", arguments)
            total += size * sum(a != b for a, b in re.findall(r"(\d+),(\d+)", pairs[1] if pairs else ""))
        else:
            group = read_group_size(arguments, num_devices)
            total += size * (group - 1) * num_devices // group * (2 if name == "all-reduce" else 1)
    return total


def read_group_size(arguments: str, num_devices: int) -> int:
    """Return the number of devices that take part in a collective together, from each of the forms that XLA prints."""
    if mesh := re.search(r"replica_groups=mesh\[(.*?)\].*? \{(.*?)\}", arguments):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", mesh[1]))
        return math.prod(int(sizes[axis]) for axis in re.findall(r"'(\w+)'", mesh[2]))
    if iota := re.search(r"replica_groups=\[\d+,(\d+)\]<=", arguments):
        return int(iota[1])
    listed = re.search(r"replica_groups=\{\{([\d,]*)\}", arguments)
    return len(listed[1].split(",")) if listed else num_devices


def measure_torch(seeds: range, mib: float, rounds: int) -> list[dict[str, Any]]:
    """Return the seconds and bytes of each method for each pair, in one of several processes."""
    import torch
    import torch.distributed as dist

    import layoutmap as lm
    from layoutmap.engines import get_engine

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    engine = get_engine("torch")
    results: list[dict[str, Any]] = []
    for seed in seeds:
        shapes, layouts, is_cast = draw_pair(seed, mib, ["x=2,y=2", "x=4", "y=4,x=1"])
        modules = []
        for end, dtype in enumerate((torch.float32, torch.bfloat16 if is_cast else torch.float32)):
            module = torch.nn.Module()
            for n, shape in enumerate(shapes):
                values = torch.randn(shape, generator=torch.Generator().manual_seed(n)).to(dtype)
                tensor: Any = engine.relayout(values, layouts[end][n])
                module.register_parameter(f"w{n}", torch.nn.Parameter(tensor))
            modules.append(module)
        trainer, sampler = modules
        sync = lm.plan_sync(trainer, sampler)

        @torch.no_grad()
        def gather(trainer: Any = trainer, sampler: Any = sampler, layouts: Any = layouts) -> None:
            """Gather each weight, and copy the shard of this process."""
            for n, (each, target) in enumerate(zip(trainer.parameters(), sampler.parameters(), strict=True)):
                whole = each.full_tensor()
                index = layouts[1][n].shard_slices(tuple(whole.shape), dist.get_rank())
                target.to_local().copy_(whole[index])

        methods: dict[str, Callable[[], Any]] = {"sync": sync, "gathered": gather}

        def run(name: str, methods: Any = methods) -> float:
            dist.barrier()
            seconds, _ = time_call(lambda: (methods[name](), dist.barrier()))
            return seconds

        for name in methods:
            run(name)
        seconds = run_rounds(methods, rounds, run, f"pair {seed} ")
        whole = sum(rows * width * 4 for rows, width in shapes)
        sent = {"sync": sync.plan.num_bytes, "gathered": whole * (NUM_RANKS - 1)}
        results.append(
            {"seconds": {name: statistics.median(each) for name, each in seconds.items()}, "sent": sent}
        )
    dist.destroy_process_group()
    return results


def print_results(engine: str, results: list[dict[str, Any]]) -> None:
    """Print the median and the worst ratio, and all pairs."""
    print(f"\n{engine}: seconds and MiB sent for each pair")
    ratios = [compute_ratio(each["seconds"]) for each in results]
    for ratio, each in zip(ratios, results, strict=True):
        seconds = "  ".join(f"{name} {value:.3f} s" for name, value in each["seconds"].items())
        sent = "  ".join(f"{name} {value / 2**20:.1f} MiB" for name, value in each["sent"].items())
        print(f"  {seconds}   {sent}   x {ratio:.2f}")
    print(describe_ratios("  x", ratios))
    if ratios := [compute_ratio(each["cpu"]) for each in results if "cpu" in each]:
        print(describe_ratios("  cpu x", ratios))
    for name in results[0]["seconds"]:
        if name != "sync":
            alone = [each["seconds"]["sync"] / each["seconds"][name] for each in results]
            print(describe_ratios(f"  sync / {name}", alone))


def compute_ratio(seconds: dict[str, float]) -> float:
    """Return the seconds of a sync divided by those of the faster other method."""
    return seconds["sync"] / min(each for name, each in seconds.items() if name not in ("sync", "blocks"))


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--mib", type=float, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=["jax", "torch"])
    options = parser.parse_args()
    seeds = range(options.seed, options.seed + options.pairs)
    if "RANK" in os.environ:
        print(json.dumps(measure_torch(seeds, options.mib, options.rounds)))
        return
    if options.only != "torch":
        import layoutmap as lm

        lm.simulate_devices(8, engine="jax")
        print_results("JAX", [measure_jax(seed, options.mib, options.rounds) for seed in seeds])
    if options.only != "jax":
        print_results("torch", run_process_group(__file__, sys.argv[1:], NUM_RANKS))


if __name__ == "__main__":
    main()
