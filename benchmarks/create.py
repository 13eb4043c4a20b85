"""How long it takes to create a model in its layouts, and how much memory that needs.

    python benchmarks/create.py                       two large models, 5 rounds: some minutes
    python benchmarks/create.py --model wide --rounds 3
    python benchmarks/create.py --draw 12 --seed 5    decoders of drawn sizes, a round each

Three ways, each in a fresh process, taken in turns: this library; Keras's own ModelParallel; and
the naive way, which creates plainly and then moves. On 8 simulated devices in a 2x4 mesh. Time runs
from the first line of the model to the last array being ready; imports are not counted. All three
create the same weights, and that is checked.

"live per device" is the most that the arrays on one device ever came to, watched by a thread in one
more run of each way that is not timed. "temporaries" is what XLA says that the largest program of
this library needs in addition to its result.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import statistics
import subprocess
import sys
import threading
import time

from drawn_sizes import draw, spread

DRAWN = {
    "vocabulary": (256, 1024, 4096, 32_000),
    "width": (64, 128, 256, 512, 1024),
    "ffn": (256, 1024, 4096),
    "heads": (4, 8),
    "blocks": (1, 2, 4, 8, 12),
}
METHODS = ("layoutmap", "ModelParallel", "naive")
MESH = (("batch", 2), ("model", 4))


def create(method: str, model_name: str, batch_dim: str | None = None):
    """Build the model by one of the methods; return it with all arrays ready."""
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
    """Looks again and again at what the arrays on each device come to, and keeps the most."""

    def __init__(self):
        super().__init__(daemon=True)
        self.most = 0
        self.stopped = threading.Event()

    def run(self) -> None:
        import jax

        while not self.stopped.wait(0.001):
            held: dict[object, int] = {}
            for array in jax.live_arrays():
                # Not through the array's shards: asking for them makes new arrays, which would be counted again.
                num_bytes = math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize
                for device in array.sharding.device_set:
                    held[device] = held.get(device, 0) + num_bytes
            self.most = max(self.most, *held.values(), 0)


def temporaries() -> int:
    """Return the most that one program of this library's creation needs on a device in addition to its result, in bytes."""
    from layoutmap.engines.jax.engine import engine

    most = 0
    for program in engine().programs():
        for lowered in program.lower():
            most = max(most, lowered.compile().memory_analysis().temp_size_in_bytes)
    return most


def watch(method: str, model_name: str) -> None:
    """One run that is watched, not timed; prints what it found as JSON."""
    watcher = Watch()
    watcher.start()
    model = create(method, model_name)
    watcher.stopped.set()
    watcher.join()
    found = {"live_bytes": watcher.most, "num_variables": len(model.variables)}
    print(json.dumps(found | {"temporary_bytes": temporaries() if method == "layoutmap" else 0}))


def preload(backend: str = "jax") -> None:
    """Import what this library imports late, so that imports are not counted."""
    importlib.import_module("layoutmap.adapters.keras")
    importlib.import_module(f"layoutmap.engines.{backend}")
    importlib.import_module(f"layoutmap.adapters.keras.backends.{backend}")


def child(method: str, model_name: str) -> None:
    """One measurement, in this process; prints it as JSON."""
    import jax
    import keras
    import numpy as np

    preload()
    programs: list[float] = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, seconds, **_: (
            programs.append(seconds) if event.endswith("backend_compile_duration") else None
        )
    )
    jax.block_until_ready([jax.device_put(np.zeros(1), device) for device in jax.devices()])
    keras.utils.set_random_seed(0)
    before, count = memory("VmRSS"), len(programs)
    start = time.perf_counter()
    model = create(method, model_name)
    seconds = time.perf_counter() - start
    peak = memory("VmHWM") - before
    held: dict[str, int] = {}
    for variable in model.variables:
        for shard in variable.value.addressable_shards:
            held[str(shard.device)] = held.get(str(shard.device), 0) + shard.data.nbytes
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
                "device_bytes": max(held.values()),
                "digest": sorted(digest),
            }
        )
    )


def memory(what: str) -> int:
    """Return a line of /proc/self/status, in bytes."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(what))


def measure(
    method: str,
    model_name: str,
    flag: str = "--child",
    script: str = __file__,
    backend: str = "jax",
    more: tuple[str, ...] = (),
) -> dict:
    """Return one measurement by a script, in a fresh process."""
    environment = {
        **os.environ,
        "KERAS_BACKEND": backend,
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
    command = [sys.executable, script, flag, method, "--model", model_name, *more]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", action="append", help="decoder, wide, tiny or micro; may be given several times"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--draw", type=int, help="how many decoders to draw, in place of --model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--child", choices=METHODS, help=argparse.SUPPRESS)
    parser.add_argument("--watch", choices=METHODS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.watch:
        watch(args.watch, args.model[0])
        return
    if args.child:
        child(args.child, args.model[0])
        return
    if args.draw:
        report_drawn(args.draw, args.seed)
        return
    for model_name in args.model or ["decoder", "wide"]:
        runs: dict[str, list[dict]] = {method: [] for method in METHODS}
        for number in range(args.rounds):
            for method in METHODS:
                print(
                    f"\r{model_name}: round {number + 1}/{args.rounds} {method:<14}", end="", file=sys.stderr
                )
                runs[method].append(measure(method, model_name))
        watched = {method: measure(method, model_name, "--watch") for method in METHODS}
        print("\r\x1b[K", end="", file=sys.stderr)
        report(model_name, runs, watched)


def report_drawn(count: int, seed: int) -> None:
    """Seconds and memory of drawn decoders, beside those of the other ways."""
    ratios: dict[tuple[str, str], list[float]] = {}
    for drawn in draw(count, seed, DRAWN):
        runs = {method: measure(method, json.dumps(drawn)) for method in METHODS}
        if any(run["digest"] != runs["layoutmap"]["digest"] for run in runs.values()):
            print("WARNING: the methods gave different weights")
        told: list[str] = []
        for method, run in runs.items():
            told.append(f"{method} {run['seconds']:.2f} s, {run['peak_bytes'] / 2**20:.0f} MiB")
            for what, key in (("seconds", "seconds"), ("memory of the process", "peak_bytes")):
                ratios.setdefault((what, method), []).append(runs["layoutmap"][key] / run[key])
        print(f"{drawn}: {'; '.join(told)}", flush=True)
    for (what, method), of in ratios.items():
        if method != "layoutmap":
            print(spread(f"{what}, layoutmap beside {method}", of))


def report(model_name: str, runs: dict[str, list[dict]], watched: dict[str, dict]) -> None:
    """Medians and ratios of one model."""

    def median(method: str, key: str) -> float:
        return statistics.median(run[key] for run in runs[method])

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
        times = [run["seconds"] for run in results]
        spread = f"{statistics.median(times):.2f} ({min(times):.2f}-{max(times):.2f})"
        print(
            f"{method:<14}  {spread:<19}  {median(method, 'seconds') / median('ModelParallel', 'seconds'):.2f} "
            f"{median(method, 'programs'):>9.0f} {median(method, 'compile_seconds'):>12.2f} "
            f"{median(method, 'peak_bytes') / 2**20:>17.0f} {watched[method]['live_bytes'] / 2**20:>20.1f}"
        )
    print(
        f"temporaries     {watched['layoutmap']['temporary_bytes'] / 2**20:.1f} MiB on each device at most (layoutmap)"
    )


if __name__ == "__main__":
    main()
