"""How near the counted memory and time of training steps come to what a GPU takes.

    python benchmarks/on_gpu.py count out/ --sizes 24 --seed 1     without a GPU: counts steps for one H100
    python benchmarks/on_gpu.py measure out/ --minutes 5           with an H100 and the same release of JAX
    python benchmarks/on_gpu.py compare out/                       prints both beside each other

Models of everyday families in drawn sizes, as `step_cost.py --sizes` draws them, on a mesh of one device. The step
that is counted is the one that the GPU runs, with the layouts of this library: its module is kept, and takes arrays of
random numbers. Seconds are the median of steps, each with arrays of its own, since a step takes over those that it is
given. The memory is the peak that the device reports; where XLA has taken more to choose its kernels, there is none.
"""

from __future__ import annotations

import argparse
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

TARGET = "h100"
STEPS = 7


def count(folder, number, seed):
    """Count drawn steps for one device, and keep their modules and figures."""
    os.environ |= {"KERAS_BACKEND": "jax", "JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3"}
    import drawn_step_models

    import layoutmap as lm
    from layoutmap.cost.cost import Cost
    from layoutmap.cost.jax import lowered
    from layoutmap.cost.machines import machine_for

    drawn_step_models.MESHES = ((1, 1),)
    folder.mkdir(parents=True, exist_ok=True)
    for each in range(seed, seed + number):
        name, make, layout_map, options = drawn_step_models.draw(each)
        kept = []
        compile_modules = lowered.compile_modules

        def keep(modules, *rest, kept=kept, compile_modules=compile_modules):
            kept.extend(modules)
            return compile_modules(modules, *rest)

        step = lm.lower_step(make, layout_map, **options)
        try:
            with patch.object(lowered, "compile_modules", keep):  # the last one is all of the step
                estimate, compiled = step.count(layout_map), step.count(layout_map, target=TARGET)
                step.compile(layout_map, target=TARGET)
        except lm.LayoutMapError as error:
            print(f"{name}: {error.what}", file=sys.stderr)
            continue
        machine = machine_for(TARGET, layout_map.mesh)
        facts = {"name": name}
        for known, counted in (("estimate", estimate), ("compiled", compiled)):
            facts[known] = {
                "seconds": Cost(counted, machine).step_seconds,
                "peak_bytes": counted.peak_bytes,
                "flops": sum(counted.flops.values()),
            }
        (folder / f"{each}.mlir").write_bytes(kept[-1])
        (folder / f"{each}.json").write_text(json.dumps(facts))
        print(json.dumps(facts), file=sys.stderr, flush=True)


def measure_one(folder, seed):
    """Compile a kept module for the device of this machine, and print the seconds and the peak of its steps."""
    import jax
    import numpy as np
    from jax._src import compiler
    from jaxlib import xla_client

    from layoutmap.engines.jax import shardy

    device = jax.devices()[0]
    options = compiler.get_compile_options(1, 1, np.array([[device.id]]))
    with shardy.context():
        module = shardy.parsed((folder / f"{seed}.mlir").read_bytes())
        (main,) = (each for each in module.body.operations if str(each.name) == '"main"')
        types = [str(each) for each in main.type.inputs]
        devices = xla_client.DeviceList((device,))
        begun = time.perf_counter()
        step = compiler.backend_compile_and_load(device.client, module, devices, options, [])
        compile_seconds = time.perf_counter() - begun
    memory = step.get_compiled_memory_stats()
    peak_bytes = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    peak_bytes += memory.output_size_in_bytes - memory.alias_size_in_bytes
    before = taken(device)
    seconds = []
    for number in range(STEPS):
        given = jax.block_until_ready([numbers(text)(np.uint32(number)) for text in types])
        begun = time.perf_counter()
        made = step.execute_sharded(given).disassemble_into_single_device_arrays()
        jax.block_until_ready(made)
        seconds.append(time.perf_counter() - begun)
        del given, made
    highest = taken(device)
    facts = {
        "device": device.device_kind,
        "seconds": statistics.median(seconds[1:]),
        "compile_seconds": compile_seconds,
        "compiled_peak_bytes": peak_bytes,
        "peak_bytes": highest if highest > before else None,
        "before_bytes": before,
    }
    print(json.dumps(facts))


def taken(device):
    """Return the most bytes of the device that arrays and steps have taken since this process began; 0: it does not say."""
    return (device.memory_stats() or {}).get("peak_bytes_in_use", 0)


@functools.cache
def numbers(text):
    """What makes an array of a type that MLIR names, as in `tensor<4x8xbf16>`, of small numbers, from a seed."""
    import jax
    import jax.numpy as jnp

    *sides, name = text.removeprefix("tensor<").removesuffix(">").split("x")
    shape = tuple(map(int, sides))
    names = {"bf16": "bfloat16", "f32": "float32", "f16": "float16", "i32": "int32", "ui32": "uint32"}
    dtype = names.get(name, {"i1": "bool", "i64": "int64", "i8": "int8", "ui8": "uint8"}.get(name))

    def made(seed):
        mixed = (jax.lax.iota("uint32", math.prod(shape)) + seed) * jnp.uint32(2654435761) >> 16
        if jnp.issubdtype(dtype, jnp.floating):
            return ((mixed.astype("float32") / 2**16 - 0.5) * 0.04).astype(dtype).reshape(shape)
        return (mixed % (2 if dtype == "bool" else 1000)).astype(dtype).reshape(shape)

    return jax.jit(made)


def measure(folder, minutes):
    """Measure kept steps, each in a process of its own, until the time is over."""
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
    from step_cost import distribution

    rows = []
    for file in sorted(folder.glob("*.measured")):
        counted, measured = json.loads(file.with_suffix(".json").read_text()), json.loads(file.read_text())
        rows.append((counted, measured))
        quotients = (f"{each:.2f}" for _, each in sorted(against(counted, measured).items()))
        gigabytes = f"{(measured['peak_bytes'] or 0) / 1e9:.2f} GB"
        print(f"{counted['name']}: {1e3 * measured['seconds']:.2f} ms, {gigabytes}; {', '.join(quotients)}")
    for what in sorted({key for row in rows for key in against(*row)}):
        found = [(against(*row)[what], row[0]["name"]) for row in rows if what in against(*row)]
        print(distribution(f"{what}, {len(found)} steps", found))


def against(counted, measured):
    """Counted figures divided by measured ones, by what they are of."""
    found = {}
    for known in ("estimate", "compiled"):
        found[f"seconds, {known}"] = counted[known]["seconds"] / measured["seconds"]
        if measured["peak_bytes"]:
            found[f"peak, {known}"] = counted[known]["peak_bytes"] / measured["peak_bytes"]
    if measured["peak_bytes"]:
        found["peak, as XLA says there"] = measured["compiled_peak_bytes"] / measured["peak_bytes"]
    return found


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("count", "measure", "compare", "measure-one"))
    parser.add_argument("folder", type=Path, help="where modules and figures are")
    parser.add_argument("--sizes", type=int, default=24, metavar="N", help="so many drawn steps")
    parser.add_argument("--seed", type=int, default=1, help="the seed of the first of them")
    parser.add_argument("--minutes", type=float, default=5, help="when no further step is measured")
    asked = parser.parse_args()
    if asked.what == "count":
        count(asked.folder, asked.sizes, asked.seed)
    elif asked.what == "measure":
        measure(asked.folder, asked.minutes)
    elif asked.what == "measure-one":
        measure_one(asked.folder, asked.seed)
    else:
        compare(asked.folder)


if __name__ == "__main__":
    main()
