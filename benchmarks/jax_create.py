"""How long it takes to create a Llama of flax.nnx in its layouts, and how much memory that needs.

    python benchmarks/jax_create.py                 3 rounds: some minutes
    python benchmarks/jax_create.py --model tiny

Three ways, each in a fresh process, taken in turns, on 8 simulated devices in a 2x4 mesh: `layout_map.build`; `nnx.jit`
of a function that makes the model and constrains its state; and `jax.jit` of the same with `out_shardings`. Time runs
from the first line of the model to the last array being ready; imports are not counted. "differs from plain" counts
variables whose bits are not those of the model made plainly, which is made afterwards.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time

METHODS = ("layoutmap", "nnx.jit", "jit(out_shardings)")
MODELS = {
    "tiny": {"vocabulary": 1024, "width": 128, "blocks": 2, "heads": 8, "key_heads": 4, "hidden": 512},
    "llama": {"vocabulary": 32000, "width": 1024, "blocks": 12, "heads": 16, "key_heads": 8, "hidden": 4096},
}


def create(method: str, name: str):
    """Make the model by one of the methods; return it with all arrays ready."""
    import jax
    from flax import nnx
    from jax.sharding import NamedSharding
    from nnx_models import RULES, Llama, LlamaModel

    import layoutmap as lm

    size = Llama(**MODELS[name])
    layout_map = lm.LayoutMap(lm.create_mesh("batch=2,model=4"), RULES, rest="replicated")

    def make() -> LlamaModel:
        return LlamaModel(size, nnx.Rngs(0))

    if method == "layoutmap":
        model = layout_map.build(make, library="jax")
        return jax.block_until_ready(nnx.state(model)) and model
    mesh = jax.make_mesh((2, 4), ("batch", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

    def sharding(path, value) -> NamedSharding:
        found = layout_map[".".join(map(str, path))]
        names = found.sharding_specs if found is not None else ()
        return NamedSharding(mesh, jax.P(*(None if n == lm.UNSHARDED else n for n in names)))

    graph, abstract = nnx.split(nnx.eval_shape(make))
    flat = [(path, v.replace(sharding(path, v))) for path, v in nnx.to_flat_state(abstract)]
    shardings = nnx.from_flat_state(flat)
    if method == "nnx.jit":

        @nnx.jit
        def made():
            model = make()
            nnx.update(model, jax.lax.with_sharding_constraint(nnx.state(model), shardings))
            return model

        model = made()
    else:
        model = nnx.merge(graph, jax.jit(lambda: nnx.state(make()), out_shardings=shardings)())
    jax.block_until_ready(nnx.state(model))
    return model


def child(method: str, name: str) -> None:
    """One measurement, in this process; prints it as JSON."""
    import jax
    import numpy as np
    from create import memory
    from flax import nnx
    from nnx_models import Llama, LlamaModel

    from layoutmap.adapters import get_adapter
    from layoutmap.engines import get_engine

    get_adapter("jax"), get_engine("jax")
    jax.block_until_ready([jax.device_put(np.zeros(1), device) for device in jax.devices()])
    before, wall, processor = memory("VmRSS"), time.perf_counter(), time.process_time()
    model = create(method, name)
    found = {
        "seconds": time.perf_counter() - wall,
        "processor": time.process_time() - processor,
        "peak_bytes": memory("VmHWM") - before,
    }
    leaves = jax.tree.leaves(nnx.state(model, nnx.Param))
    held: dict[str, int] = {}
    for array in leaves:
        for shard in array.addressable_shards:
            held[str(shard.device)] = held.get(str(shard.device), 0) + shard.data.nbytes
    plain = jax.tree.leaves(nnx.state(LlamaModel(Llama(**MODELS[name]), nnx.Rngs(0)), nnx.Param))
    differ = sum(not np.array_equal(a, b) for a, b in zip(leaves, plain, strict=True))
    found |= {
        "weights_bytes": sum(a.nbytes for a in leaves),
        "device_bytes": max(held.values()),
        "differ": differ,
    }
    print(json.dumps(found))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=MODELS, default="llama")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--child", choices=METHODS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args.child, args.model)
        return
    from create import measure

    runs: dict[str, list[dict]] = {method: [] for method in METHODS}
    for number in range(args.rounds):
        for method in METHODS:
            print(f"\rround {number + 1}/{args.rounds} {method:<20}", end="", file=sys.stderr)
            runs[method].append(measure(method, args.model, script=__file__))
    print("\r\x1b[K", end="", file=sys.stderr)

    def median(method: str, key: str) -> float:
        return statistics.median(run[key] for run in runs[method])

    first = runs["layoutmap"][0]
    print(f"{args.model}: {first['weights_bytes'] / 2**20:.0f} MiB of weights; {args.rounds} rounds, medians")
    print(
        f"{'method':<20} {'seconds':>8} {'ratio':>6} {'processor s':>12} {'ratio':>6} {'peak MiB':>9} "
        f"{'device MiB':>11} {'differs from plain':>19}"
    )
    for method in METHODS:
        seconds, processor = median(method, "seconds"), median(method, "processor")
        print(
            f"{method:<20} {seconds:>8.2f} {seconds / median('nnx.jit', 'seconds'):>6.2f} {processor:>12.2f} "
            f"{processor / median('nnx.jit', 'processor'):>6.2f} {median(method, 'peak_bytes') / 2**20:>9.0f} "
            f"{median(method, 'device_bytes') / 2**20:>11.1f} {median(method, 'differ'):>19.0f}"
        )


if __name__ == "__main__":
    main()
