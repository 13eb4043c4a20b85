"""How long a save holds up the training: `CheckpointManager.save` beside `layoutmap.save`, durable, in one run.

    python benchmarks/checkpoint_async.py                 1 GiB of weights, 5 rounds, JAX and torch
    python benchmarks/checkpoint_async.py --gib 4         weights of 4 GiB; needs as much memory again on torch

Each framework in a process of its own, the two ways in turns, into one directory. JAX has eight devices on the CPU, the
weights sharded over them, and donates the weights to a step after each save; torch has plain modules, and changes the
weights in place.

"save" is `layoutmap.save`, until the step is durable; "blocks" is how long a manager's `save` takes, and "then there"
how long until its step is durable, too; medians over the rounds, in seconds. "share" is blocks / save. "copies" is how
long one pass of memcpy over the weights takes, into memory that was used before.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np

FRAMEWORKS = ("jax", "torch")
NUM_WEIGHTS = 16
WIDTH = 4096


def models_of_jax(rows: int) -> tuple[Any, Callable[[Any], Any]]:
    """Return a model, and what a step makes of it."""
    import jax

    import layoutmap as lm

    layout_map = lm.LayoutMap(lm.create_mesh("x=8"), {r".*": ("x", None)})
    model = layout_map.build(
        lambda: {f"w{n}": jax.random.normal(jax.random.key(n), (rows, WIDTH)) for n in range(NUM_WEIGHTS)},
        library="jax",
    )
    step = jax.jit(lambda weights: jax.tree.map(lambda w: w * 0.5, weights), donate_argnums=0)
    return model, lambda weights: jax.block_until_ready(step(weights))


def models_of_torch(rows: int) -> tuple[Any, Callable[[Any], Any]]:
    import torch

    model = torch.nn.Sequential(*[torch.nn.Linear(WIDTH, rows, bias=False) for _ in range(NUM_WEIGHTS)])

    def step(model: Any) -> Any:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)
        return model

    return model, step


def memcpy_seconds(num_bytes: int) -> float:
    source = np.ones(num_bytes // NUM_WEIGHTS // 4, np.float32)
    target = source.copy()
    start = time.perf_counter()
    for _ in range(NUM_WEIGHTS):
        np.copyto(target, source)
    return time.perf_counter() - start


def child(framework: str, gib: float, rounds: int, folder: str) -> None:
    """Measure one framework; prints what it found as JSON."""
    import layoutmap as lm

    rows = 8 * max(1, round(gib * 2**30 / 4 / NUM_WEIGHTS / WIDTH / 8))
    model, step = {"jax": models_of_jax, "torch": models_of_torch}[framework](rows)
    found: dict[str, list[float]] = {"save": [], "blocks": [], "then there": [], "copies": []}
    with lm.CheckpointManager(f"{folder}/managed", keep_last=1) as manager:
        for number in range(rounds + 1):
            start = time.perf_counter()
            lm.save(model, f"{folder}/saved", step=number)
            saved = time.perf_counter()
            shutil.rmtree(f"{folder}/saved")
            begin = time.perf_counter()
            manager.save(model, number)
            returned = time.perf_counter()
            model = step(model)
            manager.wait()
            there = time.perf_counter()
            if number:  # the first round makes what is made once
                found["save"].append(saved - start)
                found["blocks"].append(returned - begin)
                found["then there"].append(there - begin)
                found["copies"].append(memcpy_seconds(NUM_WEIGHTS * rows * WIDTH * 4))
    sys.stdout.write(json.dumps({name: statistics.median(each) for name, each in found.items()}))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gib", type=float, default=1.0, help="size of the weights")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--frameworks", nargs="*", default=FRAMEWORKS, choices=FRAMEWORKS)
    parser.add_argument("--directory", help="where to write; of the file system that is to be measured")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments.child[0], arguments.gib, arguments.rounds, arguments.child[1])
        return
    print(f"{'':8}{'save':>10}{'blocks':>10}{'share':>10}{'then there':>12}{'copies':>10}   seconds")
    for framework in arguments.frameworks:
        with tempfile.TemporaryDirectory(dir=arguments.directory) as folder:
            options = ["--gib", str(arguments.gib), "--rounds", str(arguments.rounds)]
            run = subprocess.run(
                [sys.executable, __file__, *options, "--child", framework, folder],
                env={
                    **os.environ,
                    "JAX_PLATFORMS": "cpu",
                    "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
                },
                stdout=subprocess.PIPE,
                check=True,
            )
        found = json.loads(run.stdout)
        print(
            f"{framework:8}{found['save']:>10.3f}{found['blocks']:>10.3f}{found['blocks'] / found['save']:>10.1%}"
            f"{found['then there']:>12.3f}{found['copies']:>10.3f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
