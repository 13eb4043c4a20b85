"""Compare the counted memory and time of training steps with those of a GPU.

    python benchmarks/on_gpu.py count out/ --sizes 24 --seed 1     without a GPU: counts steps for one H100
    python benchmarks/on_gpu.py measure out/ --minutes 5           with an H100 and the same release of JAX
    python benchmarks/on_gpu.py compare out/                       prints both beside each other

The models are common ones in random sizes, as in `step_cost.py --sizes`, on a mesh of one device. The GPU runs the
module of the counted step, with the layouts of this library and arrays of random numbers. Seconds are the median of
several steps. A step donates its arrays, so each step gets new ones. The memory is the peak that the device reports. It
is missing if XLA used more memory while it chose its kernels.
"""

from __future__ import annotations

import functools
import json
import math
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import patch

from measure import KERAS_ON_CPU, make_parser

TARGET = "h100"
STEPS = 7


def count(folder, number, seed):
    """Count random steps for one device, and save their modules and figures."""
    os.environ |= KERAS_ON_CPU
    import drawn_step_models

    import layoutmap as lm
    from layoutmap.cost.cost import Cost
    from layoutmap.cost.jax import lowered
    from layoutmap.cost.machines import resolve_machine

    drawn_step_models.MESHES = ((1, 1),)
    folder.mkdir(parents=True, exist_ok=True)
    for each in range(seed, seed + number):
        name, make, layout_map, options = drawn_step_models.draw(each)
        saved = []
        compile_modules = lowered.compile_modules

        def save_modules(modules, *rest, saved=saved, compile_modules=compile_modules):
            saved.extend(modules)
            return compile_modules(modules, *rest)

        step = lm.lower_step(make, layout_map, **options)
        try:
            with patch.object(lowered, "compile_modules", save_modules):  # the last module is the whole step
                estimate, compiled = step.count(layout_map), step.count(layout_map, target=TARGET)
                step.compile(layout_map, target=TARGET)
        except lm.LayoutMapError as error:
            print(f"{name}: {error.what}", file=sys.stderr)
            continue
        machine = resolve_machine(TARGET, layout_map.mesh)
        facts = {"name": name}
        for known, counted in (("estimate", estimate), ("compiled", compiled)):
            facts[known] = {
                "seconds": Cost(counted, machine).step_seconds,
                "peak_bytes": counted.peak_bytes,
                "flops": sum(counted.flops.values()),
            }
        (folder / f"{each}.mlir").write_bytes(saved[-1])
        (folder / f"{each}.json").write_text(json.dumps(facts))
        print(json.dumps(facts), file=sys.stderr, flush=True)


def measure_one(folder, seed):
    """Compile a saved module for the device of this machine, and print the seconds and the peak of its steps."""
    import jax
    import numpy as np
    from jax._src import compiler
    from jaxlib import xla_client

    from layoutmap.engines.jax import shardy

    device = jax.devices()[0]
    options = compiler.get_compile_options(1, 1, np.array([[device.id]]))
    with shardy.make_mlir_context():
        module = shardy.parse_module((folder / f"{seed}.mlir").read_bytes())
        (main,) = (each for each in module.body.operations if str(each.name) == '"main"')
        types = [str(each) for each in main.type.inputs]  # pyright: ignore[reportAttributeAccessIssue]
        devices = xla_client.DeviceList((device,))
        begun = time.perf_counter()
        step = compiler.backend_compile_and_load(device.client, module, devices, options, [])
        compile_seconds = time.perf_counter() - begun
    memory = step.get_compiled_memory_stats()
    peak_bytes = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    peak_bytes += memory.output_size_in_bytes - memory.alias_size_in_bytes
    before = read_device_peak(device)
    seconds = []
    for number in range(STEPS):
        inputs = jax.block_until_ready([make_filler(text)(np.uint32(number)) for text in types])
        begun = time.perf_counter()
        outputs = step.execute_sharded(inputs).disassemble_into_single_device_arrays()
        jax.block_until_ready(outputs)
        seconds.append(time.perf_counter() - begun)
        del inputs, outputs
    highest = read_device_peak(device)
    facts = {
        "device": device.device_kind,
        "seconds": statistics.median(seconds[1:]),
        "compile_seconds": compile_seconds,
        "compiled_peak_bytes": peak_bytes,
        "peak_bytes": highest if highest > before else None,
        "before_bytes": before,
    }
    print(json.dumps(facts))


def read_device_peak(device):
    """Return the peak bytes of arrays and steps on the device in this process, or 0 if it reports none."""
    return (device.memory_stats() or {}).get("peak_bytes_in_use", 0)


@functools.cache
def make_filler(text):
    """Return a function from a seed to an array of small numbers of an MLIR type, such as `tensor<4x8xbf16>`."""
    import jax
    import jax.numpy as jnp

    *sides, name = text.removeprefix("tensor<").removesuffix(">").split("x")
    shape = tuple(map(int, sides))
    names = {"bf16": "bfloat16", "f32": "float32", "f16": "float16", "i32": "int32", "ui32": "uint32"}
    dtype = names.get(name, {"i1": "bool", "i64": "int64", "i8": "int8", "ui8": "uint8"}.get(name))

    def fill(seed):
        mixed = (jax.lax.iota("uint32", math.prod(shape)) + seed) * jnp.uint32(2654435761) >> 16
        if jnp.issubdtype(dtype, jnp.floating):
            return ((mixed.astype("float32") / 2**16 - 0.5) * 0.04).astype(dtype).reshape(shape)
        return (mixed % (2 if dtype == "bool" else 1000)).astype(dtype).reshape(shape)

    return jax.jit(fill)


def measure(folder, minutes):
    """Measure saved steps, each in its own process, until the time is over."""
    deadline = time.monotonic() + 60 * minutes
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    for file in sorted(folder.glob("*.mlir")):
        if time.monotonic() > deadline:
            break
        command = [sys.executable, __file__, "measure-one", str(folder), "--seed", file.stem]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            print(f"{file.stem}: {done.stderr[-600:]}", flush=True)
            continue
        facts = done.stdout.splitlines()[-1]
        (folder / f"{file.stem}.measured").write_text(facts)
        print(file.stem, facts, flush=True)


def compare(folder):
    """Print counted figures divided by those of the device, for each step, and their distributions."""
    from step_cost import describe_distribution

    rows = []
    for file in sorted(folder.glob("*.measured")):
        counted, measured = json.loads(file.with_suffix(".json").read_text()), json.loads(file.read_text())
        rows.append((counted, measured))
        cells = (f"{each:.2f}" for _, each in sorted(compute_quotients(counted, measured).items()))
        gigabytes = f"{(measured['peak_bytes'] or 0) / 1e9:.2f} GB"
        print(f"{counted['name']}: {1e3 * measured['seconds']:.2f} ms, {gigabytes}; {', '.join(cells)}")
    quotients = [(compute_quotients(*row), row[0]["name"]) for row in rows]
    for title in sorted({key for each, _ in quotients for key in each}):
        values = [(each[title], name) for each, name in quotients if title in each]
        print(describe_distribution(f"{title}, {len(values)} steps", values))


def compute_quotients(counted, measured):
    """Return the counted figures divided by the measured ones, by title."""
    quotients = {}
    for known in ("estimate", "compiled"):
        quotients[f"seconds, {known}"] = counted[known]["seconds"] / measured["seconds"]
        if measured["peak_bytes"]:
            quotients[f"peak, {known}"] = counted[known]["peak_bytes"] / measured["peak_bytes"]
    if measured["peak_bytes"]:
        quotients["peak, as XLA says there"] = measured["compiled_peak_bytes"] / measured["peak_bytes"]
    return quotients


def main():
    parser = make_parser(__doc__)
    parser.add_argument("action", choices=("count", "measure", "compare", "measure-one"))
    parser.add_argument("folder", type=Path, help="folder of the modules and figures")
    parser.add_argument("--sizes", type=int, default=24, metavar="N", help="number of random steps")
    parser.add_argument("--seed", type=int, default=1, help="seed of the first step")
    parser.add_argument("--minutes", type=float, default=5, help="time limit for starting another step")
    args = parser.parse_args()
    if args.action == "count":
        count(args.folder, args.sizes, args.seed)
    elif args.action == "measure":
        measure(args.folder, args.minutes)
    elif args.action == "measure-one":
        measure_one(args.folder, args.seed)
    else:
        compare(args.folder)


if __name__ == "__main__":
    main()
