"""Compare the time and memory of creating a Keras model sharded, by three methods.

    python benchmarks/create.py                       two large models, 5 rounds: some minutes
    python benchmarks/create.py --model wide --rounds 3
    python benchmarks/create.py --draw 12 --seed 5    decoders of drawn sizes, a round each

The methods are this library, Keras's own ModelParallel, and "naive", which creates the model
unsharded and then shards it. They take turns, each in a fresh process, on 8 simulated devices in a
2x4 mesh. Time runs from the first line of the model until the last array is ready, without imports.
The benchmark checks that all three create the same weights.

"live per device" is the most bytes of arrays on one device at any time. A thread samples them in one
more run of each method, which is not timed. "temporaries" is the scratch memory that XLA reports for
the largest program of this library.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import threading
from collections import Counter
from functools import partial

from measure import (
    compute_median,
    count_device_bytes,
    describe_ratios,
    draw_sizes,
    format_spread,
    make_parser,
    read_status,
    run_method,
    run_rounds,
    time_call,
)

DRAWN = {
    "vocabulary": (256, 1024, 4096, 32_000),
    "width": (64, 128, 256, 512, 1024),
    "ffn": (256, 1024, 4096),
    "heads": (4, 8),
    "blocks": (1, 2, 4, 8, 12),
}
METHODS = ("layoutmap", "ModelParallel", "naive")
MESH = (("batch", 2), ("model", 4))
KEYS = ("seconds", "programs", "compile_seconds", "peak_bytes")


def create(method: str, model_name: str, batch_dim: str | None = None):
    """Build the model by one of the methods, and return it with all arrays ready."""
    import jax
    import keras
    import numpy as np
    from models import KERAS_RULES, RULES, make_model

    import layoutmap as lm

    example = np.zeros((2, 16), "int32")
    symbol = keras.KerasTensor(example.shape, "int32")
    if method == "layoutmap":
        layout_map = lm.LayoutMap(lm.create_mesh(MESH), RULES)
        model = layout_map.build(lambda: make_model(model_name), inputs=example, batch_dim=batch_dim)
    elif method == "ModelParallel":
        mesh = keras.distribution.DeviceMesh((2, 4), ("batch", "model"), keras.distribution.list_devices())
        layout_map = keras.distribution.LayoutMap(mesh)
        for pattern, axes in KERAS_RULES.items():
            layout_map[pattern] = axes
        keras.distribution.set_distribution(
            keras.distribution.ModelParallel(layout_map=layout_map, batch_dim_name="batch")
        )
        model = make_model(model_name)
        model(symbol)
    else:
        model = make_model(model_name)
        model(symbol)
        layout_map = lm.LayoutMap(lm.create_mesh(MESH), RULES)
        layout_map.apply(model)
    jax.block_until_ready([v.value for v in model.variables])
    return model


class Watch(threading.Thread):
    """Samples the bytes of live arrays on each device, and keeps the maximum."""

    def __init__(self):
        super().__init__(daemon=True)
        self.most = 0
        self.stopped = threading.Event()

    def run(self) -> None:
        import jax

        while not self.stopped.wait(0.001):
            totals: Counter[object] = Counter()
            for array in jax.live_arrays():
                # Reading the array's shards would create new arrays that count again, so compute the size.
                num_bytes = math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize
                for device in array.sharding.device_set:
                    totals[device] += num_bytes
            self.most = max(self.most, *totals.values(), 0)


def count_temporary_bytes() -> int:
    """Return the scratch bytes on a device of this library's largest creation program."""
    from layoutmap.engines.jax.engine import engine

    most = 0
    for program in engine().list_programs():
        for lowered in program.lower_segments():
            most = max(most, lowered.compile().memory_analysis().temp_size_in_bytes)
    return most


def watch(method: str, model_name: str) -> None:
    """Create the model once without a timer, and print the live bytes as JSON."""
    watcher = Watch()
    watcher.start()
    _model = create(method, model_name)
    watcher.stopped.set()
    watcher.join()
    temporary_bytes = count_temporary_bytes() if method == "layoutmap" else 0
    print(json.dumps({"live_bytes": watcher.most, "temporary_bytes": temporary_bytes}))


def import_adapters(backend: str = "jax") -> None:
    """Import the modules that this library imports lazily, so that no measurement includes imports."""
    importlib.import_module("layoutmap.adapters.keras")
    importlib.import_module(f"layoutmap.engines.{backend}")
    importlib.import_module(f"layoutmap.adapters.keras.backends.{backend}")


def measure_method(method: str, model_name: str) -> None:
    """Create the model once in this process, and print the measurements as JSON."""
    import jax
    import keras
    import numpy as np

    import_adapters()
    programs: list[float] = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, seconds, **_: (
            programs.append(seconds) if event.endswith("backend_compile_duration") else None
        )
    )
    jax.block_until_ready([jax.device_put(np.zeros(1), device) for device in jax.devices()])
    keras.utils.set_random_seed(0)
    before, count = read_status("VmRSS"), len(programs)
    seconds, model = time_call(lambda: create(method, model_name))
    peak = read_status("VmHWM") - before
    largest = max(model.variables, key=lambda v: v.value.nbytes)
    digest = [float(np.asarray(shard.data, np.float64).sum()) for shard in largest.value.addressable_shards]
    print(
        json.dumps(
            {
                "seconds": seconds,
                "peak_bytes": peak,
                "programs": len(programs) - count,
                "compile_seconds": sum(programs[count:]),
                "weights_bytes": sum(v.value.nbytes for v in model.variables),
                "device_bytes": count_device_bytes(v.value for v in model.variables),
                "digest": sorted(digest),
            }
        )
    )


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument(
        "--model", action="append", help="decoder, wide, tiny or micro; may be given several times"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--draw", type=int, help="number of random decoders, instead of --model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--child", choices=METHODS, help=argparse.SUPPRESS)
    parser.add_argument("--watch", choices=METHODS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.watch:
        watch(args.watch, args.model[0])
        return
    if args.child:
        measure_method(args.child, args.model[0])
        return
    if args.draw:
        report_drawn(args.draw, args.seed)
        return
    for model_name in args.model or ["decoder", "wide"]:
        run = partial(run_method, __file__, model=model_name)
        runs = run_rounds(METHODS, args.rounds, run, f"{model_name}: ")
        watched = {method: run(method, flag="--watch") for method in METHODS}
        report(model_name, runs, watched)


def report_drawn(count: int, seed: int) -> None:
    """Print the seconds and memory of random decoders, and their ratios to the other methods."""
    ratios: dict[tuple[str, str], list[float]] = {}
    for sizes in draw_sizes(count, seed, DRAWN):
        runs = {method: run_method(__file__, method, json.dumps(sizes)) for method in METHODS}
        if any(run["digest"] != runs["layoutmap"]["digest"] for run in runs.values()):
            print("WARNING: the methods gave different weights")
        cells: list[str] = []
        for method, run in runs.items():
            cells.append(f"{method} {run['seconds']:.2f} s, {run['peak_bytes'] / 2**20:.0f} MiB")
            for title, key in (("seconds", "seconds"), ("memory of the process", "peak_bytes")):
                ratios.setdefault((title, method), []).append(runs["layoutmap"][key] / run[key])
        print(f"{sizes}: {'; '.join(cells)}", flush=True)
    for (title, method), values in ratios.items():
        if method != "layoutmap":
            print(describe_ratios(f"{title}, layoutmap beside {method}", values))


def report(model_name: str, runs: dict[str, list[dict]], watched: dict[str, dict]) -> None:
    """Print the medians and ratios of one model."""
    first = runs["layoutmap"][0]
    if any(run["digest"] != first["digest"] for results in runs.values() for run in results):
        print("WARNING: the methods gave different weights")
    print(
        f"\n{model_name}: {first['weights_bytes'] / 2**20:.0f} MiB of weights, "
        f"{first['device_bytes'] / 2**20:.1f} MiB of them on each device of a 2x4 mesh; "
        f"{len(runs['layoutmap'])} rounds, medians (smallest-largest)"
    )
    print(
        "method          seconds              ratio  programs  compiling s  process peak MiB  live per device MiB"
    )
    for method, results in runs.items():
        spread = format_spread([run["seconds"] for run in results])
        medians = {key: compute_median(results, key) for key in KEYS}
        print(
            f"{method:<14}  {spread:<19}  {medians['seconds'] / compute_median(runs['ModelParallel'], 'seconds'):.2f} "
            f"{medians['programs']:>9.0f} {medians['compile_seconds']:>12.2f} "
            f"{medians['peak_bytes'] / 2**20:>17.0f} {watched[method]['live_bytes'] / 2**20:>20.1f}"
        )
    print(
        f"temporaries     {watched['layoutmap']['temporary_bytes'] / 2**20:.1f} MiB on each device at most (layoutmap)"
    )


if __name__ == "__main__":
    main()
