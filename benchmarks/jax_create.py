"""Compare the time and memory of creating a Llama of flax.nnx sharded, by three methods.

    python benchmarks/jax_create.py                 3 rounds: some minutes
    python benchmarks/jax_create.py --model tiny

The methods are `layout_map.build`, `nnx.jit` of a function that makes the model and constrains its state, and `jax.jit`
of the same with `out_shardings`. They take turns, each in a fresh process, on 8 simulated devices in a 2x4 mesh. Time
runs from the first line of the model until the last array is ready, without imports. "differs from plain" counts the
variables that differ in any bit from an unsharded model, which is made afterwards.
"""

from __future__ import annotations

import argparse
import json
import time

from measure import compute_median, count_device_bytes, make_parser, read_status, run_method, run_rounds

METHODS = ("layoutmap", "nnx.jit", "jit(out_shardings)")
MODELS = {
    "tiny": {"vocabulary": 1024, "width": 128, "blocks": 2, "heads": 8, "key_heads": 4, "hidden": 512},
    "llama": {"vocabulary": 32000, "width": 1024, "blocks": 12, "heads": 16, "key_heads": 8, "hidden": 4096},
}


def create(method: str, name: str):
    """Make the model by one of the methods, and return it with all arrays ready."""
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

    def get_sharding(path) -> NamedSharding:
        layout = layout_map[".".join(map(str, path))]
        names = layout.sharding_specs if layout is not None else ()
        return NamedSharding(mesh, jax.P(*(None if n == lm.UNSHARDED else n for n in names)))

    graph, abstract = nnx.split(nnx.eval_shape(make))
    flat = [(path, v.replace(get_sharding(path))) for path, v in nnx.to_flat_state(abstract)]
    shardings = nnx.from_flat_state(flat)
    if method == "nnx.jit":

        @nnx.jit
        def make_sharded():
            model = make()
            nnx.update(model, jax.lax.with_sharding_constraint(nnx.state(model), shardings))
            return model

        model = make_sharded()
    else:
        model = nnx.merge(graph, jax.jit(lambda: nnx.state(make()), out_shardings=shardings)())
    jax.block_until_ready(nnx.state(model))
    return model


def measure_method(method: str, name: str) -> None:
    """Create the model once in this process, and print the measurements as JSON."""
    import jax
    import numpy as np
    from flax import nnx
    from nnx_models import Llama, LlamaModel

    from layoutmap.adapters import get_adapter
    from layoutmap.engines import get_engine

    get_adapter("jax"), get_engine("jax")
    jax.block_until_ready([jax.device_put(np.zeros(1), device) for device in jax.devices()])
    before, wall, processor = read_status("VmRSS"), time.perf_counter(), time.process_time()
    model = create(method, name)
    result = {
        "seconds": time.perf_counter() - wall,
        "processor": time.process_time() - processor,
        "peak_bytes": read_status("VmHWM") - before,
    }
    leaves = jax.tree.leaves(nnx.state(model, nnx.Param))
    unsharded = jax.tree.leaves(nnx.state(LlamaModel(Llama(**MODELS[name]), nnx.Rngs(0)), nnx.Param))
    differ = sum(not np.array_equal(a, b) for a, b in zip(leaves, unsharded, strict=True))
    result |= {
        "weights_bytes": sum(a.nbytes for a in leaves),
        "device_bytes": count_device_bytes(leaves),
        "differ": differ,
    }
    print(json.dumps(result))


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--model", choices=MODELS, default="llama")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--child", choices=METHODS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        measure_method(args.child, args.model)
        return
    runs = run_rounds(METHODS, args.rounds, lambda method: run_method(__file__, method, args.model))
    first = runs["layoutmap"][0]
    print(f"{args.model}: {first['weights_bytes'] / 2**20:.0f} MiB of weights; {args.rounds} rounds, medians")
    print(
        f"{'method':<20} {'seconds':>8} {'ratio':>6} {'processor s':>12} {'ratio':>6} {'peak MiB':>9} "
        f"{'device MiB':>11} {'differs from plain':>19}"
    )
    base = {key: compute_median(runs["nnx.jit"], key) for key in ("seconds", "processor")}
    for method, results in runs.items():
        seconds, processor = compute_median(results, "seconds"), compute_median(results, "processor")
        print(
            f"{method:<20} {seconds:>8.2f} {seconds / base['seconds']:>6.2f} {processor:>12.2f} "
            f"{processor / base['processor']:>6.2f} {compute_median(results, 'peak_bytes') / 2**20:>9.0f} "
            f"{compute_median(results, 'device_bytes') / 2**20:>11.1f} {compute_median(results, 'differ'):>19.0f}"
        )


if __name__ == "__main__":
    main()
